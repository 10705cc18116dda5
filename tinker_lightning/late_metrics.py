"""Metrics that come back from the server after their step, logged under the step they belong to."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import lightning.pytorch as pl
import torch

from tinker_lightning.window import Step

if TYPE_CHECKING:
    from collections.abc import Callable

    from tinker_lightning.client.futures import TinkerFuture

LOSS = "train_loss"
_SUM = "loss:sum"


@dataclass(frozen=True, slots=True)
class _Entry:
    sent: Step
    trainer: pl.Trainer
    step: int
    to_loggers: bool


class LateMetrics:
    """The steps whose metrics are still on their way, oldest first.

    Args:
        wait: Waits for the result or the failure of a request, and may be ended.
    """

    def __init__(self, wait: Callable[[TinkerFuture[Any]], None]) -> None:
        self._wait = wait
        self._waiting: deque[_Entry] = deque()
        self._names: set[str] = set()

    def are_monitored(self, trainer: pl.Trainer, *, by_step: bool = False) -> bool:
        """Whether something is about to look at a metric that comes late; at any metric while none has come yet."""
        looking: list[Any] = [*trainer.callbacks, *trainer.lr_scheduler_configs]  # type: ignore[attr-defined]
        if by_step:
            looking = [one for one in trainer.checkpoint_callbacks if _saves_after(one, trainer.global_step + 1)]
        monitored = {getattr(one, "monitor", None) for one in looking} - {None}
        return bool(monitored & self._names if self._names else monitored)

    def add(self, sent: Step, trainer: pl.Trainer) -> None:
        """A step was sent; it belongs to the step that the trainer's loggers would write now."""
        step = trainer.fit_loop.epoch_loop._batches_that_stepped
        every: int = trainer.log_every_n_steps  # type: ignore[attr-defined]  # set by a connector
        self._waiting.append(_Entry(sent, trainer, step, bool(every) and (step + 1) % every == 0))

    def log(self, *, wait: bool) -> None:
        """Logs what is there; with `wait` waits for the rest. Failures are left to be raised by the client."""
        while self._waiting and (wait or self._waiting[0].sent.optim.done()):
            entry = self._waiting[0]
            self._wait(entry.sent.optim)
            self._waiting.popleft()
            if entry.sent.optim.failed:
                continue
            metrics = _metrics(entry.sent)
            self._names.update(metrics)
            if entry.to_loggers and metrics:
                # Directly: `self.log` has no step of its own, and is refused after the last one.
                for logger in entry.trainer.loggers:
                    logger.log_metrics(metrics, step=entry.step)
            entry.trainer.callback_metrics.update({name: torch.tensor(value) for name, value in metrics.items()})
            if LOSS in metrics:
                entry.trainer.progress_bar_metrics[LOSS] = metrics[LOSS]


def _saves_after(callback: Any, step: int) -> bool:
    every: int = getattr(callback, "_every_n_train_steps", 0)
    return every > 0 and step % every == 0


def _metrics(sent: Step) -> dict[str, float]:
    """What the step says of itself, and the losses that ran on the server: the mean over its window, as scaled."""
    metrics: dict[str, float] = {}
    if sent.losses:
        outputs = [(loss.result().metrics, scale) for loss, scale in sent.losses]
        metrics |= {name: float(value) for name, value in outputs[-1][0].items() if name != _SUM}
        metrics[LOSS] = sum(scale * float(output.get(_SUM, 0.0)) for output, scale in outputs)
    return metrics | {name: float(value) for name, value in (sent.optim.result().metrics or {}).items()}
