"""Sends the forward passes of an accumulation window together, so that a step waits for the network once."""

from __future__ import annotations

import logging
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from lightning.pytorch.utilities.model_helpers import is_overridden
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature

from tinker_lightning.lightning.base import RemoteBase
from tinker_lightning.lightning.checkpoint import rng
from tinker_lightning.lightning.checkpoint.loaders import ResumableLoader
from tinker_lightning.rows.batches import as_list

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tinker_lightning.remote.calls import Pass

logger = logging.getLogger("tinker_lightning")

_HOOKS = ("on_before_batch_transfer", "transfer_batch_to_device", "on_after_batch_transfer")


class LookAhead:
    """Holds forward passes that were sent before the steps that use them."""

    def __init__(self) -> None:
        self._sent: dict[int, tuple[list[Any], Pass | None]] = {}
        self._is_off = False

    @contextmanager
    def step(self, module: RemoteBase, batch: Any) -> Iterator[None]:
        """Sends all forward passes of a window at its first micro-batch; the step inside the block uses its own."""
        number = module.trainer.fit_loop.epoch_loop.total_batch_idx
        if number not in self._sent and not self._is_off:
            self._sent = dict(enumerate(self._send(module, batch), number))
        if number not in self._sent:
            yield
            return
        data, sent = self._sent.pop(number)
        with module.using_pass(batch, data, sent) as remote:
            yield
            if sent is not None and remote.missed:
                self._turn_off(module, "its training_step uses other datums than datums(batch) returns")

    def _send(self, module: RemoteBase, batch: Any) -> list[tuple[list[Any], Pass | None]]:
        """Sends the forward passes of the rest of this window, unless only one batch is left."""
        trainer: Any = module.trainer
        loader = trainer.train_dataloader
        if (
            not module.automatic_optimization
            or not module.chosen_route().needs_logprobs
            or not isinstance(loader, ResumableLoader)  # several loaders
            or is_param_in_hook_signature(module.training_step, "dataloader_iter", explicit=True)
        ):
            return []
        data = trainer.datamodule
        if hooks := [name for name in _HOOKS if is_overridden(name, module, RemoteBase) or is_overridden(name, data)]:
            self._turn_off(module, f"its {hooks[0]} changes batches before they are trained; do that in datums")
            return []
        index, size = trainer.fit_loop.batch_idx, trainer.accumulate_grad_batches
        left = int(min((index // size + 1) * size, trainer.num_training_batches)) - index
        sent: list[tuple[list[Any], Pass | None]] = []
        # Earlier failures are raised here, not by a request whose own failure can wait for its step.
        with module.lm.backend.unread.held():
            for number, following in enumerate([batch, *loader.peek(index, left - 1)], index):
                try:
                    if following is not batch:
                        converted = trainer.precision_plugin.convert_input(following)
                        following = trainer.strategy.batch_to_device(converted)
                    # Each batch has its own random numbers: how far ahead it is drawn must not change them.
                    with rng.seeded(loader.seed + number):
                        data = as_list(module.datums(following))
                    sent.append((data, module.lm.send(data) if left > 1 else None))
                except Exception:  # raised again by the step of this batch
                    break
        return sent

    def _turn_off(self, module: RemoteBase, reason: str) -> None:
        self._sent, self._is_off = {}, True
        logger.warning("%s is trained without look-ahead: %s.", type(module).__name__, reason)
