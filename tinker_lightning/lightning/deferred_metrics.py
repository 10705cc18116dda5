"""Metrics of a remote module: logged with their step, or deferred until the server returns them, under that step."""

from __future__ import annotations

import contextlib
import logging
import math
from collections import Counter, deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from typing_extensions import override

from tinker_lightning import losses
from tinker_lightning.client.passes.request import reduced
from tinker_lightning.errors import InvalidInput, OperationFailed, TinkerLightningError
from tinker_lightning.lightning import _compat
from tinker_lightning.lightning.session import LAST_WAIT, SessionModule
from tinker_lightning.losses import custom
from tinker_lightning.losses.batch import target_weights
from tinker_lightning.losses.builtin import LOSSES as BUILT_IN
from tinker_lightning.losses.custom import PASS_METRICS, prefix_clashes
from tinker_lightning.losses.library import supported_settings
from tinker_lightning.losses.likelihood import likelihood_scores
from tinker_lightning.lossgraph.graph_loss import CUSTOM_PREFIX, LIBRARY_PREFIX
from tinker_lightning.remote.calls import ServerCall, Step
from tinker_lightning.remote.lm import raise_first, settle, wait_for_all
from tinker_lightning.rows.batches import count_datums

if TYPE_CHECKING:
    from collections.abc import Callable, Container, Iterable, Mapping, Sequence
    from typing import TypeAlias

    from lightning.pytorch.utilities.types import LRSchedulerConfig

    from tinker_lightning.client.futures import TinkerFuture
    from tinker_lightning.types import Datum, ForwardBackwardOutput

    FinishedPass: TypeAlias = tuple[ForwardBackwardOutput, ServerCall]

LOSS = "train_loss"
VALUE = "value"
TOTAL = "loss_total"
SCORES = frozenset({"nll", "perplexity"})
COUNTS = frozenset({"tokens", "action_tokens"})
# What a run is controlled and drawn by; "step" would even set the step of a logger's row.
RESERVED = frozenset({LOSS, "val_loss", "test_loss", TOTAL, "grad_norm", "learning_rate", "epoch", "step"})

_SUM = "loss:sum"

# The ratio of a loss to the first one from which on training diverges.
_DIVERGED = 1000.0

logger = logging.getLogger("tinker_lightning")


class LoggingModule(SessionModule):
    """A module that logs the metrics of its remote model. See `SessionModule` for the arguments."""

    def __init__(self, model: Any, adapter: dict[str, Any], base_url: str | None, api_key: str | None) -> None:
        super().__init__(model, adapter, base_url, api_key)
        self._deferred = DeferredMetrics(self.lm.handle.remote.wait_for_end, self.server_metrics)
        # The metrics of the micro-batches whose gradients are in the window, and of the current one.
        self._window_metrics: list[tuple[dict[str, float], int]] = []
        self._batch_metrics: tuple[dict[str, float], int] = ({}, 0)
        self._logged: set[str] = set()
        # The scores of the last validation, and the version of the weights that it was of.
        self._validated: tuple[int, dict[str, float]] = (0, {})

    @override
    def log(self, *args: Any, **kwargs: Any) -> None:
        """Logs a value as `LightningModule.log` does, with the number of datums as the default batch size."""
        if kwargs.get("batch_size") is None and self.has_trainer:
            _compat.set_default_batch_size(self.trainer, count_datums)
        super().log(*args, **kwargs)

    def server_metrics(self, passes: Sequence[FinishedPass]) -> Mapping[str, float]:
        """Returns metrics of losses that ran on the server, in addition to their own; none by default."""
        del passes
        return {}

    def drain(self) -> None:
        """Waits for all requests of the module's remote models, logs them, and raises unread failures as one error."""
        if self.has_trainer and self.trainer.received_sigterm:
            wait_for_all(self, LAST_WAIT)
            self._deferred.log(wait=False)
        else:
            self._deferred.log(wait=True)
            wait_for_all(self)
        raise_first(self)

    def settle(self, timeout: float, error: BaseException) -> None:
        """Waits a while for requests sent before an error, logs them, and adds their failures to the error as notes."""
        settle(self, timeout, error)
        with contextlib.suppress(TinkerLightningError):
            self._deferred.log(wait=False)

    def _log_present(self, metrics: Mapping[str, float], batch_size: int) -> None:
        """Logs the metrics of a step and drops those it lacks, whose last values Lightning would repeat."""
        if missing := self._logged - metrics.keys():
            _compat.drop_logged(self.trainer, "training_step", missing)
        self._logged = set(metrics)
        if LOSS in metrics:
            self._deferred.watch.observe(metrics[LOSS], self.trainer, LogStep.current(self.trainer).step)
        for name, value in metrics.items():
            self.log(name, value, prog_bar=name == LOSS, batch_size=batch_size)


