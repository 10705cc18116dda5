"""A loss as plain data: the nodes that a tracer recorded, on the wire as the official SDK writes them.

Reading a graph checks its form and looks every call up in the allow-list; nothing of it is run or evaluated. What it
may cost when it runs is bounded by `graph_run`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from tinker_lightning.errors import InvalidLoss
from tinker_lightning.losses import graph_functions
from tinker_lightning.losses.graph_functions import FORBIDDEN_ARGUMENTS, Function
from tinker_lightning.losses.graph_numbers import MAX_INT

FORMAT = 1
MAX_NODES = 4096
MAX_VALUES = 1 << 15  # arguments of all nodes together, those inside lists counted too
MAX_DEPTH = 8
MAX_TEXT = 256

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,127}")
_DEVICE = re.compile(r"[a-z]{2,8}(:[0-9]{1,3})?")
_DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        torch.bool,
        torch.uint8,
        torch.int8,
        torch.int16,
        torch.int32,
        torch.int64,
        torch.float16,
        torch.bfloat16,
        torch.float32,
        torch.float64,
    )
}
_MEMORY_FORMATS = {"contiguous_format": torch.contiguous_format, "preserve_format": torch.preserve_format}
_FLOATS = {"inf": math.inf, "-inf": -math.inf, "nan": math.nan}


@dataclass(frozen=True, slots=True)
class Ref:
    """The value of an earlier node, by its place."""

    node: int


@dataclass(frozen=True, slots=True)
class Node:
    """One call. `target` is what a placeholder, a function or a method is called."""

    op: str
    name: str
    target: str
    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Graph:
    """Nodes in the order they run: placeholders first, then calls.

    Args:
        inputs: The placeholders' targets, in the order of the values that a run takes.
        calls: What is computed of them. Ref 0 is the first placeholder.
        functions: What each call calls.
        output: What is returned, with a Ref where a value stands.
    """

    inputs: tuple[str, ...]
    calls: tuple[Node, ...]
    functions: tuple[Function, ...]
    output: Any

    @property
    def size(self) -> int:
        """How many values it holds, which is about what it takes in memory."""
        return len(self.inputs) + sum(_count([list(node.args), list(node.kwargs.values())]) for node in self.calls)

    @classmethod
    def build(cls, inputs: Sequence[str], calls: Sequence[Node], output: Any) -> Graph:
        """A graph of nodes that were made here; what they call is looked up.

        Raises:
            InvalidLoss: If a call is not on the list.
        """
        functions = []
        for node in calls:
            try:
                functions.append(graph_functions.find(node.op, node.target))
            except InvalidLoss as error:
                raise InvalidLoss(f"node {node.name!r}: {error}") from error
        return cls(tuple(inputs), tuple(calls), tuple(functions), output)

    def encode(self) -> dict[str, Any]:
        """The graph as JSON has it."""
        called = [node.name for node in self.calls]
        names = [*_placeholder_names(self.inputs, {*called, "output"}), *called]
        nodes: list[dict[str, Any]] = [
            {"op": "placeholder", "name": name, "target": target, "args": [], "kwargs": {}}
            for name, target in zip(names, self.inputs, strict=False)
        ]
        nodes += [
            {
                "op": node.op,
                "name": node.name,
                "target": node.target,
                "args": [encode_value(arg, names) for arg in node.args],
                "kwargs": {key: encode_value(arg, names) for key, arg in node.kwargs.items()},
            }
            for node in self.calls
        ]
        output = [encode_value(self.output, names)]
        nodes.append({"op": "output", "name": "output", "target": "output", "args": output, "kwargs": {}})
        return {"format": FORMAT, "nodes": nodes}

    @classmethod
    def decode(cls, message: Any, inputs: Sequence[str] | None = None) -> Graph:
        """A graph from its JSON.

        Args:
            message: The JSON, already parsed.
            inputs: What its placeholders must be, in order; None takes those that it has.

        Raises:
            InvalidLoss: If it is none, calls what is not on the list, or is too large; names the node.
        """
        if not isinstance(message, dict) or not isinstance(message.get("nodes"), list):
            raise InvalidLoss("a graph is an object with a list of nodes")
        if message.get("format", FORMAT) != FORMAT:
            raise InvalidLoss(f"format {message['format']!r} of a graph is not known here, only {FORMAT}")
        if len(message["nodes"]) > MAX_NODES:
            raise InvalidLoss(f"a graph of {len(message['nodes'])} nodes; at most {MAX_NODES} are taken")
        reader = _Reader()
        for i, entry in enumerate(message["nodes"]):
            try:
                reader.read(entry)
            except InvalidLoss as error:
                name = entry.get("name") if isinstance(entry, dict) else None
                raise InvalidLoss(f"node {name if isinstance(name, str) else i!r:.140}: {error}") from error
        if reader.output is None:
            raise InvalidLoss("the last node of a graph must be its output")
        if inputs is not None and tuple(reader.inputs) != tuple(inputs):
            raise InvalidLoss(f"the placeholders are {_listing(reader.inputs)}, but should be {_listing(inputs)}")
        return cls(tuple(reader.inputs), tuple(reader.calls), tuple(reader.functions), reader.output[0])


class _Reader:
    """Takes nodes one after another; a reference can only lead back, so that there are no cycles."""

    def __init__(self) -> None:
        self.inputs: list[str] = []
        self.calls: list[Node] = []
        self.functions: list[Function] = []
        self.output: list[Any] | None = None
        self._places: dict[str, int] = {}
        self._values = 0

    def read(self, entry: Any) -> None:
        if self.output is not None:
            raise InvalidLoss("it stands behind the output")
        if not isinstance(entry, dict):
            raise InvalidLoss("a node is an object with op, name, target, args and kwargs")
        op, name, target = (entry.get(key) for key in ("op", "name", "target"))
        args, kwargs = entry.get("args", []), entry.get("kwargs", {})
        if not isinstance(name, str) or not _NAME.fullmatch(name):
            raise InvalidLoss("a name is a letter or underscore followed by letters, digits and underscores")
        if name in self._places:
            raise InvalidLoss("there is another node of this name")
        if not isinstance(target, str) or len(target) > MAX_TEXT:
            raise InvalidLoss(f"the target must be a text of at most {MAX_TEXT} characters")
        if not isinstance(args, list) or not isinstance(kwargs, dict):
            raise InvalidLoss("args must be a list and kwargs an object")
        if op == "placeholder":
            self._placeholder(target, args or kwargs)
        elif op in ("call_function", "call_method"):
            self.functions.append(graph_functions.find(op, target))
            self.calls.append(Node(op, name, target, *self._arguments(args, kwargs)))
        elif op == "output":
            if len(args) != 1 or kwargs:
                raise InvalidLoss("an output has one argument: what is returned")
            self.output = [self._decode(args[0], 0)]
        else:
            raise InvalidLoss(f"op {op!r:.40} is not taken; a loss reads its inputs and calls functions and methods")
        self._places[name] = len(self._places)

    def _placeholder(self, target: str, arguments: Any) -> None:
        if self.calls:
            raise InvalidLoss("placeholders stand before all other nodes")
        if arguments:
            raise InvalidLoss("a placeholder has no default")
        if target in self.inputs:
            raise InvalidLoss(f"there is another placeholder for {target!r}")
        self.inputs.append(target)

    def _arguments(self, args: list[Any], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        for key in kwargs:
            if not _NAME.fullmatch(key) or key in FORBIDDEN_ARGUMENTS:
                raise InvalidLoss(f"the argument {key!r:.140} is not taken")
        return tuple(self._decode(arg, 0) for arg in args), {key: self._decode(arg, 0) for key, arg in kwargs.items()}

    def _decode(self, value: Any, depth: int) -> Any:
        self._values += 1
        if depth > MAX_DEPTH or self._values > MAX_VALUES:
            raise InvalidLoss(
                f"arguments may be nested {MAX_DEPTH} deep, and all nodes together may have {MAX_VALUES} of them"
            )
        if value is None or isinstance(value, bool | float):
            return value
        if isinstance(value, int):
            if not -MAX_INT <= value < MAX_INT:
                raise InvalidLoss("a whole number that no tensor can hold")
            return value
        if isinstance(value, str):
            if len(value) > MAX_TEXT:
                raise InvalidLoss(f"a text of more than {MAX_TEXT} characters")
            return value
        if isinstance(value, list):
            return [self._decode(part, depth + 1) for part in value]
        if isinstance(value, dict) and len(value) == 1:
            ((kind, content),) = value.items()
            return self._decode_object(kind, content, depth)
        raise InvalidLoss("an argument is a number, text, list, or an object with one key, such as {'ref': name}")

    def _decode_object(self, kind: str, content: Any, depth: int) -> Any:
        if kind == "ref":
            place = self._places.get(content) if isinstance(content, str) else None
            if place is None:
                raise InvalidLoss(f"it refers to {content!r:.140}, which no node before it is called")
            return Ref(place)
        if kind == "tuple" and isinstance(content, list):
            return tuple(self._decode(part, depth + 1) for part in content)
        if kind == "dict" and isinstance(content, dict) and all(len(key) <= MAX_TEXT for key in content):
            return {key: self._decode(part, depth + 1) for key, part in content.items()}
        if kind == "slice" and isinstance(content, list) and len(content) == 3:
            return slice(*(self._decode(part, depth + 1) for part in content))
        if kind == "ellipsis" and content is True:
            return Ellipsis
        if isinstance(content, str):
            if kind == "device" and _DEVICE.fullmatch(content):
                return torch.device("cpu")  # stands for wherever the loss runs
            for name, table in _CONSTANTS.items():
                if kind == name and content in table:
                    return table[content]
        raise InvalidLoss(f"the argument {{{kind!r:.40}: {content!r:.40}}} is not known")


_CONSTANTS: dict[str, dict[str, Any]] = {
    "float": _FLOATS,
    "dtype": _DTYPES,
    "layout": {"strided": torch.strided},
    "memory_format": _MEMORY_FORMATS,
}


def encode_value(value: Any, names: Sequence[str]) -> Any:
    """An argument as JSON has it; `names` are those of the nodes.

    Raises:
        InvalidLoss: If it has no place in a graph.
    """
    if isinstance(value, Ref):
        return {"ref": names[value.node]}
    if isinstance(value, float) and not math.isfinite(value):
        return {"float": str(value)}
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, tuple):
        return {"tuple": [encode_value(part, names) for part in value]}
    if isinstance(value, list):
        return [encode_value(part, names) for part in value]
    if isinstance(value, dict):
        return {"dict": {key: encode_value(part, names) for key, part in value.items()}}
    if isinstance(value, slice):
        return {"slice": [encode_value(part, names) for part in (value.start, value.stop, value.step)]}
    if value is Ellipsis:
        return {"ellipsis": True}
    for kind in (torch.dtype, torch.device, torch.layout, torch.memory_format):
        if isinstance(value, kind):
            return {kind.__name__: str(value).removeprefix("torch.")}
    raise InvalidLoss(f"{type(value).__name__} has no place in a graph; use numbers, text, tensors, and lists of them")


def _count(value: Any) -> int:
    if isinstance(value, tuple | list):
        return 1 + sum(_count(part) for part in value)
    return 1 + sum(_count(part) for part in value.values()) if isinstance(value, dict) else 1


def refs(value: Any) -> Iterator[int]:
    """The places that an argument refers to."""
    if isinstance(value, Ref):
        yield value.node
    elif isinstance(value, tuple | list):
        for part in value:
            yield from refs(part)
    elif isinstance(value, dict):
        yield from refs(list(value.values()))
    elif isinstance(value, slice):
        yield from refs([value.start, value.stop, value.step])


def _placeholder_names(targets: Sequence[str], taken: set[str]) -> Iterator[str]:
    """Names for placeholders: their targets, where these can be names and no call has them."""
    for i, target in enumerate(targets):
        name = target if _NAME.fullmatch(target) else f"input_{i}"
        while name in taken:
            name += "_"
        taken.add(name)
        yield name


def _listing(names: Sequence[str]) -> str:
    return ", ".join(names)[:400] or "none"
