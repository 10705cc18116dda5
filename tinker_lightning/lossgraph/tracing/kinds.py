"""What a recorded call returns in Python, as far as that can be told before it runs: a tensor, a number, a shape."""

from __future__ import annotations

import itertools
import math
import operator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, fx

from tinker_lightning.lossgraph.tracing.writer import target_name

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

_METHODS: dict[str, type] = {
    "dim": int,
    "ndimension": int,
    "numel": int,
    "element_size": int,
    "is_floating_point": bool,
    "item": float,  # or int, by the dtype; a number in any case
}
_ATTRIBUTES: dict[str, type] = {"shape": torch.Size, "dtype": torch.dtype, "device": torch.device, "ndim": int}
_TUPLES = {
    *("aminmax", "broadcast_tensors", "chunk", "cummax", "cummin", "kthvalue", "sort", "split", "std_mean", "topk"),
    *("unbind", "var_mean"),
}
# These return a tuple if they are told a dimension, and otherwise a tensor.
_TUPLES_ALONG = {"max", "median", "min", "nanmedian"}


def kind_of(node: fx.Node) -> type | None:
    """The type of a node's value in Python; None if it depends on values."""
    if node.op == "call_method":
        name = str(node.target)
        if name == "size":
            return torch.Size if len(node.args) == 1 and not node.kwargs else int
        return _METHODS.get(name) or _of_call(name, node)
    name = target_name(node.target)
    if name in ("getattr", "builtins.getattr"):
        return _ATTRIBUTES.get(str(node.args[1]), Tensor)
    if name == "operator.getitem":
        return _of_item(*node.args)
    if name.startswith(("operator.", "math.")) and not any(_kind(each) is Tensor for each in node.all_input_nodes):
        return _of_numbers(name, node.args)
    return _of_call(name.rpartition(".")[2], node)


def rank_of(node: fx.Node) -> int | None:
    """How many dimensions a tensor has, or entries a shape; None if that is not known."""
    if node.op == "placeholder":
        return node.meta.get("rank")
    source = node.args[0] if node.args else None
    known = source.meta.get("rank") if isinstance(source, fx.Node) else None
    if known is None or node.meta["kind"] is not torch.Size:
        return None
    if target_name(node.target) != "operator.getitem":
        return known if node.op == "call_method" or "getattr" in target_name(node.target) else None
    index = node.args[1]
    if not isinstance(index, slice):
        return None
    parts = (index.start, index.stop, index.step)
    return len(range(known)[index]) if all(part is None or isinstance(part, int) for part in parts) else None


def _of_call(name: str, node: fx.Node) -> type:
    if name in _TUPLES:
        return tuple
    if name in _TUPLES_ALONG:
        along = node.kwargs.get("dim", node.args[1] if len(node.args) > 1 else None)
        return Tensor if along is None or _kind(along) is Tensor else tuple
    if name == "where" and node.op == "call_function" and len(node.args) + len(node.kwargs) == 1:
        return tuple
    if name == "nonzero" and node.kwargs.get("as_tuple"):
        return tuple
    return Tensor


def _of_item(source: Any, index: Any) -> type | None:
    kind = _kind(source)
    if kind in (tuple, torch.Size):
        is_slice = isinstance(index, slice)
        return kind if is_slice else Tensor if kind is tuple else int
    return Tensor if kind is Tensor else None


def _of_numbers(name: str, args: Iterable[Any]) -> type | None:
    """What Python's operators make of such numbers, tried with examples."""
    module, _, function = name.partition(".")
    if function == "add" and any(_kind(arg) is torch.Size for arg in args):
        return torch.Size
    call: Callable[..., Any] | None = getattr(math if module == "math" else operator, function, None)
    if call is None:
        return None
    found = set()
    for examples in itertools.product(*(_examples(arg) for arg in args)):
        try:
            found.add(type(call(*examples)))
        except (ArithmeticError, TypeError, ValueError):
            return None
    return found.pop() if len(found) == 1 else None


def _examples(value: Any) -> tuple[Any, ...]:
    if not isinstance(value, fx.Node):
        return (value,)
    kind = _kind(value)
    return (2, 2.0) if kind is None else (kind(2),) if kind in (int, float, bool) else (value,)


def _kind(value: Any) -> type | None:
    kind: type | None = value.meta.get("kind") if isinstance(value, fx.Node) else type(value)
    return kind
