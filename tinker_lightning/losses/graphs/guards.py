"""Functions of the allow-list that need a guard around torch's own, and what some of them take beside their result."""

from __future__ import annotations

import functools
import inspect
import math
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from tinker_lightning.errors import InvalidLoss

if TYPE_CHECKING:
    from collections.abc import Callable

# How many pieces a tensor may be cut into; each is an object.
MAX_PIECES = 1024
_WRITES = {"inplace", "out"}
# What processors multiply matrices of with all their might. Of others torch does it in a plain loop, which takes a
# hundred times as long and more, by how the matrices lie in memory.
_QUICK = (torch.float32, torch.float64)


def attribute(value: Any, name: Any) -> Any:
    """An attribute of a tensor, of those that tell its form."""
    if isinstance(value, Tensor) and name in _ATTRIBUTES:
        return _ATTRIBUTES[name](value)
    # What max, sort, topk and their like return.
    if isinstance(value, tuple) and len(value) == 2 and name in ("values", "indices"):
        return value[name == "indices"]
    raise InvalidLoss(f"the attribute {name!r} cannot be read; known are {', '.join(sorted(_ATTRIBUTES))}")


_ATTRIBUTES: dict[str, Callable[[Tensor], Any]] = {
    "shape": lambda x: x.shape,
    "dtype": lambda x: x.dtype,
    "device": lambda x: x.device,
    "ndim": lambda x: x.ndim,
    "T": lambda x: x.T,
    "mT": lambda x: x.mT,
    "data": lambda x: x.detach(),
}
ATTRIBUTES = frozenset({*_ATTRIBUTES, "values", "indices"})


def is_mask(index: Any) -> bool:
    """Whether an index picks by truth values, so that how many it picks is known only afterwards."""
    if isinstance(index, Tensor):
        return index.dtype in (torch.bool, torch.uint8)
    return isinstance(index, tuple | list) and any(is_mask(part) for part in index)


def _check_index(index: Any) -> None:
    """Refuses masks beside other index tensors: they are broadcast against each other, by the number of true values."""
    parts = index if isinstance(index, tuple) else (index,)
    if is_mask(index) and not all(is_mask(part) for part in parts if isinstance(part, Tensor | list | tuple)):
        raise InvalidLoss("a mask can be combined with slices and numbers in an index, not with other index tensors")


def getitem(value: Any, index: Any) -> Any:
    """`value[index]`."""
    if not isinstance(value, Tensor | tuple):
        raise InvalidLoss(f"only tensors and tuples have items, not {type(value).__name__}")
    _check_index(index)
    return value[index]


def setitem(value: Any, index: Any, item: Any) -> None:
    """`value[index] = item`."""
    if not isinstance(value, Tensor) or not isinstance(item, Tensor | int | float):
        raise InvalidLoss("only items of tensors can be set, to tensors and numbers")
    _check_index(index)
    if value.is_meta and is_mask(index):
        return  # what a mask picks is not known, and never more than there is
    value[index] = item


def setitem_work(value: Any, index: Any, _: Any) -> int:
    """The elements that are set."""
    _check_index(index)
    return int(value.numel() * (value.ndim + 2) if is_mask(index) else value[index].numel())


def tensor(data: Any, *, dtype: torch.dtype | None = None, device: Any = None) -> Tensor:
    """A tensor of numbers; a tensor is copied, without its gradient."""
    if isinstance(data, Tensor):
        return data.detach().to(dtype=dtype or data.dtype, copy=True)
    _check_numbers(data)
    return torch.tensor(data, dtype=dtype, device=device)


def as_tensor(data: Any, *, dtype: torch.dtype | None = None, device: Any = None) -> Tensor:
    """A tensor as it is, or one of numbers."""
    return data.to(dtype=dtype or data.dtype) if isinstance(data, Tensor) else tensor(data, dtype=dtype, device=device)


def new_tensor(self: Tensor, data: Any, *, dtype: torch.dtype | None = None, device: Any = None) -> Tensor:
    """A tensor of numbers, of the same dtype."""
    return tensor(data, dtype=dtype or self.dtype, device=device)


