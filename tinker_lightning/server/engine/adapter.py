"""An adapter in training: its weights, the accumulated gradient and the AdamW state."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from tinker_lightning.errors import InvalidInput, OperationFailed

if TYPE_CHECKING:
    from collections.abc import Mapping

    from tinker_lightning.server.engine.interface import AdapterWeights
    from tinker_lightning.types import AdamParams

_MOMENTS = ("exp_avg", "exp_avg_sq")


class LoraAdapter:
    """Trainable LoRA weights. Every method either succeeds or leaves the adapter unchanged.

    Args:
        weights: The weights.
        token_budget: The number of positions per model call, which decides how sums are rounded; None stands for the
            budget of the base model. A saved training state restores its own.
    """

    def __init__(self, weights: AdapterWeights, token_budget: int | None = None) -> None:
        self.weights = weights
        self.token_budget = token_budget
        self.gradient: dict[str, Tensor] = {}
        self._parameters = {name: nn.Parameter(tensor) for name, tensor in weights.tensors.items()}
        self._optimizer = torch.optim.AdamW(self._parameters.values(), fused=True)

    @property
    def steps(self) -> int:
        """Number of optimizer steps taken."""
        state = self._optimizer.state[next(iter(self._parameters.values()))]
        return int(state["step"]) if state else 0

    def add_gradient(self, parameters: Mapping[str, nn.Parameter]) -> None:
        """Adds gradients to the accumulated sum; raises `OperationFailed` if it would not be finite."""
        grads = {name: parameter.grad for name, parameter in parameters.items() if parameter.grad is not None}
        total = self.gradient | {
            name: self.gradient[name] + grad if name in self.gradient else grad for name, grad in grads.items()
        }
        # Checked here and not in step(), because a non-finite gradient could be neither applied nor removed again.
        if not torch.isfinite(get_total_norm(total.values())):
            raise OperationFailed(
                "the accumulated gradient would not be finite, so the gradient of this batch was not added. Scale the "
                "loss down."
            )
        self.gradient = total

    def step(self, params: AdamParams) -> dict[str, float]:
        """Takes an AdamW step and returns the metrics; raises `OperationFailed` if weights would not be finite."""
        gradients = {
            name: self.gradient.get(name, torch.zeros_like(parameter)) for name, parameter in self._parameters.items()
        }
        norm = get_total_norm(gradients.values())
        for name, parameter in self._parameters.items():
            parameter.grad = gradients[name].clone() if params.grad_clip_norm else gradients[name]
        if params.grad_clip_norm:
            clip_grads_with_norm_(self._parameters.values(), params.grad_clip_norm, norm)
        group = self._optimizer.param_groups[0]
        group["lr"] = params.learning_rate
        group["betas"] = (params.beta1, params.beta2)
        group["eps"] = params.eps
        group["weight_decay"] = params.weight_decay
        backup = [parameter.detach().clone() for parameter in self._parameters.values()]
        state = copy.deepcopy(self._optimizer.state_dict())
        self._optimizer.step()
        self._optimizer.zero_grad()
        # A gradient with a finite norm has finite moments, so only the weights can overflow.
        if not torch.isfinite(get_total_norm(parameter.detach() for parameter in self._parameters.values())):
            with torch.no_grad():
                for parameter, values in zip(self._parameters.values(), backup, strict=True):
                    parameter.copy_(values)
            self._optimizer.load_state_dict(state)
            raise OperationFailed(
                f"a step with learning_rate={params.learning_rate} and eps={params.eps} would produce weights that "
                "are not finite. The weights are unchanged, and the gradient is kept for another attempt."
            )
        self.gradient = {}
        return {"grad_norm": float(norm), "learning_rate": params.learning_rate}

    def training_state(self) -> dict[str, Tensor]:
        """Returns the AdamW state and the gradient of an unfinished accumulation window, for an exact resume."""
        state: dict[str, Tensor] = {f"gradient/{name}": grad for name, grad in self.gradient.items()}
        for name, parameter in self._parameters.items():
            for key, value in self._optimizer.state[parameter].items():
                state[f"{key}/{name}"] = value
        return state

    def load(self, weights: AdapterWeights, training_state: Mapping[str, Tensor] | None) -> None:
        """Loads weights and the training state; without a training state, the optimizer is reset."""
        steps: list[dict[str, Tensor]] = []
        for name, parameter in self._parameters.items():
            state = {
                key: training_state[f"{key}/{name}"].clone()
                for key in ("step", *_MOMENTS)
                if training_state is not None and f"{key}/{name}" in training_state
            }
            if state and (len(state) != 3 or any(state[key].shape != parameter.shape for key in _MOMENTS)):
                raise InvalidInput(f"the saved optimizer state does not match the parameter {name}")
            steps.append(state)
        with torch.no_grad():
            for (name, parameter), state in zip(self._parameters.items(), steps, strict=True):
                parameter.copy_(weights.tensors[name])
                self._optimizer.state[parameter] = state
        prefix = "gradient/"
        self.gradient = {
            key.removeprefix(prefix): value.clone()
            for key, value in (training_state or {}).items()
            if key.startswith(prefix)
        }
