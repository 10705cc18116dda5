"""Stand-ins for tensors and numbers, which record operations on them and raise for those that need a value.

The functions at the end determine what is known about the result of a call: its kind, the length of a shape, and
whether it may share memory with an argument.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, NoReturn, TypeAlias

import torch
from torch import Tensor, fx
from torch.fx.node import _get_qualified_name

from tinker_lightning.errors import LossNotTraceable
from tinker_lightning.lossgraph.graph import Ref, leaves
from tinker_lightning.lossgraph.guards import ATTRIBUTES
from tinker_lightning.lossgraph.source_lines import current_line, is_outside

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from typing import Self

# An "item" is a number in Python and a tensor of one element in a graph. Everything else that is known before a graph
# runs on values (sizes, settings, dtypes) is a "number", except for whole shapes.
Kind: TypeAlias = Literal["tensor", "number", "item", "shape", "tuple"]

ALTERNATIVES = (
    "Write it with torch.where and operations on whole tensors, or run it locally: forward_backward_custom runs any "
    "Python, at the cost of a second forward pass."
)
SETTING = "hyperparameters."
# Methods whose results a graph cannot hold. The result of `item` is a tensor of one element there.
_NON_TORCH_METHODS = ("backward", "numpy", "tolist", "__array__", "retain_grad", "register_hook", "requires_grad_")
_RANKS = ("dim", "ndimension", "ndim")
_PARTS = ("values", "indices")  # of the results of max, sort and topk
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
# Exceptions raised by stand-ins since tracing began. If the function catches one, the trace would be wrong.
trace_errors: list[Exception] = []


class NeedsSettings(Exception):
    """Raised if Python needs the value of an expression of these settings, so that they have to be fixed."""

    def __init__(self, names: frozenset[str]) -> None:
        super().__init__(names)
        self.names = names


@dataclass(eq=False, slots=True)
class Memory:
    """Memory that several stand-ins may share until one of them is modified, which then gets a new one."""

    is_input: bool = False
    written: str | None = None  # the line that modified a tensor in it; empty if the line is unknown


def new_memory(*, is_input: bool = False) -> frozenset[Memory]:
    """Returns memory that nothing else shares yet."""
    return frozenset({Memory(is_input)})


@dataclass(eq=False, slots=True)
class ValueInfo:
    """Everything that is known about the value of a stand-in."""

    ref: Ref  # the call that returns its current value
    kind: Kind
    inputs: frozenset[str]  # the names of the inputs that it depends on
    has_grad: bool = False
    rank: int | None = None  # the number of dimensions of a tensor, or the length of a shape, if known
    memories: frozenset[Memory] = frozenset()  # that it may be in
    meta: dict[str, Any] = field(default_factory=dict)  # required by torch.fx

    @property
    def written(self) -> str | None:
        """The line that modified its memory through another stand-in; None if nothing has."""
        return next((memory.written for memory in self.memories if memory.written is not None), None)

    def overwrite(self, other: ValueInfo, line: str) -> None:
        """Takes over the value of another stand-in; those that share memory with this one cannot be used any more."""
        for memory in self.memories:
            memory.written = line
        self.ref, self.has_grad, self.inputs, self.memories = other.ref, other.has_grad, other.inputs, new_memory()


class Value(fx.Proxy):
    """The stand-in for a number, a shape, a tuple, or anything else that is not a tensor."""

    node: ValueInfo  # type: ignore[assignment]  # this tracer keeps no nodes of torch.fx

    @property  # type: ignore[misc]  # read-only
    def __class__(self) -> type:
        """Raises for `isinstance` in the user's code, whose result is unknown; torch gets the class.

        Without it, `isinstance(x.shape[0], int)` would be False while tracing, and the other branch would be taken
        silently: see `test_the_type_of_anything_else_raises`.
        """
        if is_outside(sys._getframe(1).f_code.co_filename):
            needs_value(
                self,
                "it asks for the type of a number, a size or a tuple: with isinstance, or by a torch function that "
                "another module imported by name (call it as torch.arange there, not as arange)",
            )
        return type(self)

    def __getattr__(self, k: str) -> Any:
        if k.startswith("__"):
            raise AttributeError(k)
        if k in _PARTS and self.node.kind == "tuple":
            return _read(self, k)
        if k != "numel" or self.node.kind != "shape":
            needs_value(self, f"it reads the attribute {k!r} of a number, a size or a tuple")
        return _method(self, k)

    def __len__(self) -> int:
        if self.node.kind != "shape":
            needs_value(self, "it asks for len() of a tensor, which is not known while tracing; use x.shape[0]")
        if self.node.rank is None:
            needs_value(self, "it asks for len() of a shape, which is not known while tracing; use x.ndim")
        return self.node.rank

    def __format__(self, _: str) -> str:
        return str(self)

    def __repr__(self) -> str:
        return str(self) if is_outside(sys._getframe(1).f_code.co_filename) else type(self).__name__

    # Makes functions of numpy raise instead of converting the stand-in.
    __array_ufunc__ = None

    @classmethod
    def __torch_function__(cls, orig_method: Any, types: Any, args: Any = None, kwargs: Any = None) -> Any:
        # The base class looks for stand-ins of exactly its own class among the arguments.
        return fx.Proxy.__torch_function__(orig_method, types, args, kwargs)


def _needing_value(reason: str) -> Callable[..., NoReturn]:
    return lambda self, *_, **__: needs_value(self, reason)


for _name, _reason in {
    "__float__": "it converts a tensor to a Python number with float(); remove the conversion",
    "__int__": "it converts a tensor to a Python number with int(); remove the conversion",
    "__index__": "it needs a tensor's value, or a size, as a Python integer (range, a list's index)",
    "__array__": "it passes a tensor to numpy or another library; only torch can be traced",
    "__str__": "it formats a value as text (an f-string, str(), print)",
    "__round__": "it rounds a value with round(); remove the call, or use torch.round(x, decimals=3)",
    "__deepcopy__": "it copies a tensor with Python's copy; use x.clone()",
    "__reduce_ex__": "it copies or pickles a tensor; use x.clone()",
}.items():
    setattr(Value, _name, _needing_value(_reason))


class TensorValue(Value, Tensor):  # type: ignore[misc]  # their operators differ in their return types
    """The stand-in for a tensor. It is a `Tensor`, so that `isinstance` works, but it has no values."""

    def __new__(cls, *_: Any) -> Self:
        """Creates a tensor without memory, so that its values cannot be read by mistake."""
        with torch._C.DisableTorchFunction():
            empty: Self = torch.empty((), device="meta").as_subclass(cls)
        return empty

    @property  # type: ignore[misc]  # read-only
    def __class__(self) -> type:
        """Returns the class, because a tensor is known to be one."""
        return type(self)

    def __getattribute__(self, k: str) -> Any:
        if k.startswith("__") or k in ("node", "tracer"):
            return object.__getattribute__(self, k)
        if not hasattr(Tensor, k):
            raise AttributeError
        rank = self.node.rank
        if rank is not None and k in _RANKS:
            return rank if k == "ndim" else lambda: rank
        if k in ATTRIBUTES:
            return _read(self, k)
        if not callable(getattr(Tensor, k)):
            readable = ", ".join(sorted(ATTRIBUTES))
            reject(f"it reads the attribute {k!r}; a server-side loss can read {readable}, and call methods")
        return _method(self, k)

    def __getattr__(self, k: str) -> NoReturn:
        raise AttributeError(f"Tensor has no attribute {k!r}")

    def __setitem__(self, index: Any, item: Any) -> None:
        self.tracer.set_item(self, index, item)  # type: ignore[attr-defined]  # stand-ins are made by recorders


class ListValue(TensorValue):
    """The stand-in for log-probabilities in a function that may expect a list with one tensor per datum.

    On a server they are one tensor. Operations that lists support as well raise, because they would mean something
    else there; `logprobs[...]`, which lists do not support, is the tensor.
    """

    def __getitem__(self, index: Any) -> Any:
        if index is Ellipsis:
            return TensorValue(self.node, self.tracer)
        _check_index(index)
        part: Any = super().__getitem__(index)
        return ListValue(part.node, part.tracer) if isinstance(index, slice) else part

    def __setitem__(self, index: Any, item: Any) -> None:
        _check_index(index)
        super().__setitem__(index, item)

    def __iter__(self) -> NoReturn:
        _no_list("it loops over the log-probabilities of each datum")

    __reversed__ = __iter__

    def __len__(self) -> int:
        _no_list("it counts the log-probabilities of datums with len()")


TensorValue.__name__ = ListValue.__name__ = "Tensor"  # the name that messages show


def _check_index(index: Any) -> None:
    """Raises if an index would select one item of a list."""
    if not (index is None or index is Ellipsis or isinstance(index, slice | tuple | list)):
        which = f"datum {index}" if isinstance(index, int) else "a datum"
        _no_list(f"it takes the log-probabilities of {which}")


def _no_list(reason: str) -> NoReturn:
    reject(
        f"{reason}, but on a server they are one tensor, [B, T], with zeros after the end of shorter datums, which a "
        "mean would count",
        "Write it with losses.Batch(data, logprobs), whose tensors are the same everywhere, and its weights; or use "
        "route='two-pass'.",
    )


def _read(value: Value, attribute: str) -> Any:
    return value.tracer.create_proxy("call_function", getattr, (value, attribute), {})


def _method(value: Value, name: str) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        if name in _NON_TORCH_METHODS:
            reject(f"it calls .{name}(), which a graph cannot hold; keep every value a tensor")
        return value.tracer.create_proxy("call_method", name, (value, *args), kwargs)

    return call


def find_stand_ins(value: Any) -> list[Value]:
    """Returns the stand-ins in nested arguments."""
    return [part for part in leaves(value) if isinstance(part, Value)]


def needs_value(value: fx.Proxy, reason: str) -> NoReturn:
    """Raises `NeedsSettings` if the value depends only on settings, which can be fixed, else `LossNotTraceable`."""
    inputs: frozenset[str] = value.node.inputs  # type: ignore[attr-defined]
    if inputs and all(name.startswith(SETTING) for name in inputs):
        trace_errors.append(NeedsSettings(frozenset(name.removeprefix(SETTING) for name in inputs)))
        raise trace_errors[-1]
    reject(reason)


def reject(reason: str, fix: str = ALTERNATIVES) -> NoReturn:
    """Raises `LossNotTraceable` for the line that is being traced."""
    trace_errors.append(LossNotTraceable(f"{current_line()}{reason}. {fix}"))
    raise trace_errors[-1]


def target_name(target: Any) -> str:
    """Returns the name of a function on the wire, as the official SDK writes it."""
    try:
        name = _get_qualified_name(target)
    except (RuntimeError, AttributeError):
        return str(getattr(target, "__qualname__", target))
    return "operator." + name.removeprefix("_operator.") if name.startswith("_operator.") else name


def result_kind(op: str, target: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Kind:
    """Returns the kind of a call's result."""
    name = target.rpartition(".")[2]
    if op == "call_method":
        if name == "size":
            return "number" if len(args) > 1 or kwargs else "shape"
        if name in _NUMBERS:
            return "number"
    if target in GETATTR:
        return _ATTRIBUTES.get(args[1], "tensor")
    kinds = {value.node.kind for value in find_stand_ins([args, kwargs])}
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


def shape_length(kind: Kind, target: str, args: Sequence[Any]) -> int | None:
    """Returns the length of a shape, if it is known: the shape of an input, or a slice of it."""
    if kind != "shape" or not isinstance(args[0], Value) or args[0].node.rank is None:
        return None
    if target != "operator.getitem":
        return args[0].node.rank if target in ("size", *GETATTR) else None
    return None if find_stand_ins(args[1]) else len(range(args[0].node.rank)[args[1]])


def may_share(target: str, args: Sequence[Any]) -> bool:
    """Returns whether a call's result may share memory with its arguments."""
    if target == "operator.getitem":
        index = args[1] if isinstance(args[1], tuple) else (args[1],)
        return not any(isinstance(part, list | Tensor) for part in index)
    if target in GETATTR:
        return str(args[1]) in (*SHARING, "values", "indices")
    return target.rpartition(".")[2] in SHARING
