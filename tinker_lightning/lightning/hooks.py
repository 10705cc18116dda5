"""Hooks that every fit of a remote model needs, even if the hooks of a user's module do not call `super()`."""

from __future__ import annotations

import copy
import functools
import logging
import time
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.trainer.states import TrainerFn
from typing_extensions import override

from tinker_lightning.errors import LossWithoutGradient, ResultExpired, ResultTimeout, ServerUnreachable, SessionLost
from tinker_lightning.lightning import _compat, checks, loggers, reports
from tinker_lightning.lightning.checkpoint import contents, files
from tinker_lightning.lightning.checkpoint.format import SECTION, read_window
from tinker_lightning.lightning.deferred_metrics import LossWatch
from tinker_lightning.lightning.hyperparameters import hide_in_configs
from tinker_lightning.lightning.progress import StepBar, StepCount, replace_default_bar
from tinker_lightning.lightning.session import LAST_WAIT, WaitTerminated
from tinker_lightning.losses import custom
from tinker_lightning.losses.regularizers.composition import as_regularizers
from tinker_lightning.remote.calls import TokenCount
from tinker_lightning.remote.lm import dropping, holds_server_loss, raise_first, remotes_of
from tinker_lightning.threads.background import SigintHold

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from torch import Tensor

    from tinker_lightning.client.transport.retries import Pause
    from tinker_lightning.lightning.module import RemoteModule
    from tinker_lightning.remote.calls import Step
    from tinker_lightning.remote.window import RemoteModel


logger = logging.getLogger("tinker_lightning")

# The shortest interval at which rows are written to CSV files, in seconds.
_FLUSH_SECONDS = 1.0
# How long a wait lasts before the client is asked what for, and how often from then on, in seconds.
_ASK_SECONDS = 1.0


def attach(trainer: pl.Trainer, module: RemoteModule) -> None:
    """Adds the hooks of a module as the first callback of its trainer, replacing the hooks of an earlier run."""
    detach(trainer)
    replace_default_bar(trainer)
    _compat.CALLBACKS.get(trainer).insert(0, RemoteHooks(trainer, module))
    _compat.ignore_own_warnings(module)
    _compat.hide_unlimited_epochs(trainer)
    _compat.when_selected(trainer, functools.partial(_continue_logs, trainer))


def detach(trainer: pl.Trainer) -> None:
    """Removes the hooks from a trainer, without changing the list that it may be iterating over."""
    callbacks = [one for one in _compat.CALLBACKS.get(trainer) if not isinstance(one, RemoteHooks)]
    _compat.CALLBACKS.set(trainer, callbacks)


def note_file(trainer: pl.Trainer | None, path: object, states: Iterable[str] = (), step: int | None = None) -> None:
    """Notes a checkpoint that was written after a step with the remote states that it names.

    Without a step, no fit can resume from the file: it has only weights, or was removed.
    """
    if trainer is None:
        return  # the module is only connected
    loggers.log_file(trainer, path, states)
    for each in _hooks_of(trainer):
        each.files.pop(str(path), None)
        if step is not None:
            each.files[str(path)] = step


@contextmanager
def showing(trainer: pl.Trainer | None, what: str) -> Iterator[None]:
    """Shows in the bar of a fit what it waits for, and logs it at level `INFO`."""
    logger.info("%s", what)
    bar = None if trainer is None else trainer.progress_bar_callback
    if trainer is None or not isinstance(bar, StepBar):
        yield
        return
    bar.waiting_for = what
    bar.draw(trainer, waits=True)
    try:
        yield
    finally:
        bar.waiting_for = ""


def report_failure(trainer: pl.Trainer, error: BaseException) -> None:
    """Reports what a fit has trained before an error ended it, and how to resume it."""
    for each in _hooks_of(trainer):
        try:
            each.report_failure(error)
        except Exception:  # which must not take the place of the error
            logger.warning("what the fit has trained before it failed could not be reported", exc_info=True)


def _hooks_of(trainer: pl.Trainer) -> list[RemoteHooks]:
    return [each for each in _compat.CALLBACKS.get(trainer) if isinstance(each, RemoteHooks)]


