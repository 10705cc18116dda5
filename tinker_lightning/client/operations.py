"""One operation from submission to result: one round trip where the server can wait, two elsewhere."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from tinker_lightning.client.connection import JSON, PROTOBUF
from tinker_lightning.errors import (
    InvalidInput,
    NotFound,
    OperationFailed,
    ResultExpired,
    TinkerLightningError,
)
from tinker_lightning.types import ForwardBackwardOutput, SampleResponse
from tinker_lightning.types.requests import RetrieveFutureRequest
from tinker_lightning.wire import compression, protobuf
from tinker_lightning.wire import json as wire_json

if TYPE_CHECKING:
    from collections.abc import Callable

    import httpx

    from tinker_lightning.client.session import Session

logger = logging.getLogger("tinker_lightning.client")

T = TypeVar("T")

_BINARY: dict[type[Any], Callable[[bytes], Any]] = {
    ForwardBackwardOutput: protobuf.decode_output,
    SampleResponse: protobuf.decode_sample,
}


@dataclass(frozen=True, slots=True)
class Operation(Generic[T]):
    """Something to ask of a server.

    Args:
        endpoint: Behind `/api/v1/`.
        body: The encoded request.
        result: What it answers.
        model_id: The model or sampler that it is asked of.
        seq_id: Its number.
        content_type: Of the body.
    """

    endpoint: str
    body: bytes
    result: type[T]
    model_id: str = ""
    seq_id: int = 0
    content_type: str = JSON

    def __str__(self) -> str:
        return f"{self.endpoint} {self.seq_id} of {self.model_id}" if self.model_id else self.endpoint


async def perform(session: Session, operation: Operation[T], *, on_submitted: Callable[[], None] | None = None) -> T:
    """Submits an operation and waits for its result.

    Raises:
        TinkerLightningError: With the operation, its model, number and request id in the message.
    """
    request_id = ""
    try:
        try:
            response = await _submit(session, operation)
        finally:
            if on_submitted is not None:
                on_submitted()
        answered_itself = session.extensions.submit_and_wait and response.status_code != 408
        if not answered_itself:
            request_id = str(session.connection.json(response).get("request_id") or "")
            response = await _fetch(session, operation, request_id)
        return _decode(session, operation, response)
    except TinkerLightningError as error:
        # The same class, so that `except` keeps its meaning, with the operation in front.
        located = type(error)(f"{operation}{request_id and f', request {request_id}'}: {error}")
        located.operation, located.model_id = operation.endpoint, operation.model_id or None
        located.seq_id, located.request_id = operation.seq_id or None, request_id or None
        raise located from error


async def _submit(session: Session, operation: Operation[Any]) -> httpx.Response:
    wait = session.extensions.submit_and_wait
    body, headers = (
        operation.body,
        {"Content-Type": operation.content_type, "Accept": _accept(operation) if wait else JSON},
    )
    if session.config.proto_compress_fwdbwd and operation.content_type == PROTOBUF:
        body = compression.compress(body)
        headers["Content-Encoding"] = "zstd"
    prefix = "/ext/v1/" if wait else "/api/v1/"
    return await session.connection.send(
        "POST", prefix + operation.endpoint, body, headers=headers, pending=(408,) if wait else ()
    )


async def _fetch(session: Session, operation: Operation[Any], request_id: str) -> httpx.Response:
    """Polls for a result until it is there; says once per change what the server is waiting for."""
    if not request_id:
        raise OperationFailed("the server took the request but gave no request_id to fetch its result by")
    body = wire_json.dumps(RetrieveFutureRequest(request_id))
    headers = {"Accept": _accept(operation)}
    shown = "active"
    while True:
        try:
            response = await session.connection.send(
                "POST", "/api/v1/retrieve_future", body, headers=headers, pending=(408, 410)
            )
        except NotFound as error:
            raise ResultExpired(f"the server knows nothing of it: {error}") from error
        if response.status_code == 410:
            raise ResultExpired("its result is no longer kept")
        if response.status_code != 408:
            content = response.headers.get("content-type", "")
            if PROTOBUF in content or session.connection.json(response).get("type") != "try_again":
                return response
        pending = session.connection.json(response) if response.content else {}
        state = str(pending.get("queue_state") or "active")
        if state != shown:
            shown = state
            reason = pending.get("queue_state_reason") or "no reason given"
            logger.warning("%s: the server's queue is %s (%s)", operation, state, reason)


def _decode(session: Session, operation: Operation[T], response: httpx.Response) -> T:
    if PROTOBUF in response.headers.get("content-type", ""):
        decoded: T = _BINARY[operation.result](response.content)
        return decoded
    message = session.connection.json(response)
    if "error" in message:
        raise _failure(message)
    return wire_json.parse(operation.result, response.content)


def _failure(message: dict[str, Any]) -> TinkerLightningError:
    error = str(message["error"])
    return InvalidInput(error) if message.get("category") == "user" else OperationFailed(error)


def _accept(operation: Operation[Any]) -> str:
    return f"{PROTOBUF}, {JSON}" if operation.result in _BINARY else JSON
