"""A loss as plain data: the recorded nodes, on the wire in the format of the official SDK.

Decoding a graph checks its structure and looks up every call in the allow-list. Nothing is executed or evaluated; `run`
bounds the cost of a run.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from tinker_lightning.errors import InvalidLoss
from tinker_lightning.lossgraph import functions
from tinker_lightning.lossgraph.guards import ATTRIBUTES, MAX_INT

if TYPE_CHECKING:
    from collections.abc import Iterable

__all__ = ["FORMAT", "MAX_NODES", "MAX_VALUES", "Graph", "Node", "Ref", "encode_value", "find_lines", "refs"]

FORMAT = 1
MAX_NODES = 4096
MAX_VALUES = 1 << 15  # arguments of all nodes together, including those inside lists
MAX_DEPTH = 8
MAX_TEXT = 256

NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,127}")
_DEVICE = re.compile(r"[a-z]{2,8}(:[0-9]{1,3})?")
_DTYPES = "bool uint8 int8 int16 int32 int64 float16 bfloat16 float32 float64"
_CONSTANTS: dict[str, dict[str, Any]] = {
    "float": {"inf": math.inf, "-inf": -math.inf, "nan": math.nan},
    "dtype": {name: getattr(torch, name) for name in _DTYPES.split()},
    "layout": {"strided": torch.strided},
    "memory_format": {name: getattr(torch, name) for name in ("contiguous_format", "preserve_format")},
}
_NODE_NAME = re.compile(r"\bnode '(\w+)'")


@dataclass(frozen=True, slots=True)
class Ref:
    """A reference to the value of an earlier node, by its position."""

    node: int


@dataclass(frozen=True, slots=True)
class Node:
    """One call. `target` is the name of a placeholder, a function or a method."""

    op: str
    name: str
    target: str
    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Graph:
    """Nodes in the order in which they run: placeholders first (`Ref(0)` is the first one), then calls."""

    inputs: Sequence[str]  # the targets of the placeholders
    calls: Sequence[Node]
    output: Any
    lines: Mapping[str, str] = field(default_factory=dict, compare=False)  # the user's line of each call; not sent
    size: int = field(default=0, compare=False)  # the values of a decoded graph, to which its memory is proportional

    def encode(self) -> dict[str, Any]:
        """Returns the graph as JSON."""
        called = [node.name for node in self.calls]
        names = [*_placeholder_names(self.inputs, {*called, "output"}), *called]
        nodes = [
            *(Node("placeholder", name, target) for name, target in zip(names, self.inputs, strict=False)),
            *self.calls,
            Node("output", "output", "output", (self.output,)),
        ]
        encoded = [
            {
                "op": node.op,
                "name": node.name,
                "target": node.target,
                "args": [encode_value(arg, names) for arg in node.args],
                "kwargs": {key: encode_value(arg, names) for key, arg in node.kwargs.items()},
            }
            for node in nodes
        ]
        return {"format": FORMAT, "nodes": encoded}

    @classmethod
    def decode(cls, message: Any) -> Graph:
        """Returns the graph that parsed JSON describes; raises `InvalidLoss` if it is invalid or too large."""
        if not isinstance(message, dict) or not isinstance(message.get("nodes"), list):
            raise InvalidLoss("a graph must be an object with a list of nodes")
        if message.get("format", FORMAT) != FORMAT:
            raise InvalidLoss(f"the graph has format {message['format']!r}; only {FORMAT} is supported")
        if len(message["nodes"]) > MAX_NODES:
            raise InvalidLoss(f"the graph has {len(message['nodes'])} nodes; at most {MAX_NODES} are supported")
        reader = Reader()
        for i, entry in enumerate(message["nodes"]):
            try:
                reader.read(entry)
            except InvalidLoss as error:
                name = entry.get("name") if isinstance(entry, dict) else None
                raise InvalidLoss(f"node {name if isinstance(name, str) else i!r:.140}: {error}") from error
        if reader.output is None:
            raise InvalidLoss("the last node of a graph must be its output")
        size = len(reader.inputs) + 3 * len(reader.calls) + reader.values  # a call, its arguments and their dict
        return cls(tuple(reader.inputs), tuple(reader.calls), reader.output[0], size=size)


def find_lines(message: str, graphs: Iterable[Graph]) -> list[str]:
    """Returns the user's lines of the node that an error message names, in all graphs that have such a node."""
    name = _NODE_NAME.search(message)
    lines = [graph.lines.get(name[1]) for graph in graphs] if name else []
    return [line for line in dict.fromkeys(lines) if line]


def _placeholder_names(targets: Sequence[str], taken: set[str]) -> Iterator[str]:
    """Yields names for placeholders: their targets, if these are valid and unused."""
    for i, target in enumerate(targets):
        name = target if NAME.fullmatch(target) else f"input_{i}"
        while name in taken:
            name += "_"
        taken.add(name)
        yield name


