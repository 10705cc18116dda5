"""The functions that an uploaded loss may call: an explicit list, looked up by name.

It omits functions that draw random numbers (a pass must be repeatable), return uninitialized memory (`empty`), modify
a tensor, expose its memory (`storage`, `as_strided`, `out=`), or whose result can grow with the values in a tensor.
"""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.fx.node import _get_qualified_name
from torch.nn import functional as F  # noqa: N812

from tinker_lightning.errors import InvalidLoss
from tinker_lightning.lossgraph import guards
from tinker_lightning.lossgraph.guards import MATH, OPERATORS, check_index, is_mask

# Arguments that would let a function write to other tensors, or change its result in other ways.
_FORBIDDEN_ARGUMENTS = frozenset({"out", "generator", "requires_grad", "pin_memory", "names"})


@dataclass(frozen=True, slots=True)
class Function:
    """A function that a graph may call."""

    call: Callable[..., Any]
    is_factory: bool = False  # creates a tensor from numbers, so it needs a device
    is_dynamic: bool = False  # the size of the result depends on values; it is at most the size of the argument
    inside: Callable[..., int] | None = None  # elements of an intermediate tensor that can be larger than the result
    work: Callable[..., int] | None = None  # cost of the call, if it can exceed reading arguments and writing results


# For other dtypes torch computes matrix products in a plain loop, which can be more than a hundred times slower.
_FAST_DTYPES = (torch.float32, torch.float64)
# The names of torch's parameters for the operands of products: the left one, then the right one.
_FACTORS = ("input", "other", "mat2", "vec", "tensor")


def _product_work(*args: Any, **kwargs: Any) -> int:
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


def _product_inside(*args: Any, **kwargs: Any) -> int:
    """Returns the elements of the larger operand after both are broadcast over the batch."""
    left, right = _factors(args, kwargs)
    batch = int(torch.broadcast_shapes(left.shape[:-2], right.shape[:-2]).numel())
    return batch * max(math.prod(left.shape[-2:]), math.prod(right.shape[-2:]))


