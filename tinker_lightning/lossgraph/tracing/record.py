"""Writes a loss function down as a graph, by calling it once with stand-ins that record what is done to them.

What Python itself does (loops, branches on settings, f-strings) happens while tracing and leaves no trace. What would
need the value of a tensor (a branch on it, `float(x)`, numpy) is refused, with the line.
"""

from __future__ import annotations

import math
import threading
import types
from contextlib import ExitStack
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, fx
from torch.overrides import TorchFunctionMode

from tinker_lightning.errors import InvalidInput, InvalidLoss, LossNotTraceable
from tinker_lightning.losses.regularizers.background import Modes
from tinker_lightning.lossgraph.graphs import functions
from tinker_lightning.lossgraph.graphs.graph import Graph
from tinker_lightning.lossgraph.tracing.kinds import kind_of, rank_of
from tinker_lightning.lossgraph.tracing.lines import here, place_of, within
from tinker_lightning.lossgraph.tracing.signatures import globals_of
from tinker_lightning.lossgraph.tracing.values import WAYS_OUT, DependsOn, TensorValue, Value, needs_value, refuse
from tinker_lightning.lossgraph.tracing.writer import Writer, is_write, target_name
from tinker_lightning.lossgraph.tracing.writes import seen_writes

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

__all__ = ["WAYS_OUT", "DependsOn", "Recorder", "Value", "record", "refuse"]

# While it traces, fx replaces functions of `math`, some of torch and methods of modules for the whole process.
_ONE_AT_A_TIME = threading.RLock()
# What torch says of torch.cat(x), where a function takes the batch for a list.
_NO_LIST = "must be tuple of Tensors, not Tensor"
# Functions that never ask a stand-in. Torch takes sizes one by one only if the first is a number of Python's, and what
# is given as a dtype for one, so that it would read the memory of something else.
_OF_SIZES = (torch.empty, torch.ones, torch.rand, torch.randn, torch.zeros)
_LIMITS = (torch.finfo, torch.iinfo)
_OF_DTYPES = (*_LIMITS, torch.can_cast, torch.promote_types)


def record(fn: Callable[..., Any], body: Callable[[Recorder], Any]) -> Graph:
    """The graph of a function.

    Args:
        fn: The function that the user wrote.
        body: Calls it with stand-ins that it asks of the recorder, and returns what the graph is to return.

    Raises:
        LossNotTraceable: If it does what no graph can say; names the line.
        InvalidInput: If it calls a loss of the library in a way that this refuses.
        DependsOn: If Python needs a value of certain inputs only.
    """
    recorder = Recorder()
    returned: list[Any] = []

    def run() -> None:
        with ExitStack() as stack:
            # What is cast around the decoration is no part of the function, and the server knows nothing of it.
            for device, _ in Modes.current().autocast:
                stack.enter_context(torch.autocast(device, enabled=False))
            stack.enter_context(_Factories(recorder))
            stack.enter_context(torch.enable_grad())
            returned.append(recorder.create_arg(body(recorder)))

    def driver() -> None:
        run()

    # fx looks for functions of `math` in the globals of what it traces; those are to be the user's.
    traced = types.FunctionType(driver.__code__, globals_of(fn), closure=driver.__closure__)
    try:
        with _ONE_AT_A_TIME:
            recorder.trace(traced)
    except (LossNotTraceable, DependsOn):
        raise
    except Exception as error:
        if isinstance(error, InvalidInput) and not isinstance(error, InvalidLoss):
            raise  # a loss of the library has refused a setting, or the lack of an input, in words of its own
        reason = f"{type(error).__name__}: {str(error).strip() or 'no message'}"
        if _NO_LIST in reason:
            reason = (
                "it joins a list of tensors, but on a server the batch is one tensor already, [B, T], with zeros "
                "behind the end of shorter datums"
            )
        raise LossNotTraceable(f"{place_of(error)}{reason.partition(chr(10))[0][:300]}. {WAYS_OUT}") from error
    return _graph(recorder, returned[0])


def _graph(recorder: Recorder, output: Any) -> Graph:
    nodes = [node for node in recorder.graph.nodes if node.op != "output"]
    inputs = [proxy.node for proxy in recorder.inputs.values()]
    writer = Writer(inputs, recorder.numbers, seen_writes(nodes, output), keeps=any(map(is_write, nodes)))
    places: dict[str, str] = {}
    for node in nodes:
        if node.op in ("call_function", "call_method"):
            written = len(writer.calls)
            try:
                writer.add(node)
            except InvalidLoss as error:
                raise LossNotTraceable(f"{node.meta['place']}{error}. {WAYS_OUT}") from error
            places |= {call.name: node.meta["place"].line.strip() for call in writer.calls[written:]}
    try:
        graph = Graph.build(tuple(recorder.inputs), writer.calls, writer.argument(output, no_grad=False))
        decoded = Graph.decode(graph.encode())  # which is what the server does, so that it is refused here already
    except InvalidLoss as error:
        raise LossNotTraceable(f"{error}. {WAYS_OUT}") from error
    return replace(decoded, places=places)


