"""Splits a batch into requests that the server accepts, and combines their results."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tinker_lightning.types import DmelChunk, EncodedTextChunk, ForwardBackwardOutput, ImageChunk

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tinker_lightning.types import Datum


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


def combine(outputs: Sequence[ForwardBackwardOutput]) -> ForwardBackwardOutput:
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
