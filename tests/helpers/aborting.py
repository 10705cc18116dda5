"""Fits that end in the middle of an accumulation window, and the states to expect after them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.utils.data import DataLoader

from tests.helpers.reference import bits
from tests.helpers.trainers import quiet
from tinker_lightning import Datum, RemoteModule, collate

if TYPE_CHECKING:
    from collections.abc import Callable

    import lightning.pytorch as pl
    from torch import Tensor

    from tinker_lightning.client import ServiceClient
    from tinker_lightning.server import EmbeddedTrainer

N = 4
DATA = [Datum.from_tokens(list(f"text {i}: hello".encode())) for i in range(12)]
LATER = [Datum.from_tokens(list(f"{i} later".encode())) for i in range(6)]
STRATEGIES = ["tinker", "auto"]


class Interrupted(RemoteModule):
    """Does something when the loss of a certain micro-batch is computed."""

    def __init__(self, model: Any, at: int | None = None, action: Callable[..., Any] | None = None) -> None:
        super().__init__(model, learning_rate=1e-2)
        self.at, self.action, self.batches = at, action, 0

    def loss(self, _: list[Any], logprobs: list[Tensor]) -> Tensor:
        loss = -torch.cat(logprobs).mean()
        self.batches += 1
        if self.action is not None and self.batches - 1 == self.at:
            changed = self.action(self, loss)
            return loss if changed is None else changed
        return loss


class Server:
    """A trainer and a client of it."""

    def __init__(self, trainer: EmbeddedTrainer, service: ServiceClient) -> None:
        self.trainer = trainer
        self.service = service

    def module(self, at: int | None = None, action: Callable[..., Any] | None = None) -> Interrupted:
        """A module on a new model, the same for each call."""
        return Interrupted(self.service.create_lora_training_client("tiny", rank=2, seed=1), at, action)

    def bits(self, module: RemoteModule) -> dict[str, bytes]:
        """Weights, moments and gathered gradient, once all that was sent has been done."""
        module.drain()
        return bits(self.trainer, module.lm.backend.model_id)  # type: ignore[attr-defined]

    def expected(self, steps: int, data: list[Datum] = DATA) -> tuple[dict[str, bytes], dict[str, bytes]]:
        """The same after so many windows of the data, and after a later fit, where nothing went wrong."""
        module = self.module()
        fit(module, "auto", data, max_steps=steps)
        before = self.bits(module)
        fit(module, "auto", LATER)
        return before, self.bits(module)


def fit(module: RemoteModule, strategy: str, data: list[Datum] = DATA, **options: Any) -> pl.Trainer:
    file = options.pop("ckpt_path", None)
    trainer = quiet(strategy=strategy, accelerator="cpu", **{"accumulate_grad_batches": N, "max_epochs": 1, **options})
    trainer.fit(module, DataLoader(data, 1, collate_fn=collate), ckpt_path=file)  # type: ignore[arg-type]
    return trainer