def _check_numbers(data: Any) -> None:
    if isinstance(data, list | tuple):
        for part in data:
            _check_numbers(part)
    elif not isinstance(data, int | float):
        raise InvalidLoss(f"torch.tensor takes numbers here, not {type(data).__name__}; join tensors with torch.stack")


def divide(self: Any, other: Any, *, rounding_mode: str | None = None) -> Tensor:
    """`torch.div`, without the one case that ends the process."""
    exact = not any(isinstance(x, Tensor) and x.dtype.is_floating_point for x in (self, other))
    if rounding_mode == "trunc" and exact:
        # The smallest whole number by -1 does not only overflow: it ends the process.
        raise InvalidLoss("rounding_mode='trunc' needs a tensor of floats")
    return torch.div(self, other, rounding_mode=rounding_mode)


def repeat_interleave(self: Tensor, repeats: Any, dim: int | None = None) -> Tensor:
    """The same number of repeats for every element: a tensor of them could ask for any size."""
    if not isinstance(repeats, int):
        raise InvalidLoss("repeat_interleave takes a whole number of repeats, not a tensor of them")
    return torch.repeat_interleave(self, repeats, dim)


def split(self: Tensor, split_size_or_sections: Any = None, dim: int = 0, *, split_size: Any = None) -> Any:
    """`torch.split` into a bounded number of pieces."""
    size = split_size_or_sections if split_size is None else split_size
    if isinstance(size, int):
        _check_pieces(self.shape[dim] / max(size, 1))
    return torch.split(self, size, dim)


def chunk(self: Tensor, chunks: int, dim: int = 0) -> Any:
    """`torch.chunk` into a bounded number of pieces."""
    _check_pieces(min(chunks, self.shape[dim]))
    return torch.chunk(self, chunks, dim)


def unbind(self: Tensor, dim: int = 0) -> Any:
    """`torch.unbind` into a bounded number of pieces."""
    _check_pieces(self.shape[dim])
    return torch.unbind(self, dim)


def _check_pieces(pieces: float) -> None:
    if pieces > MAX_PIECES:
        raise InvalidLoss(f"a tensor can be cut into at most {MAX_PIECES} pieces here, and this would be {pieces:.0f}")


