"""A loss on one datum that a server runs, in the form of the protocol's `create_custom_loss`.

`fn(logprobs, *inputs)` gets the log-probabilities of a datum's targets and the inputs that its parameters name, and
returns `(loss, metrics)`. A batch's loss is the sum over its datums.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, fx

from tinker_lightning.errors import InvalidDatum, InvalidLoss, LossNotTraceable
from tinker_lightning.losses.surrogate import check_scalar
from tinker_lightning.lossgraph.graphs.graph import Graph
from tinker_lightning.lossgraph.graphs.json import Node, Ref, mapped
from tinker_lightning.lossgraph.graphs.run import Program
from tinker_lightning.lossgraph.tracing.record import Recorder, record
from tinker_lightning.lossgraph.tracing.signatures import (
    loss_and_metrics,
    place_of_function,
    signature_of,
    wrong_output,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from tinker_lightning.types import TensorData

# The name of an input that multiplies the loss, for servers that have no other way to scale it.
SCALE = "loss_scale"
MAX_INPUTS = 16
MAX_METRICS = 256
_LOGPROBS = "logprobs"
_INPUT = re.compile(r"[a-z_][a-z0-9_]{0,63}")
_METRIC = re.compile(r"custom/[a-z0-9_./-]{1,64}:(sum|mean)")


@dataclass(frozen=True, slots=True)
class LossInput:
    """An input of a loss: 0 dimensions for a number, 1 for `[T]`, 2 for `[T, K]`."""

    name: str
    rank: int


@dataclass(frozen=True, slots=True)
class DatumLoss:
    """A loss on one datum, as a graph. The first input is `logprobs`."""

    name: str
    inputs: tuple[LossInput, ...]
    program: Program

    @classmethod
    def decode(cls, name: str, inputs: Sequence[LossInput], graph: Any) -> DatumLoss:
        """Returns the loss that a client has uploaded.

        Raises:
            InvalidLoss: If it is malformed; says where.
        """
        _check_inputs(inputs)
        decoded = Graph.decode(graph, [each.name for each in inputs])
        _check_output(decoded.output)
        return cls(name[:200], tuple(inputs), Program(decoded))

    def scaled(self) -> DatumLoss:
        """Returns the same loss with one more input, by which it is multiplied."""
        graph, count = self.program.graph, len(self.inputs)

        def moved(value: Any) -> Any:
            return mapped(value, lambda part: Ref(part.node + (part.node >= count)) if isinstance(part, Ref) else part)

        loss, metrics = moved(graph.output)
        calls = [replace(node, args=moved(node.args), kwargs=moved(dict(node.kwargs))) for node in graph.calls]
        calls.append(Node("call_function", "scaled_loss", "operator.mul", (loss, Ref(count))))
        scaled = Graph([*graph.inputs, SCALE], calls, (Ref(count + len(calls)), metrics))
        return DatumLoss.decode(self.name, [*self.inputs, LossInput(SCALE, 0)], scaled.encode())

    def select(self, inputs: Mapping[str, TensorData]) -> list[TensorData]:
        """Returns the inputs that it reads from a datum, not yet as dense tensors.

        Args:
            inputs: The inputs of a datum, including `target_tokens`.

        Raises:
            InvalidDatum: If one is missing, or has the wrong number of dimensions.
        """
        found: list[TensorData] = []
        for each in self.inputs:
            name = "target_tokens" if each.name == _LOGPROBS else each.name
            if name not in inputs:
                raise InvalidDatum(f"{name}: missing; {self.name} reads it")
            tensor = inputs[name]
            # Protobuf does not distinguish a number from a vector of length 1.
            if len(tensor.shape) != each.rank and not (each.rank == 0 and tensor.shape == [1]):
                raise InvalidDatum(
                    f"{name}: has the shape {tensor.shape}, but {self.name} takes {each.rank} dimensions"
                )
            if each.name != _LOGPROBS:
                found.append(tensor)
        return found

    def check(
        self, shape: Sequence[int], selected: Sequence[TensorData], dtype: torch.dtype, deadline: float = math.inf
    ) -> None:
        """Runs the graph on shapes alone; `shape` is that of the log-probabilities.

        Raises:
            InvalidLoss: If a call of the graph cannot take its arguments, or takes too much.
        """
        values = [torch.empty(shape, dtype=dtype, device="meta")]
        for given, each in zip(selected, self.inputs[1:], strict=True):
            kind = torch.int64 if given.dtype == "int64" else dtype
            values.append(torch.empty(given.shape if each.rank else [], dtype=kind, device="meta"))
        self.program.check(values, deadline=deadline)

    def tensors(self, selected: Sequence[TensorData], dtype: torch.dtype) -> list[Tensor]:
        """Returns what was selected as dense tensors; floating-point ones in that dtype."""
        tensors = [each.to_torch() for each in selected]
        tensors = [tensor.to(dtype) if tensor.is_floating_point() else tensor for tensor in tensors]
        return [t if each.rank else t.reshape(()) for t, each in zip(tensors, self.inputs[1:], strict=True)]

    def __call__(
        self, logprobs: Tensor, arguments: Sequence[Tensor], deadline: float = math.inf
    ) -> tuple[Tensor, dict[str, Any]]:
        """Returns the loss of a datum, and its metrics as the graph returns them.

        Raises:
            InvalidLoss: If a call of the graph fails or takes too much, or the loss is no scalar.
        """
        loss, metrics = self.program([logprobs, *arguments], deadline=deadline)
        check_scalar(loss)
        return loss, metrics


def trace_datum_loss(fn: Callable[..., Any], input_ranks: Mapping[str, int]) -> DatumLoss:
    """Traces a function of one datum.

    Args:
        fn: `fn(logprobs, *inputs)`, which returns `(loss, metrics)`; metrics are named `custom/<name>:sum` or `:mean`.
        input_ranks: The number of dimensions of `logprobs` and of each input.

    Raises:
        LossNotTraceable: If a graph cannot express it; names the line.
    """
    name = getattr(fn, "__name__", type(fn).__name__)
    inputs = _signature(fn, name, input_ranks)

    def body(recorder: Recorder) -> Any:
        returned = fn(*(recorder.input(each.name, each.rank, has_grad=each.name == _LOGPROBS) for each in inputs))
        loss, metrics = loss_and_metrics(fn, returned)
        for key, value in metrics.items():
            if not isinstance(key, str):
                raise LossNotTraceable(f"{place_of_function(fn)}a metric cannot be called {key!r:.100}; use a text")
            if not isinstance(value, fx.Proxy):
                wrong_output(fn, f"metric {key!r} as a tensor computed from what it is given", value)
        return loss, metrics

    graph = record(fn, body)
    return replace(DatumLoss.decode(name, inputs, graph.encode()), program=Program(graph))


def _signature(fn: Callable[..., Any], name: str, input_ranks: Mapping[str, int]) -> list[LossInput]:
    parameters = list(signature_of(fn).parameters.values())
    for each in parameters:
        if each.kind not in (each.POSITIONAL_ONLY, each.POSITIONAL_OR_KEYWORD) or each.default is not each.empty:
            raise InvalidLoss(
                f"{name}: the parameter {each.name} must be a plain one without a default: it names an input that each "
                "datum has"
            )
    names = [each.name for each in parameters]
    if set(input_ranks) != set(names):
        raise InvalidLoss(
            f"{name}: input_ranks must give the number of dimensions of {', '.join(names)}, got "
            f"{', '.join(map(str, input_ranks)) or 'none'}"
        )
    inputs = [LossInput(each, input_ranks[each]) for each in names]
    _check_inputs(inputs)
    return inputs


def _check_inputs(inputs: Sequence[LossInput]) -> None:
    if not inputs or inputs[0].name != _LOGPROBS or inputs[0].rank not in (1, 2):
        raise InvalidLoss("the first input must be logprobs, with 1 dimension ([T]) or 2 ([T, K])")
    if len(inputs) > MAX_INPUTS:
        raise InvalidLoss(f"a loss of a datum takes at most {MAX_INPUTS} inputs, got {len(inputs)}")
    for each in inputs:
        if not _INPUT.fullmatch(each.name):
            raise InvalidLoss(f"an input cannot be called {each.name!r:.80}; use small letters, digits and '_'")
        if each.rank not in (0, 1, 2):
            raise InvalidLoss(f"{each.name}: an input has 0, 1 or 2 dimensions, not {each.rank!r:.20}")


def _check_output(output: Any) -> None:
    if not (isinstance(output, tuple | list) and len(output) == 2 and isinstance(output[0], Ref)):
        raise InvalidLoss("the graph must return (loss, metrics)")
    if not isinstance(output[1], dict):
        raise InvalidLoss("the graph must return its metrics as a dict")
    if len(output[1]) > MAX_METRICS:
        raise InvalidLoss(f"a loss returns at most {MAX_METRICS} metrics, got {len(output[1])}")
    for name, value in output[1].items():
        if not _METRIC.fullmatch(name):
            raise InvalidLoss(
                f"the metric {name!r:.100} must be called custom/<name>:sum or custom/<name>:mean, in small letters; "
                "the ending says how it is put together over datums"
            )
        if not isinstance(value, Ref):
            raise InvalidLoss(f"the metric {name!r} must be a tensor")
