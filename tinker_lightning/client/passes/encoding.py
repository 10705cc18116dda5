"""Encodes a pass as numbered requests: split as the server asks, or as the gradients of a retained forward."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

from tinker_lightning.client.passes import chunking
from tinker_lightning.client.transport.operations import Operation, encode
from tinker_lightning.losses.builtin import LOSSES
from tinker_lightning.types import Datum, ForwardBackwardOutput, ModelInput, TensorData
from tinker_lightning.types.requests import ForwardBackwardRequest

if TYPE_CHECKING:
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
    requests = split(session, data)
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
        combined = chunking.combine([request.of_call(output, chunk) for output, chunk in pairs])
        retained = tuple(zip(numbers, map(len, chunks), strict=True))
        return replace(combined, retained=retained) if retain else combined

    return operations, combine


def split(session: Session, data: list[Datum]) -> list[list[Datum]]:
    """Divides a batch into requests of the size that the server accepts."""
    return chunking.split(data, session.config.fwdbwd_max_chunk_len, session.config.fwdbwd_max_chunk_bytes_count)


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

        gradients = [TensorData.of_array(-datum.loss_fn_inputs["weights"].to_numpy()) for datum in chunk]
        bare = [Datum(ModelInput([]), {"gradient": gradient}) for gradient in gradients]
        whole = partial(encoded, "forward_backward", chunk, {})
        return replace(encoded("retained_backward", bare, {"forward": float(forward)}), whole=whole)

    def operations(first: int) -> list[Operation[ForwardBackwardOutput]]:
        return [operation(number, *each) for number, each in enumerate(chunks, first)]

    return operations, chunking.combine


def _without_weights(datum: Datum) -> Datum:
    """Returns what a retained forward needs of a datum, whose weights are the gradient that follows."""
    return datum.with_only_inputs({"target_tokens": datum.loss_fn_inputs["target_tokens"]})
