"""Estimates of the work and memory of calls that do more than read their arguments and write their results.

Work is measured in elements that take as long to read.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from tinker_lightning.lossgraph.graphs.guards import check_index, is_mask

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

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
    """Returns the product of all sizes; a size of 1 counts as that of the other operand."""
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


def joined(*args: Any, **kwargs: Any) -> int:
    """Returns the number of elements of all tensors, which are concatenated."""
    return sum(value.numel() for value in (*args, *kwargs.values()) if isinstance(value, Tensor))


def broadcast(*args: Any, **kwargs: Any) -> int:
    """Returns the number of elements after broadcasting, which can be more than the result after a reduction has."""
    shapes = [value.shape for value in (*args, *kwargs.values()) if isinstance(value, Tensor)]
    try:
        return int(torch.broadcast_shapes(*shapes).numel())
    except RuntimeError:
        return 0  # not an elementwise operation
