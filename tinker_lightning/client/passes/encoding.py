"""Encodes a pass as numbered requests: split as the server asks, or as the gradients of a retained forward."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

from tinker_lightning.client.dialects.surrogate import Surrogate
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

    from torch import Tensor

    from tinker_lightning.client.passes.request import ServerPass
    from tinker_lightning.client.transport.session import Session

T = TypeVar("T")

# A request: what encodes it, in one or more operations from a number on, and what combines their results.
Parts: TypeAlias = tuple[Callable[[int], list[Operation[T]]], Callable[[list[T]], T]]


def parts(session: Session, model_id: str, request: ServerPass, *, forward_only: bool) -> Parts[ForwardBackwardOutput]:
    """Encodes a pass, in as many requests as the limits of the server need."""
    if request.retained is not None:
        return _retained_parts(session, model_id, request, request.retained)
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
            return encode(session.dialect, "forward_backward", endpoint, body, ForwardBackwardOutput)

        def whole() -> Operation[ForwardBackwardOutput]:
            data, gradients = zip(*chunk, strict=True)
            return encoded("forward_backward", Surrogate().datums(data, gradients, None), {})

        bare = [Datum(ModelInput([]), {"gradient": TensorData(each, copy=False)}) for _, each in chunk]
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
