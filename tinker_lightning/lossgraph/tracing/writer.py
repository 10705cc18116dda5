"""SubmitOrder a recording of torch.fx's into the nodes of a graph."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import Tensor, fx
from torch.fx.node import _get_qualified_name

from tinker_lightning.errors import InvalidLoss
from tinker_lightning.lossgraph.graphs import functions
from tinker_lightning.lossgraph.graphs.graph import Node, Ref, encode_value
from tinker_lightning.lossgraph.graphs.json import check_attribute

if TYPE_CHECKING:
    from collections.abc import Mapping

# What gives a number, a shape or a dtype, and not a tensor.
_PLAIN = ("size", "dim", "ndimension", "numel", "element_size", "is_floating_point")
_PLAIN_ATTRIBUTES = ("shape", "dtype", "device", "ndim")
# Operators that have a method for `x += y`; what the others compute is copied into the tensor.
_WRITES = {"operator.add": "add_", "operator.sub": "sub_", "operator.mul": "mul_"}


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


def is_write(node: fx.Node) -> bool:
    """Whether a call changes its first argument, as the function says it."""
    if node.op == "call_function":
        name = target_name(node.target)
        return name == "operator.setitem" or (name.startswith("torch.Tensor.") and _ends_in_place(name))
    return node.op == "call_method" and _ends_in_place(str(node.target))


def _ends_in_place(method: str) -> bool:
    return method.endswith("_") and not method.endswith("__")


class Writer:
    """Numbers the nodes, and says with `detach` where `torch.no_grad` or `item` ends a gradient.

    Args:
        placeholders: The inputs, in order.
        numbers: Those of them that are numbers.
        in_place: The operators that are to change the tensor itself.
        keeps: Whether tensors are changed, so that the value of now must be kept for what needs it.
    """

    def __init__(
        self, placeholders: list[fx.Node], numbers: set[fx.Node], in_place: set[fx.Node], *, keeps: bool
    ) -> None:
        self.calls: list[Node] = []
        self._places: dict[fx.Node, int] = {node: i for i, node in enumerate(placeholders)}
        self._inputs = len(placeholders)
        self._plain = set(numbers)
        self._no_grad: set[fx.Node] = set()
        self._detached: dict[fx.Node, int] = {}
        self._in_place = in_place
        self._keeps = keeps or bool(in_place)

    def add(self, node: fx.Node) -> None:
        """Takes the next call.

        Raises:
            InvalidLoss: If it is not on the allow-list, or has an argument that no graph can hold.
        """
        target = str(node.target) if node.op == "call_method" else target_name(node.target)
        if target == "item":
            self._item(node)
            return
        function = functions.find(node.op, target)
        if target in ("getattr", "builtins.getattr"):
            check_attribute(node.args[1])
        named = functions.without_forbidden(node.op, node.kwargs)
        functions.check_arguments(target, function, node.args, named)
        self._check_numbers(node, target)
        if node in self._in_place or is_write(node):
            self._write(node, target, named)
            return
        if self._is_plain(node, target):
            self._plain.add(node)
        # Taking a part out of a value that has no gradient gives none either, whatever the value is.
        part = target in ("operator.getitem", "getattr") and node.args[0] in self._no_grad
        no_grad = bool(node.meta["no_grad"]) or part
        if no_grad:
            self._no_grad.add(node)
        args = tuple(self.argument(arg, no_grad=no_grad) for arg in node.args)
        kwargs = {key: self.argument(arg, no_grad=no_grad) for key, arg in named.items()}
        self._places[node] = self._call(node.op, node.name, target, args, kwargs).node
        if no_grad and self._keeps and node.meta["kind"] is Tensor and node not in self._plain:
            # Once for all: through what shares its memory it may be given a gradient later.
            self._places[node] = self.argument(node, no_grad=False).node
            self._no_grad.discard(node)

    def _check_numbers(self, node: fx.Node, target: str) -> None:
        """Refuses tensors where a run would need a number of Python's."""
        if target.startswith("math.") and not all(each in self._plain for each in node.all_input_nodes):
            raise InvalidLoss(f"{target} works on numbers, and .item() is still a tensor; use torch.{target[5:]}")
        fill = node.kwargs.get("fill_value", node.args[1] if len(node.args) > 1 else None)
        if target in ("torch.full", "torch.full_like") and isinstance(fill, fx.Node) and fill not in self._plain:
            raise InvalidLoss(f"{target} fills with a number that is known before; write torch.ones(...) * value")
        repeats = node.kwargs.get("repeats", node.args[1] if len(node.args) > 1 else None)
        if target.endswith("repeat_interleave") and isinstance(repeats, fx.Node) and repeats not in self._plain:
            raise InvalidLoss("repeat_interleave takes a whole number of repeats, not a tensor of them")

    def _item(self, node: fx.Node) -> None:
        """The value without its gradient, as a number has it."""
        source = node.args[0]
        assert isinstance(source, fx.Node)  # noqa: S101  # the method's own tensor
        value = Ref(self._places[source])
        if source in self._plain:
            self._plain.add(node)
        else:
            value = self._call("call_method", node.name, "detach", (value,))
            if self._keeps:
                value = self._call("call_method", f"{node.name}_kept", "clone", (value,))
        self._places[node] = value.node

    def _write(self, node: fx.Node, target: str, named: Mapping[str, Any]) -> None:
        """A call that changes its first argument, and returns it."""
        source = node.args[0]
        assert isinstance(source, fx.Node)  # noqa: S101  # what is written to
        value = written = self.argument(source, no_grad=False)
        no_grad = bool(node.meta["no_grad"])
        if no_grad:  # the value changes, and its gradient does not
            written = self._call("call_method", f"{node.name}_written", "detach", (value,))
        args = tuple(self.argument(arg, no_grad=no_grad) for arg in node.args[1:])
        kwargs = {key: self.argument(arg, no_grad=no_grad) for key, arg in named.items()}
        op = node.op
        if node in self._in_place:
            op, method = "call_method", _WRITES.get(target, "copy_")
            if method == "copy_":
                old = self._call("call_method", f"{node.name}_old", "clone", (written,))
                args = (self._call("call_function", f"{node.name}_new", target, (old, *args)),)
            target = method
        result = self._call(op, node.name, target, (written, *args), kwargs)
        self._places[node] = value.node if no_grad else result.node

    def _call(self, op: str, name: str, target: str, args: tuple[Any, ...], kwargs: Any = None) -> Ref:
        self.calls.append(Node(op, name, target, args, kwargs or {}))
        return Ref(self._inputs + len(self.calls) - 1)

    def argument(self, value: Any, *, no_grad: bool) -> Any:
        """An argument with places for nodes; of a call that has a gradient, without what should have none."""
        if isinstance(value, fx.Node):
            if no_grad or value not in self._no_grad or value in self._plain:
                return Ref(self._places[value])
            if value not in self._detached:
                place = Ref(self._places[value])
                self._detached[value] = self._call("call_method", f"{value.name}_detached", "detach", (place,)).node
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
