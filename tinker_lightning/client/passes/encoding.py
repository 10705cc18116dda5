"""Encodes a pass as numbered requests: split as the server asks, or as the gradients of a retained forward."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

from tinker_lightning.client.transport.operations import Operation, encode
from tinker_lightning.losses.builtin import LOSSES
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
    from collections.abc import Sequence

    from tinker_lightning.client.passes.request import ServerPass
    from tinker_lightning.client.transport.session import Session

T = TypeVar("T")

# A request: what encodes it, in one or more operations from a number on, and what combines their results.
Parts: TypeAlias = tuple[Callable[[int], list[Operation[T]]], Callable[[list[T]], T]]


def parts(session: Session, model_id: str, request: ServerPass, *, forward_only: bool) -> Parts[ForwardBackwardOutput]:
    """Encodes a pass, in as many requests as the limits of the server need."""
    if request.retained is not None and not forward_only:
        return _of_retained(session, model_id, request, request.retained)
    retain = request.retain and session.extensions.retained_forwards
    name = "forward" if forward_only else "forward_backward"
    endpoint = "retained_forward" if retain else "forward_backward"
    if request.counted_only and not forward_only and request.loss in LOSSES and session.extensions.counted_logprobs:
        endpoint = "counted_forward_backward"
    settings = request.loss, request.config, forward_only, request.inputs, request.scale
    data = [_without_weights(datum) for datum in request.data] if retain else request.data
    requests = chunks_for(session, data)
    chunks = [request.for_call(chunk) for chunk in requests]
    numbers: list[int] = []

    def operations(first: int) -> list[Operation[ForwardBackwardOutput]]:
        numbers.extend(range(first, first + len(chunks)))
        return [
            encode(
                session.dialect,
                name,
                endpoint,
                ForwardBackwardRequest(model_id, number, chunk, *settings),
                ForwardBackwardOutput,
            )
            for number, chunk in zip(numbers, chunks, strict=True)
        ]

    def combine(outputs: list[ForwardBackwardOutput]) -> ForwardBackwardOutput:
        pairs = zip(outputs, requests, strict=True)
        combined = combine_outputs([request.of_call(output, chunk) for output, chunk in pairs])
        retained = tuple(zip(numbers, map(len, chunks), strict=True))
        return replace(combined, retained=retained) if retain else combined

    return operations, combine


def chunks_for(session: Session, data: list[Datum]) -> list[list[Datum]]:
    """Divides a batch into requests of the size that the server accepts."""
    return split(data, session.config.fwdbwd_max_chunk_len, session.config.fwdbwd_max_chunk_bytes_count)


def _of_retained(
    session: Session, model_id: str, request: ServerPass, retained: tuple[tuple[int, int], ...]
) -> Parts[ForwardBackwardOutput]:
    """Encodes the gradients of retained forwards without their datums, which follow only if the server needs them."""
    data = iter(request.data)
    chunks = [(forward, list(itertools.islice(data, count))) for forward, count in retained]

    def operation(number: int, forward: int, chunk: list[Datum]) -> Operation[ForwardBackwardOutput]:
        def encoded(endpoint: str, datums: list[Datum], config: dict[str, Any]) -> Operation[ForwardBackwardOutput]:
            asked = ForwardBackwardRequest(model_id, number, datums, request.loss, config)
            return encode(session.dialect, "forward_backward", endpoint, asked, ForwardBackwardOutput)

        gradients = [TensorData.wrap(-datum.loss_fn_inputs["weights"].to_numpy()) for datum in chunk]
        bare = [Datum(ModelInput([]), {"gradient": gradient}) for gradient in gradients]
        whole = partial(encoded, "forward_backward", chunk, {})
        return replace(encoded("retained_backward", bare, {"forward": float(forward)}), whole=whole)

    def operations(first: int) -> list[Operation[ForwardBackwardOutput]]:
        return [operation(number, *each) for number, each in enumerate(chunks, first)]

    return operations, combine_outputs


def _without_weights(datum: Datum) -> Datum:
    """Returns what a retained forward needs of a datum, whose weights are the gradient that follows."""
    return datum.with_only_inputs({"target_tokens": datum.loss_fn_inputs["target_tokens"]})


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
            size += 4 * chunk.length
        elif isinstance(chunk, ImageChunk):
            size += len(chunk.data)
        elif isinstance(chunk, DmelChunk):
            size += len(chunk.dmel)
    for tensor in datum.loss_fn_inputs.values():
        size += tensor.values.nbytes
        if tensor.sparse_crow_indices is not None and tensor.sparse_col_indices is not None:
            size += tensor.sparse_crow_indices.nbytes + tensor.sparse_col_indices.nbytes
    return size
