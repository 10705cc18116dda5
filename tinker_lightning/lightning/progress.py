"""The progress bar of a fit, which counts the steps that the server has finished.

Epoch 0:  30%|███       | 3/10 steps, 5 in flight [00:12<00:28, 410 tok/s, train_loss=2.31]
                          │           └ sent, and not answered yet
                          └ answered by the server
"""

from __future__ import annotations

import math
import sys
import time
from collections import deque
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.callbacks import ProgressBar, RichProgressBar, TQDMProgressBar
from lightning.pytorch.callbacks.progress.tqdm_progress import Tqdm
from typing_extensions import override

from tinker_lightning.lightning import _compat

if TYPE_CHECKING:
    import lightning.pytorch as pl

    from tinker_lightning.client.futures import TinkerFuture

# The number of times a step was finished over which the pace is measured.
_HISTORY = 50

# How often the bar is drawn in a terminal while nothing happens, in seconds.
_DRAW_SECONDS = 1.0


class StepCount:
    """The steps of a fit: finished, in flight and left, and their pace.

    Args:
        trainer: The trainer, which counts a step when it is sent.
        tokens: The number of tokens that were trained before.
    """

    def __init__(self, trainer: pl.Trainer, tokens: int) -> None:
        self._trainer = trainer
        self._began = time.monotonic()
        self._start = trainer.global_step
        self._in_flight: deque[tuple[TinkerFuture[Any], int]] = deque()  # with the tokens trained up to each
        self._tokens = tokens
        # The time, and how many steps and tokens were finished then.
        self._history = deque([(self._began, trainer.global_step, tokens)], maxlen=_HISTORY)

    def add(self, optim: TinkerFuture[Any], tokens: int) -> None:
        """Adds a step that was sent, with the number of tokens that are trained when it is finished."""
        self._in_flight.append((optim, tokens))

    def update(self) -> None:
        """Counts the steps that the server has answered since the last call, up to the first that has failed."""
        while self._in_flight and self._in_flight[0][0].done() and not self._in_flight[0][0].failed:
            _, self._tokens = self._in_flight.popleft()
        finished, counted = self.finished, self._history[-1][1]
        if finished < counted:  # a search for a learning rate has taken steps, which Lightning has undone
            self._history.clear()
        if finished != counted:
            self._history.append((time.monotonic(), finished, self._tokens))

    @property
    def in_flight(self) -> int:
        """The number of steps that were sent and not answered."""
        return len(self._in_flight)

    @property
    def finished(self) -> int:
        """The number of steps that are done, including those of earlier fits and those without a gradient."""
        return max(0, self._trainer.global_step - self.in_flight)

    @property
    def total(self) -> float:
        """The number of steps at which the fit ends, infinite if it is not known."""
        trainer = self._trainer
        if trainer.max_steps == -1 and trainer.lightning_module and not trainer.lightning_module.automatic_optimization:
            return math.inf
        try:
            total = trainer.estimated_stepping_batches
        except MisconfigurationException:  # the number of batches of a step changes
            return math.inf
        return total if total >= 0 else math.inf

    @property
    def elapsed(self) -> float:
        """The seconds since training began."""
        return time.monotonic() - self._began

    @property
    def taken(self) -> int:
        """The number of steps that this fit has finished."""
        return self.finished - self._start

    @property
    def seconds_per_step(self) -> float | None:
        """The seconds that a step takes; None before the first one is finished. Grows while the next one is late."""
        (began, first, _), (ended, last, _) = self._history[0], self._history[-1]
        if last == first:
            return None
        return max((ended - began) / (last - first), (time.monotonic() - began) / (last - first + 1), 1e-9)

    @property
    def tokens_per_second(self) -> float | None:
        """The number of tokens trained per second; None before the first step is finished."""
        if (seconds := self.seconds_per_step) is None:
            return None
        (_, first, before), (_, last, after) = self._history[0], self._history[-1]
        return (after - before) / ((last - first) * seconds)

    def describe_steps(self) -> str:
        """Returns the counts as text: `3/10 steps, 5 in flight`."""
        total = self.total
        text = f"{self.finished}/{total:.0f} steps" if math.isfinite(total) else f"{self.finished} steps"
        return f"{text}, {self.in_flight} in flight" if self.in_flight else text

    def describe_speed(self) -> str:
        """Returns the tokens per second as text."""
        speed = self.tokens_per_second
        return "" if speed is None else f"{speed:,.0f} tok/s"


