"""A loss as plain data: the recorded nodes, on the wire in the format of the official SDK.

Decoding a graph checks its structure and looks up every call in the allow-list. Nothing is executed or evaluated; `run`
bounds the cost of a run.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from tinker_lightning.errors import InvalidLoss
from tinker_lightning.lossgraph.graphs.json import MAX_VALUES, NAME, Node, Reader, Ref, encode_value, refs

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

__all__ = ["FORMAT", "MAX_NODES", "MAX_VALUES", "Graph", "Node", "Ref", "encode_value", "places_of", "refs"]

FORMAT = 1
MAX_NODES = 4096
_NAMED = re.compile(r"\bnode '(\w+)'")


@dataclass(frozen=True, slots=True)
class Graph:
    """Nodes in the order in which they run: placeholders first (`Ref(0)` is the first one), then calls."""

    inputs: Sequence[str]  # the targets of the placeholders
    calls: Sequence[Node]
    output: Any
    places: Mapping[str, str] = field(default_factory=dict, compare=False)  # the user's line of each call; not sent

    @property
    def size(self) -> int:
        """The number of values, to which the memory of the graph is proportional."""
        return (
            len(self.inputs) + sum(_count([node.args, dict(node.kwargs)]) for node in self.calls) + _count(self.output)
        )

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
        return cls(tuple(reader.inputs), tuple(reader.calls), reader.output[0])


def places_of(message: str, graphs: Iterable[Graph]) -> list[str]:
    """Returns the user's lines of the node that an error message names, in all graphs that have such a node."""
    named = _NAMED.search(message)
    found = [graph.places.get(named[1]) for graph in graphs] if named else []
    return [place for place in dict.fromkeys(found) if place]


def _count(value: Any) -> int:
    parts = value.values() if isinstance(value, dict) else value if isinstance(value, tuple | list) else ()
    return 1 + sum(map(_count, parts))


def _placeholder_names(targets: Sequence[str], taken: set[str]) -> Iterator[str]:
    """Yields names for placeholders: their targets, if these are valid and unused."""
    for i, target in enumerate(targets):
        name = target if NAME.fullmatch(target) else f"input_{i}"
        while name in taken:
            name += "_"
        taken.add(name)
        yield name
