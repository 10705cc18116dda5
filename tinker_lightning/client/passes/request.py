"""A pass with a server-side loss: what it contains, and the numbered requests that it is encoded in."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, TypeVar

import numpy as np
from torch import Tensor

from tinker_lightning.client.dialects.surrogate import Surrogate, completed, times
from tinker_lightning.client.server_losses import LossHandle, located
from tinker_lightning.client.transport.operations import Operation, encode
from tinker_lightning.errors import InvalidInput
from tinker_lightning.losses import custom
from tinker_lightning.losses.builtin import LOSSES
from tinker_lightning.lossgraph.graph import Graph
from tinker_lightning.types import (
    Datum,
    DmelChunk,
    EncodedTextChunk,
    ForwardBackwardOutput,
    ImageChunk,
    ModelInput,
    TensorData,
)
from tinker_lightning.types.requests import ForwardBackwardRequest

if TYPE_CHECKING:
    from concurrent.futures import Future

    from tinker_lightning.client.dialects.dialect import Dialect
    from tinker_lightning.client.futures import TinkerFuture
    from tinker_lightning.client.transport.session import Session

T = TypeVar("T")

_NO_TOKENS = ModelInput()


@dataclass(frozen=True, slots=True)
class ServerPass:
    """A pass that is checked and ready to be sent."""

    data: list[Datum]
    loss: str
    config: dict[str, float | str] = field(default_factory=dict)
    inputs: dict[str, TensorData] = field(default_factory=dict)  # given once for the batch
    scale: float = 1.0  # the server multiplies the gradient by it
    local: LossHandle | None = None  # a per-datum loss that the server does not run
    finish: Callable[[ForwardBackwardOutput], ForwardBackwardOutput] | None = None  # converts the result
    lose: Callable[[], None] | None = None  # called if the server may have dropped the loss
    graphs: Sequence[Graph] = ()  # as they were traced here, to find the line of an error
    per_batch: Literal["no", "call", "window"] = "no"  # the sequences by which the server divides
    even_batch: bool = False  # the server needs an even number of datums
    counted_only: bool = False  # log-probabilities are read only where the built-in loss depends on them
    retain: bool = False  # a forward that the server keeps for its gradient, if it can
    retained: tuple[tuple[int, int], ...] | None = None  # the forwards that a gradient belongs to, see the output
    gradients: Sequence[Tensor] = ()  # of the retained forwards, in place of datums that carry them
    forward_only: str = ""  # why the pass has no gradient on this server

    def received(self, future: TinkerFuture[ForwardBackwardOutput]) -> TinkerFuture[ForwardBackwardOutput]:
        """Returns the future that the caller gets.

        A server makes room by dropping losses. A failed pass cannot be repeated, because later ones are already in
        flight; but the next pass with this loss uploads it again.
        """
        lose = self.lose
        if lose is not None:
            # Registered first, so that whoever sees the failure and continues finds it noted.
            future._source.add_done_callback(lambda source: lose() if _is_rejected(source) else None)
        finish = self.finish or (lambda output: output)
        return future.then(finish, functools.partial(located, graphs=self.graphs))

    def call_datums(self, chunk: list[Datum]) -> list[Datum]:
        """Returns the datums of one request, with the division by its number of sequences undone."""
        chunk = completed(chunk) if self.even_batch else chunk
        return times(chunk, len(chunk)) if self.per_batch == "call" else chunk

    def call_output(self, output: ForwardBackwardOutput, chunk: list[Datum]) -> ForwardBackwardOutput:
        """Returns the result of one request, without the datum that made its number even."""
        return replace(output, loss_fn_outputs=output.loss_fn_outputs[: len(chunk)]) if self.even_batch else output


def surrogate_pass(
    carrier: Surrogate,
    data: list[Datum],
    gradients: Sequence[Tensor],
    logprobs: Sequence[Tensor] | None = None,
    retained: tuple[tuple[int, int], ...] | None = None,
) -> ServerPass:
    """Returns the pass whose surrogate loss carries the gradient of another loss.

    Args:
        carrier: The surrogate loss of the server.
        data: The datums.
        gradients: The gradient with respect to the log-probabilities of each datum.
        logprobs: These log-probabilities; only some surrogates need them.
        retained: The forwards that the server keeps for this gradient, which is then sent as it is.
    """
    if retained is not None:
        return ServerPass(data, carrier.loss, gradients=gradients, retained=retained)
    return ServerPass(
        carrier.datums(data, gradients, logprobs),
        carrier.loss,
        carrier.config,
        per_batch=carrier.per_batch,
        even_batch=carrier.even_batch,
    )


def as_forward(dialect: Dialect, request: ServerPass) -> ServerPass:
    """Returns a pass with the weights at which a server computes no gradient and all log-probabilities."""
    if dialect.forward == "zero_weights":
        data = [weighted(datum, 0.0) for datum in request.data]
        return replace(request, data=data, loss=custom.SURROGATE, config={})
    if dialect.unit_forward_weights:
        return replace(request, data=[weighted(datum, 1.0) for datum in request.data])
    return request


def weighted(datum: Datum, weight: float) -> Datum:
    """Returns a datum with the same weight on all its targets."""
    targets = datum.loss_fn_inputs["target_tokens"]
    return datum.with_inputs(weights=TensorData.wrap(np.full(targets.shape, weight, np.float32)))


def _is_rejected(source: Future[Any]) -> bool:
    return not source.cancelled() and isinstance(source.exception(), InvalidInput)


# A request: what encodes it, in one or more operations from a number on, and what combines their results.
Parts: TypeAlias = tuple[Callable[[int], list[Operation[T]]], Callable[[list[T]], T]]


def parts(session: Session, model_id: str, request: ServerPass, *, forward_only: bool) -> Parts[ForwardBackwardOutput]:
    """Encodes a pass, in as many requests as the limits of the server need."""
    if request.retained is not None:
        return _retained_parts(session, model_id, request, request.retained)
    if forward_only:
        request = as_forward(session.dialect, request)
    name = "forward" if forward_only else "forward_backward"
    endpoint = "retained_forward" if request.retain else "forward_backward"
    if request.counted_only and not forward_only and request.loss in LOSSES and session.extensions.counted_logprobs:
        endpoint = "counted_forward_backward"
    settings = request.loss, request.config, forward_only, request.inputs, request.scale
    requests = chunks_for(session, request.data)
    chunks = [request.call_datums(chunk) for chunk in requests]
    numbers: list[int] = []

    def operations(first: int) -> list[Operation[ForwardBackwardOutput]]:
        numbers.extend(range(first, first + len(chunks)))
        pairs = zip(numbers, chunks, strict=True)
        return [
            encode(session.dialect, endpoint, body, ForwardBackwardOutput, name)
            for body in (ForwardBackwardRequest(model_id, number, chunk, *settings) for number, chunk in pairs)
        ]

    def combine(outputs: list[ForwardBackwardOutput]) -> ForwardBackwardOutput:
        pairs = zip(outputs, requests, strict=True)
        combined = combine_outputs([request.call_output(output, chunk) for output, chunk in pairs])
        retained = tuple(zip(numbers, map(len, chunks), strict=True))
        return replace(combined, retained=retained) if request.retain else combined

    return operations, combine


def chunks_for(session: Session, data: list[Datum]) -> list[list[Datum]]:
    """Divides a batch into requests of the size that the server accepts."""
    return split(data, session.config.fwdbwd_max_chunk_len, session.config.fwdbwd_max_chunk_bytes_count)


def _retained_parts(
    session: Session, model_id: str, request: ServerPass, retained: tuple[tuple[int, int], ...]
) -> Parts[ForwardBackwardOutput]:
    """Encodes the gradients of retained forwards without their datums, which follow only if the server needs them."""
    pairs = zip(request.data, request.gradients, strict=True)
    chunks = [(forward, list(itertools.islice(pairs, count))) for forward, count in retained]

    def operation(number: int, forward: int, chunk: list[tuple[Datum, Tensor]]) -> Operation[ForwardBackwardOutput]:
        def encoded(endpoint: str, datums: list[Datum], config: dict[str, Any]) -> Operation[ForwardBackwardOutput]:
            body = ForwardBackwardRequest(model_id, number, datums, request.loss, config)
            return encode(session.dialect, endpoint, body, ForwardBackwardOutput, "forward_backward")

        def whole() -> Operation[ForwardBackwardOutput]:
            data, gradients = zip(*chunk, strict=True)
            return encoded("forward_backward", Surrogate().datums(data, gradients, None), {})

        bare = [Datum(_NO_TOKENS, {"gradient": TensorData(each, copy=False)}) for _, each in chunk]
        return replace(encoded("retained_backward", bare, {"forward": float(forward)}), whole=whole)

    def operations(first: int) -> list[Operation[ForwardBackwardOutput]]:
        return [operation(number, *each) for number, each in enumerate(chunks, first)]

    return operations, combine_outputs


def split(data: Sequence[Datum], max_datums: int, max_bytes: int) -> list[list[Datum]]:
    """Splits datums into consecutive runs within both limits; a datum above the limit is sent alone."""
    chunks: list[list[Datum]] = []
    filled = 0
    for datum in data:
        own = _size(datum)
        if not chunks or len(chunks[-1]) >= max_datums or filled + own > max_bytes:
            chunks.append([])
            filled = 0
        chunks[-1].append(datum)
        filled += own
    return chunks


def combine_outputs(outputs: Sequence[ForwardBackwardOutput]) -> ForwardBackwardOutput:
    """Combines results: outputs in order, metrics reduced by the suffix of their names."""
    if len(outputs) == 1:
        return outputs[0]
    counts = [len(output.loss_fn_outputs) for output in outputs]
    metrics: dict[str, float] = {}
    for name in outputs[0].metrics:
        values = [output.metrics[name] for output in outputs if name in output.metrics]
        if len(values) == len(outputs):
            metrics |= reduced(name, values, counts)
    return ForwardBackwardOutput(
        [datum for output in outputs for datum in output.loss_fn_outputs], metrics, outputs[0].loss_fn_output_type
    )


def reduced(name: str, values: list[float], counts: list[int]) -> dict[str, float]:
    """Reduces a metric of several passes by its suffix, e.g. `tokens:sum`; returns nothing for unknown suffixes.

    `counts` are the numbers of datums of the passes, by which means are weighted.
    """
    mean = sum(value * count for value, count in zip(values, counts, strict=True)) / max(sum(counts), 1)
    kind = name.rpartition(":")[2]
    if kind == "unique":
        return {name if i == 0 else f"{name}_{i}": value for i, value in enumerate(values)}
    reduced = {
        "sum": sum(values),
        "mean": mean,
        "min": min(values),
        "max": max(values),
        "slack": max(values) - mean,
        "hash2": float(sum(int(value) % 2**64 for value in values) % 2**64) if kind == "hash2" else 0.0,
    }
    return {name: reduced[kind]} if kind in reduced else {}


def size(data: Sequence[Datum]) -> int:
    """Estimates the size of datums on the wire, in bytes."""
    return sum(map(_size, data))


def _size(datum: Datum) -> int:
    """Estimates the size of a datum on the wire, in bytes."""
    size = 0
    for chunk in datum.model_input.chunks:
        if isinstance(chunk, EncodedTextChunk):
            size += chunk.tokens.nbytes
        elif isinstance(chunk, ImageChunk):
            size += len(chunk.data)
        elif isinstance(chunk, DmelChunk):
            size += len(chunk.dmel)
    for tensor in datum.loss_fn_inputs.values():
        size += tensor.values.nbytes
        if tensor.sparse_crow_indices is not None and tensor.sparse_col_indices is not None:
            size += tensor.sparse_crow_indices.nbytes + tensor.sparse_col_indices.nbytes
    return size
