"""A loss as plain data: the nodes that a tracer recorded, on the wire as the official SDK writes them.

Reading a graph checks its form and looks every call up in the allow-list; nothing of it is run or evaluated. What it
may cost when it runs is bounded by `run`.
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
    """Nodes in the order they run: placeholders first, then calls.

    Args:
        inputs: The placeholders' targets, in the order of the values that a run takes.
        calls: What is computed of them. Ref 0 is the first placeholder.
        functions: What each call calls.
        output: What is returned, with a Ref where a value stands.
        places: The user's line behind each call, by its name, where it was traced. It stays there.
    """

    inputs: tuple[str, ...]
    calls: tuple[Node, ...]
    functions: tuple[Function, ...]
    output: Any
    places: Mapping[str, str] = field(default_factory=dict, compare=False)

    @property
    def size(self) -> int:
        """How many values it holds, which is about what it takes in memory."""
        calls = sum(_count([list(node.args), list(node.kwargs.values())]) for node in self.calls)
        return len(self.inputs) + calls + _count(self.output)

    @classmethod
    def build(cls, inputs: Sequence[str], calls: Sequence[Node], output: Any) -> Graph:
        """A graph of nodes that were made here; what they call is looked up.

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
    """The user's lines behind the node that an error names; more than one if graphs call others by the same name."""
    named = _NAMED.search(message)
    found = [graph.places.get(named[1]) for graph in graphs] if named else []
    return [place for place in dict.fromkeys(found) if place]


def _count(value: Any) -> int:
    if isinstance(value, tuple | list):
        return 1 + sum(_count(part) for part in value)
    return 1 + sum(_count(part) for part in value.values()) if isinstance(value, dict) else 1


def _placeholder_names(targets: Sequence[str], taken: set[str]) -> Iterator[str]:
    """Names for placeholders: their targets, where these can be names and no call has them."""
    for i, target in enumerate(targets):
        name = target if NAME.fullmatch(target) else f"input_{i}"
        while name in taken:
            name += "_"
        taken.add(name)
        yield name


def _listing(names: Sequence[str]) -> str:
    return ", ".join(names)[:400] or "none"