@dataclass(frozen=True, slots=True)
class LogStep:
    """The step that loggers would write now.

    Args:
        step: The number under which they write it.
        epoch: The epoch, which Lightning adds to what it logs.
        is_logged: Whether they write it, by `log_every_n_steps`.
    """

    step: int
    epoch: int
    is_logged: bool

    @classmethod
    def current(cls, trainer: pl.Trainer) -> LogStep:
        """Returns the step of a trainer."""
        step, every = _compat.BATCHES_THAT_STEPPED.get(trainer), _compat.LOG_EVERY_N_STEPS.get(trainer)
        return cls(step, trainer.current_epoch, bool(every) and (step + 1) % every == 0)


def log_at(trainer: pl.Trainer, metrics: Mapping[str, float], when: LogStep) -> None:
    """Logs metrics under a step, which `self.log` cannot do for an earlier one, nor after the last one."""
    if when.is_logged and metrics:
        for logger in trainer.loggers:
            logger.log_metrics({"epoch": when.epoch, **metrics}, step=when.step)
    trainer.callback_metrics.update({name: torch.tensor(value) for name, value in metrics.items()})


class LossWatch:
    """Warns once in a fit about a loss that is a thousand times the first one."""

    def __init__(self) -> None:
        self._first: float | None = None
        self._has_warned = False

    def observe(self, loss: float, trainer: pl.Trainer, step: int) -> None:
        """Compares the loss of a step with the first one, or with 0.01 if that is smaller, as for policy losses."""
        if self._first is None:
            self._first = loss
        if self._has_warned or not abs(loss) > _DIVERGED * max(abs(self._first), 0.01):
            return
        self._has_warned = True
        rates = {group["lr"] for optimizer in trainer.optimizers for group in optimizer.param_groups}
        logger.warning(
            "the loss of step %d is %.4g, after %.4g at the first step: training diverges. The learning rate is "
            "%s; lower it, or set gradient_clip_val.",
            step,
            loss,
            self._first,
            ", ".join(f"{rate:g}" for rate in sorted(rates)),
        )


@dataclass(frozen=True, slots=True)
class _Entry:
    requests: Step
    trainer: pl.Trainer
    when: LogStep
    share: float
    logged: frozenset[str]


