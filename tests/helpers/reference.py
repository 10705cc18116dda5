"""What to compare with: gradients by plain autograd, and the gradients and states that a trainer holds."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch import Tensor

from tinker_lightning.server.engine.causal_lm import CausalLM

if TYPE_CHECKING:
    import contextlib
    from collections.abc import Callable, Sequence

    from tinker_lightning.server import EmbeddedTrainer
    from tinker_lightning.server.engine.interface import Adapter

    Running: TypeAlias = Callable[[Any], contextlib.AbstractContextManager[str]]


def lora_model(trainer: EmbeddedTrainer, model_id: str) -> tuple[CausalLM, Adapter]:
    """A model in training with its adapter, of the default engine."""
    base, adapter = trainer.registry.model(model_id).ready()
    assert isinstance(base, CausalLM)
    return base, adapter


def autograd(
    trainer: EmbeddedTrainer, model_id: str, texts: Sequence[str], loss: Callable[[list[Tensor]], Tensor]
) -> Tensor:
    """The gradient of a loss of the texts' log-probabilities, text by text, as one vector."""
    base, adapter = lora_model(trainer, model_id)
    with base.lora.use(adapter.weights) as parameters:
        logprobs = []
        for text in texts:
            ids = torch.tensor(list(text.encode()))
            logits = base.model(input_ids=ids[None, :-1]).logits[0]
            logprobs.append(logits.log_softmax(-1).gather(-1, ids[1:, None])[:, 0])
        loss(logprobs).backward()
        return torch.cat([parameter.grad.flatten() for parameter in parameters.values() if parameter.grad is not None])


def gathered(trainer: EmbeddedTrainer, model_id: str) -> Tensor:
    """The gradient that the server has accumulated for the next step, as one vector."""
    _, adapter = trainer.registry.model(model_id).ready()
    return torch.cat([adapter.gradient[name].flatten() for name in adapter.weights.tensors])


def bits(trainer: EmbeddedTrainer, model_id: str) -> dict[str, bytes]:
    """Everything that training changes in a model, to the bit: weights, gathered gradient, moments."""
    _, adapter = trainer.registry.model(model_id).ready()
    tensors = {**adapter.weights.tensors, **adapter.training_state()}
    return {name: tensor.detach().numpy().tobytes() for name, tensor in tensors.items()}
