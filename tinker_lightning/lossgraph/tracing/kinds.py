"""Properties of the result of a recorded call: its kind, and whether it may share memory with an argument."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import Tensor
from torch.fx.node import _get_qualified_name

from tinker_lightning.lossgraph.tracing.values import Value, stand_ins

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from tinker_lightning.lossgraph.tracing.values import Kind

GETATTR = ("getattr", "builtins.getattr")
_NUMBERS = {"dim", "ndimension", "numel", "element_size", "is_floating_point"}
_ATTRIBUTES: dict[str, Kind] = {"shape": "shape", "dtype": "number", "device": "number", "ndim": "number"}
_TUPLES = {
    *("aminmax", "broadcast_tensors", "chunk", "cummax", "cummin", "sort", "split", "std_mean", "topk"),
    *("unbind", "var_mean"),
}
# These return a tuple if they are given a dimension, and otherwise a tensor.
_TUPLES_ALONG = {"max", "median", "min", "nanmedian"}
_SHARING = """
T as_tensor bfloat16 bool broadcast_tensors broadcast_to chunk contiguous cpu cuda data detach diagonal double einsum
expand expand_as flatten float half int long mT movedim narrow permute pos positive ravel reshape reshape_as select
split squeeze swapaxes t to transpose type_as unbind unflatten unfold unsqueeze view view_as
"""
# Functions, methods and attributes whose result may be a view of an argument, or the argument itself.
SHARING = frozenset(_SHARING.split())


def target_name(target: Any) -> str:
    """Returns the name of a function on the wire, as the official SDK writes it."""
    try:
        name = _get_qualified_name(target)
    except (RuntimeError, AttributeError):
        return str(getattr(target, "__qualname__", target))
    return "operator." + name.removeprefix("_operator.") if name.startswith("_operator.") else name


def kind_of(op: str, target: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Kind:
    """Returns the kind of a call's result."""
    name = target.rpartition(".")[2]
    if op == "call_method":
        if name == "size":
            return "number" if len(args) > 1 or kwargs else "shape"
        if name in _NUMBERS:
            return "number"
    if target in GETATTR:
        return _ATTRIBUTES.get(args[1], "tensor")
    kinds = {value.node.kind for value in stand_ins([args, kwargs])}
    if target == "operator.getitem":
        source: Kind = args[0].node.kind if isinstance(args[0], Value) else "tensor"
        if source in ("tuple", "shape"):
            return source if isinstance(args[1], slice) else "tensor" if source == "tuple" else "number"
    elif target.startswith(("operator.", "math.")) and "tensor" not in kinds:
        return "item" if "item" in kinds else "shape" if "shape" in kinds else "number"
    if name in _TUPLES or (name == "nonzero" and kwargs.get("as_tuple")):
        return "tuple"
    if name in _TUPLES_ALONG:
        along = kwargs.get("dim", args[1] if len(args) > 1 else None)
        return "tensor" if along is None or (isinstance(along, Value) and along.node.kind == "tensor") else "tuple"
    return "tensor"


def rank_of(kind: Kind, target: str, args: Sequence[Any]) -> int | None:
    """Returns the length of a shape, if it is known: the shape of an input, or a slice of it."""
    if kind != "shape" or not isinstance(args[0], Value) or args[0].node.rank is None:
        return None
    if target != "operator.getitem":
        return args[0].node.rank if target in ("size", *GETATTR) else None
    return None if stand_ins(args[1]) else len(range(args[0].node.rank)[args[1]])


def picks_view(index: Any) -> bool:
    """Returns whether an index creates a view: numbers, slices, None and Ellipsis do, tensors and lists do not."""
    return all(
        part.node.kind == "number"
        if isinstance(part, Value)
        else part is None or part is Ellipsis or type(part) in (int, slice)
        for part in (index if isinstance(index, tuple) else (index,))
    )


def may_share(target: str, args: Sequence[Any]) -> bool:
    """Returns whether a call's result may share memory with its arguments."""
    if target == "operator.getitem":
        index = args[1] if isinstance(args[1], tuple) else (args[1],)
        return not any(isinstance(part, list | Tensor) for part in index)
    if target in GETATTR:
        return str(args[1]) in (*SHARING, "values", "indices")
    return target.rpartition(".")[2] in SHARING
