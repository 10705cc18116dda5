"""Batches of a `RolloutLoader`: plans of what to sample and train, which Lightning may draw early."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tinker_lightning.rl.rollouts import RolloutLoader
    from tinker_lightning.rl.units import Unit


class RolloutBatch:
    """A batch of a `RolloutLoader`: which prompts to train on, not yet sampled.

    Args:
        loader: The loader.
        ticket: Its number in the run.
    """

    # Not a dataclass: Lightning would rebuild it when it moves a batch to a device.
    __slots__ = ("loader", "ticket")

    def __init__(self, loader: RolloutLoader, ticket: int) -> None:
        self.loader = loader
        self.ticket = ticket

    @property
    def unit(self) -> int:
        """The number of its rollouts in the run; with several epochs or minibatches, several batches have the same."""
        return self.ticket // self.loader.steps_per_batch

    @property
    def part(self) -> int:
        """Which of the optimizer steps of these rollouts it is."""
        return self.ticket % self.loader.steps_per_batch

    def places(self, unit: Unit) -> range:
        """Returns the places of its groups in the unit."""
        size = math.ceil(unit.planned / self.loader.minibatches)
        first = self.part % self.loader.minibatches * size
        return range(first, min(first + size, unit.planned))

    def __repr__(self) -> str:
        return f"RolloutBatch({self.ticket})"
