"""An adapter in training: its weights, the gradient gathered since the last step, and AdamW's state."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from tinker_lightning.errors import InvalidInput, OperationFailed

if TYPE_CHECKING:
    from collections.abc import Mapping

    from tinker_lightning.server.engine.lora import LoraWeights
    from tinker_lightning.types import AdamParams

_MOMENTS = ("exp_avg", "exp_avg_sq")


class Adapter:
    """Weights that learn. Every method either succeeds or leaves the adapter as it was."""

    def __init__(self, weights: LoraWeights) -> None:
        self.weights = weights
        self.gradient: dict[str, Tensor] = {}
        self._parameters = {name: nn.Parameter(tensor) for name, tensor in weights.tensors.items()}
        self._optimizer = torch.optim.AdamW(self._parameters.values(), fused=True)

    @property
    def steps(self) -> int:
        """How many steps AdamW has taken."""
        state = self._optimizer.state[next(iter(self._parameters.values()))]
        return int(state["step"]) if state else 0

    def add_gradient(self, parameters: Mapping[str, nn.Parameter]) -> None:
        """Adds what a backward left on the parameters; gradients gather as a plain sum until the next step."""
        found = {name: parameter.grad for name, parameter in parameters.items() if parameter.grad is not None}
        for name, grad in found.items():
            if not torch.isfinite(grad).all():
                raise OperationFailed(f"the gradient of {name} is not finite, so it was not added")
        for name, grad in found.items():
            self.gradient[name] = self.gradient[name] + grad if name in self.gradient else grad

    def step(self, params: AdamParams) -> dict[str, float]:
        """One step of AdamW on the gathered gradient, which is cleared; returns its metrics."""
        gradients = {
            name: self.gradient.get(name, torch.zeros_like(parameter)) for name, parameter in self._parameters.items()
        }
        norm = torch.nn.utils.get_total_norm(gradients.values())
        if not torch.isfinite(norm):
            self.gradient = {}  # it could never be applied and would fail every later step too
            raise OperationFailed(
                "the sum of the gradients since the last step is not finite; it was dropped and the weights are "
                "unchanged. Scale the loss down."
            )
        for name, parameter in self._parameters.items():
            parameter.grad = gradients[name].clone() if params.grad_clip_norm else gradients[name]
        if params.grad_clip_norm:
            torch.nn.utils.clip_grads_with_norm_(self._parameters.values(), params.grad_clip_norm, norm)
        group = self._optimizer.param_groups[0]
        group["lr"] = params.learning_rate
        group["betas"] = (params.beta1, params.beta2)
        group["eps"] = params.eps
        group["weight_decay"] = params.weight_decay
        backup = self._copy_state()
        self._optimizer.step()
        self._optimizer.zero_grad()
        if not self._is_finite():
            self._restore_state(backup)
            raise OperationFailed(
                f"a step with learning_rate={params.learning_rate} and eps={params.eps} would leave weights that are "
                "not finite; it was not taken and the gradient is kept"
            )
        self.gradient = {}
        return {"grad_norm": float(norm), "learning_rate": params.learning_rate}

    def training_state(self) -> dict[str, Tensor]:
        """AdamW's moments and step, and the gradient of an unfinished window: what a resumed run needs to be exact."""
        state: dict[str, Tensor] = {f"gradient/{name}": grad for name, grad in self.gradient.items()}
        for name, parameter in self._parameters.items():
            for key, value in self._optimizer.state[parameter].items():
                state[f"{key}/{name}"] = value
        return state

    def load(self, weights: LoraWeights, training_state: Mapping[str, Tensor] | None) -> None:
        """Takes over weights, and the training state if given; without it AdamW starts anew."""
        steps: list[dict[str, Tensor]] = []
        for name, parameter in self._parameters.items():
            state = {
                key: training_state[f"{key}/{name}"].clone()
                for key in ("step", *_MOMENTS)
                if training_state is not None and f"{key}/{name}" in training_state
            }
            if state and (len(state) != 3 or any(state[key].shape != parameter.shape for key in _MOMENTS)):
                raise InvalidInput(f"the saved optimizer state does not fit the parameter {name}")
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

    def _copy_state(self) -> list[tuple[Tensor, dict[str, Tensor]]]:
        state = self._optimizer.state
        return [
            (parameter.detach().clone(), {key: value.clone() for key, value in state[parameter].items()})
            for parameter in self._parameters.values()
        ]

    def _restore_state(self, backup: list[tuple[Tensor, dict[str, Tensor]]]) -> None:
        with torch.no_grad():
            for parameter, (values, state) in zip(self._parameters.values(), backup, strict=True):
                parameter.copy_(values)
                self._optimizer.state[parameter] = state

    def _is_finite(self) -> bool:
        # A sum is finite only if all its terms are, and one pass over the memory is enough to take it.
        tensors = [
            (parameter, self._optimizer.state[parameter]["exp_avg_sq"]) for parameter in self._parameters.values()
        ]
        return all(math.isfinite(float(tensor.detach().sum())) for pair in tensors for tensor in pair)
