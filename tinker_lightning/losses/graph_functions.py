"""What an uploaded loss may call: an explicit list, looked up by name. Nothing else is ever reached by a name.

Left out on purpose: whatever draws random numbers (a pass must be repeatable), returns memory that nobody has written
(`empty`, `resize_`), looks behind a tensor (`storage`, `as_strided`, `out=`), or can grow by the values in a tensor.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.fx.node import _get_qualified_name
from torch.nn import functional as F  # noqa: N812

from tinker_lightning.errors import InvalidLoss
from tinker_lightning.losses.graph_numbers import MATH, OPERATORS

# How many pieces a tensor may be cut into; each is an object.
MAX_PIECES = 1024
# Arguments that would give a function more power than its name says.
FORBIDDEN_ARGUMENTS = frozenset({"out", "generator", "requires_grad", "pin_memory", "names"})


@dataclass(frozen=True, slots=True)
class Function:
    """Something that a graph may call.

    Args:
        call: What is called.
        is_factory: Whether it makes a tensor out of nothing, so that it has to be told where.
        is_dynamic: Whether the size of its result is known only afterwards. It is never more than its argument's.
        inside: The elements of the largest tensor that it makes on the way, where that may be more than its result's.
        work: The elements that would take as long to read, where that may be more than those it is given and returns.
    """

    call: Callable[..., Any]
    is_factory: bool = False
    is_dynamic: bool = False
    inside: Callable[..., int] | None = None
    work: Callable[..., int] | None = None


def _attribute(value: Any, name: Any) -> Any:
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


def _getitem(value: Any, index: Any) -> Any:
    if not isinstance(value, Tensor | tuple):
        raise InvalidLoss(f"only tensors and tuples have items, not {type(value).__name__}")
    _check_index(index)
    return value[index]


def _setitem(value: Any, index: Any, item: Any) -> None:
    if not isinstance(value, Tensor) or not isinstance(item, Tensor | int | float):
        raise InvalidLoss("only items of tensors can be set, to tensors and numbers")
    _check_index(index)
    if value.is_meta and is_mask(index):
        return  # what a mask picks is not known, and never more than there is
    value[index] = item


def _setitem_work(value: Any, index: Any, _: Any) -> int:
    _check_index(index)
    return int(value.numel() * (value.ndim + 2) if is_mask(index) else value[index].numel())


def _tensor(data: Any, *, dtype: torch.dtype | None = None, device: Any = None) -> Tensor:
    if isinstance(data, Tensor):
        return data.detach().to(dtype=dtype or data.dtype, copy=True)
    _check_numbers(data)
    return torch.tensor(data, dtype=dtype, device=device)


def _as_tensor(data: Any, *, dtype: torch.dtype | None = None, device: Any = None) -> Tensor:
    return data.to(dtype=dtype or data.dtype) if isinstance(data, Tensor) else _tensor(data, dtype=dtype, device=device)


def _new_tensor(self: Tensor, data: Any, *, dtype: torch.dtype | None = None, device: Any = None) -> Tensor:
    return _tensor(data, dtype=dtype or self.dtype, device=device)


def _check_numbers(data: Any) -> None:
    if isinstance(data, list | tuple):
        for part in data:
            _check_numbers(part)
    elif not isinstance(data, int | float):
        raise InvalidLoss(f"torch.tensor takes numbers here, not {type(data).__name__}; join tensors with torch.stack")


def _divide(self: Any, other: Any, *, rounding_mode: str | None = None) -> Tensor:
    exact = not any(isinstance(x, Tensor) and x.dtype.is_floating_point for x in (self, other))
    if rounding_mode == "trunc" and exact:
        # The smallest whole number by -1 does not only overflow: it ends the process.
        raise InvalidLoss("rounding_mode='trunc' needs a tensor of floats")
    return torch.div(self, other, rounding_mode=rounding_mode)


def _repeat_interleave(self: Tensor, repeats: Any, dim: int | None = None) -> Tensor:
    if not isinstance(repeats, int):
        raise InvalidLoss("repeat_interleave takes a whole number of repeats, not a tensor of them")
    return torch.repeat_interleave(self, repeats, dim)


def _split(self: Tensor, split_size_or_sections: Any = None, dim: int = 0, *, split_size: Any = None) -> Any:
    size = split_size_or_sections if split_size is None else split_size
    if isinstance(size, int):
        _check_pieces(self.shape[dim] / max(size, 1))
    return torch.split(self, size, dim)


def _chunk(self: Tensor, chunks: int, dim: int = 0) -> Any:
    _check_pieces(min(chunks, self.shape[dim]))
    return torch.chunk(self, chunks, dim)


def _unbind(self: Tensor, dim: int = 0) -> Any:
    _check_pieces(self.shape[dim])
    return torch.unbind(self, dim)


def _check_pieces(pieces: float) -> None:
    if pieces > MAX_PIECES:
        raise InvalidLoss(f"a tensor can be cut into at most {MAX_PIECES} pieces here, and this would be {pieces:.0f}")


def _same(self: Tensor, *_: Any, **__: Any) -> Tensor:
    if not isinstance(self, Tensor):
        raise InvalidLoss(f"this is a tensor's method, and {type(self).__name__} is none")
    return self


def _norm(self: Tensor, p: Any = "fro", dim: Any = None, keepdim: bool = False, dtype: Any = None) -> Tensor:
    if p == "nuc":
        raise InvalidLoss("the nuclear norm is not taken: it needs a singular value decomposition")
    result: Tensor = torch.norm(self, p, dim, keepdim, dtype=dtype)
    return result


def _diff(self: Tensor, n: int = 1, dim: int = -1) -> Tensor:
    if n > 8:
        raise InvalidLoss(f"diff is taken up to n=8, not {n}")
    return torch.diff(self, n, dim)


def _roll(self: Tensor, shifts: Any, dims: Any = None) -> Tensor:
    if isinstance(shifts, list | tuple) and len(shifts) > self.ndim:
        raise InvalidLoss(f"{len(shifts)} shifts for {self.ndim} dimensions")
    return torch.roll(self, shifts, () if dims is None else dims)


def _product_work(left: Tensor, right: Tensor, *_: Any, **__: Any) -> int:
    """Each element of the left meets each column of the right; multiplications are quick."""
    columns = right.shape[-1] if right.ndim > 1 else 1
    batch = int(torch.broadcast_shapes(left.shape[:-2], right.shape[:-2]).numel())
    rows = math.prod(left.shape[-2:])
    return batch * rows * columns // 16


def _product_inside(left: Tensor, right: Tensor, *_: Any, **__: Any) -> int:
    """Both are copied to the shape that their batches are broadcast to."""
    batch = int(torch.broadcast_shapes(left.shape[:-2], right.shape[:-2]).numel())
    return batch * max(math.prod(left.shape[-2:]), math.prod(right.shape[-2:]))


def _inner_work(left: Tensor, right: Tensor) -> int:
    return left.numel() * right.numel() // (16 * max(1, right.shape[-1] if right.ndim else 1))


def _einsum(equation: str, *operands: Any) -> Tensor:
    if len(operands) == 1 and isinstance(operands[0], list | tuple):
        operands = tuple(operands[0])
    if not isinstance(equation, str) or len(operands) > 2:
        raise InvalidLoss("einsum takes an equation and one or two tensors; of more, take two at a time")
    return torch.einsum(equation, *operands)


def _einsum_work(equation: str, *operands: Any) -> int:
    if len(operands) == 1 and isinstance(operands[0], list | tuple):
        operands = tuple(operands[0])
    sizes: dict[str, int] = {}
    for part, operand in zip(equation.split("->")[0].split(","), operands, strict=False):
        letters = part.replace("...", "").replace(" ", "")
        extra = operand.shape[: operand.ndim - len(letters)]
        sizes["..."] = sizes.get("...", 1) * math.prod(extra)
        sizes |= dict(zip(letters, operand.shape[operand.ndim - len(letters) :], strict=False))
    return math.prod(sizes.values()) // 16


def _sorting_work(self: Tensor, *_: Any, **__: Any) -> int:
    return 16 * self.numel()


def _broadcast(*args: Any, **kwargs: Any) -> int:
    """What the tensors become when they meet, which a reduction afterwards does not show."""
    shapes = [value.shape for value in (*args, *kwargs.values()) if isinstance(value, Tensor)]
    try:
        return int(torch.broadcast_shapes(*shapes).numel())
    except RuntimeError:
        return 0  # they do not meet element by element


_POINTWISE = """
abs absolute acos acosh add addcdiv addcmul arctan2 asin asinh atan atan2 atanh bitwise_and bitwise_not bitwise_or
bitwise_xor ceil clamp clamp_max clamp_min clip copysign cos cosh digamma eq erf erfc erfinv exp exp2 expm1 fix
float_power floor floor_divide fmax fmin fmod frac ge greater greater_equal gt heaviside hypot isclose isfinite isinf
isnan isneginf isposinf le lerp less less_equal lgamma log log10 log1p log2 logaddexp logaddexp2 logical_and
logical_not logical_or logical_xor logit lt masked_fill maximum minimum mul multiply nan_to_num ne neg negative
not_equal positive pow reciprocal relu remainder round rsqrt sgn sigmoid sign signbit sin sinc sinh sqrt square sub
subtract tan tanh true_divide trunc where xlogy
"""
_REDUCTIONS = """
all amax amin aminmax any argmax argmin count_nonzero cummax cummin cumsum log_softmax logcumsumexp logsumexp max mean
min nanmean nansum prod softmax std sum var
"""
_SORTING = "argsort kthvalue median nanmedian nanquantile quantile sort topk"
_SHAPES = """
broadcast_to clone detach diag diag_embed diagonal flatten flip gather index_add index_fill index_select movedim
narrow permute ravel reshape scatter scatter_add select squeeze swapaxes t take take_along_dim tile transpose tril
triu unflatten unsqueeze
"""
# As functions only: their methods do not exist, or mean something else.
_JOINS = """
broadcast_tensors cat concat dstack full_like hstack ones_like outer stack std_mean var_mean vstack zeros_like
"""
_METHODS = """
add_ bfloat16 bool clamp_ contiguous copy_ dim double element_size expand expand_as fill_ float half int
is_floating_point long masked_fill_ mul_ ndimension new_full new_ones new_zeros numel outer repeat reshape_as size sub_
to type_as unfold view view_as zero_
"""
_FACTORIES = "arange eye full linspace ones zeros"
_FUNCTIONAL = """
binary_cross_entropy binary_cross_entropy_with_logits cosine_embedding_loss cosine_similarity cross_entropy elu gelu
hardtanh hinge_embedding_loss huber_loss kl_div l1_loss leaky_relu log_softmax logsigmoid margin_ranking_loss mse_loss
nll_loss normalize one_hot pad pairwise_distance poisson_nll_loss relu relu6 sigmoid silu smooth_l1_loss
soft_margin_loss softmax softmin softplus softsign tanh tanhshrink threshold
"""
_SPECIAL: dict[str, Function] = {
    "div": Function(_divide),
    "divide": Function(_divide),
    "repeat_interleave": Function(_repeat_interleave),
    "split": Function(_split),
    "chunk": Function(_chunk),
    "unbind": Function(_unbind),
    "norm": Function(_norm),
    "diff": Function(_diff),
    "roll": Function(_roll),
    "nonzero": Function(lambda self: torch.nonzero(self), is_dynamic=True),
    "argwhere": Function(lambda self: torch.nonzero(self), is_dynamic=True),
    "masked_select": Function(torch.masked_select, is_dynamic=True),
    "matmul": Function(torch.matmul, inside=_product_inside, work=_product_work),
    **{name: Function(getattr(torch, name), work=_product_work) for name in ("mm", "bmm", "mv", "dot")},
    "inner": Function(torch.inner, work=_inner_work),
    **{name: Function(getattr(torch, name), work=_sorting_work) for name in _SORTING.split()},
}


def _functions() -> dict[str, Function]:
    allowed: dict[str, Function] = {
        **{name: Function(call) for name, call in {**OPERATORS, **MATH}.items()},
        "operator.matmul": _SPECIAL["matmul"],
        "operator.getitem": Function(_getitem),
        "operator.setitem": Function(_setitem, work=_setitem_work),
        "torch.tensor": Function(_tensor, is_factory=True),
        "torch.scalar_tensor": Function(_tensor, is_factory=True),
        "torch.as_tensor": Function(_as_tensor, is_factory=True),
        "torch.functional.einsum": Function(_einsum, work=_einsum_work),
        "torch.einsum": Function(_einsum, work=_einsum_work),
        "torch.cosine_similarity": Function(F.cosine_similarity, inside=_broadcast),
    }
    for name in ("getattr", "builtins.getattr"):
        allowed[name] = Function(_attribute)
    for name in f"{_POINTWISE} {_REDUCTIONS} {_SHAPES} {_JOINS}".split():
        call = getattr(torch, name)
        allowed[f"torch.{name}"] = allowed[_get_qualified_name(call)] = Function(call)
    for name in _FACTORIES.split():
        allowed[f"torch.{name}"] = Function(getattr(torch, name), is_factory=True)
    for name in _FUNCTIONAL.split():
        call = getattr(F, name)
        allowed[f"torch.nn.functional.{name}"] = allowed[_get_qualified_name(call)] = Function(call, inside=_broadcast)
    for name, function in _SPECIAL.items():
        allowed[f"torch.{name}"] = allowed[_get_qualified_name(getattr(torch, name))] = function
    return allowed


def _methods() -> dict[str, Function]:
    allowed = {name: Function(getattr(Tensor, name)) for name in f"{_POINTWISE} {_REDUCTIONS} {_SHAPES}".split()}
    allowed |= {name: Function(getattr(Tensor, name)) for name in _METHODS.split()}
    allowed |= _SPECIAL
    allowed["new_tensor"] = Function(_new_tensor, is_factory=True)
    for name in ("cpu", "cuda"):  # a loss runs where the model is
        allowed[name] = Function(_same)
    return allowed


FUNCTIONS: dict[str, Function] = _functions()
METHODS: dict[str, Function] = _methods()


def find(op: str, target: str) -> Function:
    """What a node calls.

    Raises:
        InvalidLoss: If it is not on the list.
    """
    table = FUNCTIONS if op == "call_function" else METHODS
    if op == "call_function" and target.startswith("torch.Tensor."):
        table, target = METHODS, target.removeprefix("torch.Tensor.")
    if target not in table:
        kind = "function" if op == "call_function" else "method"
        raise InvalidLoss(f"the {kind} {target!r} is not among those that a loss on a server may call")
    return table[target]
