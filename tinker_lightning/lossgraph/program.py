"""Runs a graph with bounded memory and time.

Before a graph runs on tensors, it runs on shapes: torch's `meta` device determines the shape of each result without
computing values, so a call that would exhaust the memory raises before it is made. After a call whose result has a size
that depends on values (`x[mask]`), each call is checked right before it runs.
"""

from __future__ import annotations

import math
import time
from collections import OrderedDict
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from tinker_lightning.errors import InvalidLoss, MemoryLimitExceeded
from tinker_lightning.lossgraph.functions import broadcast_elements, find
from tinker_lightning.lossgraph.graph import Node, Ref, leaves, map_leaves, refs
from tinker_lightning.lossgraph.guards import MAX_PIECES, check_device, is_mask, number

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from tinker_lightning.lossgraph.functions import Function
    from tinker_lightning.lossgraph.graph import Graph

_MAX_RANK = 12
_META = torch.device("meta")
_KEPT_PLANS = 4096  # one per length of datums
# Sequences are processed item by item; each item takes as long as this many elements of a tensor.
_MAX_PARTS = 4 * MAX_PIECES
_PART_WORK = 1024


@dataclass(frozen=True, slots=True)
class Limits:
    """The limits of one run of a graph."""

    elements: int = 1 << 23  # of one value
    total: int = 1 << 27  # elements that all calls together read and write, which also bounds the backward
    seconds: float = 20.0  # after which no further call is started
    memory: int = 4 << 30  # bytes of all new values together, because a backward may keep all of them
    # Takes memory for the values of a run before they are created; raises if there is not enough.
    reserve: Callable[[int], None] | None = field(default=None, compare=False)
    deadline: float = field(default=math.inf, compare=False)  # as in `time.monotonic`, in addition to `seconds`


@dataclass(frozen=True, slots=True)
class Use:
    """The use of memory and time: elements read and written, bytes of all new values, and bytes of the largest."""

    total: int = 0
    kept: int = 0
    largest: int = 0

    @property
    def memory(self) -> int:
        """The memory of a run at its peak: all values, and in a backward the gradients of a call."""
        return self.kept + 3 * self.largest


