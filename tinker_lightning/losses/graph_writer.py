"""Turns a recording of torch.fx's into the nodes of a graph."""

from __future__ import annotations

from typing import Any

from torch import fx
from torch.fx.node import _get_qualified_name

from tinker_lightning.losses import graph_functions
from tinker_lightning.losses.graph import Node, Ref, encode_value

# What gives a number, a shape or a dtype, and not a tensor.
_PLAIN = ("size", "dim", "ndimension", "numel", "element_size", "is_floating_point")
_PLAIN_ATTRIBUTES = ("shape", "dtype", "device", "ndim")


def setitem(value: Any, index: Any, item: Any) -> None:
    """`value[index] = item`, under a name that a recording can hold."""
    value[index] = item


def target_name(target: Any) -> str:
    """How the official SDK writes a function on the wire."""
    if target is setitem:
        return "operator.setitem"
    try:
        name = _get_qualified_name(target)
    except (RuntimeError, AttributeError):
        return str(getattr(target, "__qualname__", target))
    return "operator." + name.removeprefix("_operator.") if name.startswith("_operator.") else name


class Writer:
    """Numbers the nodes, and says with `detach` where `torch.no_grad` ends a gradient.

    Args:
        placeholders: The inputs, in order.
        numbers: Those of them that are numbers.
    """

    def __init__(self, placeholders: list[fx.Node], numbers: set[fx.Node]) -> None:
        self.calls: list[Node] = []
        self._places: dict[fx.Node, int] = {node: i for i, node in enumerate(placeholders)}
        self._inputs = len(placeholders)
        self._plain = set(numbers)
        self._no_grad: set[fx.Node] = set()
        self._detached: dict[fx.Node, int] = {}

    def add(self, node: fx.Node) -> None:
        """Takes the next call.

        Raises:
            InvalidLoss: If it is not on the allow-list, or has an argument that no graph can hold.
        """
        if node.op == "call_method" and node.target == "item":
            source = node.args[0]
            assert isinstance(source, fx.Node)  # noqa: S101  # the method's own tensor
            self._places[node] = self._places[source]
            for kind in (self._plain, self._no_grad):
                if source in kind:
                    kind.add(node)
            return
        target = str(node.target) if node.op == "call_method" else target_name(node.target)
        graph_functions.find(node.op, target)
        if self._is_plain(node, target):
            self._plain.add(node)
        # Taking a part out of a value that has no gradient gives none either, whatever the value is.
        part = target in ("operator.getitem", "getattr") and node.args[0] in self._no_grad
        no_grad = bool(node.meta["no_grad"]) or part
        if no_grad:
            self._no_grad.add(node)
        args = tuple(self.argument(arg, no_grad=no_grad) for arg in node.args)
        kwargs = {key: self.argument(arg, no_grad=no_grad) for key, arg in node.kwargs.items()}
        self._places[node] = self._inputs + len(self.calls)
        self.calls.append(Node(node.op, node.name, target, args, kwargs))

    def argument(self, value: Any, *, no_grad: bool) -> Any:
        """An argument with places for nodes; of a call that has a gradient, without what should have none."""
        if isinstance(value, fx.Node):
            if no_grad or value not in self._no_grad or value in self._plain:
                return Ref(self._places[value])
            if value not in self._detached:
                self._detached[value] = self._inputs + len(self.calls)
                name = f"{value.name}_detached"
                self.calls.append(Node("call_method", name, "detach", (Ref(self._places[value]),)))
            return Ref(self._detached[value])
        if isinstance(value, tuple):
            return tuple(self.argument(part, no_grad=no_grad) for part in value)
        if isinstance(value, list):
            return [self.argument(part, no_grad=no_grad) for part in value]
        if isinstance(value, dict):
            return {key: self.argument(part, no_grad=no_grad) for key, part in value.items()}
        if isinstance(value, slice):
            return slice(*(self.argument(part, no_grad=no_grad) for part in (value.start, value.stop, value.step)))
        encode_value(value, ())
        return value

    def _is_plain(self, node: fx.Node, target: str) -> bool:
        if node.op == "call_method":
            return target in _PLAIN
        if target == "getattr" and node.args[1] in _PLAIN_ATTRIBUTES:
            return True
        derives = target == "operator.getitem" or target.startswith(("operator.", "math."))
        return derives and bool(node.all_input_nodes) and all(each in self._plain for each in node.all_input_nodes)
