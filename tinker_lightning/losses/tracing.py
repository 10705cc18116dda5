"""Writes a loss function down as a graph, by calling it once with stand-ins that record what is done to them.

What Python itself does (loops, branches on settings, f-strings) happens while tracing and leaves no trace. What would
need the value of a tensor (a branch on it, `float(x)`, numpy) is refused, with the line.
"""

from __future__ import annotations

import math
import threading
import types
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np
import torch
from torch import Tensor, fx
from torch.overrides import TorchFunctionMode

from tinker_lightning.errors import InvalidLoss, LossNotTraceable
from tinker_lightning.losses import graph_functions
from tinker_lightning.losses.graph import Graph
from tinker_lightning.losses.graph_lines import here, place_of
from tinker_lightning.losses.graph_writer import Writer, setitem, target_name

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

WAYS_OUT = (
    "Write it with torch.where and operations on whole tensors, or leave it on this side: forward_backward_custom runs "
    "any Python, for the price of a second forward pass."
)
# While it traces, fx replaces functions of `math` and methods of modules for the whole process.
_ONE_AT_A_TIME = threading.RLock()
_JOINS = (torch.cat, torch.concat, torch.stack, torch.hstack, torch.vstack)
# Methods that leave torch. `item` is none of them: inside a graph a number is a tensor of one element.
_LEAVING = ("backward", "numpy", "tolist", "__array__", "retain_grad", "register_hook", "requires_grad_")


class DependsOn(Exception):
    """Python needs the value of something that depends only on these inputs; they could be fixed instead."""

    def __init__(self, inputs: frozenset[str], error: LossNotTraceable) -> None:
        super().__init__(inputs)
        self.inputs = inputs
        self.error = error


def record(fn: Callable[..., Any], body: Callable[[Recorder], Any]) -> Graph:
    """The graph of a function.

    Args:
        fn: The function that the user wrote.
        body: Calls it with stand-ins that it asks of the recorder, and returns what the graph is to return.

    Raises:
        LossNotTraceable: If it does what no graph can say; names the line.
        DependsOn: If Python needs a value of certain inputs only.
    """
    recorder = Recorder()
    returned: list[Any] = []

    def run() -> None:
        with _Factories(recorder), torch.enable_grad():
            returned.append(recorder.create_arg(body(recorder)))

    def driver() -> None:
        run()

    # fx looks for functions of `math` in the globals of what it traces; those are to be the user's.
    traced = types.FunctionType(driver.__code__, _globals(fn), closure=driver.__closure__)
    try:
        with _ONE_AT_A_TIME:
            recorder.trace(traced)
    except (LossNotTraceable, DependsOn):
        raise
    except Exception as error:
        reason = f"{type(error).__name__}: {str(error).strip() or 'no message'}"
        raise LossNotTraceable(f"{place_of(error)}{reason.partition(chr(10))[0][:300]}. {WAYS_OUT}") from error
    return _graph(recorder, returned[0])


def _graph(recorder: Recorder, output: Any) -> Graph:
    writer = Writer([proxy.node for proxy in recorder.inputs.values()], recorder.numbers)
    for node in recorder.graph.nodes:
        if node.op in ("call_function", "call_method"):
            try:
                writer.add(node)
            except InvalidLoss as error:
                raise LossNotTraceable(f"{node.meta['place']}{error}. {WAYS_OUT}") from error
    try:
        graph = Graph.build(tuple(recorder.inputs), writer.calls, writer.argument(output, no_grad=False))
        return Graph.decode(graph.encode())  # which is what the server does, so that it is refused here already
    except InvalidLoss as error:
        raise LossNotTraceable(f"{error}. {WAYS_OUT}") from error