class Reader:
    """Reads nodes in order. References can only point backwards, so there are no cycles."""

    def __init__(self) -> None:
        self.inputs: list[str] = []
        self.calls: list[Node] = []
        self.output: list[Any] | None = None
        self._positions: dict[str, int] = {}
        self.values = 0  # arguments, including those inside others

    def read(self, entry: Any) -> None:
        """Reads the next node; raises `InvalidLoss` if it is malformed or calls a function that is not on the list."""
        if self.output is not None:
            raise InvalidLoss("a node follows the output")
        if not isinstance(entry, dict):
            raise InvalidLoss("a node is an object with op, name, target, args and kwargs")
        op, name, target = (entry.get(key) for key in ("op", "name", "target"))
        args, kwargs = entry.get("args", []), entry.get("kwargs", {})
        if not isinstance(name, str) or not NAME.fullmatch(name):
            raise InvalidLoss("a name is a letter or underscore followed by letters, digits and underscores")
        if name in self._positions:
            raise InvalidLoss("another node has this name")
        if not isinstance(target, str) or len(target) > MAX_TEXT:
            raise InvalidLoss(f"the target must be a string of at most {MAX_TEXT} characters")
        if not isinstance(args, list) or not isinstance(kwargs, dict):
            raise InvalidLoss("args must be a list and kwargs an object")
        if op == "placeholder":
            if self.calls:
                raise InvalidLoss("placeholders must precede all other nodes")
            if args or kwargs:
                raise InvalidLoss("a placeholder cannot have a default")
            if target in self.inputs:
                raise InvalidLoss(f"there is another placeholder for {target!r}")
            self.inputs.append(target)
        elif op in ("call_function", "call_method"):
            function = functions.find(op, target)
            node = Node(op, name, target, *self._arguments(op, args, kwargs))
            functions.check_arguments(target, function, node.args, node.kwargs)
            self.calls.append(node)
            if target in ("getattr", "builtins.getattr"):
                check_attribute(*args[1:])
        elif op == "output":
            if len(args) != 1 or kwargs:
                raise InvalidLoss("an output has one argument, the value to return")
            self.output = [self._decode(args[0], 0)]
        else:
            raise InvalidLoss(f"op {op!r:.40} is not supported; a loss has inputs, functions and methods")
        self._positions[name] = len(self._positions)

    def _arguments(self, op: str, args: list[Any], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        for key in kwargs:
            if not NAME.fullmatch(key):
                raise InvalidLoss(f"the argument {key!r:.140} is not supported")
        named = functions.drop_forbidden(op, kwargs)
        return tuple(self._decode(arg, 0) for arg in args), {key: self._decode(arg, 0) for key, arg in named.items()}

    def _decode(self, value: Any, depth: int) -> Any:
        self.values += 1
        if depth > MAX_DEPTH or self.values > MAX_VALUES:
            raise InvalidLoss(
                f"arguments may be nested {MAX_DEPTH} deep, and all nodes together may have {MAX_VALUES} of them"
            )
        if isinstance(value, int) and not -MAX_INT <= value < MAX_INT:
            raise InvalidLoss("an integer is too large for a tensor")
        if isinstance(value, str) and len(value) > MAX_TEXT:
            raise InvalidLoss(f"a string has more than {MAX_TEXT} characters")
        if value is None or isinstance(value, bool | float | int | str):
            return value
        if isinstance(value, list):
            return [self._decode(part, depth + 1) for part in value]
        if isinstance(value, dict) and len(value) == 1:
            ((kind, content),) = value.items()
            return self._decode_object(kind, content, depth)
        raise InvalidLoss("an argument must be a number, string, list or object with one key, such as {'ref': name}")

    def _decode_object(self, kind: str, content: Any, depth: int) -> Any:
        if kind == "ref":
            position = self._positions.get(content) if isinstance(content, str) else None
            if position is None:
                raise InvalidLoss(f"it refers to {content!r:.140}, but no earlier node has this name")
            return Ref(position)
        if kind == "tuple" and isinstance(content, list):
            return tuple(self._decode(part, depth + 1) for part in content)
        if kind == "dict" and isinstance(content, dict) and all(len(key) <= MAX_TEXT for key in content):
            return {key: self._decode(part, depth + 1) for key, part in content.items()}
        if kind == "slice" and isinstance(content, list) and len(content) == 3:
            return slice(*(self._decode(part, depth + 1) for part in content))
        if kind == "ellipsis" and content is True:
            return Ellipsis
        if kind == "device" and isinstance(content, str) and _DEVICE.fullmatch(content):
            return torch.device("cpu")  # replaced by the device of the run
        if isinstance(content, str) and content in _CONSTANTS.get(kind, {}):
            return _CONSTANTS[kind][content]
        raise InvalidLoss(f"the argument {{{kind!r:.40}: {content!r:.40}}} is invalid")


def check_attribute(name: Any = None, *_: Any) -> None:
    """Raises `InvalidLoss` if a graph cannot read an attribute."""
    if not isinstance(name, str) or name not in ATTRIBUTES:
        raise InvalidLoss(f"the attribute {name!r:.140} is not supported; use one of {', '.join(sorted(ATTRIBUTES))}")


def encode_value(value: Any, names: Sequence[str]) -> Any:
    """Returns an argument as JSON, given the names of all nodes; raises `InvalidLoss` if a graph cannot contain it."""
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
    raise InvalidLoss(f"a graph cannot contain {type(value).__name__}; use numbers, strings, tensors and lists")


def map_leaves(value: Any, change: Callable[[Any], Any]) -> Any:
    """Applies a function to every item of nested tuples, lists, dicts and slices."""
    if isinstance(value, tuple):
        return tuple(map_leaves(part, change) for part in value)
    if isinstance(value, list):
        return [map_leaves(part, change) for part in value]
    if isinstance(value, dict):
        return {key: map_leaves(part, change) for key, part in value.items()}
    if isinstance(value, slice):
        return slice(*(map_leaves(part, change) for part in (value.start, value.stop, value.step)))
    return change(value)


def leaves(value: Any) -> Iterator[Any]:
    """Yields the items of nested tuples, lists, dicts and slices."""
    if isinstance(value, slice):
        value = (value.start, value.stop, value.step)
    if isinstance(value, tuple | list | dict):
        for part in value.values() if isinstance(value, dict) else value:
            yield from leaves(part)
    else:
        yield value


def refs(value: Any) -> list[int]:
    """Returns the positions of the nodes that an argument refers to."""
    return [part.node for part in leaves(value) if isinstance(part, Ref)]
