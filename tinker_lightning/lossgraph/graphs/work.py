"""What calls take beside what they are given and return: time as elements to read, and memory on the way."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from tinker_lightning.lossgraph.graphs.guards import check_index, is_mask

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

# What processors multiply matrices of with all their might. Of others torch does it in a plain loop, which takes a
# hundred times as long and more, by how the matrices lie in memory.
_QUICK = (torch.float32, torch.float64)
# What torch calls the operands of products: the left, then the right by the one name or another.
_FACTORS = ("input", "other", "mat2", "vec", "tensor")


def product_work(*args: Any, **kwargs: Any) -> int:
    """Each element of the left meets each column of the right."""
    left, right = _factors(args, kwargs)
    columns = right.shape[-1] if right.ndim > 1 else 1
    batch = int(torch.broadcast_shapes(left.shape[:-2], right.shape[:-2]).numel())
    rows = math.prod(left.shape[-2:])
    return _multiplications(batch * rows * columns, left, right)


def _factors(args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Tensor, Tensor]:
    """What is multiplied, by whatever names torch has for it."""
    left, right, *_ = (*args, *(kwargs[name] for name in _FACTORS if name in kwargs))
    return left, right


def _multiplications(count: int, *operands: Any) -> int:
    """As many elements as would take as long to read."""
    return count // 16 if all(operand.dtype in _QUICK for operand in operands) else 8 * count


def product_inside(*args: Any, **kwargs: Any) -> int:
    """Both are copied to the shape that their batches are broadcast to."""
    left, right = _factors(args, kwargs)
    batch = int(torch.broadcast_shapes(left.shape[:-2], right.shape[:-2]).numel())
    return batch * max(math.prod(left.shape[-2:]), math.prod(right.shape[-2:]))


def inner_work(*args: Any, **kwargs: Any) -> int:
    """Each row of the left meets each row of the right."""
    left, right = _factors(args, kwargs)
    meetings = left.numel() * right.numel() // max(1, right.shape[-1] if right.ndim else 1)
    return _multiplications(meetings, left, right)


def einsum_work(equation: str, *operands: Any) -> int:
    """The product of all sizes; where one operand has 1, that is the other's."""
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
    """To sort an element takes as long as to read several."""
    return 16 * input.numel()


def setitem_work(value: Any, index: Any, _: Any) -> int:
    """The elements that are set."""
    check_index(index)
    return int(value.numel() * (value.ndim + 2) if is_mask(index) else value[index].numel())


def joined(*args: Any, **kwargs: Any) -> int:
    """The elements of all tensors together, which are put one behind the other."""
    return sum(value.numel() for value in (*args, *kwargs.values()) if isinstance(value, Tensor))


def broadcast(*args: Any, **kwargs: Any) -> int:
    """What the tensors become when they meet, which a reduction afterwards does not show."""
    shapes = [value.shape for value in (*args, *kwargs.values()) if isinstance(value, Tensor)]
    try:
        return int(torch.broadcast_shapes(*shapes).numel())
    except RuntimeError:
        return 0  # they do not meet element by element
