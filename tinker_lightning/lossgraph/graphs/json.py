"""The nodes of a graph, and the JSON form of their arguments, as the official SDK writes them."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from tinker_lightning.errors import InvalidLoss
from tinker_lightning.lossgraph.graphs import functions
from tinker_lightning.lossgraph.graphs.guards import ATTRIBUTES
from tinker_lightning.lossgraph.graphs.numbers import MAX_INT

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


class Reader:
    """Reads nodes in order. References can only point backwards, so there are no cycles."""

    def __init__(self) -> None:
        self.inputs: list[str] = []
        self.calls: list[Node] = []
        self.output: list[Any] | None = None
        self._places: dict[str, int] = {}
        self._values = 0

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
        if name in self._places:
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
        self._places[name] = len(self._places)

    def _arguments(self, op: str, args: list[Any], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        for key in kwargs:
            if not NAME.fullmatch(key):
                raise InvalidLoss(f"the argument {key!r:.140} is not supported")
        named = functions.without_forbidden(op, kwargs)
        return tuple(self._decode(arg, 0) for arg in args), {key: self._decode(arg, 0) for key, arg in named.items()}

    def _decode(self, value: Any, depth: int) -> Any:
        self._values += 1
        if depth > MAX_DEPTH or self._values > MAX_VALUES:
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
            place = self._places.get(content) if isinstance(content, str) else None
            if place is None:
                raise InvalidLoss(f"it refers to {content!r:.140}, but no earlier node has this name")
            return Ref(place)
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


def mapped(value: Any, change: Callable[[Any], Any]) -> Any:
    """Applies a function to every item of nested tuples, lists, dicts and slices."""
    if isinstance(value, tuple):
        return tuple(mapped(part, change) for part in value)
    if isinstance(value, list):
        return [mapped(part, change) for part in value]
    if isinstance(value, dict):
        return {key: mapped(part, change) for key, part in value.items()}
    if isinstance(value, slice):
        return slice(*(mapped(part, change) for part in (value.start, value.stop, value.step)))
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
