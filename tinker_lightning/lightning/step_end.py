"""From the moment in which a step is sent until Lightning has counted it, nothing comes between.

Stopped there, a run would have a step on the server that its counters and files do not know of, and a resumed one would
take it a second time.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import lightning.pytorch as pl

from tinker_lightning.remote import interrupts

if TYPE_CHECKING:
    from collections.abc import Callable


class StepEnd(pl.Callback):
    """The first of all callbacks: when the batch's end is told to it, Lightning has counted the step.

    Args:
        wait: Called then, before other callbacks look at the metrics of the step; may wait for them.
    """

    def __init__(self, wait: Callable[[], None]) -> None:
        self._wait = wait
        self._hold = interrupts.SigintHold()

    def attach(self, trainer: pl.Trainer) -> None:
        """Becomes the first callback of a trainer."""
        self.detach(trainer)
        trainer.callbacks.insert(0, self)  # type: ignore[attr-defined]  # set by a connector

    @staticmethod
    def detach(trainer: pl.Trainer) -> None:
        """Removes what an earlier fit has left."""
        callbacks: list[Any] = trainer.callbacks  # type: ignore[attr-defined]
        callbacks[:] = [one for one in callbacks if not isinstance(one, StepEnd)]

    def begin(self) -> None:
        """A step was sent."""
        self._hold.begin()

    def on_train_batch_end(self, *_: Any, **__: Any) -> None:
        """Lets a Ctrl-C through that has waited."""
        self._hold.end()
        self._wait()

    def on_exception(self, *_: Any, **__: Any) -> None:
        """The run ends anyway."""
        self._hold.end(act=False)
