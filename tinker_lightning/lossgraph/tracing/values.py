"""Stand-ins for tensors and numbers: they record what is done to them, and refuse what would need their value."""

from __future__ import annotations

import operator
import sys
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import Tensor, fx

from tinker_lightning.errors import LossNotTraceable
from tinker_lightning.losses.batch import StackedLogprobs
from tinker_lightning.lossgraph.graphs.guards import ATTRIBUTES
from tinker_lightning.lossgraph.tracing.lines import here, is_outside
from tinker_lightning.lossgraph.tracing.writer import setitem

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from typing import Self

WAYS_OUT = (
    "Write it with torch.where and operations on whole tensors, or leave it on this side: forward_backward_custom runs "
    "any Python, for the price of a second forward pass."
)
# Methods that leave torch. `item` is none of them: inside a graph a number is a tensor of one element.
_LEAVING = ("backward", "numpy", "tolist", "__array__", "retain_grad", "register_hook", "requires_grad_")
_RANKS = ("dim", "ndimension", "ndim")
_PARTS = ("values", "indices")  # of what max, sort, topk and their like return


class DependsOn(Exception):
    """Python needs the value of something that depends only on these inputs; they could be fixed instead."""

    def __init__(self, inputs: frozenset[str], error: LossNotTraceable) -> None:
        super().__init__(inputs)
        self.inputs = inputs
        self.error = error


class Value(fx.Proxy):
    """The stand-in for a number, a shape, or another thing that is no tensor."""

    @property  # type: ignore[misc]  # read-only
    def __class__(self) -> type:
        """What `isinstance` goes by in the user's code. torch asks too, from the same line, so that it never lies."""
        if not is_outside(sys._getframe(1).f_code.co_filename):
            return type(self)
        kind: type | None = self.node.meta["kind"]
        if kind is None:
            needs_value(self, "it asks for the type of a number")
        return kind

    def __getattr__(self, k: str) -> Any:
        kind: type = self.node.meta["kind"] or float
        if k.startswith("__") or not (hasattr(kind, k) or (kind is tuple and k in _PARTS)):
            raise AttributeError(f"{kind.__name__} has no attribute {k!r}")
        return _read(self, k) if k in _PARTS else Attribute(self, k)

    def __setitem__(self, index: Any, item: Any) -> None:
        self.tracer.create_proxy("call_function", setitem, (self, index, item), {})

    def __len__(self) -> int:
        if self.node.meta["kind"] is not torch.Size:
            needs_value(self, "it asks for len() of a tensor, which is not known while tracing; use x.shape[0]")
        if self.node.meta["rank"] is None:
            needs_value(self, "it asks for len() of a shape, which is not known while tracing; use x.ndim")
        return int(self.node.meta["rank"])

    def __float__(self) -> float:
        needs_value(self, "it makes a Python number of a tensor with float(); leave that out")

    def __int__(self) -> int:
        needs_value(self, "it makes a Python number of a tensor with int(); leave that out")

    def __index__(self) -> int:
        needs_value(self, "it needs a tensor's value, or a size, as a whole number of Python's (range, a list's index)")

    def __array__(self, *_: Any, **__: Any) -> Any:
        needs_value(self, "it gives a tensor to numpy or another library; only torch can be traced")

    def __str__(self) -> str:
        needs_value(self, "it makes text of a value (an f-string, str(), print)")

    def __round__(self, _: Any = None) -> Any:
        needs_value(self, "it rounds a value with round(); leave that out, or use torch.round(x, decimals=3)")

    def __format__(self, _: str) -> str:
        return str(self)

    def __repr__(self) -> str:
        return str(self) if is_outside(sys._getframe(1).f_code.co_filename) else super().__repr__()

    def __deepcopy__(self, _: Any) -> NoReturn:
        refuse("it copies a tensor with Python's copy; use x.clone()")

    def __reduce_ex__(self, _: Any) -> NoReturn:
        refuse("it copies or pickles a tensor; use x.clone()")

    # With this numpy's own functions refuse the stand-in, in place of doing something else with it.
    __array_ufunc__ = None

    @classmethod
    def __torch_function__(cls, orig_method: Any, types: Any, args: Any = None, kwargs: Any = None) -> Any:
        # As the base class's, which looks for stand-ins of its own class among the arguments.
        return fx.Proxy.__torch_function__(orig_method, types, args, kwargs)


class TensorValue(Value, Tensor):  # type: ignore[misc]  # their operators differ in what they are said to return
    """The stand-in for a tensor. It is one, for torch asks `isinstance` too, and then looks into its memory."""

    def __new__(cls, *_: Any) -> Self:
        """One with nothing in it that could be read by mistake."""
        with torch._C.DisableTorchFunction():
            empty: Self = Tensor._make_subclass(cls, torch.empty((), device="meta"))
        return empty

    @property  # type: ignore[misc]  # read-only
    def __class__(self) -> type:
        return type(self)

    def __getattribute__(self, k: str) -> Any:
        if k.startswith("__") or k in ("node", "tracer", "as_tensor"):
            return object.__getattribute__(self, k)
        if not hasattr(Tensor, k):
            raise AttributeError(f"Tensor has no attribute {k!r}")
        rank = self.node.meta["rank"]
        if rank is not None and k in _RANKS:
            return rank if k == "ndim" else lambda: rank
        if k in ATTRIBUTES:
            return _read(self, k)
        method = Attribute(self, k)
        return method if callable(getattr(Tensor, k)) else method.node