def _inner_work(*args: Any, **kwargs: Any) -> int:
    """Returns the work of `inner`: each row on the left is multiplied with each row on the right."""
    left, right = _factors(args, kwargs)
    return _multiplications(left.numel() * right.numel() // max(1, right.shape[-1] if right.ndim else 1), left, right)


def _einsum_work(equation: str, *operands: Any) -> int:
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


def _sorting_work(input: Tensor, *_: Any, **__: Any) -> int:  # noqa: A002  # torch's name
    """Returns the work of sorting."""
    return 16 * input.numel()


def _setitem_work(value: Any, index: Any, _: Any) -> int:
    """Returns the number of elements that are set."""
    check_index(index)
    return int(value.numel() * (value.ndim + 2) if is_mask(index) else value[index].numel())


def _joined_elements(*args: Any, **kwargs: Any) -> int:
    """Returns the number of elements of all tensors, which are concatenated."""
    return sum(value.numel() for value in (*args, *kwargs.values()) if isinstance(value, Tensor))


def broadcast_elements(*args: Any, **kwargs: Any) -> int:
    """Returns the number of elements after broadcasting, which can be more than the result after a reduction has."""
    shapes = [value.shape for value in (*args, *kwargs.values()) if isinstance(value, Tensor)]
    try:
        return int(torch.broadcast_shapes(*shapes).numel())
    except RuntimeError:
        return 0  # not an elementwise operation


_POINTWISE = """
abs absolute acos acosh add addcdiv addcmul arctan2 asin asinh atan atan2 atanh bitwise_and bitwise_not bitwise_or
bitwise_xor ceil clamp clamp_max clamp_min clip copysign cos cosh digamma eq erf erfc erfinv exp exp2 expm1 fix
float_power floor fmax fmin frac ge greater greater_equal gt heaviside hypot isclose isfinite isinf
isnan isneginf isposinf le lerp less less_equal lgamma log log10 log1p log2 logaddexp logaddexp2 logical_and
logical_not logical_or logical_xor logit lt masked_fill maximum minimum mul multiply nan_to_num ne neg negative
not_equal positive pow reciprocal relu round rsqrt sgn sigmoid sign signbit sin sinc sinh sqrt square sub
subtract tan tanh true_divide trunc where xlogy
"""
_REDUCTIONS = """
all amax amin aminmax any argmax argmin count_nonzero cummax cummin cumprod cumsum log_softmax logcumsumexp logsumexp
max mean min nanmean nansum prod softmax std sum trace var
"""
_SORTING = "argsort median nanmedian nanquantile quantile sort topk"
_SHAPES = """
broadcast_to clone detach diag diag_embed diagonal flatten flip gather index_add index_fill index_select movedim
narrow permute ravel reshape scatter scatter_add select squeeze swapaxes t take take_along_dim tile transpose tril
triu unflatten unsqueeze
"""
# Functions only; the methods do not exist or mean something else.
_JOINS = """
broadcast_tensors cat concat dstack full_like hstack ones_like outer stack std_mean var_mean vstack zeros_like
"""
_METHODS = """
bfloat16 bool contiguous dim double element_size expand expand_as float half int is_floating_point long ndimension
new_full new_ones new_zeros outer repeat reshape_as size type_as unfold view view_as
"""
_FACTORIES = "arange eye full linspace ones zeros"
_FUNCTIONAL = """
binary_cross_entropy binary_cross_entropy_with_logits celu cosine_embedding_loss cosine_similarity cross_entropy elu
gelu hardtanh hinge_embedding_loss huber_loss kl_div l1_loss layer_norm leaky_relu log_softmax logsigmoid
margin_ranking_loss mish mse_loss nll_loss normalize pad pairwise_distance poisson_nll_loss relu relu6 selu sigmoid
silu smooth_l1_loss soft_margin_loss softmax softmin softplus softsign tanh tanhshrink threshold triplet_margin_loss
"""
# From `torch.special`. The others are slow series, or have no gradient.
_TORCH_SPECIAL = """
digamma entr erf erfc erfinv exp2 expit expm1 gammaln log1p log_softmax logit logsumexp psi round sinc softmax xlog1py
xlogy
"""
_SPECIAL: dict[str, Function] = {
    "div": Function(guards.divide),
    "divide": Function(guards.divide),
    **{name: Function(guards.integer_division(getattr(torch, name))) for name in ("floor_divide", "fmod", "remainder")},
    "repeat_interleave": Function(guards.repeat_interleave),
    "split": Function(guards.split),
    "chunk": Function(guards.chunk),
    "unbind": Function(guards.unbind),
    "norm": Function(guards.norm),
    "diff": Function(guards.diff, inside=_joined_elements),
    "roll": Function(guards.roll),
    "nonzero": Function(torch.nonzero, is_dynamic=True),
    "argwhere": Function(torch.argwhere, is_dynamic=True),
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
        "operator.floordiv": Function(guards.integer_division(OPERATORS["operator.floordiv"])),
        "operator.mod": Function(guards.integer_division(OPERATORS["operator.mod"])),
        "operator.getitem": Function(guards.getitem),
        "operator.setitem": Function(guards.setitem, work=_setitem_work),
        "torch.tensor": Function(guards.tensor, is_factory=True),
        "torch.scalar_tensor": Function(guards.tensor, is_factory=True),
        "torch.as_tensor": Function(guards.as_tensor, is_factory=True),
        "torch.functional.einsum": Function(guards.einsum, work=_einsum_work),
        "torch.einsum": Function(guards.einsum, work=_einsum_work),
        "torch.cosine_similarity": Function(F.cosine_similarity, inside=broadcast_elements),
    }
    for name in ("getattr", "builtins.getattr"):
        allowed[name] = Function(guards.attribute)
    for name in f"{_POINTWISE} {_REDUCTIONS} {_SHAPES} {_JOINS}".split():
        call = getattr(torch, name)
        allowed[f"torch.{name}"] = allowed[_get_qualified_name(call)] = Function(call)
    for name in _FACTORIES.split():
        allowed[f"torch.{name}"] = Function(getattr(torch, name), is_factory=True)
    for name in _FUNCTIONAL.split():
        call = getattr(F, name)
        allowed[f"torch.nn.functional.{name}"] = allowed[_get_qualified_name(call)] = Function(
            call, inside=broadcast_elements
        )
    for name in _TORCH_SPECIAL.split():
        call = getattr(torch.special, name)
        allowed[f"torch.special.{name}"] = allowed[_get_qualified_name(call)] = Function(call)
    vector_norm = torch.linalg.vector_norm
    allowed["torch.linalg.vector_norm"] = allowed[_get_qualified_name(vector_norm)] = Function(vector_norm)
    allowed["torch.linalg.norm"] = allowed[_get_qualified_name(torch.linalg.norm)] = Function(guards.linalg_norm)
    for name in ("torch.nn.utils.rnn.pad_sequence", "torch._C._nn.pad_sequence"):
        allowed[name] = Function(guards.pad_sequence)
    for name, function in _SPECIAL.items():
        allowed[f"torch.{name}"] = allowed[_get_qualified_name(getattr(torch, name))] = function
    allowed["torch.nn.functional.one_hot"] = allowed[_get_qualified_name(F.one_hot)] = Function(guards.one_hot)
    allowed["torch.where"] = Function(guards.where)
    return allowed


def _methods() -> dict[str, Function]:
    allowed = {name: Function(getattr(Tensor, name)) for name in f"{_POINTWISE} {_REDUCTIONS} {_SHAPES}".split()}
    allowed |= {name: Function(getattr(Tensor, name)) for name in _METHODS.split()}
    allowed |= _SPECIAL
    allowed["to"] = Function(guards.to)
    allowed["numel"] = Function(guards.numel)
    allowed["new_tensor"] = Function(guards.new_tensor, is_factory=True)
    for name in ("cpu", "cuda"):  # a loss runs on the device of the model
        allowed[name] = Function(guards.unchanged)
    return allowed


FUNCTIONS: dict[str, Function] = _functions()
METHODS: dict[str, Function] = _methods()


def find(op: str, target: str) -> Function:
    """Returns the function that a node calls; raises `InvalidLoss` if it is not on the list."""
    table = FUNCTIONS if op == "call_function" else METHODS
    if op == "call_function" and target.startswith("torch.Tensor."):
        table, target = METHODS, target.removeprefix("torch.Tensor.")
    if target not in table:
        kind = "function" if op == "call_function" else "method"
        raise InvalidLoss(f"the {kind} {target!r} is not among those that a server-side loss may call")
    return table[target]


def drop_forbidden(op: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Returns keyword arguments without the forbidden ones; raises `InvalidLoss` unless they are None or False.

    torch records them with these values. Methods are called with them only by numpy, so there they always raise.
    """
    for name in sorted(_FORBIDDEN_ARGUMENTS & arguments.keys()):
        if op == "call_method" or not (arguments[name] is None or arguments[name] is False):
            raise InvalidLoss(f"the argument {name!r} is not supported")
    return {name: value for name, value in arguments.items() if name not in _FORBIDDEN_ARGUMENTS}


def check_arguments(target: str, function: Function, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Raises `InvalidLoss` if a Python function does not take these arguments, or would write to a tensor."""
    signature = _signature(function.call)
    if signature is None:
        return  # one of torch's C++ functions, which take `out` by name only
    try:
        arguments = signature.bind(*args, **kwargs).arguments
    except TypeError as error:
        takes = ", ".join(signature.parameters)
        raise InvalidLoss(f"{target}: {error}; on a server it takes ({takes})") from None
    for name in ("inplace", "out"):
        if arguments.get(name) is not None and arguments[name] is not False:
            raise InvalidLoss(f"{name} is not supported; use the tensor that {target} returns")


@functools.cache
def _signature(call: Callable[..., Any]) -> inspect.Signature | None:
    try:
        return inspect.signature(call)
    except ValueError:
        return None
