"""Encodes requests in the terms of a dialect."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import numpy as np

from tinker_lightning.client.dialects.dialect import OLD_NESTED_FIELDS
from tinker_lightning.client.transport.connection import JSON, PROTOBUF
from tinker_lightning.errors import InvalidInput, Unsupported
from tinker_lightning.types import TensorData
from tinker_lightning.wire import json as wire_json
from tinker_lightning.wire import protobuf

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from tinker_lightning.client.dialects.dialect import Dialect
    from tinker_lightning.types import Datum
    from tinker_lightning.types.requests import ForwardBackwardRequest


def encode_pass(dialect: Dialect, request: ForwardBackwardRequest) -> tuple[str, bytes, str]:
    """Returns the endpoint, the body and the content type of a pass; a forward is one of `server_pass.as_forward`.

    Raises:
        InvalidInput: If the server would misunderstand a datum, or compute a gradient in a forward.
    """
    check_targets(dialect, request.data)
    if request.forward_only and dialect.forward == "zero_weights":
        for i, datum in enumerate(request.data):
            weights = datum.loss_fn_inputs.get("weights")
            if weights is None or weights.to_numpy().any():
                raise InvalidInput(
                    f"datum {i}: a forward needs weights of 0 on servers of the dialect {dialect.name!r}, because "
                    "their passes always accumulate a gradient"
                )
        request = dataclasses.replace(request, forward_only=False)
    endpoint = "forward" if request.forward_only and dialect.forward == "forward" else "forward_backward"
    if dialect.encoding == "json":
        return endpoint, wire_json.forward_backward_body(request), JSON
    return endpoint, protobuf.encode_forward_backward(request), PROTOBUF


def check_targets(dialect: Dialect, data: Sequence[Datum]) -> None:
    """Raises `InvalidInput` if a datum has several targets per position on a server that takes one."""
    if dialect.multiple_targets:
        return
    for i, datum in enumerate(data):
        targets = datum.loss_fn_inputs.get("target_tokens")
        if targets is not None and len(targets.shape) != 1:
            raise InvalidInput(
                f"datum {i}: target_tokens has the shape {targets.shape}, but servers of the dialect {dialect.name!r} "
                "take one target per position"
            )


def encode_json(dialect: Dialect, endpoint: str, request: Any) -> bytes:
    """Returns the JSON body of a request, without the optional fields that the server does not know.

    Raises:
        Unsupported: If such a field has a value that matters.
    """
    body: dict[str, Any] = {}
    for name in _unknown(dialect, endpoint, request):
        parent, _, nested = name.rpartition(".")
        body = body or wire_json.fields_of(request)
        if parent:
            body[parent] = {each: value for each, value in wire_json.fields_of(body[parent]).items() if each != nested}
        else:
            body.pop(name, None)
    return wire_json.dumps(body or request)


def _unknown(dialect: Dialect, endpoint: str, message: Any, prefix: str = "") -> Iterator[str]:
    """Yields the fields of a message that the server does not know; raises `Unsupported` if one has a value."""
    for field in dataclasses.fields(message):
        value, name = getattr(message, field.name), f"{prefix}{field.name}"
        if dialect.knows(endpoint, name):
            if not prefix and field.name in OLD_NESTED_FIELDS and dataclasses.is_dataclass(value):
                yield from _unknown(dialect, endpoint, value, f"{name}.")
            continue
        if value != field.default:
            raise Unsupported(f"{name}: servers of the dialect {dialect.name!r} do not support it; leave it out")
        yield name


def weighted(datum: Datum, weight: float) -> Datum:
    """Returns a datum with the same weight on all its targets."""
    targets = datum.loss_fn_inputs["target_tokens"]
    return datum.with_inputs(weights=TensorData.wrap(np.full(targets.shape, weight, np.float32)))