class ListValue(TensorValue, StackedLogprobs):  # type: ignore[misc]
    """The stand-in for log-probabilities of a function that may take them for a list, with a tensor for each datum.

    On a server they are one tensor. What a list can do too is refused, where it would mean something else.
    """

    def __getitem__(self, index: Any) -> Any:
        _check_index(index)
        part: Any = super().__getitem__(index)
        return ListValue(part.node, part.tracer) if isinstance(index, slice) else part

    def __setitem__(self, index: Any, item: Any) -> None:
        _check_index(index)
        super().__setitem__(index, item)

    def __iter__(self) -> NoReturn:
        _no_list("it goes through the log-probabilities of each datum")

    def __reversed__(self) -> NoReturn:
        _no_list("it goes through the log-probabilities of each datum")

    def __len__(self) -> int:
        _no_list("it counts the log-probabilities of datums with len()")

    def as_tensor(self) -> Any:
        """Returns the stand-in for the one tensor."""
        return TensorValue(self.node, self.tracer)


def _check_index(index: Any) -> None:
    """Refuses an index that would pick one of a list. Others a list does not take, or gives a list for."""
    if not (index is None or index is Ellipsis or isinstance(index, slice | tuple | list)):
        which = f"datum {index}" if isinstance(index, int) else "a datum"
        _no_list(f"it takes the log-probabilities of {which}")


def _no_list(reason: str) -> NoReturn:
    refuse(
        f"{reason}, but on a server they are one tensor, [B, T], with zeros behind the end of shorter datums, which a "
        "mean would count",
        "Write it with losses.Batch(data, logprobs), whose tensors are so everywhere, and its weights; or use "
        "route='two-pass'.",
    )


class Attribute(Value):
    """An attribute that becomes a method if it is called; read in another way it is refused."""

    def __init__(self, root: Value, attr: str) -> None:
        self.root = root
        self.attr = attr
        self.tracer = root.tracer

    @property
    def node(self) -> fx.Node:  # type: ignore[override]
        """Refused."""
        refuse(
            f"it reads the attribute {self.attr!r}, which a loss on a server cannot; it can read "
            f"{', '.join(sorted(ATTRIBUTES))}, and call methods"
        )

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The call of a method."""
        if self.attr in _LEAVING:
            refuse(f"it calls .{self.attr}(), which leaves torch; keep every value a tensor")
        return self.tracer.create_proxy("call_method", self.attr, (self.root, *args), kwargs)


def _read(value: Value, attribute: str) -> Any:
    return value.tracer.create_proxy("call_function", getattr, (value, attribute), {})


def _in_place(name: str) -> Callable[[Value, Any], Any]:
    def write(self: Value, other: Any) -> Any:
        result = self.tracer.create_proxy("call_function", getattr(operator, name), (self, other), {})
        result.node.meta["in_place"] = True
        return result

    return write


TensorValue.__name__ = ListValue.__name__ = "Tensor"  # which messages of torch's and ours have in them

# Of numbers `+=` makes a new one, which is what Python does without these.
for _name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "and_", "or_", "xor", "lshift", "rshift"):
    setattr(TensorValue, f"__i{_name.removesuffix('_')}__", _in_place(_name))


def needs_value(value: fx.Proxy, reason: str) -> NoReturn:
    """Refuses a use that needs a value, unless the value could be fixed.

    Raises:
        DependsOn: With the inputs that it depends on, none if it depends on no input.
    """
    error = LossNotTraceable(f"{here()}{reason}. {WAYS_OUT}")
    inputs: dict[str, Value] = value.tracer.inputs  # type: ignore[attr-defined]  # stand-ins are made by recorders
    names = {proxy.node: name for name, proxy in inputs.items()}
    raise DependsOn(frozenset(names[node] for node in _placeholders(value.node)), error) from error


def refuse(reason: str, mend: str = WAYS_OUT) -> NoReturn:
    """Refuses what stands on the line that is being traced."""
    raise LossNotTraceable(f"{here()}{reason}. {mend}")


def _placeholders(node: fx.Node) -> Iterable[fx.Node]:
    """Those that a node depends on."""
    seen, waiting = {node}, [node]
    while waiting:
        current = waiting.pop()
        if current.op == "placeholder":
            yield current
        for earlier in current.all_input_nodes:
            if earlier not in seen:
                seen.add(earlier)
                waiting.append(earlier)
