"""Functions of the allow-list that check their arguments and then call the torch function of the same name.

Their parameters have the same names as in torch, because a loss may pass them by name.
"""

# ruff: noqa: A002, A006, ARG005, D103  # names and behavior are torch's, including parameters that no check needs

from __future__ import annotations

import functools
import math
import operator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812
from torch.nn.utils import rnn

from tinker_lightning.errors import InvalidLoss

if TYPE_CHECKING:
    from collections.abc import Callable

# The number of pieces that a tensor may be split into; each is an object.
MAX_PIECES = 1024
_PIECES = f"a tensor can be split into at most {MAX_PIECES} pieces"
_SINGULAR_VALUES = "is not supported: it needs a singular value decomposition"

_TENSOR_ATTRIBUTES = frozenset({"T", "data", "device", "dtype", "mT", "ndim", "shape"})
_PAIR_ATTRIBUTES = ("values", "indices")  # of the results of max, sort and topk
ATTRIBUTES = _TENSOR_ATTRIBUTES | {*_PAIR_ATTRIBUTES}


def attribute(value: Any, name: Any) -> Any:
    if isinstance(value, Tensor) and name in _TENSOR_ATTRIBUTES:
        return value.detach() if name == "data" else getattr(value, name)
    if isinstance(value, tuple) and len(value) == 2 and name in _PAIR_ATTRIBUTES:
        return value[_PAIR_ATTRIBUTES.index(name)]
    raise InvalidLoss(f"the attribute {name!r:.140} is not supported; use one of {', '.join(sorted(ATTRIBUTES))}")


def is_mask(index: Any) -> bool:
    """Returns whether an index is a mask, so that the number of selected elements depends on values."""
    if isinstance(index, Tensor):
        return index.dtype in (torch.bool, torch.uint8)
    return isinstance(index, tuple | list) and any(is_mask(part) for part in index)


def check_index(index: Any) -> None:
    """Raises if a mask is combined with other index tensors, which would be broadcast with its true values."""
    parts = index if isinstance(index, tuple) else (index,)
    if is_mask(index) and not all(is_mask(part) for part in parts if isinstance(part, Tensor | list | tuple)):
        raise InvalidLoss("a mask can be combined with slices and numbers in an index, not with other index tensors")


def getitem(value: Any, index: Any) -> Any:
    if not isinstance(value, Tensor | tuple):
        raise InvalidLoss(f"only tensors and tuples have items, not {type(value).__name__}")
    check_index(index)
    return value[index]


def setitem(value: Any, index: Any, item: Any) -> Tensor:
    # Returns a copy, because a graph never modifies a tensor.
    if not isinstance(value, Tensor) or not isinstance(item, Tensor | int | float):
        raise InvalidLoss("only items of tensors can be set, to tensors and numbers")
    check_index(index)
    changed = value.clone()
    if not (value.is_meta and is_mask(index)):  # the elements that a mask selects are unknown
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
        raise InvalidLoss(f"torch.tensor takes numbers, not {type(data).__name__}; join tensors with torch.stack")


