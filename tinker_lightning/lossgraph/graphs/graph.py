"""A loss as plain data: the nodes that a tracer recorded, on the wire in the form of the official SDK.

Reading a graph checks its form and looks up every call in the allow-list; nothing is run or evaluated. What it may cost
when it runs is bounded by `run`.
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
    """Nodes in the order in which they run: placeholders first, then calls.

    Args:
        inputs: The targets of the placeholders, in the order of the values that a run takes.
        calls: The calls. Ref 0 is the first placeholder.
        output: What is returned, with a Ref in the place of each value.
        places: The user's line of each call, by its name, in the process that traced it. It is never sent.
    """

    inputs: Sequence[str]
    calls: Sequence[Node]
    output: Any
    places: Mapping[str, str] = field(default_factory=dict, compare=False)

    @property
    def size(self) -> int:
        """Returns the number of values in it, to which its memory is proportional."""
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
        """Returns the graph that parsed JSON describes.

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
        return cls(tuple(reader.inputs), tuple(reader.calls), reader.output[0])


def places_of(message: str, graphs: Iterable[Graph]) -> list[str]:
    """Returns the user's lines of the node that an error names; several if graphs have different nodes of that name."""
    named = _NAMED.search(message)
    found = [graph.places.get(named[1]) for graph in graphs] if named else []
    return [place for place in dict.fromkeys(found) if place]


def _count(value: Any) -> int:
    parts = value.values() if isinstance(value, dict) else value if isinstance(value, tuple | list) else ()
    return 1 + sum(map(_count, parts))


def _placeholder_names(targets: Sequence[str], taken: set[str]) -> Iterator[str]:
    """Yields names for placeholders: their targets, if these are valid names and no call has them."""
    for i, target in enumerate(targets):
        name = target if NAME.fullmatch(target) else f"input_{i}"
        while name in taken:
            name += "_"
        taken.add(name)
        yield name