class DeferredMetrics:
    """Logs the metrics of steps when they arrive, oldest first.

    Args:
        wait: Waits for a request; it may raise to end the wait.
        more_metrics: Returns metrics of server-side losses in addition to their own.
    """

    def __init__(
        self,
        wait: Callable[[TinkerFuture[Any]], None],
        more_metrics: Callable[[Sequence[FinishedPass]], Mapping[str, float]],
    ) -> None:
        self._wait = wait
        self._more_metrics = more_metrics
        self._waiting: deque[_Entry] = deque()
        self.watch = LossWatch()
        self._names: set[str] = set()

    def are_monitored(self, trainer: pl.Trainer, *, by_step: bool = False) -> bool:
        """Returns whether a callback or scheduler monitors a deferred metric; any metric while no name is known yet.

        With `by_step`, only those that read a metric after this step count.
        """
        readers: list[Any]
        if by_step:
            readers = [one for one in trainer.checkpoint_callbacks if _may_save(one, trainer.global_step)]
            readers += [one for one in trainer.lr_scheduler_configs if _is_due(one, trainer)]
        else:
            readers = [*_compat.CALLBACKS.get(trainer), *trainer.lr_scheduler_configs]
        monitored = {getattr(one, "monitor", None) for one in readers} - {None}
        return bool(monitored & self._names if self._names else monitored)

    def add(self, requests: Step, trainer: pl.Trainer, share: float, logged: Iterable[str]) -> None:
        """Adds the requests of a step, whose metrics belong to the step that loggers would write now.

        `share` turns the sum over its window, divided by the full window size, into a mean. `logged` are the names
        of the step's metrics that were logged already, which no metric of the server replaces.
        """
        self._waiting.append(_Entry(requests, trainer, LogStep.current(trainer), share, frozenset(logged)))

    def log(self, *, wait: bool) -> None:
        """Logs the metrics that have arrived; with `wait`, waits for the rest. The client raises failures."""
        while self._waiting:
            entry = self._waiting[0]
            futures: list[TinkerFuture[Any]] = [entry.requests.optim, *(loss for loss, _ in entry.requests.losses)]
            if wait:
                for future in futures:
                    self._wait(future)
            for future in futures:
                if not future.done():
                    return
            self._waiting.popleft()
            if any(future.failed for future in futures):
                continue
            metrics = self._metrics(entry)
            if metrics.get("grad_norm") == 0:
                for _, call in entry.requests.losses:
                    custom.warn_of_zero(call.name.removeprefix(LIBRARY_PREFIX).removeprefix(CUSTOM_PREFIX))
            self._names.update(metrics)
            log_at(entry.trainer, metrics, entry.when)
            if LOSS in metrics:
                entry.trainer.progress_bar_metrics[LOSS] = metrics[LOSS]
                self.watch.observe(metrics[LOSS], entry.trainer, entry.when.step)

    def _metrics(self, entry: _Entry) -> dict[str, float]:
        """Returns the metrics of a step and of losses that ran on the server, which keep the names of their metrics."""
        passes = [(loss.result(), call) for loss, call in entry.requests.losses]
        step = {name: float(value) for name, value in (entry.requests.optim.result().metrics or {}).items()}
        more = {name: value for name, value in step.items() if name not in entry.logged}
        return {**more, **self._more_metrics(passes), **window_metrics(passes, entry.share)} if passes else more


def _may_save(callback: Any, step: int) -> bool:
    """Returns whether a checkpoint callback may save after this step; one with a time interval may after each."""
    if not isinstance(callback, ModelCheckpoint):
        return False
    every = _compat.EVERY_N_TRAIN_STEPS.get(callback)
    return _compat.TRAIN_TIME_INTERVAL.get(callback) is not None or (every > 0 and step % every == 0)


def _is_due(scheduler: LRSchedulerConfig, trainer: pl.Trainer) -> bool:
    """Returns whether a scheduler reads its metric after this step, which Lightning counts in batches."""
    batches = trainer.fit_loop.epoch_loop.batch_idx + 1
    return scheduler.interval == "step" and batches % scheduler.frequency == 0


