"""Resumes Lightning's loops exactly where a checkpoint was written.

Lightning infers the position from its counters and skips some of the remaining work: logging a step's row, a
validation, the end of the epoch, a scheduler that waits for a metric. Here the position is stored, and that work runs
before training resumes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self

from lightning.pytorch.callbacks import GradientAccumulationScheduler
from lightning.pytorch.loops.fit_loop import RestartStage as FitStage
from lightning.pytorch.loops.training_epoch_loop import RestartStage as EpochStage

from tinker_lightning.lightning import _compat
from tinker_lightning.lightning.checkpoint.contents import capture_epoch, restore_epoch
from tinker_lightning.lightning.checkpoint.format import LOADERS, check_entry, read_loaders, read_position

if TYPE_CHECKING:
    import lightning.pytorch as pl


# The values of `where`: the work that was under way when a file was written.
EPOCH_START = "epoch start"  # nothing, or the start hooks of an epoch, which run again
BATCH_START = "batch start"  # a batch, which is trained again, or nothing between two batches
BATCH_END = "batch end"  # the end hooks of a batch; its row and a validation that is due follow
VALIDATION = "validation"  # a validation, which starts again
VALIDATION_END = "validation end"  # the end hooks of a validation
EPOCH_END = "epoch end"  # the end hooks of an epoch; its row follows


def capture(trainer: pl.Trainer) -> dict[str, Any]:
    """Returns the position of a trainer's loops, as tensors and plain data."""
    fit, loop = trainer.fit_loop, trainer.fit_loop.epoch_loop
    where, is_cut = _where(trainer), _is_cut(trainer)
    epochs, batches = fit.epoch_progress, loop.batch_progress
    reopened = int(is_cut and where == EPOCH_START)
    done = int(where == BATCH_END)
    return {
        "where": BATCH_START if reopened else where,
        "is_cut": is_cut,
        "epochs": [epochs.current.completed - reopened, epochs.total.completed - reopened],
        "batches": [batches.current.completed + done, batches.total.completed + done],
        "is_last_batch": batches.is_last_batch,
        "logged_steps": _compat.BATCHES_THAT_STEPPED.get(trainer),
        "accumulate": trainer.accumulate_grad_batches,
        "reloaded": [_compat.TRAIN_RELOAD_EPOCH.get(trainer), _compat.VAL_RELOAD_EPOCH.get(trainer)],
        "callback_metrics": dict(trainer.callback_metrics),
        "row": _row(trainer, where),
        "epoch_metrics": capture_epoch(trainer),
    }


@dataclass(frozen=True, slots=True)
class Resume:
    """The position that a fit resumes from, read from its checkpoint.

    Args:
        rng: The random number generators.
        loops: The position of the loops.
        loaders: The states of the training loaders.
        max_steps: The limit of steps of the trainer, which a resume may have to raise for a while.
    """

    rng: dict[str, Any]
    loops: dict[str, Any]
    loaders: list[dict[str, Any]]
    max_steps: int

    @classmethod
    def read(cls, checkpoint: dict[str, Any], file: object, trainer: pl.Trainer) -> Self | None:
        """Reads the position of a checkpoint; None for a file of another strategy."""
        position = read_position(checkpoint, file)
        if position is None:
            return None
        loops = position["loop_position"]
        if loops["where"] != EPOCH_START:  # where no loader is in use
            check_entry(checkpoint, file, LOADERS)
        return cls(position["rng"], loops, read_loaders(checkpoint, file), trainer.fit_loop.epoch_loop.max_steps)

    def raise_limits(self, trainer: pl.Trainer, checkpoint: dict[str, Any]) -> None:
        """Raises the limits of a run that has reached them but has work left, so that Lightning enters its loops."""
        loop = trainer.fit_loop.epoch_loop
        if self.loops["where"] != EPOCH_START:
            checkpoint["loops"]["fit_loop"]["epoch_progress"]["current"]["processed"] = self.loops["epochs"][0]
        if self.loops["where"] not in (EPOCH_START, BATCH_START) and loop.max_steps != -1:
            loop.max_steps = max(loop.max_steps, checkpoint["global_step"] + 1)

    def restore_limits(self, trainer: pl.Trainer) -> None:
        """Restores the limit of steps that `raise_limits` may have raised."""
        trainer.fit_loop.epoch_loop.max_steps = self.max_steps


