"""Records a loss function as a graph, by calling it once with stand-ins that record every operation.

Python itself (loops, branches on settings, f-strings) runs while tracing and is not recorded. An operation that needs
the value of a tensor (a branch on it, `float(x)`, numpy) raises an error that names the line.

A graph never modifies a tensor. `x += y`, `x[i] = y` and `x.clamp_(0)` are recorded as functions that return a new
tensor, which replaces the value of the stand-in. In Python, such a write would also change the tensors that share its
memory, so these raise when they are used later: after `row = x[0]` and `row += 1`, `x` cannot be used. Writes to inputs
raise at once, because the caller's tensor would change.
"""

from __future__ import annotations

import math
import threading
import types
from collections import Counter
from contextlib import ExitStack
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, fx
from torch.overrides import TorchFunctionMode
from typing_extensions import override

from tinker_lightning.errors import InvalidInput, InvalidLoss, LossNotTraceable
from tinker_lightning.lossgraph import functions
from tinker_lightning.lossgraph.functions import FUNCTIONS
from tinker_lightning.lossgraph.graph import Graph, Node, Ref, check_attribute, encode_value, leaves, map_leaves
from tinker_lightning.lossgraph.source_lines import current_line, error_line, function_globals, is_running
from tinker_lightning.lossgraph.stand_ins import (
    ALTERNATIVES,
    GETATTR,
    SETTING,
    NeedsSettings,
    TensorValue,
    Value,
    ValueInfo,
    find_stand_ins,
    may_share,
    needs_value,
    new_memory,
    reject,
    result_kind,
    shape_length,
    target_name,
    trace_errors,
)
from tinker_lightning.threads.background import Modes

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tinker_lightning.lossgraph.stand_ins import Kind

# While tracing, torch.fx replaces functions of `math`, some of torch and methods of modules for the whole process.
_TRACING_LOCK = threading.RLock()
# Modules whose functions torch.fx replaces by functions that look for stand-ins first. The originals would ask for the
# type of a number, accept single sizes only if the first is a Python number, and read the memory of a stand-in that is
# passed as a dtype.
_MODULES = (torch, torch.nn.functional, torch.special, torch.linalg, torch.nn.utils.rnn)
_NOT_LISTED = (torch.empty, torch.rand, torch.randn, torch.finfo, torch.iinfo, torch.can_cast, torch.promote_types)
_WRAPPED = (
    *_NOT_LISTED,
    *(getattr(module, name) for module in _MODULES for name in dir(module) if f"{module.__name__}.{name}" in FUNCTIONS),
)
_IN_PLACE = """
abs_ add_ clamp_ clamp_max_ clamp_min_ copy_ div_ exp_ fill_ log_ masked_fill_ mul_ neg_ pow_ relu_ scatter_
scatter_add_ sigmoid_ sqrt_ square_ sub_ tanh_ zero_
"""
IN_PLACE = frozenset(_IN_PLACE.split())
_LIST_FUNCTIONS = ("cat", "concat", "dstack", "hstack", "pad_sequence", "stack", "vstack")
_OPERATORS = ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "and_", "or_", "xor", "lshift", "rshift")


def record(fn: Callable[..., Any], body: Callable[[Recorder], Any]) -> Graph:
    """Returns the graph of `fn`, which `body` calls with stand-ins from the recorder.

    Raises:
        LossNotTraceable: If the function cannot be traced. The message contains the line.
        NeedsSettings: If the control flow depends on settings, which have to be fixed for another attempt.
    """
    recorder = Recorder()
    returned: list[Any] = []

    def run() -> None:
        with ExitStack() as stack:
            # Autocast around the decorator is not part of the function.
            for device, _ in Modes.current().autocast:
                stack.enter_context(torch.autocast(device, enabled=False))
            stack.enter_context(_Factories(recorder))
            stack.enter_context(torch.enable_grad())
            result = body(recorder)
            if trace_errors:  # but caught by the function
                raise trace_errors[0]
            returned.append(recorder.create_arg(result))

    def driver() -> None:
        run()

    # torch.fx replaces functions of `math` in the globals of the traced function, so these must be the user's.
    traced_fn = types.FunctionType(driver.__code__, function_globals(fn), closure=driver.__closure__)
    with _TRACING_LOCK:
        trace_errors.clear()
        try:
            recorder.trace(traced_fn)
            return recorder.build_graph(returned[0])
        except (LossNotTraceable, NeedsSettings):
            raise
        except Exception as error:
            if trace_errors:  # but converted to another exception
                raise trace_errors[0] from error
            if isinstance(error, InvalidInput) and not isinstance(error, InvalidLoss):
                raise  # from a loss of the library: a setting is invalid, or an input is missing
            reason = f"{type(error).__name__}: {str(error).strip() or 'no message'}"
            raise LossNotTraceable(
                f"{error_line(error)}{reason.partition(chr(10))[0][:300]}. {ALTERNATIVES}"
            ) from error