class StepBar(ProgressBar):
    """A progress bar of a fit by finished steps; all other bars, and fits of other modules, are Lightning's own."""

    def __init__(self) -> None:
        super().__init__()
        self.steps: StepCount | None = None
        """The steps of the fit of a remote module."""
        self.waiting_for = ""
        """What the fit waits for, which the bar shows."""
        self.pause = ""
        """What the server does not answer, and for how long, which the bar shows as well."""
        self._drawn = (-1, 0.0)  # the number of finished steps, and the time

    @property
    @override
    def total_train_batches(self) -> int | float:
        """The number of steps of the fit."""
        return super().total_train_batches if self.steps is None else self.steps.total

    @override
    def get_metrics(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> dict[str, Any]:
        """Returns the metrics to show, without the version of the logger, which takes the place of one."""
        metrics: dict[str, Any] = super().get_metrics(trainer, pl_module)
        metrics.pop("v_num", None)
        return metrics

    @property
    def _wait(self) -> str:
        return ", ".join(filter(None, (self.waiting_for, self.pause)))

    def draw(self, trainer: pl.Trainer, *, waits: bool = False) -> None:
        """Draws the steps; while the fit `waits`, only if that shows something new, and no file fills with it."""
        if self.steps is None:
            return
        finished, now = self.steps.finished, time.monotonic()
        is_due = sys.stdout.isatty() and now - self._drawn[1] >= _DRAW_SECONDS
        if not waits or is_due or finished > self._drawn[0]:
            self._drawn = finished, now
            self._draw(self.steps, trainer, with_metrics=not waits)

    def _draw(self, steps: StepCount, trainer: pl.Trainer, *, with_metrics: bool) -> None:
        """Draws the steps, and unless that would compute metrics in the middle of a batch, the metrics."""
        raise NotImplementedError

    @override
    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Draws the number of the epoch."""
        super().on_train_epoch_start(trainer, pl_module)
        self.draw(trainer)

    @override
    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *args: Any) -> None:
        """Draws the steps in place of the batches."""
        if self.steps is None:
            super().on_train_batch_end(trainer, pl_module, *args)
        self.draw(trainer)

    @override
    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Draws the steps and metrics of the epoch."""
        super().on_train_epoch_end(trainer, pl_module)
        self.draw(trainer)

    @override
    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Draws the steps that were in flight when the last batch ended."""
        self.draw(trainer)
        super().on_train_end(trainer, pl_module)


class StepTqdm(Tqdm):
    """A tqdm bar that shows the pace of finished steps."""

    steps: StepCount | None = None
    waiting_for = ""

    @property
    @override
    def format_dict(self) -> dict[str, Any]:
        """The values that are shown."""
        values: dict[str, Any] = super().format_dict
        steps = self.steps
        if steps is None:
            return {**values, "steps": "", "speed": ""}
        speed, seconds = steps.describe_speed(), steps.seconds_per_step
        return {
            **values,
            "elapsed": steps.elapsed,
            "rate": None if seconds is None else 1 / seconds,
            "initial": values["n"],  # no rate before the first step is finished
            "steps": steps.describe_steps(),
            "speed": "".join(f", {each}" for each in (speed, self.waiting_for) if each),
        }

    @override
    def reset(self, total: float | None = None) -> None:
        """Does nothing at the start of an epoch, because one bar shows the whole fit."""


class StepTQDMProgressBar(StepBar, TQDMProgressBar):
    """Lightning's tqdm bar, by finished steps."""

    _bar: StepTqdm | None = None

    @override
    def init_train_tqdm(self) -> Tqdm:
        """Returns the bar of training."""
        bar = self._bar = StepTqdm(
            desc=self.train_description,
            position=2 * self.process_position,
            disable=self.is_disabled,
            leave=True,
            dynamic_ncols=True,
            file=sys.stdout,
            bar_format="{l_bar}{bar}| {steps} [{elapsed}<{remaining}{speed}{postfix}]",
        )
        bar.steps = self.steps
        return bar

    @override
    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        """Ends the line of the bar before an error is printed."""
        super().on_exception(trainer, pl_module, exception)
        if self._bar is not None:
            self._bar.close()

    @override
    def print(self, *args: Any, **kwargs: Any) -> None:
        """Prints above the bar, and also where there is none, which Lightning's own does not."""
        if self.is_enabled:
            Tqdm.write(kwargs.pop("sep", " ").join(map(str, args)), **kwargs)

    @override
    def _draw(self, steps: StepCount, trainer: pl.Trainer, *, with_metrics: bool) -> None:
        bar = self._bar
        if bar is None or bar.disable:
            return
        bar.n, bar.waiting_for = steps.finished, self._wait
        if with_metrics:
            bar.set_postfix(self.get_metrics(trainer, trainer.lightning_module), refresh=False)
        bar.refresh()


class StepRichProgressBar(StepBar, RichProgressBar):
    """Lightning's Rich bar, by finished steps."""

    @override
    def configure_columns(self, trainer: pl.Trainer) -> list[Any]:
        """Returns the columns, of which the last three are others for the bar of training."""
        from rich.progress import BarColumn, ProgressColumn, Task
        from rich.text import Text

        class Field(ProgressColumn):
            def __init__(self, column: ProgressColumn, name: str) -> None:
                self._column = column
                self._name = name
                super().__init__()

            def render(self, task: Task) -> Any:
                """Renders a field of the task, or the column of Lightning."""
                text = task.fields.get(self._name)
                return self._column.render(task) if text is None else Text(text, style="dim")

        *columns, batches, times, speed = super().configure_columns(trainer)
        for each in columns:
            if isinstance(each, BarColumn):
                each.bar_width = 20
        return [*columns, Field(batches, "steps"), Field(times, "times"), Field(speed, "speed")]

    @override
    def _draw(self, steps: StepCount, trainer: pl.Trainer, *, with_metrics: bool) -> None:
        if self.progress is None or self.train_progress_bar_id is None or self.is_disabled:
            return
        seconds, left = steps.seconds_per_step, steps.total - steps.finished
        remaining = "?" if seconds is None or not math.isfinite(left) else clock(left * seconds)
        self.progress.update(
            self.train_progress_bar_id,
            completed=steps.finished,
            steps=steps.describe_steps(),
            times=f"{clock(steps.elapsed)}<{remaining}",
            speed=" ".join(each for each in (steps.describe_speed(), self._wait) if each),
        )
        if with_metrics:
            _compat.UPDATE_METRICS.get(self)(trainer, trainer.lightning_module)
        self.refresh()

    @override
    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Ends the bar before what is printed at the end of a fit."""
        super().on_train_end(trainer, pl_module)
        if self.progress is not None and self.is_enabled:
            self.progress.stop()


def replace_default_bar(trainer: pl.Trainer) -> StepBar | None:
    """Replaces the bar that a trainer has by default by one of finished steps; returns it, or None for other bars."""
    bar = trainer.progress_bar_callback
    if isinstance(bar, StepBar):
        return bar
    kind = {RichProgressBar: StepRichProgressBar, TQDMProgressBar: StepTQDMProgressBar}.get(type(bar))
    if bar is None or kind is None or not _compat.is_default_bar(bar):
        return None
    own: StepBar = kind()
    if bar.is_disabled:  # type: ignore[attr-defined]
        own.disable()
    _compat.CALLBACKS.set(trainer, [own if each is bar else each for each in _compat.CALLBACKS.get(trainer)])
    return own


def clock(seconds: float) -> str:
    """Returns a time as text: `02:30`."""
    return str(timedelta(seconds=int(seconds))).removeprefix("0:")


_compat.note_default_bars()
