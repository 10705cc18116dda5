"""Functions of the allow-list that do what torch's functions of these names do, after a check.

Their parameters have the same names as in torch, because a loss may pass them by name.
"""

# ruff: noqa: A002  # torch's name for a tensor is `input`

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812
from torch.nn.utils import rnn

from tinker_lightning.errors import InvalidLoss

if TYPE_CHECKING:
    from collections.abc import Callable

# The number of pieces that a tensor may be cut into; each is an object.
MAX_PIECES = 1024


_OF_TENSORS = frozenset({"T", "data", "device", "dtype", "mT", "ndim", "shape"})
_OF_PAIRS = ("values", "indices")  # what max, sort and topk return
ATTRIBUTES = _OF_TENSORS | {*_OF_PAIRS}


def attribute(value: Any, name: Any) -> Any:
    if isinstance(value, Tensor) and name in _OF_TENSORS:
        return value.detach() if name == "data" else getattr(value, name)
    if isinstance(value, tuple) and len(value) == 2 and name in _OF_PAIRS:
        return value[_OF_PAIRS.index(name)]
    raise InvalidLoss(f"the attribute {name!r:.140} cannot be read; known are {', '.join(sorted(ATTRIBUTES))}")


def is_mask(index: Any) -> bool:
    """Returns whether an index is a mask, so that the number of elements it picks depends on values."""
    if isinstance(index, Tensor):
        return index.dtype in (torch.bool, torch.uint8)
    return isinstance(index, tuple | list) and any(is_mask(part) for part in index)


def check_index(index: Any) -> None:
    """Raises if a mask is combined with other index tensors: these broadcast, by the number of true values."""
    parts = index if isinstance(index, tuple) else (index,)
    if is_mask(index) and not all(is_mask(part) for part in parts if isinstance(part, Tensor | list | tuple)):
        raise InvalidLoss("a mask can be combined with slices and numbers in an index, not with other index tensors")


def getitem(value: Any, index: Any) -> Any:
    if not isinstance(value, Tensor | tuple):
        raise InvalidLoss(f"only tensors and tuples have items, not {type(value).__name__}")
    check_index(index)
    return value[index]


def setitem(value: Any, index: Any, item: Any) -> Tensor:
    # In a copy: a graph never changes a tensor that it is given.
    if not isinstance(value, Tensor) or not isinstance(item, Tensor | int | float):
        raise InvalidLoss("only items of tensors can be set, to tensors and numbers")
    check_index(index)
    changed = value.clone()
    if not (value.is_meta and is_mask(index)):  # what a mask picks is not known, and never more than there is
        changed[index] = item
    return changed


def tensor(data: Any, *, dtype: torch.dtype | None = None, device: Any = None) -> Tensor:
    if isinstance(data, Tensor):
        return data.detach().to(dtype=dtype or data.dtype, copy=True)
    _check_numbers(data)
    return torch.tensor(data, dtype=dtype, device=device)


def as_tensor(data: Any, *, dtype: torch.dtype | None = None, device: Any = None) -> Tensor:
    return data.to(dtype=dtype or data.dtype) if isinstance(data, Tensor) else tensor(data, dtype=dtype, device=device)


def new_tensor(self: Tensor, data: Any, *, dtype: torch.dtype | None = None, device: Any = None) -> Tensor:
    return tensor(data, dtype=dtype or self.dtype, device=device)


def _check_numbers(data: Any) -> None:
    if isinstance(data, list | tuple):
        for part in data:
            _check_numbers(part)
    elif not isinstance(data, int | float):
        raise InvalidLoss(f"torch.tensor takes numbers here, not {type(data).__name__}; join tensors with torch.stack")