class Recorder(fx.Tracer):
    """Records the calls that are made with stand-ins, and the line of each.

    While it records, inputs are numbered -1, -2, … and calls 0, 1, ….
    """

    def __init__(self) -> None:
        super().__init__(autowrap_modules=(math,), autowrap_functions=_WRAPPED)
        self._autowrap_search.extend(_MODULES)  # next to the user's globals
        self.inputs: dict[str, Value] = {}
        self._calls: list[Node] = []
        self._lines: dict[str, str] = {}
        self._names: Counter[str] = Counter()
        self._detached: dict[Ref, Ref] = {}

    def input(self, target: str, rank: int | None = None, *, has_grad: bool = False) -> Value:
        """Returns the stand-in for a tensor with `rank` dimensions, or any number if None, or for a setting."""
        if target not in self.inputs:
            kind: Kind = "number" if target.startswith(SETTING) else "tensor"
            memories = new_memory(is_input=True) if kind == "tensor" else frozenset()
            ref = Ref(-1 - len(self.inputs))
            self.inputs[target] = self._value(ValueInfo(ref, kind, frozenset({target}), has_grad, rank, memories))
        return self.inputs[target]

    def _value(self, info: ValueInfo) -> Value:
        return (TensorValue if info.kind == "tensor" else Value)(info, self)  # type: ignore[arg-type]

    def build_graph(self, output: Any) -> Graph:
        """Returns the graph of all calls."""

        def number(value: Any) -> Any:
            if not isinstance(value, Ref):
                return value
            return Ref(-1 - value.node if value.node < 0 else len(self.inputs) + value.node)

        calls = [
            Node(call.op, call.name, call.target, map_leaves(call.args, number), map_leaves(dict(call.kwargs), number))
            for call in self._calls
        ]
        try:
            graph = Graph(tuple(self.inputs), calls, map_leaves(output, number))
            decoded = Graph.decode(graph.encode())  # as on the server, so that errors are raised here already
        except InvalidLoss as error:
            raise LossNotTraceable(f"{error}. {ALTERNATIVES}") from error
        return replace(decoded, lines=self._lines)

    @override
    def create_proxy(self, kind: str, target: Any, args: Any, kwargs: Any, *_: Any, **__: Any) -> Value:
        """Records a call, on behalf of torch.fx and stand-ins."""
        name = target if kind == "call_method" else target_name(target)
        method = name.removeprefix("torch.Tensor.")
        if method in IN_PLACE and (kind == "call_method" or method != name):
            return self._call_in_place(method, *args, **kwargs)
        if method == "item":
            number = self.call("call_method", "detach", args, kwargs).node
            return self._value(replace(number, kind="item", memories=frozenset()))
        return self.call(kind, name, args, kwargs)

    def call(self, op: str, target: str, args: Any, kwargs: Any) -> Value:
        """Records a call of a function or method on the allow-list; under `torch.no_grad`, of detached tensors."""
        if not torch.is_grad_enabled() and is_running(torch.autograd.function.__file__, "apply"):
            reject("it has a custom backward, which a graph cannot hold; write it with detach()")
        if Modes.current().autocast:
            reject("it computes under torch.autocast, which a graph does not hold; cast with x.to(torch.bfloat16)")
        if target in ("torch.finfo", "torch.iinfo"):
            reject(
                "it asks for the limits of a tensor's dtype, which is not known while tracing; name a dtype, as in "
                "torch.finfo(torch.float32).min"
            )
        try:
            function = functions.find(op, target)
            named = functions.drop_forbidden(op, kwargs)
            functions.check_arguments(target, function, args, named)
            if target in GETATTR:
                check_attribute(args[1])
            _check_kinds(target, args, kwargs)
            recorded = self.create_arg(tuple(args)), {key: self.create_arg(arg) for key, arg in named.items()}
        except InvalidLoss as error:
            if isinstance(error, LossNotTraceable):
                raise
            reject(str(error))
        operands = find_stand_ins([args, kwargs])
        kind = result_kind(op, target, args, kwargs)
        info = ValueInfo(
            self._add(op, target, *recorded),
            kind,
            frozenset().union(*(each.node.inputs for each in operands)),
            rank=shape_length(kind, target, args),
        )
        if kind in ("tensor", "tuple"):
            # Indexing a tuple computes nothing, so the item keeps its gradient under no_grad.
            is_part = bool(operands) and operands[0].node.kind == "tuple"
            ends = target.endswith("detach") or (target in GETATTR and args[1] == "data")
            info.has_grad = (torch.is_grad_enabled() or is_part) and not ends and any(v.node.has_grad for v in operands)
            if may_share(target, args):
                sources = operands[:1] if op == "call_method" else operands  # x.view_as(y) shares the memory of x only
                info.memories = frozenset().union(*(each.node.memories for each in sources))
            else:
                info.memories = new_memory()
        return self._value(info)

    def _add(self, op: str, target: str, args: Any, kwargs: Any) -> Ref:
        base = target.rpartition(".")[2]
        self._names[base] += 1
        name = base if self._names[base] == 1 else f"{base}_{self._names[base] - 1}"
        self._calls.append(Node(op, name, target, args, kwargs))
        self._lines[name] = current_line().line.strip()
        return Ref(len(self._calls) - 1)

    @override
    def create_arg(self, a: Any) -> Any:
        """Returns an argument with references instead of stand-ins; raises for tensors from outside."""
        return map_leaves(a, self._argument)

    def _argument(self, value: Any) -> Any:
        if isinstance(value, Value):
            info = value.node
            if (written := info.written) is not None:
                reject(
                    f"it uses a tensor that shares memory with another one, which was modified in place before "
                    f"({written})",
                    "Use the tensor that was modified, modify a copy (y = x.clone()), or write x[i] = x[i] + y instead "
                    "of x[i] += y.",
                )
            if torch.is_grad_enabled() or not info.has_grad or info.kind != "tensor":
                return info.ref
            if info.ref not in self._detached:
                self._detached[info.ref] = self._add("call_method", "detach", (info.ref,), {})
            return self._detached[info.ref]
        if isinstance(value, Tensor):
            reject(
                f"it uses a tensor of shape {list(value.shape)} from outside. Pass it to the loss as an input, or use "
                "a number (.item()) or a list (.tolist()) instead"
            )
        if isinstance(value, np.generic):
            return value.item()
        if isinstance(value, np.ndarray):
            reject("it uses a numpy array from outside. Pass it to the loss as an input")
        encode_value(value, ())
        return value

    def set_item(self, tensor: TensorValue, index: Any, item: Any) -> None:
        """Records `tensor[index] = item`."""
        self._write(tensor, self.call("call_function", "operator.setitem", (tensor, index, item), {}))

    def in_place(self, tensor: TensorValue, name: str, other: Any) -> TensorValue:
        """Records an augmented assignment such as `tensor += other`."""
        return self._write(tensor, self.call("call_function", f"operator.{name}", (tensor, other), {}), other)

    def _call_in_place(self, method: str, tensor: Any, *args: Any, **kwargs: Any) -> Value:
        """Records the call of a method that modifies its tensor."""
        if not isinstance(tensor, TensorValue):
            reject(f"it calls {method} on something other than a tensor")
        if method == "zero_":
            return self._write(tensor, torch.zeros_like(tensor))
        if method in ("fill_", "copy_"):
            (value,) = (*args, *kwargs.values())
            is_number = not isinstance(value, Value) or value.node.kind == "number"
            return self._write(tensor, torch.full_like(tensor, value) if is_number else value, value)
        return self._write(tensor, self.call("call_method", method[:-1], (tensor, *args), kwargs), args, kwargs)

    def _write(self, tensor: TensorValue, result: Any, *operands: Any) -> TensorValue:
        """Replaces the value of a tensor that the function has computed."""
        info = tensor.node
        if any(memory.is_input for memory in info.memories):
            reject(
                "it modifies an input, or a tensor that may share memory with one, in place",
                "Modify a copy: x = x.clone(), then x[i] = y; or write x = x + y instead of x += y.",
            )
        if info.has_grad and not torch.is_grad_enabled():
            reject(
                "under torch.no_grad() it modifies a tensor that has a gradient; write x = x + (changed - x).detach()"
            )
        if any(each.node.kind != "number" for each in find_stand_ins(operands)):
            # In-place operations keep the shape and the dtype.
            result = result.expand_as(tensor).type_as(tensor)
        info.overwrite(result.node, current_line().line.strip())
        return tensor

    @override
    def call_module(self, m: Any, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Traces the forward of a module; its parameters are tensors from outside."""
        del m
        return forward(*args, **kwargs)

    @override
    def to_bool(self, obj: fx.Proxy) -> bool:
        """Raises for a branch."""
        needs_value(obj, "it branches on the value or size of a tensor (if, and, or, not, max, assert)")

    @override
    def iter(self, obj: fx.Proxy) -> Iterator[Any]:
        """Returns the entries of a shape whose length is known."""
        info: ValueInfo = obj.node  # type: ignore[assignment]
        if info.kind != "shape":
            needs_value(obj, "it loops over a tensor, or over a batch that is one tensor and not a list")
        if info.rank is None:
            needs_value(obj, "it unpacks a shape, which here needs a name for each part: batch, length = x.shape")
        return (obj[i] for i in range(info.rank))  # type: ignore[index]

    @override
    def keys(self, obj: fx.Proxy) -> Any:
        """Raises for `**x`."""
        needs_value(obj, "it uses a tensor as a dict")


def _check_kinds(target: str, args: Any, kwargs: Any) -> None:
    """Raises for tensors where the call needs a Python number or a list."""
    second = kwargs.get("repeats", kwargs.get("fill_value", args[1] if len(args) > 1 else None))
    is_tensor = isinstance(second, Value) and second.node.kind in ("tensor", "item")
    if target in ("torch.full", "torch.full_like") and is_tensor:
        raise InvalidLoss(f"{target} needs a number that does not depend on a tensor; write torch.ones(...) * value")
    if target.endswith("repeat_interleave") and is_tensor:
        raise InvalidLoss("repeat_interleave takes an integer number of repeats, not a tensor")
    if target.startswith("math.") and any(each.node.kind != "number" for each in find_stand_ins(args)):
        raise InvalidLoss(f"{target} works on numbers, and .item() is still a tensor; use torch.{target[5:]}")
    if target.rpartition(".")[2] in _LIST_FUNCTIONS and args and isinstance(args[0], TensorValue):
        raise InvalidLoss(
            "it joins a list of tensors, but on a server the batch is already one tensor, [B, T], with zeros after the "
            "end of shorter datums"
        )


def _augmented(name: str) -> Callable[[Any, Any], Any]:
    return lambda self, other: self.tracer.in_place(self, name, other)


# Not for numbers, so that `n += 1` creates a new one, as in Python.
for _name in _OPERATORS:
    setattr(TensorValue, f"__i{_name.removesuffix('_')}__", _augmented(_name))


class _Factories(TorchFunctionMode):
    """Records tensors that the function creates from numbers; they would otherwise be tensors from outside."""

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()
        self._recorder = recorder

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        has_stand_in = bool(find_stand_ins([args, kwargs]))
        has_tensor = any(isinstance(part, Tensor) for part in leaves([args, kwargs]))
        # Also without a tensor stand-in among the arguments, because torch does not dispatch on stand-ins of numbers.
        if target_name(func) in FUNCTIONS and (has_stand_in or not has_tensor):
            return self._recorder.create_proxy("call_function", func, args, kwargs)
        result = func(*args, **kwargs)
        if isinstance(result, Tensor) and not has_stand_in and not has_tensor:
            reject(f"it calls {target_name(func)}, which is not among the functions that a server-side loss may call")
        return result