class RemoteHooks(pl.Callback):
    """Checks losses, logs deferred metrics and waits for the server before any other callback runs."""

    def __init__(self, trainer: pl.Trainer, module: RemoteModule) -> None:
        self._trainer = trainer
        self._module = module
        self._hold = SigintHold()
        self._received = 0
        self._terminated: float | None = None
        self._asked = 0.0
        self._pause: Pause | None = None  # when the client was last asked
        self._steps: StepCount | None = None  # of the fit that runs
        self._tokens = TokenCount()  # before it
        self._taken = 0
        self._before: dict[str, float] = {}
        self._flushed = 0.0
        self.files: dict[str, int] = {}
        """The checkpoints of the fit and their steps, the newest last."""

    @override
    def setup(self, trainer: pl.Trainer, *_: Any, **__: Any) -> None:
        """Checks the trainer with the callbacks of `configure_callbacks`, hides API keys from them, secures files."""
        files.secure(trainer.strategy)
        self._module.decide_deferral()
        checks.check(trainer, self._module)
        hide_in_configs(_compat.CALLBACKS.get(trainer), self._module._api_keys)
        reports.hide_summary(trainer)
        self._connect()

    @override
    def on_fit_start(self, *_: Any) -> None:
        """Checks the regularizers, which `RemoteModule.setup` may have created."""
        as_regularizers(self._module.regularizers)
        self._connect()

    @override
    def on_sanity_check_start(self, trainer: pl.Trainer, *_: Any) -> None:
        """Checks the optimizers before anything is sent."""
        checks.check_steps(trainer.optimizers)

    @override
    def on_validation_start(self, *_: Any) -> None:
        """Connects to remote models that `RemoteModule.setup` has created."""
        self._connect()

    @override
    def on_test_start(self, *_: Any) -> None:
        """Connects to remote models that `RemoteModule.setup` has created."""
        self._connect()

    @override
    def on_predict_start(self, *_: Any) -> None:
        """Drops samplers of earlier weights."""
        self._module._prompt_sampler.reset()
        self._connect()

    @override
    def on_train_start(self, trainer: pl.Trainer, *_: Any) -> None:
        """Checks the optimizers and restores the accumulation windows, which Lightning has zeroed after loading."""
        module = self._module
        checks.check_optimizers(trainer, module)
        if trainer.ckpt_path is not None:
            module.restore_window()
        module._loaded_window = None
        self._received = module.lm.handle.remote.received
        module._deferred.watch = LossWatch()
        remote = module.lm.handle.remote
        self._tokens, self._taken = copy.copy(remote.tokens), remote.steps
        self._steps = StepCount(trainer, remote.tokens.trained)
        version, validated = module._validated
        self._before = validated if version == remote.version else {}
        settings = reports.model_settings(module)
        loggers.log_settings(trainer, settings)
        reports.show_report(trainer, reports.start_report(trainer, module, settings))
        self._set_bar(self._steps)

    @override
    def on_train_batch_start(self, trainer: pl.Trainer, *_: Any) -> None:
        """Starts a new accumulation window where Lightning does."""
        self._asked, self._pause = time.monotonic(), None
        module = self._module
        module._batch_metrics = ({}, 0)
        is_first = trainer.fit_loop.epoch_loop.batch_idx % trainer.accumulate_grad_batches == 0
        if is_first or not module.automatic_optimization:
            module._window_metrics = []

    @override
    def on_before_backward(self, _: pl.Trainer, __: pl.LightningModule, loss: Tensor) -> None:
        """Drops the accumulation window and raises `InvalidLoss` if a loss has no gradient or is not finite."""
        if loss.requires_grad and loss.numel() == 1 and torch.isfinite(loss):
            return
        with dropping(self._module):
            custom.check_scalar(loss)
            custom.check_differentiable(loss)
            if not holds_server_loss(loss):
                custom.check_finite(loss)

    @override
    def on_after_backward(self, *_: Any) -> None:
        """Raises `LossWithoutGradient` if no gradient has reached the remote model."""
        module = self._module
        received, self._received = self._received, module.lm.handle.remote.received
        if module.automatic_optimization and module.lm.handle.requires_grad and received == self._received:
            with dropping(module):
                raise LossWithoutGradient(custom.no_gradient_message())
        module._window_metrics.append(module._batch_metrics)

    @override
    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any, **__: Any) -> None:
        """Raises a Ctrl-C that was held until the step was counted, and logs the metrics that have arrived.

        Waits for the metrics of this step if a callback or scheduler is about to read them.
        """
        self._hold.end()
        deferred = self._module._deferred
        is_monitored = deferred.are_monitored(trainer, by_step=True)
        deferred.log(wait=is_monitored)
        if is_monitored:
            raise_first(self._module)  # a callback that monitors the metric would only report it missing
        self._show_steps()
        if time.monotonic() - self._flushed > _FLUSH_SECONDS:
            loggers.flush_csv(trainer)
            self._flushed = time.monotonic()

    @override
    def on_validation_end(self, trainer: pl.Trainer, *_: Any) -> None:
        """Keeps the scores of a validation, which are those before a fit that follows."""
        if not trainer.sanity_checking:
            self._module._validated = self._module.lm.handle.remote.version, reports.scores(trainer, "val_")

    @override
    def on_validation_epoch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        """Waits for the metrics of the last step if callbacks or schedulers monitor them."""
        deferred = self._module._deferred
        deferred.log(wait=deferred.are_monitored(trainer))

    @override
    def on_train_epoch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        """Waits for the metrics of the epoch, so that other callbacks see them."""
        self._module._deferred.log(wait=not trainer.received_sigterm)
        self._show_steps()

    @override
    def on_train_end(self, *_: Any) -> None:
        """Waits for the last steps and logs them."""
        self._module.drain()
        self._show_steps()

    @override
    def on_exception(self, *_: Any, **__: Any) -> None:
        """Drops a Ctrl-C that was held, because the run ends anyway."""
        self._hold.end(deliver=False)
        self._set_bar(None)

    @override
    def on_save_checkpoint(self, _: Any, __: Any, checkpoint: dict[str, Any]) -> None:
        """Saves the window, in case the module overrides `on_save_checkpoint` without calling `super()`."""
        contents.add_section(checkpoint, self._module)

    @override
    def on_load_checkpoint(self, trainer: Any, _: Any, checkpoint: dict[str, Any]) -> None:
        """Reads the window, in case the module overrides `on_load_checkpoint` without calling `super()`."""
        file = self._module.checkpoint_file
        self._module._loaded_window = read_window(checkpoint, file)
        if trainer.state.fn == TrainerFn.FITTING:
            section, step = checkpoint.get(SECTION, {}), checkpoint["global_step"]  # the trainer's follows
            loggers.warn_of_other_runs(trainer, section, file, step)
            # Another strategy does not return to the place at which the file was written.
            is_exact = getattr(trainer.strategy, "strategy_name", "") == "tinker" and bool(section.get("strategy"))
            loggers.drop_later_rows(trainer, section, file, step, logs_again=is_exact)

    @override
    def teardown(self, trainer: pl.Trainer, *_: Any, **__: Any) -> None:
        """Waits for everything in flight; the session stays, so that the next stage sees the same model."""
        module = self._module
        detach(trainer)
        for each in remotes_of(module):
            each.on_step = None
        module.drain()
        if self._steps is not None:
            remote = module.lm.handle.remote
            # By hand, a step of another optimizer is counted, too.
            skipped = self._steps.taken - (remote.steps - self._taken) if module.automatic_optimization else 0
            reports.show_report(
                trainer, reports.end_report(trainer, self._steps, remote.tokens - self._tokens, self._before, skipped)
            )
            self._steps = None
            self._set_bar(None)

    def report_failure(self, error: BaseException) -> None:
        """Reports what a fit has trained before an error ended it, if it has taken a step."""
        if self._steps is None:
            return
        steps, self._steps = self._steps, None
        steps.update()
        if isinstance(error, SessionLost | ServerUnreachable | ResultExpired | ResultTimeout):
            resume = reports.describe_resume(self._trainer, steps.finished, self.files)
            error.args = (f"{error} Resume {resume}.",)
        if not steps.taken:
            return
        trained = self._module.lm.handle.remote.tokens - self._tokens
        reports.show_report(self._trainer, reports.failure_report(self._trainer, steps, trained, self.files, error))

    def _set_bar(self, steps: StepCount | None) -> None:
        """Sets the steps that the bar shows; None when the fit has ended."""
        if isinstance(bar := self._trainer.progress_bar_callback, StepBar):
            bar.steps = steps

    def _connect(self) -> None:
        for remote in remotes_of(self._module):
            remote.while_waiting = self._while_waiting
            remote.on_step = functools.partial(self._on_step, remote)

    def _on_step(self, remote: RemoteModel, requests: Step) -> None:
        """Notes the metrics of a step of the module's own model, which are logged when they arrive.

        Ctrl-C is held from a step's submission until Lightning has counted it: a run that stopped in between would
        repeat the step after a resume.
        """
        module, trainer, share = self._module, self._trainer, 1.0
        if module.automatic_optimization:
            share = trainer.accumulate_grad_batches / max(1, len(module._window_metrics))
            self._hold.begin()
        if remote is module.lm.handle.remote:
            module._deferred.add(requests, trainer, share, module._logged)
            if self._steps is not None:
                self._steps.add(requests.optim, remote.tokens.trained)

    def _while_waiting(self) -> None:
        if time.monotonic() - self._asked >= _ASK_SECONDS:
            self._asked, self._pause = time.monotonic(), self._ask()
        self._check_sigterm(is_fault=self._pause is not None and self._pause.is_fault)
        bar = self._trainer.progress_bar_callback
        if self._steps is not None and isinstance(bar, StepBar):  # which other hooks draw only between batches
            self._steps.update()
            bar.pause = "" if self._pause is None else str(self._pause)
            bar.draw(self._trainer, waits=True)

    def _ask(self) -> Pause | None:
        """Returns what the models wait for; raises `ResultTimeout` if that is longer than the strategy allows."""
        pauses = [remote.pause for remote in remotes_of(self._module)]
        pause = max(filter(None, pauses), key=lambda each: each.waited, default=None)
        limit = getattr(self._trainer.strategy, "max_wait", None)
        if pause is not None and limit is not None:
            until = time.time() + limit - pause.waited
            pause = replace(pause, until=until if pause.until is None else min(until, pause.until))
            if pause.waited > limit:
                raise ResultTimeout(
                    f"the fit has waited for {pause.waited:.0f} s for {self._module.lm.backend.server}, and "
                    f"TinkerStrategy(max_wait={limit:g}) allows no more: {pause.reason}."
                )
        return pause

    def _show_steps(self) -> None:
        """Counts the steps that are finished; a bar of the user gets the numbers as metrics."""
        if self._steps is None:
            return
        self._steps.update()
        bar = self._trainer.progress_bar_callback
        if isinstance(bar, StepBar):  # which is drawn by its own hook, which follows
            bar.pause = ""
        elif bar is not None:
            counts = {"steps_done": self._steps.finished, "in_flight": self._steps.in_flight}
            self._trainer.progress_bar_metrics.update(counts)

    def _check_sigterm(self, *, is_fault: bool) -> None:
        """Ends a wait some seconds after a SIGTERM, at once if the server is silent or refuses what is waited for.

        Lightning checks for it only between batches.
        """
        if not self._trainer.received_sigterm:
            self._terminated = None
        elif self._terminated is None:
            self._terminated = time.monotonic()
        elif is_fault or time.monotonic() - self._terminated > LAST_WAIT:
            raise WaitTerminated


def _continue_logs(trainer: pl.Trainer, file: Any) -> None:
    """Makes the loggers of a fit continue the runs of its checkpoint, before Lightning starts them."""
    if trainer.state.fn == TrainerFn.FITTING:
        loggers.adopt_runs(trainer, file)
        loggers.reopen_csv(trainer)
