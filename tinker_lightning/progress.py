"""Where a run goes on after a checkpoint: Lightning's own counters, set right where they would lose something."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import lightning.pytorch as pl


def resume_at_validation(checkpoint: dict[str, Any], trainer: pl.Trainer) -> None:
    """Lets a checkpoint of a batch's end go on with the validation that is due behind it.

    Such a checkpoint is written before the validation, and Lightning, resuming from it, goes on behind it: the scores
    of that step, and what callbacks make of them, would be missing. So it is written as one from the validation's
    start.
    """
    loop, fetcher = trainer.fit_loop.epoch_loop, trainer.fit_loop._data_fetcher
    now: Any = loop.batch_progress.current
    is_batch_end = now.ready == now.processed == now.completed + 1
    if not trainer.training or not is_batch_end or fetcher is None or not loop._should_check_val_fx(fetcher):
        return
    counters = checkpoint["loops"]["fit_loop"]
    for tracker in ("total", "current"):
        counters["epoch_loop.batch_progress"][tracker]["completed"] += 1
        validated = counters["epoch_loop.val_loop.batch_progress"][tracker]
        done = validated["completed"] if tracker == "total" else 0
        validated.update(ready=done + 1, started=done + 1, processed=done, completed=done)
