"""A loss as plain data: the nodes that a tracer recorded, on the wire in the form of the official SDK.

Reading a graph checks its form and looks up every call in the allow-list; nothing is run or evaluated. What it may cost
when it runs is bounded by `run`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from tinker_lightning.errors import InvalidLoss
from tinker_lightning.lossgraph.graphs import functions
from tinker_lightning.lossgraph.graphs.functions import Function
from tinker_lightning.lossgraph.graphs.json import MAX_VALUES, NAME, Node, Reader, Ref, encode_value, refs

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

__all__ = ["FORMAT", "MAX_NODES", "MAX_VALUES", "Graph", "Node", "Ref", "encode_value", "places_of", "refs"]

FORMAT = 1
MAX_NODES = 4096
_NAMED = re.compile(r"\bnode '(\w+)'")


@dataclass(frozen=True, slots=True)
class Graph:
    """Nodes in the order in which they run: placeholders first, then calls.

    Args:
        inputs: The targets of the placeholders, in the order of the values that a run takes.
        calls: The calls. Ref 0 is the first placeholder.
        functions: The function of each call.
        output: What is returned, with a Ref in the place of each value.
        places: The user's line of each call, by its name, in the process that traced it. It is never sent.
    """

    inputs: tuple[str, ...]
    calls: tuple[Node, ...]
    functions: tuple[Function, ...]
    output: Any
    places: Mapping[str, str] = field(default_factory=dict, compare=False)

    @property
    def size(self) -> int:
        """Returns the number of values in it, to which its memory is proportional."""
        calls = sum(_count([list(node.args), list(node.kwargs.values())]) for node in self.calls)
        return len(self.inputs) + calls + _count(self.output)

    @classmethod
    def build(cls, inputs: Sequence[str], calls: Sequence[Node], output: Any) -> Graph:
        """Returns the graph of these nodes.

        Raises:
            InvalidLoss: If a call is not on the list.
        """
        called: list[Function] = []
        for node in calls:
            try:
                called.append(functions.find(node.op, node.target))
            except InvalidLoss as error:
                raise InvalidLoss(f"node {node.name!r}: {error}") from error
        return cls(tuple(inputs), tuple(calls), tuple(called), output)

    def encode(self) -> dict[str, Any]:
        """Returns the graph as JSON."""
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
        """Returns the graph that JSON describes.

        Args:
            message: The JSON, already parsed.
            inputs: The placeholders that it must have, in order; None accepts any.

        Raises:
            InvalidLoss: If it is malformed, calls a function that is not on the list, or is too large; names the node.
        """
        if not isinstance(message, dict) or not isinstance(message.get("nodes"), list):
            raise InvalidLoss("a graph is an object with a list of nodes")
        if message.get("format", FORMAT) != FORMAT:
            raise InvalidLoss(f"format {message['format']!r} of a graph is not known here, only {FORMAT}")
        if len(message["nodes"]) > MAX_NODES:
            raise InvalidLoss(f"a graph of {len(message['nodes'])} nodes; at most {MAX_NODES} are taken")
        reader = Reader()
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


def places_of(message: str, graphs: Iterable[Graph]) -> list[str]:
    """Returns the user's lines of the node that an error names; several if graphs have different nodes of that name."""
    named = _NAMED.search(message)
    found = [graph.places.get(named[1]) for graph in graphs] if named else []
    return [place for place in dict.fromkeys(found) if place]


def _count(value: Any) -> int:
    if isinstance(value, tuple | list):
        return 1 + sum(_count(part) for part in value)
    return 1 + sum(_count(part) for part in value.values()) if isinstance(value, dict) else 1


def _placeholder_names(targets: Sequence[str], taken: set[str]) -> Iterator[str]:
    """Yields names for placeholders: their targets, if these are valid names and no call has them."""
    for i, target in enumerate(targets):
        name = target if NAME.fullmatch(target) else f"input_{i}"
        while name in taken:
            name += "_"
        taken.add(name)
        yield name


def _listing(names: Sequence[str]) -> str:
    return ", ".join(names)[:400] or "none"