def to(self: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """`tensor.to`, by a dtype, another tensor, or a device that stands for where the loss runs."""
    if not isinstance(self, Tensor):
        raise InvalidLoss(f"this is a tensor's method, and {type(self).__name__} is none")
    target = args[0] if args else None
    if isinstance(target, str) or (isinstance(target, int) and not isinstance(target, bool)):
        raise _device_error(target)
    result: Tensor = self.to(*args, **kwargs)
    return result


def check_device(device: Any) -> None:
    """Refuses a device of the graph's own choice: text or a number."""
    if device is not None and not isinstance(device, torch.device):
        raise _device_error(device)


def _device_error(device: Any) -> InvalidLoss:
    return InvalidLoss(
        f"the device {device!r:.40} cannot be chosen: a loss runs where the model is. Leave it out, or use the device "
        "of an input, x.device."
    )


def same(self: Tensor, *_: Any, **__: Any) -> Tensor:
    """The tensor itself: a loss runs where the model is."""
    if not isinstance(self, Tensor):
        raise InvalidLoss(f"this is a tensor's method, and {type(self).__name__} is none")
    return self


def norm(self: Tensor, p: Any = "fro", dim: Any = None, keepdim: bool = False, dtype: Any = None) -> Tensor:
    """`torch.norm` of vectors."""
    if p == "nuc":
        raise InvalidLoss("the nuclear norm is not taken: it needs a singular value decomposition")
    result: Tensor = torch.norm(self, p, dim, keepdim, dtype=dtype)
    return result


def diff(self: Tensor, n: int = 1, dim: int = -1) -> Tensor:
    """`torch.diff`, which is computed `n` times over."""
    if n > 8:
        raise InvalidLoss(f"diff is taken up to n=8, not {n}")
    return torch.diff(self, n, dim)


def roll(self: Tensor, shifts: Any, dims: Any = None) -> Tensor:
    """`torch.roll`, which is computed once for each shift."""
    if isinstance(shifts, list | tuple) and len(shifts) > self.ndim:
        raise InvalidLoss(f"{len(shifts)} shifts for {self.ndim} dimensions")
    return torch.roll(self, shifts, () if dims is None else dims)


def pure(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function of `torch.nn.functional` that writes to none of its arguments, by whatever place it is told to."""
    try:
        signature = inspect.signature(function)
    except ValueError:
        return function  # torch's C++ functions take `out` by name only, and no `inplace`
    if not _WRITES & signature.parameters.keys():
        return function

    @functools.wraps(function)
    def guarded(*args: Any, **kwargs: Any) -> Any:
        given = signature.bind(*args, **kwargs).arguments
        for name in _WRITES & given.keys():
            if given[name] is not None and given[name] is not False:
                raise InvalidLoss(f"{name} is not taken: a loss goes on with what {function.__name__} returns")
        return function(*args, **kwargs)

    return guarded


def kthvalue(self: Tensor, k: int, dim: int = -1, keepdim: bool = False) -> tuple[Tensor, Tensor]:
    """`torch.kthvalue` by sorting: torch's own takes the square of the time on values that are laid out for it."""
    size = self.shape[dim] if self.ndim else 1
    if not isinstance(k, int) or not 1 <= k <= size:
        raise InvalidLoss(f"kthvalue takes k from 1 to the size of the dimension, {size}, not {k!r:.40}")
    values, places = torch.sort(self, dim=dim)
    if not self.ndim:
        return values, places
    values, places = values.narrow(dim, k - 1, 1), places.narrow(dim, k - 1, 1)
    return (values, places) if keepdim else (values.squeeze(dim), places.squeeze(dim))


def product_work(left: Tensor, right: Tensor, *_: Any, **__: Any) -> int:
    """Each element of the left meets each column of the right."""
    columns = right.shape[-1] if right.ndim > 1 else 1
    batch = int(torch.broadcast_shapes(left.shape[:-2], right.shape[:-2]).numel())
    rows = math.prod(left.shape[-2:])
    return _multiplications(batch * rows * columns, left, right)


def _multiplications(count: int, *operands: Any) -> int:
    """As many elements as would take as long to read."""
    return count // 16 if all(operand.dtype in _QUICK for operand in operands) else 8 * count


def product_inside(left: Tensor, right: Tensor, *_: Any, **__: Any) -> int:
    """Both are copied to the shape that their batches are broadcast to."""
    batch = int(torch.broadcast_shapes(left.shape[:-2], right.shape[:-2]).numel())
    return batch * max(math.prod(left.shape[-2:]), math.prod(right.shape[-2:]))


def inner_work(left: Tensor, right: Tensor) -> int:
    """Each row of the left meets each row of the right."""
    meetings = left.numel() * right.numel() // max(1, right.shape[-1] if right.ndim else 1)
    return _multiplications(meetings, left, right)


def einsum(equation: str, *operands: Any) -> Tensor:
    """`torch.einsum` of one or two tensors, whose largest intermediate is the result."""
    if len(operands) == 1 and isinstance(operands[0], list | tuple):
        operands = tuple(operands[0])
    if not isinstance(equation, str) or len(operands) > 2:
        raise InvalidLoss("einsum takes an equation and one or two tensors; of more, take two at a time")
    return torch.einsum(equation, *operands)


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


def sorting_work(self: Tensor, *_: Any, **__: Any) -> int:
    """To sort an element takes as long as to read several."""
    return 16 * self.numel()


def broadcast(*args: Any, **kwargs: Any) -> int:
    """What the tensors become when they meet, which a reduction afterwards does not show."""
    shapes = [value.shape for value in (*args, *kwargs.values()) if isinstance(value, Tensor)]
    try:
        return int(torch.broadcast_shapes(*shapes).numel())
    except RuntimeError:
        return 0  # they do not meet element by element
