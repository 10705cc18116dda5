"""The limits of one run of a graph, and a meter for its use of memory and time."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from tinker_lightning.errors import InvalidLoss
from tinker_lightning.lossgraph.graphs.guards import MAX_PIECES
from tinker_lightning.lossgraph.graphs.numbers import number

_MAX_RANK = 12


@dataclass(frozen=True, slots=True)
class Limits:
    """The limits of one run of a graph."""

    elements: int = 1 << 23  # of one value
    total: int = 1 << 27  # elements that all calls together read and write, which also bounds the backward
    seconds: float = 20.0  # after which no further call is started
    memory: int = 4 << 30  # bytes of all new values together, because a backward may keep all of them
    # Takes memory for the values of a run before they are created; raises if there is not enough.
    reserve: Callable[[int], None] | None = field(default=None, compare=False)
    deadline: float = field(default=math.inf, compare=False)  # as in `time.monotonic`, in addition to `seconds`


@dataclass(frozen=True, slots=True)
class Use:
    """What calls have used: elements read and written, bytes of new values, and those of the largest value."""

    total: int = 0
    kept: int = 0
    largest: int = 0

    @property
    def memory(self) -> int:
        """The memory of a run at its peak: all values, and in a backward the gradients of a call."""
        return self.kept + 3 * self.largest


class Meter:
    """Counts elements and bytes, and raises when they exceed the limits.

    Args:
        limits: The limits.
        used: What earlier calls of the same run have used.
        reserve: Takes memory before values are created.
    """

    def __init__(
        self,
        limits: Limits,
        used: Use = Use(),
        reserve: Callable[[int], None] | None = None,  # immutable
    ) -> None:
        self._limits = limits
        self._total, self._kept, self._largest = used.total, used.kept, used.largest
        self._reserve = reserve
        if reserve is not None:
            reserve(used.memory)

    @property
    def used(self) -> Use:
        """What has been counted up to now."""
        return Use(self._total, self._kept, self._largest)

    def size(self, value: Any) -> None:
        """Raises if a value is too large, or of a kind that a graph cannot hold."""
        if isinstance(value, Tensor):
            if value.ndim > _MAX_RANK:
                raise InvalidLoss(f"it returns a tensor with {value.ndim} dimensions; at most {_MAX_RANK} are allowed")
            self.elements(value.numel(), value.dtype.itemsize)
        elif isinstance(value, tuple | list):
            # Flat and short, because checking nested sequences could take too long.
            if len(value) > MAX_PIECES:
                raise InvalidLoss(f"it returns {len(value)} values; at most {MAX_PIECES} are allowed")
            for part in value:
                if isinstance(part, tuple | list):
                    raise InvalidLoss("it returns nested sequences")
                self.size(part)
        elif value is not None and not isinstance(value, torch.dtype | torch.device):
            number(value)

    def elements(self, count: int, itemsize: int = 4) -> None:
        """Raises if a tensor has too many elements."""
        if count > (most := min(self._limits.elements, self._limits.memory // itemsize)):
            raise InvalidLoss(f"it would create a tensor of {count:.3g} elements; at most {most:.3g} are allowed")

    def keep(self, size: int) -> None:
        """Counts the bytes of new values, which may have to be kept for a backward."""
        self._kept += size
        if self._kept > self._limits.memory:
            raise InvalidLoss(
                f"up to here the loss takes {self._kept / 2**30:.3g} GiB of memory; at most "
                f"{self._limits.memory / 2**30:.3g} GiB are allowed. Use a smaller batch, or fewer operations on large "
                "tensors."
            )
        self._largest = max(self._largest, size)
        if self._reserve is not None:
            self._reserve(self.used.memory)

    def add(self, work: int) -> None:
        """Counts the elements that a call reads, computes and writes."""
        self._total += work
        if self._total > self._limits.total:
            raise InvalidLoss(
                f"up to here the loss reads and writes {self._total:.3g} elements; at most {self._limits.total:.3g} "
                "are allowed. Use a smaller batch, or fewer operations on large tensors; matrix products count least "
                "in float32."
            )