class Recorder(fx.Tracer):
    """Records what happens to stand-ins, with the line of each call."""

    def __init__(self) -> None:
        super().__init__(autowrap_modules=(math,))
        self.inputs: dict[str, Value] = {}
        self.numbers: set[fx.Node] = set()

    def input(self, target: str, *, is_number: bool = False) -> Value:
        """The stand-in for an input."""
        if target not in self.inputs:
            name = "".join(c if c.isalnum() else "_" for c in target)
            self.inputs[target] = self.create_proxy("placeholder", name, (), {})  # type: ignore[assignment]
            if is_number:
                self.numbers.add(self.inputs[target].node)
        return self.inputs[target]

    def proxy(self, node: fx.Node) -> Value:
        """A stand-in of ours."""
        return Value(node, self)

    def create_node(self, kind: str, *args: Any, **kwargs: Any) -> fx.Node:
        """A call, with its place and whether it would take part in gradients."""
        if kind == "call_function" and args[0] in _JOINS and args[1] and _is_placeholder(args[1][0]):
            refuse(
                f"it joins a list of tensors with {target_name(args[0])}, but on a server the batch is one tensor "
                "already, [B, T], with zeros behind the end of shorter datums"
            )
        node = super().create_node(kind, *args, **kwargs)
        node.meta["place"] = here()
        node.meta["no_grad"] = not torch.is_grad_enabled()
        return node

    def create_arg(self, a: Any) -> Any:
        """An argument; tensors from outside are refused."""
        if isinstance(a, Tensor):
            refuse(
                f"it uses a tensor of shape {list(a.shape)} from outside. Give it to the loss among its inputs, or "
                "use a number (.item()) or a list (.tolist()) in its place"
            )
        if isinstance(a, np.generic):
            return a.item()
        if isinstance(a, np.ndarray):
            refuse("it uses a numpy array from outside. Give it to the loss among its inputs")
        return super().create_arg(a)

    def call_module(self, m: Any, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """What a module computes."""
        del m
        return forward(*args, **kwargs)  # traced through; its parameters, if any, are tensors from outside

    def to_bool(self, obj: fx.Proxy) -> bool:
        """Refused."""
        needs_value(obj, "it branches on the value or size of a tensor (if, and, or, not, max, assert)")

    def iter(self, obj: fx.Proxy) -> Iterator[Any]:
        """Refused."""
        needs_value(obj, "it loops over a tensor, or takes a batch that is one tensor for a list")

    def keys(self, obj: fx.Proxy) -> Any:
        """Refused."""
        needs_value(obj, "it takes a tensor for a dict")


class Value(fx.Proxy):
    """The stand-in for a tensor or number."""

    def __getattr__(self, k: str) -> Attribute:  # type: ignore[override]
        return Attribute(self, k)

    def __setitem__(self, index: Any, item: Any) -> None:
        self.tracer.create_proxy("call_function", setitem, (self, index, item), {})

    def __len__(self) -> int:
        needs_value(self, "it asks for len() of a tensor, which is not known while tracing; use x.shape[0]")

    def __float__(self) -> float:
        needs_value(self, "it makes a Python number of a tensor with float(); leave that out")

    def __int__(self) -> int:
        needs_value(self, "it makes a Python number of a tensor with int(); leave that out")

    def __index__(self) -> int:
        needs_value(self, "it needs a tensor's value, or a size, as a whole number of Python's (range, a list's index)")

    def __array__(self, *_: Any, **__: Any) -> Any:
        needs_value(self, "it gives a tensor to numpy or another library; only torch can be traced")

    # With this numpy's own functions refuse the stand-in, in place of doing something else with it.
    __array_ufunc__ = None

    @classmethod
    def __torch_function__(cls, orig_method: Any, types: Any, args: Any = None, kwargs: Any = None) -> Any:
        # As the base class's, which looks for stand-ins of its own class among the arguments.
        return fx.Proxy.__torch_function__(orig_method, types, args, kwargs)


class Attribute(Value):
    """An attribute that becomes a method if it is called; else it is read when it is used."""

    def __init__(self, root: Value, attr: str) -> None:
        self.root = root
        self.attr = attr
        self.tracer = root.tracer
        self._node: fx.Node | None = None

    @property
    def node(self) -> fx.Node:  # type: ignore[override]
        """The reading of the attribute."""
        if self._node is None:
            self._node = self.tracer.create_proxy("call_function", getattr, (self.root, self.attr), {}).node
        return self._node

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The call of a method."""
        if self.attr in _LEAVING:
            refuse(f"it calls .{self.attr}(), which leaves torch; keep every value a tensor")
        return self.tracer.create_proxy("call_method", self.attr, (self.root, *args), kwargs)


class _Factories(TorchFunctionMode):
    """Records tensors that the function makes out of numbers, which would else be tensors from outside."""

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()
        self._recorder = recorder

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if _holds(fx.Proxy, [args, kwargs]) or _holds(Tensor, [args, kwargs]):
            return func(*args, **kwargs)
        if target_name(func) in graph_functions.FUNCTIONS:
            return self._recorder.create_proxy("call_function", func, args, kwargs)
        result = func(*args, **kwargs)
        if isinstance(result, Tensor):
            refuse(f"it calls {target_name(func)}, which is not among the functions that a loss on a server may call")
        return result


def needs_value(value: fx.Proxy, reason: str) -> NoReturn:
    """Refuses a use that needs a value, unless the value could be fixed.

    Raises:
        LossNotTraceable: If the value depends on no input.
        DependsOn: With the inputs that it depends on.
    """
    error = LossNotTraceable(f"{here()}{reason}. {WAYS_OUT}")
    inputs = frozenset(_ancestors(value.node))
    tracer = value.tracer
    assert isinstance(tracer, Recorder)  # noqa: S101  # stand-ins are made by recorders
    names = {proxy.node: name for name, proxy in tracer.inputs.items()}
    raise DependsOn(frozenset(names[node] for node in inputs), error) from error


def refuse(reason: str) -> NoReturn:
    """Refuses what stands on the line that is being traced."""
    raise LossNotTraceable(f"{here()}{reason}. {WAYS_OUT}")


def _globals(fn: Any) -> dict[str, Any]:
    """The globals of the function behind a partial, a method or an object that can be called."""
    for _ in range(8):
        if isinstance(fn, types.FunctionType):
            return fn.__globals__
        fn = getattr(fn, "func", None) or getattr(fn, "__func__", None) or type(fn).__call__
    return {}


def _is_placeholder(value: Any) -> bool:
    return isinstance(value, fx.Node) and value.op == "placeholder"


def _holds(kind: type, values: Any) -> bool:
    if isinstance(values, list | tuple):
        return any(_holds(kind, value) for value in values)
    if isinstance(values, dict):
        return any(_holds(kind, value) for value in values.values())
    return isinstance(values, kind)


def _ancestors(node: fx.Node) -> Iterable[fx.Node]:
    """The placeholders that a node depends on."""
    seen, waiting = {node}, [node]
    while waiting:
        current = waiting.pop()
        if current.op == "placeholder":
            yield current
        for earlier in current.all_input_nodes:
            if earlier not in seen:
                seen.add(earlier)
                waiting.append(earlier)