def window_metrics(passes: Sequence[FinishedPass], share: float = 1.0) -> dict[str, float]:
    """Returns the values of a window's losses, scaled like their gradients and by `share`, and their metrics.

    The metrics of a loss with regularizers are prefixed with `base_loss/`, as for a loss that runs locally. If the
    losses differ, their metrics are prefixed with the names of the losses. A sum with a loss whose value the server
    does not return is absent.
    """
    different: dict[tuple[bool, str, str], list[FinishedPass]] = {}
    for output, call in passes:
        key = (call.added is not None, call.name, repr(sorted(call.config.items())))
        different.setdefault(key, []).append((output, call))
    metrics: dict[str, float] = {LOSS: 0.0}
    names: Counter[str] = Counter()
    unknown: set[str] = set()
    for (is_base, name, _), alike in sorted(different.items()):  # the order of backwards must not change numbers
        prefix = "base_loss/" if is_base else ""
        if len(different) > 1:
            names[name] += 1
            prefix += f"{name}/" if names[name] == 1 else f"{name}_{names[name]}/"
        window = [
            (pass_metrics(output, call.loss, call.datums, call.config), len(call.datums)) for output, call in alike
        ]
        own = combined(window)
        if prefix:
            metrics |= prefixed_metrics(own, prefix)
        else:
            metrics |= loss_metrics(own)
        if any(_SUM not in output.metrics for output, _ in alike):
            unknown |= {LOSS, TOTAL} if is_base else {LOSS}
            continue
        value = share * sum(call.scale * float(output.metrics[_SUM]) for output, call in alike)
        total = value + share * sum(call.scale * (call.added or 0.0) for _, call in alike)
        if prefix:
            metrics[f"{prefix}{VALUE}"] = value
        if is_base:
            metrics[TOTAL] = metrics.get(TOTAL, 0.0) + total
        metrics[LOSS] += total
    return {name: number for name, number in metrics.items() if name not in unknown}


def pass_metrics(
    output: ForwardBackwardOutput, loss: Any, data: Sequence[Datum], config: Mapping[str, Any] | None
) -> dict[str, float]:
    """Returns the metrics of a pass with a server-side loss, with the same names as on every other route.

    Servers report different metrics for built-in losses, so those are computed here from the log-probabilities.
    """
    if not isinstance(loss, str) or loss not in BUILT_IN:
        metrics = {name: float(number) for name, number in output.metrics.items() if name not in PASS_METRICS}
        # The server has prefixed those of the loss that are called like its own.
        clashes = {name for name in metrics if name.replace("loss/", "") in PASS_METRICS}
        return {name.removeprefix("loss/") if name in clashes else name: each for name, each in metrics.items()}
    if loss == custom.SURROGATE and _SUM in output.metrics:  # which may come without log-probabilities
        weights = torch.cat([target_weights(datum).flatten() for datum in data]).double()
        return custom.numbers(likelihood_scores(weights.new_tensor(output.metrics[_SUM]), weights))
    function = getattr(losses, loss)
    with torch.no_grad():
        try:
            logprobs = custom.logprob_leaves(output, data)
            return custom.numbers(function(data, logprobs, **supported_settings(function, config or {}))[1])
        except (InvalidInput, OperationFailed):
            return {}  # the server takes other inputs than the library, or returns no log-probabilities


def combined(window: Sequence[tuple[Mapping[str, float], int]]) -> dict[str, float]:
    """Combines the metrics of micro-batches, given with their numbers of datums, as their names require."""
    values: dict[str, list[float]] = {}
    counts: dict[str, list[int]] = {}
    for metrics, count in window:
        for name, value in metrics.items():
            values.setdefault(name, []).append(value)
            counts.setdefault(name, []).append(count)
    totals = {name: math.fsum(each) for name, each in values.items()}
    means = [name for name, each in values.items() if len(each) > 1 and reduction(name) != "sum"]
    for name in means:
        totals |= reduced(name, values[name], counts[name]) or {name: totals[name] / len(values[name])}
    return totals


def loss_metrics(metrics: Mapping[str, float], reserved: Container[str] = RESERVED) -> dict[str, float]:
    """Returns the metrics of a loss with reserved names prefixed: `grad_norm` becomes `loss/grad_norm`."""
    return prefix_clashes(metrics, reserved, "loss")


def prefixed_metrics(metrics: Mapping[str, float], prefix: str) -> dict[str, float]:
    """Returns the metrics of one of several losses with its prefix; `value` is reserved for the value of the loss."""
    return {prefix + name: number for name, number in prefix_clashes(metrics, {VALUE}, "custom").items()}


def reduction(name: str) -> Literal["sum", "min", "max", "mean"]:
    """Returns how a metric is combined over batches: counts are summed, others combined by their suffix."""
    if name.rpartition("/")[2] in COUNTS or name.endswith(":sum"):
        return "sum"
    if name.endswith(":min"):
        return "min"
    return "max" if name.endswith(":max") else "mean"
