"""Which rollouts may start: how far sampling runs ahead of training.

Prompts are sampled and trained in units, the batches of a loader. An optimizer step trains a window of one or several
units. With a staleness of k, units of the current window and of the next k windows may be sampled, so that at any
moment at most `(k + finished steps + 1) * window` units have been started.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Window:
    """Where training is.

    Args:
        unit: The number of the unit that is trained now or next.
        position: Its place in the epoch.
        accumulate: How many units an optimizer step trains.
        length: The number of units of an epoch; None if it is unknown.
        epochs: How many epochs are left, with this one; None for any number.
        steps: How many windows are left, with this one; None for any number.
    """

    unit: int
    position: int = 0
    accumulate: int = 1
    length: int | None = None
    epochs: int | None = None
    steps: int | None = None

    def limit(self, staleness: int) -> int:
        """Returns the number of the first unit that must not be started yet.

        >>> Window(unit=5, position=1, accumulate=4).limit(0)  # the rest of its window: 5, 6 and 7
        8
        >>> Window(unit=5, position=1, accumulate=4, length=6).limit(1)  # 8 and 9 are the short last window
        10
        """
        unit, position, epochs = self.unit, self.position, self.epochs
        windows = staleness + 1 if self.steps is None else min(staleness + 1, self.steps)
        for _ in range(windows):
            end = (position // self.accumulate + 1) * self.accumulate
            if self.length is not None:
                end = min(end, self.length)
            unit += end - position
            position = end
            if self.length is not None and position >= self.length:
                epochs = None if epochs is None else epochs - 1
                if epochs is not None and epochs <= 0:
                    break
                position = 0
        return unit
