"""Measures requests and waits of each training step, and draws a timeline of some of them."""

from __future__ import annotations

import importlib.util
import logging
import time
from collections import deque
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import lightning.pytorch as pl
from typing_extensions import override

from tinker_lightning.callbacks import timeline
from tinker_lightning.callbacks.generation import require_remote
from tinker_lightning.callbacks.timeline import StepRecord
from tinker_lightning.client.transport.recording import OperationRecord, Recording
from tinker_lightning.errors import InvalidInput
from tinker_lightning.lightning.deferred_metrics import LogStep, log_at
from tinker_lightning.remote.lm import remotes_of

if TYPE_CHECKING:
    from collections.abc import Sequence
    from os import PathLike

    from tinker_lightning.lightning.module import RemoteModule

logger = logging.getLogger("tinker_lightning")


class RemoteMonitor(pl.Callback):
    """Logs latencies, queue times, bytes, tokens per second and the share of time spent waiting, for each step.

    A step's row is logged when the last of its results has arrived, under the step that it belongs to.

    Args:
        trace_steps: Steps of which to save a timeline, from the first to the last, for example `range(10, 20)`; counted
            from 0, as in loggers. It is saved as JSON for https://ui.perfetto.dev or `chrome://tracing`, and,
            if matplotlib is installed, as a picture.
        path: The JSON file; the picture has the same name and ends in `.png`. By default `timeline-<first>-<last>.json`
            in the trainer's `log_dir`, or in its `default_root_dir` if no logger writes files.
    """

    def __init__(self, trace_steps: Sequence[int] | None = None, path: str | PathLike[str] | None = None) -> None:
        if trace_steps is not None and (not len(trace_steps) or min(trace_steps) < 0):
            raise InvalidInput(f"RemoteMonitor: trace_steps must be steps from 0 on, got {trace_steps!r}")
        if path is not None and Path(path).suffix != ".json":
            raise InvalidInput(f"RemoteMonitor: path must end in .json, got {str(path)!r}")
        self.trace_steps = trace_steps
        self.path = path
        self.files: list[Path] = []
        """The files of the last timeline."""
        self._recording = Recording()
        self._active = ExitStack()
        self._pending: deque[tuple[StepRecord, LogStep]] = deque()
        self._in_flight: list[OperationRecord] = []
        self._traced: list[StepRecord] = []
        self._validations: list[tuple[float, float]] = []
        self._step, self._start, self._tokens = 0, 0.0, 0

    @override
    def on_fit_start(self, _: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Warns before training if matplotlib is missing."""
        require_remote(self, pl_module)
        if self.trace_steps is not None and importlib.util.find_spec("matplotlib") is None:
            logger.warning(
                "RemoteMonitor: the timeline is saved as JSON but not drawn, because matplotlib is not installed. "
                "Install it with: python -m pip install 'tinker-lightning[examples]'"
            )

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Starts to measure."""
        module = require_remote(self, pl_module)
        self._stop()
        self._recording, self._pending, self._in_flight, self._traced = Recording(), deque(), [], []
        for each in remotes_of(module):
            each.backend.record(self._recording)
            self._active.callback(each.backend.record, None)
        self._active.enter_context(self._recording.record_waits())
        self._step, self._start, self._tokens = trainer.global_step, time.perf_counter(), _trained(module)
        self._validations = []

    @override
    def on_validation_start(self, *_: Any) -> None:
        """Leaves out validation, whose passes belong to no step."""
        self._validations.append((time.perf_counter(), float("inf")))

    @override
    def on_validation_end(self, *_: Any) -> None:
        """Continues to measure."""
        start = self._validations.pop()[0]
        self._validations.append((start, time.perf_counter()))

    @override
    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *_: Any) -> None:
        """Ends the step, and logs those whose results have all arrived."""
        if trainer.global_step == self._step:
            return  # in the middle of an accumulation window
        now, tokens = time.perf_counter(), _trained(require_remote(self, pl_module))
        when = LogStep.current(trainer)
        operations, waits = self._recording.take()
        record = StepRecord(when.step, self._start, now, operations, waits, self._validations, tokens - self._tokens)
        self._pending.append((record, when))
        self._step, self._tokens, self._validations = trainer.global_step, tokens, []
        self._log(trainer)
        self._start = time.perf_counter()  # to draw a timeline takes seconds, which belong to no step

    @override
    def on_train_end(self, trainer: pl.Trainer, *_: Any) -> None:
        """Logs the last steps and saves a timeline that has not been saved."""
        self._log(trainer)
        self._save(trainer)
        self._stop()

    @override
    def on_exception(self, trainer: pl.Trainer, *_: Any) -> None:
        """Logs what is known of the steps before an error."""
        self.on_train_end(trainer)

    def _log(self, trainer: pl.Trainer) -> None:
        while self._pending and self._pending[0][0].is_complete:
            record, when = self._pending.popleft()
            record.earlier, self._in_flight = self._in_flight, []
            metrics, self._in_flight = record.metrics(), record.left_in_flight
            log_at(trainer, metrics, when)
            if self.trace_steps is not None and min(self.trace_steps) <= record.step <= max(self.trace_steps):
                self._traced.append(record)
                if record.step == max(self.trace_steps):
                    self._save(trainer)

    def _save(self, trainer: pl.Trainer) -> None:
        """Saves the timeline of the steps traced so far."""
        steps, self._traced = self._traced, []
        if not steps:
            return
        name = f"timeline-{steps[0].step}-{steps[-1].step}.json"
        path = Path(self.path or Path(trainer.log_dir or trainer.default_root_dir, name))
        path.parent.mkdir(parents=True, exist_ok=True)
        timeline.write_json(steps, path)
        self.files = [path]
        if importlib.util.find_spec("matplotlib") is not None:
            timeline.draw(steps, path.with_suffix(".png"))
            self.files.append(path.with_suffix(".png"))
        logger.info("RemoteMonitor: timeline of steps %d to %d in %s", steps[0].step, steps[-1].step, path)

    def _stop(self) -> None:
        self._active.close()


def _trained(module: RemoteModule) -> int:
    return sum(each.tokens.trained for each in remotes_of(module))