class Meter:
    """Counts elements and bytes, and raises when they exceed the limits.

    Args:
        limits: The limits.
        used: The use of earlier calls of the same run.
        reserve: Takes memory before values are created.
    """

    def __init__(
        self,
        limits: Limits,
        used: Use = Use(),
        reserve: Callable[[int], None] | None = None,  # immutable
    ) -> None:
        self._limits = limits
        self._total, self._kept, self._largest = used.total, used.kept, used.largest
        self._reserve = reserve
        if reserve is not None:
            reserve(used.memory)

    @property
    def used(self) -> Use:
        """The use up to now."""
        return Use(self._total, self._kept, self._largest)

    def size(self, value: Any) -> None:
        """Raises if a value is too large, or of a kind that a graph cannot hold."""
        if isinstance(value, Tensor):
            if value.ndim > _MAX_RANK:
                raise InvalidLoss(f"it returns a tensor with {value.ndim} dimensions; at most {_MAX_RANK} are allowed")
            self.elements(value.numel(), value.dtype.itemsize)
        elif isinstance(value, tuple | list):
            # Flat and short, because checking nested sequences could take too long.
            if len(value) > MAX_PIECES:
                raise InvalidLoss(f"it returns {len(value)} values; at most {MAX_PIECES} are allowed")
            for part in value:
                if isinstance(part, tuple | list):
                    raise InvalidLoss("it returns nested sequences")
                self.size(part)
        elif value is not None and not isinstance(value, torch.dtype | torch.device):
            number(value)

    def elements(self, count: int, itemsize: int = 4) -> None:
        """Raises if a tensor has too many elements."""
        if count > (most := min(self._limits.elements, self._limits.memory // itemsize)):
            raise InvalidLoss(f"it would create a tensor of {count:.3g} elements; at most {most:.3g} are allowed")

    def keep(self, size: int) -> None:
        """Counts the bytes of new values, which may have to be kept for a backward."""
        self._kept += size
        if self._kept > self._limits.memory:
            raise InvalidLoss(
                f"up to here the loss takes {self._kept / 2**30:.3g} GiB of memory; at most "
                f"{self._limits.memory / 2**30:.3g} GiB are allowed. Use a smaller batch, or fewer operations on large "
                "tensors."
            )
        self._largest = max(self._largest, size)
        if self._reserve is not None:
            self._reserve(self.used.memory)

    def add(self, work: int) -> None:
        """Counts the elements that a call reads, computes and writes."""
        self._total += work
        if self._total > self._limits.total:
            raise InvalidLoss(
                f"up to here the loss reads and writes {self._total:.3g} elements; at most {self._limits.total:.3g} "
                "are allowed. Use a smaller batch, or fewer operations on large tensors; matrix products count least "
                "in float32."
            )


DEFAULT_LIMITS = Limits()


class Program:
    """A graph that can be run, by one thread at a time."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self._functions = [find(node.op, node.target) for node in graph.calls]
        self._plans: OrderedDict[Any, tuple[int, Use]] = OrderedDict()
        self._last_use = _last_uses(graph)

    def __call__(self, values: Sequence[Any], limits: Limits = DEFAULT_LIMITS) -> Any:
        """Returns the result of the graph; raises `InvalidLoss` with the node that fails or exceeds the limits."""
        checked, used = self._plan(values, limits)
        devices = {value.device for value in values if isinstance(value, Tensor)}
        device = devices.pop() if devices else torch.device("cpu")
        environment: list[Any] = [*values, *(None for _ in self.graph.calls)]
        meter = Meter(limits, used, limits.reserve)
        for i, node, function in self._calls("the loss has run for", limits):
            with _error_at_node(node):
                if i >= checked:
                    _count_parts(node, environment, meter)
                args, kwargs = _resolve(node, function, environment, device)
                if i >= checked and not _check_dynamic(node, function, args, kwargs, meter):
                    _attempt(function, _shape_of(args), _shape_of(kwargs), meter)
                environment[len(values) + i] = function.call(*args, **kwargs)
            for position in self._last_use[i]:
                environment[position] = None
        return _fill(self.graph.output, environment)

    def check(self, values: Sequence[Any], limits: Limits = DEFAULT_LIMITS) -> int:
        """Runs the graph on shapes, up to the first result of unknown size; returns the number of calls checked."""
        return self._plan(values, limits)[0]

    def _plan(self, values: Sequence[Any], limits: Limits) -> tuple[int, Use]:
        """Returns the number of calls that were checked, and what they use."""
        key = (limits, *(_signature(value) for value in values))
        if key in self._plans:
            self._plans.move_to_end(key)
            return self._plans[key]
        environment: list[Any] = [*(_shape_of(value) for value in values), *(None for _ in self.graph.calls)]
        meter = Meter(limits)
        for target, value in zip(self.graph.inputs, values, strict=True):
            with _error_at_node(Node("placeholder", target, target)):
                meter.size(value)
        checked, used = 0, meter.used
        for i, node, function in self._calls("checking the loss took", limits):
            with _error_at_node(node):
                _count_parts(node, environment, meter)
                args, kwargs = _resolve(node, function, environment, _META)
                if _check_dynamic(node, function, args, kwargs, meter):
                    break
                environment[len(values) + i] = _attempt(function, args, kwargs, meter)
            checked, used = checked + 1, meter.used
        self._plans[key] = checked, used
        if len(self._plans) > _KEPT_PLANS:
            self._plans.popitem(last=False)
        return checked, used

    def _calls(self, doing: str, limits: Limits) -> Iterator[tuple[int, Node, Function]]:
        deadline = min(limits.deadline, time.monotonic() + limits.seconds)
        for i, node in enumerate(self.graph.calls):
            if time.monotonic() > deadline:
                raise InvalidLoss(f"node {node.name!r}: {doing} {limits.seconds:g} s and was stopped")
            yield i, node, self._functions[i]


def _attempt(function: Function, args: Any, kwargs: Any, meter: Meter) -> Any:
    """Returns the result of a call on shapes."""
    if function.inside is not None:
        inside = function.inside(*args, **kwargs)
        meter.elements(inside)
        meter.keep(4 * inside)
    if function.work is not None:
        meter.add(function.work(*args, **kwargs))
    result = function.call(*args, **kwargs)
    meter.size(result)
    meter.keep(_new_bytes(args, kwargs, result))
    meter.add(sum(tensor.numel() for tensor in _tensors([args, kwargs, result])))
    return result


def _check_dynamic(node: Node, function: Function, args: Any, kwargs: Any, meter: Meter) -> bool:
    """Returns whether the size of a result depends on values; counts the largest possible result if so."""
    is_item = node.target == "operator.getitem"
    if not (function.is_dynamic or (is_item and len(args) == 2 and is_mask(args[1]))):
        return False
    tensors = _tensors([args, kwargs])
    # A mask may be broadcast with a smaller tensor.
    picked = max((0 if is_item else broadcast_elements(*tensors), *(tensor.numel() for tensor in tensors)))
    rank = max((tensor.ndim for tensor in tensors), default=0)
    meter.add(picked * (rank + 2))
    # The selected values, or the indices of the true ones.
    itemsize = max((tensor.dtype.itemsize for tensor in tensors), default=0)
    meter.keep(picked * (itemsize if is_item else max(itemsize, 8 * rank)))
    return True


def _new_bytes(args: Any, kwargs: Any, result: Any) -> int:
    """Returns the bytes of a result that it does not share with the arguments."""
    shared = {tensor.untyped_storage()._cdata for tensor in _tensors([args, kwargs])}
    storages = (tensor.untyped_storage() for tensor in _tensors(result))
    return sum({each._cdata: each.nbytes() for each in storages if each._cdata not in shared}.values())


@contextmanager
def _error_at_node(node: Node) -> Iterator[None]:
    """Converts exceptions to `InvalidLoss` with the name of the node."""
    try:
        yield
    except MemoryLimitExceeded:
        raise
    except InvalidLoss as error:
        raise InvalidLoss(f"node {node.name!r}: {error}") from error
    except NotImplementedError as error:
        raise InvalidLoss(
            f"node {node.name!r}: the size of the result of {node.target} depends on values, so it cannot be checked "
            "before it runs; use torch.where and sums"
        ) from error
    except Exception as error:
        reason = str(error).strip().partition("\n")[0][:300] or type(error).__name__
        raise InvalidLoss(f"node {node.name!r}: {node.target} failed: {reason}") from error


def _count_parts(node: Node, environment: list[Any], meter: Meter) -> None:
    """Counts the items of the sequences that a call refers to, once per reference."""
    values = (environment[position] for position in refs([node.args, dict(node.kwargs)]))
    parts = sum(len(value) for value in values if isinstance(value, tuple | list))
    if parts > _MAX_PARTS:
        raise InvalidLoss(f"{node.target} gets {parts} values; at most {_MAX_PARTS} are allowed")
    if node.target != "operator.getitem":  # which reads only one
        meter.add(_PART_WORK * parts)


def _resolve(
    node: Node, function: Function, environment: list[Any], device: torch.device
) -> tuple[list[Any], dict[str, Any]]:
    """Returns the arguments of a call, with the device of the run in place of every other device."""
    args = [_fill(arg, environment, device) for arg in node.args]
    kwargs = {key: _fill(arg, environment, device) for key, arg in node.kwargs.items()}
    if function.is_factory:
        kwargs["device"] = device
    elif "device" in kwargs:
        check_device(kwargs["device"])
    return args, kwargs


def _fill(value: Any, environment: list[Any], device: torch.device | None = None) -> Any:
    def fill(part: Any) -> Any:
        part = environment[part.node] if isinstance(part, Ref) else part
        return device if isinstance(part, torch.device) and device is not None else part

    return map_leaves(value, fill)


def _shape_of(value: Any) -> Any:
    """Returns a value with tensors on the meta device, which have no memory.

    Strides are kept: `contiguous` copies an expanded tensor, but not one that has all of its elements.
    """

    def shape(part: Any) -> Any:
        if isinstance(part, Tensor):
            return torch.empty_strided(part.shape, part.stride(), dtype=part.dtype, device=_META)
        return _META if isinstance(part, torch.device) else part

    return map_leaves(value, shape)


def _signature(value: Any) -> Any:
    return (value.shape, value.dtype) if isinstance(value, Tensor) else (type(value), value)


def _tensors(value: Any) -> list[Tensor]:
    return [part for part in leaves(value) if isinstance(part, Tensor)]


def _last_uses(graph: Graph) -> list[list[int]]:
    """Returns, for each call, the positions of the values that no later call needs."""
    last = {position: i for i, node in enumerate(graph.calls) for position in refs([node.args, dict(node.kwargs)])}
    freed: list[list[int]] = [[] for _ in graph.calls]
    for position in last.keys() - {*refs(graph.output)}:
        freed[last[position]].append(position)
    return freed
