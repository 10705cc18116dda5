"""Limits of one run of a graph, a meter for its use of memory and time, and the cost of expensive functions."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from tinker_lightning.errors import InvalidLoss
from tinker_lightning.lossgraph.guards import MAX_PIECES, check_index, is_mask, number

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

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
    """The use of memory and time: elements read and written, bytes of all new values, and bytes of the largest."""

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
        used: The use of earlier calls of the same run.
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
        """The use up to now."""
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


# For other dtypes torch computes matrix products in a plain loop, which can be more than a hundred times slower.
_FAST_DTYPES = (torch.float32, torch.float64)
# The names of torch's parameters for the operands of products: the left one, then the right one.
_FACTORS = ("input", "other", "mat2", "vec", "tensor")


def product_work(*args: Any, **kwargs: Any) -> int:
    """Returns the work of a product: each element on the left is multiplied with each column on the right."""
    left, right = _factors(args, kwargs)
    columns = right.shape[-1] if right.ndim > 1 else 1
    batch = int(torch.broadcast_shapes(left.shape[:-2], right.shape[:-2]).numel())
    rows = math.prod(left.shape[-2:])
    return _multiplications(batch * rows * columns, left, right)


def _factors(args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Tensor, Tensor]:
    """Returns the two operands, given by position or by name."""
    left, right, *_ = (*args, *(kwargs[name] for name in _FACTORS if name in kwargs))
    return left, right


def _multiplications(count: int, *operands: Any) -> int:
    """Returns the work of this many multiplications."""
    return count // 16 if all(operand.dtype in _FAST_DTYPES for operand in operands) else 8 * count


def product_inside(*args: Any, **kwargs: Any) -> int:
    """Returns the elements of the larger operand after both are broadcast over the batch."""
    left, right = _factors(args, kwargs)
    batch = int(torch.broadcast_shapes(left.shape[:-2], right.shape[:-2]).numel())
    return batch * max(math.prod(left.shape[-2:]), math.prod(right.shape[-2:]))


def inner_work(*args: Any, **kwargs: Any) -> int:
    """Returns the work of `inner`: each row on the left is multiplied with each row on the right."""
    left, right = _factors(args, kwargs)
    return _multiplications(left.numel() * right.numel() // max(1, right.shape[-1] if right.ndim else 1), left, right)


def einsum_work(equation: str, *operands: Any) -> int:
    """Returns the product of all sizes; a size of 1 counts as the size of the other operand."""
    if len(operands) == 1 and isinstance(operands[0], list | tuple):
        operands = tuple(operands[0])
    sizes: dict[str, int] = {}
    for part, operand in zip(equation.split("->")[0].split(","), operands, strict=False):
        letters = part.replace("...", "").replace(" ", "")
        extra = operand.shape[: operand.ndim - len(letters)]
        sizes["..."] = sizes.get("...", 1) * math.prod(extra)
        for letter, size in zip(letters, operand.shape[operand.ndim - len(letters) :], strict=False):
            sizes[letter] = max(size, sizes.get(letter, 0))
    return _multiplications(math.prod(sizes.values()), *operands)


def sorting_work(input: Tensor, *_: Any, **__: Any) -> int:  # noqa: A002  # torch's name
    """Returns the work of sorting."""
    return 16 * input.numel()


def setitem_work(value: Any, index: Any, _: Any) -> int:
    """Returns the number of elements that are set."""
    check_index(index)
    return int(value.numel() * (value.ndim + 2) if is_mask(index) else value[index].numel())


def joined_elements(*args: Any, **kwargs: Any) -> int:
    """Returns the number of elements of all tensors, which are concatenated."""
    return sum(value.numel() for value in (*args, *kwargs.values()) if isinstance(value, Tensor))


def broadcast_elements(*args: Any, **kwargs: Any) -> int:
    """Returns the number of elements after broadcasting, which can be more than the result after a reduction has."""
    shapes = [value.shape for value in (*args, *kwargs.values()) if isinstance(value, Tensor)]
    try:
        return int(torch.broadcast_shapes(*shapes).numel())
    except RuntimeError:
        return 0  # not an elementwise operation