def whole(function: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a division without its one dangerous case: the smallest integer divided by -1 raises SIGFPE.

    torch up to 2.8 does not catch that, so it would end the process. `x // -1` is computed as `-x // 1`, which wraps.
    """

    def guarded(input: Any, other: Any, **options: Any) -> Any:
        left = input
        if (isinstance(left, Tensor) or isinstance(other, Tensor)) and _is_signed(left) and _is_signed(other):
            if not isinstance(left, Tensor):
                left = other.new_full((), left)
            if isinstance(other, Tensor):
                is_minus_one = other == -1
                left, other = torch.where(is_minus_one, -left, left), torch.where(is_minus_one, 1, other)
            elif other == -1:
                left, other = -left, 1
        return function(left, other, **options)

    return guarded


def _is_signed(value: Any) -> bool:
    if isinstance(value, Tensor):
        return value.dtype in (torch.int8, torch.int16, torch.int32, torch.int64)
    return isinstance(value, int) and not isinstance(value, bool)


def divide(input: Any, other: Any, *, rounding_mode: str | None = None) -> Tensor:
    result: Tensor = (whole(torch.div) if rounding_mode else torch.div)(input, other, rounding_mode=rounding_mode)
    return result


def repeat_interleave(input: Tensor, repeats: Any, dim: int | None = None) -> Tensor:
    if not isinstance(repeats, int):  # a tensor of repeats could ask for any size
        raise InvalidLoss("repeat_interleave takes a whole number of repeats, not a tensor of them")
    return torch.repeat_interleave(input, repeats, dim)


def split(tensor: Tensor, split_size_or_sections: Any = None, dim: int = 0, *, split_size: Any = None) -> Any:
    size = split_size_or_sections if split_size is None else split_size
    _check_pieces(tensor.shape[dim] / max(size, 1) if isinstance(size, int) else 0)
    return torch.split(tensor, size, dim)


def chunk(input: Tensor, chunks: int, dim: int = 0) -> Any:
    _check_pieces(min(chunks, input.shape[dim]))
    return torch.chunk(input, chunks, dim)


def unbind(input: Tensor, dim: int = 0) -> Any:
    _check_pieces(input.shape[dim])
    return torch.unbind(input, dim)


def _check_pieces(pieces: float) -> None:
    if pieces > MAX_PIECES:
        raise InvalidLoss(f"a tensor can be cut into at most {MAX_PIECES} pieces here, and this would be {pieces:.0f}")


def to(self: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    same(self)
    target = args[0] if args else None
    if isinstance(target, str) or (isinstance(target, int) and not isinstance(target, bool)):
        raise _device_error(target)
    result: Tensor = self.to(*args, **kwargs)
    return result


def check_device(device: Any) -> None:
    """Raises if a graph chooses a device, by a string or a number."""
    if device is not None and not isinstance(device, torch.device):
        raise _device_error(device)


def _device_error(device: Any) -> InvalidLoss:
    return InvalidLoss(
        f"the device {device!r:.40} cannot be chosen: a loss runs where the model is. Leave it out, or use the device "
        "of an input, x.device."
    )


def same(self: Tensor, *_: Any, **__: Any) -> Tensor:
    """Returns the tensor itself: a loss runs where the model is."""
    if not isinstance(self, Tensor):
        raise InvalidLoss(f"this is a tensor's method, and {type(self).__name__} is none")
    return self


def norm(input: Tensor, p: Any = "fro", dim: Any = None, keepdim: bool = False, dtype: Any = None) -> Tensor:
    if p == "nuc":
        raise InvalidLoss("the nuclear norm is not taken: it needs a singular value decomposition")
    result: Tensor = torch.norm(input, p, dim, keepdim, dtype=dtype)
    return result


def linalg_norm(A: Tensor, ord: Any = None, dim: Any = None, keepdim: bool = False, *, dtype: Any = None) -> Tensor:
    is_of_matrix = A.ndim == 2 if dim is None else isinstance(dim, list | tuple) and len(dim) == 2
    if is_of_matrix and ord in (2, -2, "nuc"):
        raise InvalidLoss(f"the norm {ord!r} of a matrix is not taken: it needs a singular value decomposition")
    result: Tensor = torch.linalg.norm(A, ord, dim, keepdim, dtype=dtype)
    return result


def pad_sequence(sequences: Any, *args: Any, **kwargs: Any) -> Tensor:
    if not isinstance(sequences, list | tuple):  # of a tensor, torch would create an object for each row
        raise InvalidLoss(f"pad_sequence takes a list of tensors, not {type(sequences).__name__}")
    return rnn.pad_sequence(sequences, *args, **kwargs)  # type: ignore[arg-type]  # a tuple will do


def diff(
    input: Tensor, n: int = 1, dim: int = -1, prepend: Tensor | None = None, append: Tensor | None = None
) -> Tensor:
    if n > 8:  # torch runs n times
        raise InvalidLoss(f"diff is taken up to n=8, not {n}")
    return torch.diff(input, n, dim, prepend, append)


def roll(input: Tensor, shifts: Any, dims: Any = None) -> Tensor:
    # torch runs once for each shift
    if isinstance(shifts, list | tuple) and len(shifts) > input.ndim:
        raise InvalidLoss(f"{len(shifts)} shifts for {input.ndim} dimensions")
    return torch.roll(input, shifts, () if dims is None else dims)


def nonzero(input: Tensor, *, as_tuple: bool = False) -> Any:
    return torch.nonzero(input, as_tuple=True) if as_tuple else torch.nonzero(input)


def where(condition: Tensor, input: Any, other: Any) -> Tensor:
    return torch.where(condition, input, other)


def one_hot(input: Tensor, num_classes: int) -> Tensor:
    if num_classes < 0:  # torch would derive it from the values
        raise InvalidLoss("one_hot needs num_classes here, e.g. x.shape[-1]")
    return F.one_hot(input, num_classes)


def numel(self: Any) -> int:
    if isinstance(self, tuple) and all(isinstance(size, int) for size in self):
        return math.prod(self)
    return Tensor.numel(self)


def einsum(equation: str, *operands: Any) -> Tensor:
    # The largest intermediate of one or two tensors is the result.
    if len(operands) == 1 and isinstance(operands[0], list | tuple):
        operands = tuple(operands[0])
    if not isinstance(equation, str) or len(operands) > 2:
        raise InvalidLoss("einsum takes an equation and one or two tensors; of more, take two at a time")
    return torch.einsum(equation, *operands)