def integer_division(function: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps a division so that it computes `x // -1` as `-x // 1` for integers.

    In torch, dividing the smallest integer by -1 raises SIGFPE, which ends the process.
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
    function = integer_division(torch.div) if rounding_mode else torch.div
    result: Tensor = function(input, other, rounding_mode=rounding_mode)
    return result


def split(tensor: Tensor, split_size_or_sections: Any = None, dim: int = 0, *, split_size: Any = None) -> Any:
    size = split_size_or_sections if split_size is None else split_size
    if isinstance(size, int) and tensor.shape[dim] / max(size, 1) > MAX_PIECES:
        raise InvalidLoss(_PIECES)
    return torch.split(tensor, size, dim)


def to(self: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    unchanged(self)
    target = args[0] if args else None
    if isinstance(target, str) or (isinstance(target, int) and not isinstance(target, bool)):
        raise _device_error(target)
    result: Tensor = self.to(*args, **kwargs)
    return result


def check_device(device: Any) -> None:
    """Raises if a graph chooses a device by a string or a number."""
    if device is not None and not isinstance(device, torch.device):
        raise _device_error(device)


def _device_error(device: Any) -> InvalidLoss:
    return InvalidLoss(
        f"the device {device!r:.40} is not supported, because a loss runs on the device of the model. Omit it, or use "
        "the device of an input, x.device."
    )


def unchanged(self: Tensor, *_: Any, **__: Any) -> Tensor:
    """Returns the tensor itself, because a loss runs on the device of the model."""
    if not isinstance(self, Tensor):
        raise InvalidLoss(f"this method needs a tensor, got {type(self).__name__}")
    return self


def numel(self: Any) -> int:
    if isinstance(self, tuple) and all(isinstance(size, int) for size in self):
        return math.prod(self)
    return Tensor.numel(self)


def _guarded(function: Callable[..., Any], is_unsafe: Callable[..., bool], reason: str) -> Callable[..., Any]:
    @functools.wraps(is_unsafe)  # its parameters are those that a loss may pass
    def guarded(*args: Any, **kwargs: Any) -> Any:
        if is_unsafe(*args, **kwargs):
            raise InvalidLoss(reason)
        return function(*args, **kwargs)

    return guarded


chunk = _guarded(torch.chunk, lambda input, chunks, dim=0: min(chunks, input.shape[dim]) > MAX_PIECES, _PIECES)
unbind = _guarded(torch.unbind, lambda input, dim=0: input.shape[dim] > MAX_PIECES, _PIECES)
where = _guarded(torch.where, lambda condition, input, other: False, "")  # requires three arguments
norm = _guarded(
    torch.norm,
    lambda input, p="fro", dim=None, keepdim=False, *, dtype=None: p == "nuc",
    f"the nuclear norm {_SINGULAR_VALUES}",
)
linalg_norm = _guarded(
    torch.linalg.norm,
    lambda A, ord=None, dim=None, keepdim=False, *, dtype=None: (
        ord in (2, -2, "nuc") and (A.ndim == 2 if dim is None else isinstance(dim, list | tuple) and len(dim) == 2)
    ),
    f"this norm of a matrix {_SINGULAR_VALUES}",
)
# A tensor of repeats could request any size.
repeat_interleave = _guarded(
    torch.repeat_interleave,
    lambda input, repeats, dim=None: not isinstance(repeats, int),
    "repeat_interleave takes an integer number of repeats, not a tensor",
)
# For a tensor, torch would create an object per row.
pad_sequence = _guarded(
    rnn.pad_sequence,
    lambda sequences, batch_first=False, padding_value=0.0, padding_side="right": isinstance(sequences, Tensor),
    "pad_sequence takes a list of tensors, not a tensor",
)
# torch runs once per n, and once per shift.
diff = _guarded(
    torch.diff,
    lambda input, n=1, dim=-1, prepend=None, append=None: n > 8,
    "diff is supported up to n=8",
)
roll = _guarded(
    torch.roll,
    lambda input, shifts, dims=(): isinstance(shifts, list | tuple) and len(shifts) > input.ndim,
    "roll takes at most one shift per dimension",
)
# Otherwise torch derives the number of classes from the values.
one_hot = _guarded(
    F.one_hot,
    lambda input, num_classes: num_classes < 0,
    "one_hot needs num_classes, e.g. x.shape[-1]",
)


def einsum(equation: str, *operands: Any) -> Tensor:
    # With at most two operands, no intermediate tensor is larger than the result.
    if len(operands) == 1 and isinstance(operands[0], list | tuple):
        operands = tuple(operands[0])
    if not isinstance(equation, str) or len(operands) > 2:
        raise InvalidLoss("einsum takes an equation and one or two tensors; combine more of them two at a time")
    return torch.einsum(equation, *operands)


MAX_INT = 2**63
MAX_TUPLE = 64


def _operator(name: str) -> Callable[..., Any]:
    function: Callable[..., Any] = getattr(operator, name)

    def guarded(*operands: Any) -> Any:
        if any(isinstance(operand, Tensor) for operand in operands):
            if all(isinstance(operand, Tensor | int | float) for operand in operands):
                return function(*operands)
        elif all(isinstance(operand, int | float) for operand in operands):
            if name in ("pow", "lshift"):
                _check_growth(name, *operands)
            return number(function(*operands))
        elif name == "add" and all(isinstance(operand, tuple) for operand in operands):
            return _joined(operands)
        kinds = ", ".join(type(operand).__name__ for operand in operands)
        raise InvalidLoss(f"operator.{name} works on tensors and numbers, not on {kinds}")

    return guarded


def _joined(tuples: tuple[tuple[Any, ...], ...]) -> tuple[Any, ...]:
    """Joins tuples of numbers, such as shapes; tuples of tuples could double with every node."""
    if sum(len(each) for each in tuples) > MAX_TUPLE:
        raise InvalidLoss(f"a tuple may have at most {MAX_TUPLE} values")
    parts = tuple(part for each in tuples for part in each)
    if not all(isinstance(part, int | float) for part in parts):
        raise InvalidLoss("operator.add joins tuples of numbers only; join tensors with torch.cat or torch.stack")
    return parts


def _check_growth(name: str, base: float, exponent: float) -> None:
    """Raises if an integer would be larger than any that tensors hold."""
    if isinstance(base, int) and isinstance(exponent, int) and exponent > 0:
        bits = exponent if name == "lshift" else exponent * math.log2(max(2, abs(base)))
        if bits > 63:
            raise InvalidLoss(f"operator.{name}({base}, {exponent}) is larger than any integer of a tensor")


def number(value: Any) -> Any:
    """Returns a number; raises `InvalidLoss` if it is not a number, or too large for a tensor."""
    if isinstance(value, int | float) and not (isinstance(value, int) and not -MAX_INT <= value < MAX_INT):
        return value
    raise InvalidLoss(f"{type(value).__name__} is not a number, or is too large for a tensor")


def _math(name: str) -> Callable[..., Any]:
    function: Callable[..., Any] = getattr(math, name)

    def guarded(*operands: Any) -> Any:
        if not all(isinstance(operand, int | float) for operand in operands):
            raise InvalidLoss(f"math.{name} works on numbers; use torch.{name} for tensors")
        return number(function(*(float(operand) for operand in operands)))

    return guarded


_OPERATORS = (
    "abs add and_ eq floordiv ge gt inv invert le lshift lt mod mul ne neg not_ or_ pos pow rshift sub truediv xor"
)
# Without functions whose results are unbounded (factorial, comb, perm) and those that take sequences.
_MATH = (
    "acos acosh asin asinh atan atan2 atanh ceil copysign cos cosh degrees erf erfc exp expm1 fabs floor fmod gamma "
    "isfinite isinf isnan lgamma log log10 log1p log2 pow radians sin sinh sqrt tan tanh trunc"
)

# The allow-list has its own forms of `matmul`, `getitem`, `setitem`, `floordiv` and `mod`.
OPERATORS: dict[str, Callable[..., Any]] = {f"operator.{name}": _operator(name) for name in _OPERATORS.split()}
MATH: dict[str, Callable[..., Any]] = {f"math.{name}": _math(name) for name in _MATH.split()}