def restore_loops(trainer: pl.Trainer, position: dict[str, Any]) -> None:
    """Restores the position of the loops and runs the remaining work there."""
    fit, loop = trainer.fit_loop, trainer.fit_loop.epoch_loop
    where = position["where"]
    _count(fit.epoch_progress, position["epochs"], is_under_way=where != EPOCH_START)
    _count(loop.batch_progress, position["batches"])
    loop.batch_progress.is_last_batch = position["is_last_batch"]
    _compat.BATCHES_THAT_STEPPED.set(trainer, position["logged_steps"])
    for name, epoch in zip((_compat.TRAIN_RELOAD_EPOCH, _compat.VAL_RELOAD_EPOCH), position["reloaded"], strict=True):
        name.set(trainer, epoch)
    _compat.CALLBACK_METRICS.get(trainer).update(position["callback_metrics"])
    _compat.FIT_RESTARTING.set(trainer, False)
    loop.restarting = False
    _compat.EPOCH_RESTART_STAGE.set(trainer, EpochStage.NONE)
    callbacks = _compat.CALLBACKS.get(trainer)
    if where != EPOCH_START and any(isinstance(one, GradientAccumulationScheduler) for one in callbacks):
        trainer.accumulate_grad_batches = position["accumulate"]  # the scheduler sets it only at epoch starts
    if where not in (EPOCH_START, EPOCH_END):
        restore_epoch(trainer, position["epoch_metrics"])
        if position["batches"][0]:
            _compat.FIRST_LOOP_ITER.set(trainer, True)  # otherwise the next batch would reset them
    if where in (BATCH_END, VALIDATION, VALIDATION_END):
        where = _end_batch(trainer, position)
    elif where == EPOCH_END:
        where = _end_epoch(trainer, position)
    if where == EPOCH_START:
        _compat.FIT_RESTART_STAGE.set(trainer, FitStage.NONE)
        _compat.FIT_RESUMING.set(trainer, False)  # a new epoch starts a new pass over the data
    else:
        _compat.FIT_RESTART_STAGE.set(trainer, FitStage.RESTARTED_MID_EPOCH)
        _compat.EPOCH_RESTARTING.set(trainer, True)  # keeps the counters
        if not _compat.SHOULD_ACCUMULATE.get(trainer)():
            _count_logged_steps(trainer, -1)  # a loop that restarts counts it again


def _end_batch(trainer: pl.Trainer, position: dict[str, Any]) -> str:
    fit, loop = trainer.fit_loop, trainer.fit_loop.epoch_loop
    if position["row"] is not None:
        _compat.LOG_METRICS.get(trainer)(position["row"])
    _compat.SKIP_NEXT_VAL.set(trainer, position["where"] == VALIDATION_END)
    loop.on_advance_end(_compat.DATA_FETCHER.get(trainer))
    if not loop.done:
        return BATCH_START
    fit.on_advance_end()
    return EPOCH_START


def _end_epoch(trainer: pl.Trainer, position: dict[str, Any]) -> str:
    fit, loop = trainer.fit_loop, trainer.fit_loop.epoch_loop
    if not position["is_cut"]:
        loop.update_lr_schedulers("epoch", update_plateau_schedulers=True)
    _count_logged_steps(trainer, -1)  # as Lightning does around an epoch's row
    _compat.LOG_METRICS.get(trainer)(position["row"])
    _count_logged_steps(trainer, 1)
    if position["is_cut"] and not _compat.IS_TRAINING_DONE.get(trainer):
        return BATCH_START
    fit.epoch_progress.increment_processed()
    fit.epoch_progress.increment_completed()
    return EPOCH_START


def _where(trainer: pl.Trainer) -> str:
    epochs: Any = trainer.fit_loop.epoch_progress.current
    batches: Any = trainer.fit_loop.epoch_loop.batch_progress.current
    if epochs.ready > epochs.started or epochs.ready == epochs.completed:
        return EPOCH_START
    if epochs.processed > epochs.completed:
        return EPOCH_END
    if trainer.validating:
        return VALIDATION_END if _has_validated(trainer) else VALIDATION
    return BATCH_END if batches.processed > batches.completed else BATCH_START


def _has_validated(trainer: pl.Trainer) -> bool:
    """Returns whether the scores of a validation have been logged."""
    batches: Any = trainer.fit_loop.epoch_loop.val_loop.batch_progress
    is_over = batches.is_last_batch and batches.current.completed == batches.current.ready
    return is_over and not _compat.VAL_LOGGED_OUTPUTS.get(trainer)


def _is_cut(trainer: pl.Trainer) -> bool:
    """Returns whether the last epoch ended before its data, because of a limit of steps or a stop.

    If the limit is higher after a resume, the epoch continues.
    """
    loop = trainer.fit_loop.epoch_loop
    epochs: Any = trainer.fit_loop.epoch_progress.current
    return (
        epochs.processed == epochs.ready
        and loop.batch_progress.current.ready > 0
        and not _compat.IS_LAST_READY.get(trainer)()
    )


def _row(trainer: pl.Trainer, where: str) -> dict[str, Any] | None:
    """Returns the row that Lightning would log next, without values logged by `on_train_batch_end`."""
    if where == BATCH_END:
        is_step = not _compat.SHOULD_ACCUMULATE.get(trainer)() or not trainer.lightning_module.automatic_optimization
        if not is_step or not (_compat.SHOULD_UPDATE_LOGS.get(trainer) or trainer.fast_dev_run):  # type: ignore[attr-defined]
            return None
    elif where != EPOCH_END:
        return None
    row = dict(_compat.LOGGED_METRICS.get(trainer)["log"])
    if where == BATCH_END:
        for item in _compat.TRAIN_RESULTS.get(trainer).values():
            if _compat.LOGGED_HOOK.get(item) == "on_train_batch_end":
                row.pop(_compat.FORKED_NAME.get(item)(on_step=True), None)
    return row


def _count_logged_steps(trainer: pl.Trainer, more: int) -> None:
    _compat.BATCHES_THAT_STEPPED.set(trainer, _compat.BATCHES_THAT_STEPPED.get(trainer) + more)


def _count(progress: Any, done: list[int], *, is_under_way: bool = False) -> None:
    for tracker, count in zip((progress.current, progress.total), done, strict=True):
        tracker.processed = tracker.completed = count
        tracker.ready = tracker.started = count + is_under_way