class Recorder(fx.Tracer):
    """Records what happens to stand-ins, with the line of each call."""

    def __init__(self) -> None:
        super().__init__(autowrap_modules=(math,), autowrap_functions=(*_OF_SIZES, *_OF_DTYPES))
        self._autowrap_search.append(torch)  # where these functions are called from, beside the user's globals
        self.inputs: dict[str, Value] = {}
        self.numbers: set[fx.Node] = set()

    def input(self, target: str, rank: int | None = None) -> Value:
        """The stand-in for a tensor, with its number of dimensions if that is known."""
        return self._input(target, Tensor, rank)

    def setting(self, target: str, default: float) -> Value:
        """The stand-in for a number. One that is whole by default may be given as a fraction, but not vice versa."""
        value = self._input(target, float if isinstance(default, float) else None)
        self.numbers.add(value.node)
        return value

    def _input(self, target: str, kind: type | None, rank: int | None = None) -> Value:
        if target not in self.inputs:
            name = "".join(c if c.isalnum() else "_" for c in target)
            node = self.create_node("placeholder", name, (), {})
            node.meta.update(kind=kind, rank=rank)
            self.inputs[target] = self.proxy(node)
        return self.inputs[target]

    def proxy(self, node: fx.Node) -> Value:
        """A stand-in of ours."""
        return (TensorValue if node.meta["kind"] is Tensor else Value)(node, self)

    def create_node(self, kind: str, *args: Any, **kwargs: Any) -> fx.Node:
        """A call, with its place and whether it would take part in gradients."""
        if not torch.is_grad_enabled() and within(torch.autograd.function.__file__, "apply"):
            refuse("it has a backward of its own, which a graph cannot hold; write it with detach()")
        if kind.startswith("call_") and Modes.current().autocast:
            refuse("it computes under torch.autocast, which a graph does not hold; cast with x.to(torch.bfloat16)")
        if kind == "call_function" and args[0] in _LIMITS:
            refuse(
                "it asks for the limits of a tensor's dtype, which is not known while tracing; name a dtype, as in "
                "torch.finfo(torch.float32).min"
            )
        node = super().create_node(kind, *args, **kwargs)
        node.meta["place"] = here()
        node.meta["no_grad"] = not torch.is_grad_enabled()
        if kind in ("call_function", "call_method"):
            node.meta["kind"] = kind_of(node)
            node.meta["rank"] = rank_of(node)
        return node

    def create_arg(self, a: Any) -> Any:
        """An argument; tensors from outside are refused."""
        if isinstance(a, Value):
            return a.node
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
        """The entries of a shape whose length is known; else refused."""
        meta = obj.node.meta
        if meta["kind"] is not torch.Size:
            needs_value(obj, "it loops over a tensor, or takes a batch that is one tensor for a list")
        if meta["rank"] is None:
            needs_value(obj, "it takes a shape apart, which here needs a name for each part: batch, length = x.shape")
        return (obj[i] for i in range(meta["rank"]))  # type: ignore[index]

    def keys(self, obj: fx.Proxy) -> Any:
        """Refused."""
        needs_value(obj, "it takes a tensor for a dict")


class _Factories(TorchFunctionMode):
    """Records tensors that the function makes out of numbers, which would else be tensors from outside."""

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()
        self._recorder = recorder

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        # Whether or not it is given a stand-in: in the place of a number torch would not ask it.
        is_known = target_name(func) in functions.FUNCTIONS
        if is_known and (_holds(Value, [args, kwargs]) or not _holds(Tensor, [args, kwargs])):
            return self._recorder.create_proxy("call_function", func, args, kwargs)
        if _holds(Tensor, [args, kwargs]) or _holds(Value, [args, kwargs]):
            return func(*args, **kwargs)
        result = func(*args, **kwargs)
        if isinstance(result, Tensor):
            refuse(f"it calls {target_name(func)}, which is not among the functions that a loss on a server may call")
        return result


def _holds(kind: type, values: Any) -> bool:
    if isinstance(values, list | tuple):
        return any(_holds(kind, value) for value in values)
    if isinstance(values, dict):
        return any(_holds(kind, value) for value in values.values())
    return isinstance(values, kind)
