"""Metrics that come back from the server after their step, logged under the step they belong to."""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import lightning.pytorch as pl
import torch

from tinker_lightning.client.chunking import reduced, weighted_mean
from tinker_lightning.errors import InvalidLoss
from tinker_lightning.lightning import metric_names
from tinker_lightning.lightning.metric_names import LOSS, VALUE
from tinker_lightning.remote.calls import PendingBackward, Step

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from typing import TypeAlias

    from lightning.pytorch.utilities.types import LRSchedulerConfig

    from tinker_lightning.client.futures import TinkerFuture

    # What the server says of a pass, and what was sent for it.
    _Ran: TypeAlias = tuple[Mapping[str, Any], PendingBackward]

_SUM = "loss:sum"


@dataclass(frozen=True, slots=True)
class _Entry:
    sent: Step
    trainer: pl.Trainer
    step: int
    epoch: int
    to_loggers: bool


class DeferredMetrics:
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
        schedulers = trainer.lr_scheduler_configs
        looking: list[Any] = [*trainer.callbacks, *schedulers]  # type: ignore[attr-defined]  # set by a connector
        if by_step:
            looking = [one for one in trainer.checkpoint_callbacks if _may_save(one, trainer.global_step)]
            looking += [one for one in schedulers if _is_due(one, trainer)]
        monitored = {getattr(one, "monitor", None) for one in looking} - {None}
        return bool(monitored & self._names if self._names else monitored)

    def add(self, sent: Step, trainer: pl.Trainer) -> None:
        """A step was sent; it belongs to the step that the trainer's loggers would write now."""
        step = trainer.fit_loop.epoch_loop._batches_that_stepped
        every: int = trainer.log_every_n_steps  # type: ignore[attr-defined]  # set by a connector
        to_loggers = bool(every) and (step + 1) % every == 0
        self._waiting.append(_Entry(sent, trainer, step, trainer.current_epoch, to_loggers))

    def log(self, *, wait: bool) -> None:
        """Logs what is there; with `wait` waits for the rest. Failures are left to be raised by the client.

        Raises:
            InvalidLoss: If a loss that the server computes returns metrics that cannot be logged.
        """
        while self._waiting:
            entry = self._waiting[0]
            futures: list[TinkerFuture[Any]] = [entry.sent.optim, *(loss for loss, _ in entry.sent.losses)]
            if not wait and not all(future.done() for future in futures):
                return
            for future in futures:
                self._wait(future)
            self._waiting.popleft()
            if any(future.failed for future in futures):
                continue
            try:
                metrics = _metrics(entry.sent)
            except InvalidLoss:
                self._waiting.clear()  # those behind it have the same names
                raise
            self._names.update(metrics)
            if entry.to_loggers and metrics:
                # Directly: `self.log` has no step of its own, and is refused after the last one. The epoch is added
                # as Lightning adds it to what it logs.
                for logger in entry.trainer.loggers:
                    logger.log_metrics({"epoch": entry.epoch, **metrics}, step=entry.step)
            entry.trainer.callback_metrics.update({name: torch.tensor(value) for name, value in metrics.items()})
            if LOSS in metrics:
                entry.trainer.progress_bar_metrics[LOSS] = metrics[LOSS]


def _may_save(callback: Any, step: int) -> bool:
    """Whether a checkpoint callback may save after so many steps; one that goes by the clock may after each."""
    every: int = getattr(callback, "_every_n_train_steps", 0)
    return getattr(callback, "_train_time_interval", None) is not None or (every > 0 and step % every == 0)


def _is_due(scheduler: LRSchedulerConfig, trainer: pl.Trainer) -> bool:
    """Whether a scheduler looks at its metric after this step, for which Lightning counts batches."""
    batches = trainer.fit_loop.epoch_loop.batch_idx + 1
    return scheduler.interval == "step" and batches % scheduler.frequency == 0


def _metrics(sent: Step) -> dict[str, float]:
    """What the step says of itself, and the losses that ran on the server."""
    metrics = of_losses([(loss.result().metrics, call) for loss, call in sent.losses]) if sent.losses else {}
    return metrics | {name: float(value) for name, value in (sent.optim.result().metrics or {}).items()}


def of_losses(ran: Sequence[_Ran]) -> dict[str, float]:
    """The values of a window's losses, as they were scaled, which makes means of them; and their diagnostics.

    Those of the one loss of a window have its names, or stand under `base_loss` where something was added to it here,
    as for a loss that runs here. Several different ones have their own names before them.

    Raises:
        InvalidLoss: If a diagnostic has a name under which something else is logged.
    """
    different: dict[tuple[bool, str, str], list[_Ran]] = {}
    for metrics, call in ran:
        key = (call.added is not None, call.name, repr(sorted((call.config or {}).items())))
        different.setdefault(key, []).append((metrics, call))
    found: dict[str, float] = {LOSS: 0.0}
    names: Counter[str] = Counter()
    for (is_base, name, _), alike in sorted(different.items()):  # so that numbers do not depend on a backward's order
        prefix = "base_loss/" if is_base else ""
        if len(different) > 1:
            names[name] += 1
            prefix += f"{name}/" if names[name] == 1 else f"{name}_{names[name]}/"
        combined = _combined(alike)
        metric_names.check(combined, prefix)
        found |= {prefix + metric: number for metric, number in combined.items()}
        value = sum(call.scale * float(metrics.get(_SUM, 0.0)) for metrics, call in alike)
        total = value + sum(call.scale * (call.added or 0.0) for _, call in alike)
        if prefix:
            found[f"{prefix}{VALUE}"] = value
        if is_base:
            found["loss_total"] = found.get("loss_total", 0.0) + total
        found[LOSS] += total
    return found


def _combined(ran: list[_Ran]) -> dict[str, float]:
    """The diagnostics of one loss over a window: reduced as their names say, and means where these say nothing."""
    combined: dict[str, float] = {}
    for name in {name: None for metrics, _ in ran for name in metrics if name != _SUM}:
        values = [float(metrics[name]) for metrics, _ in ran if name in metrics]
        counts = [len(call.datums) for metrics, call in ran if name in metrics]
        if len(values) == 1:
            combined[name] = values[0]
        else:
            combined |= reduced(name, values, counts) or {name: weighted_mean(values, counts)}
    return combined
