"""One operation from submission to result: one round trip where the server can wait, two elsewhere."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import httpx

from tinker_lightning.client.transport.answers import is_receipt, pending
from tinker_lightning.client.transport.recording import OperationRecord
from tinker_lightning.errors import (
    AnswerLost,
    InvalidInput,
    InvalidMessage,
    NotATinkerServer,
    NotFound,
    NotRetained,
    OperationFailed,
    ResultExpired,
    ServerUnreachable,
    TinkerLightningError,
    input_error,
)
from tinker_lightning.losses.builtin import LOSSES
from tinker_lightning.types import ForwardBackwardOutput, OptimStepResponse, SampleResponse
from tinker_lightning.types.requests import (
    ForwardBackwardRequest,
    ModelRequest,
    RetrieveFutureRequest,
    SampleRequest,
)
from tinker_lightning.wire import compression, protobuf
from tinker_lightning.wire import json as wire_json

if TYPE_CHECKING:
    from tinker_lightning.client.dialects.dialect import Dialect
    from tinker_lightning.client.transport.retries import Wait
    from tinker_lightning.client.transport.session import Session

T = TypeVar("T")
E = TypeVar("E", bound=TinkerLightningError)

JSON, PROTOBUF = wire_json.CONTENT_TYPE, protobuf.CONTENT_TYPE

# Our server's id of an operation whose submission is answered with the result.
REQUEST_ID_HEADER = "x-request-id"

_BINARY: dict[type[Any], Callable[[bytes], Any]] = {
    ForwardBackwardOutput: protobuf.decode_output,
    SampleResponse: protobuf.decode_sample,
}
# The names of metrics that some servers call differently.
_METRICS = {
    "skyrl.ai/grad_norm": "grad_norm",
    "skyrl.ai/learning_rate": "learning_rate",
    "grad_norm:mean": "grad_norm",
}
# The longest pause between polls of a server that answers polls immediately.
_POLL_SECONDS = 1.0
# How many answers of 500 to a poll are taken for a passing fault.
_BROKEN_POLLS = 3
# How often the server is asked for a result that arrives damaged, and the pause before, which grows.
_DAMAGED_RESULTS, _DAMAGED_SECONDS = 5, 0.05


@dataclass(frozen=True, slots=True)
class Operation(Generic[T]):
    """An encoded request: what the user called, where it is posted, and the class of its result."""

    name: str
    endpoint: str
    body: bytes
    content_type: str
    result: type[T]
    model_id: str | None = None  # or the sampler's id
    seq_id: int | None = None
    request: Any = None  # kept where the number may change until the operation is posted
    whole: Callable[[], Operation[T]] | None = None  # the same with its datums, if the server does not retain them
    datums: int | None = None  # of a pass
    targets: list[int] | None = None  # of each datum, where the result has the log-probability of each
    record: OperationRecord | None = None  # if it is measured

    def __str__(self) -> str:
        return self.name if self.model_id is None else f"{self.name} {self.seq_id} of {self.model_id}"


def encode(dialect: Dialect, endpoint: str, request: Any, result: type[T], name: str = "") -> Operation[T]:
    """Encodes a request in the terms of a dialect; its name is the endpoint if none is given.

    Raises:
        InvalidInput: If it contains something that cannot be sent.
    """
    name = name or endpoint
    if isinstance(request, ForwardBackwardRequest):
        standard, body, content_type = dialect.encode_pass(request)
        endpoint = standard if endpoint == "forward_backward" else endpoint
        count, targets = len(request.data), _targets(dialect, request)
        operation = Operation(name, endpoint, body, content_type, result, datums=count, targets=targets)
    else:
        operation = Operation(name, endpoint, dialect.encode_json(endpoint, request), JSON, result)
    if dialect.numbers == "strict":
        operation = replace(operation, request=request)
    if isinstance(request, ModelRequest):
        return replace(operation, model_id=request.model_id, seq_id=request.seq_id)
    if isinstance(request, SampleRequest):
        return replace(operation, model_id=request.sampling_session_id, seq_id=request.seq_id)
    return operation


def _targets(dialect: Dialect, request: ForwardBackwardRequest) -> list[int] | None:
    """Returns the number of targets of each datum if their log-probabilities are read.

    A backward's log-probabilities are read where the server sums with other weights, and the loss is computed here.
    """
    is_read = request.forward_only or dialect.unit_forward_weights or dialect.forward == "zero_weights"
    given = [datum.loss_fn_inputs.get("target_tokens") for datum in request.data]
    if not is_read or request.loss_fn not in LOSSES or any(targets is None for targets in given):
        return None
    return [math.prod(targets.shape) for targets in given if targets is not None]


def renumbered(dialect: Dialect, operation: Operation[T], seq_id: int) -> Operation[T]:
    """Returns an operation with another number."""
    request = replace(operation.request, seq_id=seq_id)
    again = encode(dialect, operation.endpoint, request, operation.result, operation.name)
    return replace(again, record=operation.record)


def operate(session: Session, endpoint: str, request: Any, result: type[T]) -> Coroutine[Any, Any, T]:
    """Encodes a request; the coroutine submits it and waits for its result."""
    return perform(session, encode(session.dialect, endpoint, request, result))


def recorded(session: Session, operations: list[Operation[T]]) -> list[Operation[T]]:
    """Returns operations that are submitted now, measured if the session has a recording."""
    recording = session.recording
    if recording is None:
        return operations
    return [replace(each, record=recording.begin(each.name, each.model_id)) for each in operations]


async def perform(
    session: Session, operation: Operation[T], *, on_submitted: Callable[[bool], None] | None = None
) -> T:
    """Submits an operation and waits for its result.

    Args:
        session: The session.
        operation: The operation.
        on_submitted: Called after the submission with whether the server has taken it, or may have.

    Raises:
        TinkerLightningError: With the operation, its model, number and request id in the message.
    """
    request_id = ""
    sequence_ids: Any = None
    record = operation.record
    if record is not None:
        record.posted = time.perf_counter()
    try:
        with session.running(operation.name) as wait:
            taken = True
            try:
                try:
                    response = await _submit(session, operation, wait)
                except NotRetained:
                    if operation.whole is None:
                        raise
                    operation = replace(operation.whole(), record=record)
                    response = await _submit(session, operation, wait)
            except TinkerLightningError as error:
                taken = isinstance(error, AnswerLost)
                raise
            finally:
                if on_submitted is not None:
                    on_submitted(taken)
            for damaged in range(1, _DAMAGED_RESULTS + 1):
                request_id = response.headers.get(REQUEST_ID_HEADER, "")
                try:
                    if not session.extensions.submit_and_wait or response.status_code == 408:
                        receipt = session.connection.json(response)
                        request_id = str(receipt.get("request_id") or "")
                        sequence_ids = receipt.get("sample_sequence_ids")
                        response = await _fetch(session, operation, request_id, wait)
                    result = _decode(session, operation, response)
                    break
                except NotATinkerServer:
                    if damaged == _DAMAGED_RESULTS or not session.dialect.deduplicates:
                        raise
                    await asyncio.sleep(damaged * _DAMAGED_SECONDS)
                    response = await _submit(session, operation, wait)  # answered from the record
        return _with_sequence_ids(result, sequence_ids, request_id) if isinstance(result, SampleResponse) else result
    except TinkerLightningError as error:
        reason = await session.reason_of(error)
        # Of the same class, so that `except` keeps its meaning. What happened comes first, ids come last.
        which = f" ({operation}{request_id and f', request {request_id}'})" if operation.model_id or request_id else ""
        kind = NotFound if _is_missing_checkpoint(operation, reason) else type(reason)
        located = kind(f"{operation.name}: {reason}{_hint(session, operation, reason)}{which}")
        raise with_ids(located, operation, request_id or None) from error
    finally:
        if record is not None:
            record.ended = time.perf_counter()


def with_ids(error: E, operation: Operation[Any], request_id: str | None = None) -> E:
    """Returns the error with the ids of the operation that it belongs to."""
    error.operation, error.model_id = operation.name, operation.model_id
    error.seq_id, error.request_id = operation.seq_id, request_id
    return error


def _with_sequence_ids(response: SampleResponse, ids: Any, request_id: str) -> Any:
    """Returns a response whose sequences have the ids that the server gave them, or unique ones if it gave none."""
    if not (isinstance(ids, list) and len(ids) == len(response.sequences)):
        ids = [f"{request_id}:{i}" for i in range(len(response.sequences))]  # as our server does
    sequences = [replace(each, sequence_id=str(name)) for each, name in zip(response.sequences, ids, strict=True)]
    return replace(response, sequences=sequences)


def _is_missing_checkpoint(operation: Operation[Any], error: TinkerLightningError) -> bool:
    """Returns whether a server that has one error for all failures reports that there is no such checkpoint."""
    is_plain = type(error) is OperationFailed and operation.endpoint == "load_weights"
    return is_plain and "checkpoint not found" in str(error).lower()


def _hint(session: Session, operation: Operation[Any], error: TinkerLightningError) -> str:
    """Returns the likely cause if an operation meets no endpoint for it, or one that does not take it."""
    name, text = session.dialect.name, str(error)
    if operation.endpoint == "load_weights" and (hint := session.dialect.load_hint(text)):
        return f".{hint}"
    missing = text.endswith((": Not Found", "(HTTP 405)", "(HTTP 415)"))
    is_pass = operation.result is ForwardBackwardOutput and not session.dialect.deduplicates
    if not missing and not (is_pass and (isinstance(error, NotFound) or "(HTTP 500)" in text)):
        return session.dialect.rejection_hint(operation.endpoint, text)
    end = "" if text.endswith((".", "?")) else "."
    return (
        f"{end} Does the server speak the dialect {name!r}? connect(url, dialect='auto') detects what it speaks. If it "
        f"did before, {session.connection.url} was replaced, or servers of several versions share this URL."
    )


async def _submit(session: Session, operation: Operation[Any], held: Wait) -> httpx.Response:
    wait = session.extensions.submit_and_wait
    body = operation.body
    headers = {"Content-Type": operation.content_type, "Accept": _accept(operation) if wait else JSON}
    if session.config.proto_compress_fwdbwd and operation.content_type == PROTOBUF:
        body = compression.compress(body)
        headers["Content-Encoding"] = "zstd"
    prefix = "/ext/v1/" if wait else "/api/v1/"
    accept = is_receipt if wait else None
    return await session.connection.send(
        "POST",
        prefix + operation.endpoint,
        body,
        headers=headers,
        accept=accept,
        repeatable=_is_repeatable(session.dialect, operation),
        record=operation.record,
        wait=held,
    )


def _is_repeatable(dialect: Dialect, operation: Operation[Any]) -> bool:
    """Returns whether an operation that may have been received can be sent again without harm."""
    if dialect.deduplicates or operation.endpoint in ("asample", "create_model"):
        return True  # a second model or sample harms nobody
    return operation.name == "forward" and dialect.numbers == "ignored"


async def _fetch(session: Session, operation: Operation[Any], request_id: str, wait: Wait) -> httpx.Response:
    """Polls until the result is available, and notes the state of its queue."""
    if not request_id:
        where = f"/api/v1/{operation.endpoint}: request_id: missing, so its result cannot be requested"
        raise session.connection.not_a_tinker_server(where)
    body = session.dialect.encode_json("retrieve_future", RetrieveFutureRequest(request_id))
    headers = {"Accept": _accept(operation)}
    quick = 0.01
    broken = 0
    # Others answer 500 for as long as they are asked for a result that they cannot encode, such as NaN.
    expected = (408, 410) if session.dialect.deduplicates else (408, 410, 500)
    while True:
        asked = time.monotonic()
        try:
            response = await session.connection.send(
                "POST",
                "/api/v1/retrieve_future",
                body,
                headers=headers,
                accept=lambda response: response.status_code in expected,
                is_poll=True,
                record=operation.record,
                wait=wait,
            )
        except NotFound as error:
            if operation.endpoint == "load_weights" and not session.dialect.deduplicates:
                raise  # such servers answer a poll with the failure itself
            raise ResultExpired(
                f"{session.connection.url} does not have its result, or no longer: {error}. If several servers share "
                "this address, connect to one of them."
            ) from error
        except InvalidInput as error:
            if session.dialect.deduplicates:
                raise
            raise OperationFailed(str(error)) from error
        except ServerUnreachable as error:
            if isinstance(error.__cause__, httpx.ReadTimeout) and not session.connection.waits.is_given_up:
                continue  # the server holds polls for longer than our read timeout
            raise
        if response.status_code == 410:
            raise ResultExpired(
                f"{session.connection.url} no longer keeps its result. Resume from the last checkpoint."
            )
        if response.status_code == 500:
            broken += 1
            if broken > _BROKEN_POLLS:
                raise OperationFailed(
                    f"{session.connection.url} cannot return the result: POST /api/v1/retrieve_future answers HTTP 500 "
                    f"({response.text[:100]!r}). Results with NaN cannot be encoded as JSON: look for a token id that "
                    "the model does not have, or for weights that are no longer finite."
                )
            await asyncio.sleep(broken * _POLL_SECONDS)
            continue
        message = pending(response)
        if message is None:
            return response
        state, reason = str(message.get("queue_state") or "active"), str(message.get("queue_state_reason") or "")
        if state == "active":
            wait.resume()
        else:
            wait.hold(f"the server's queue is {state}" + (f" ({reason})" if reason else ""))
        if time.monotonic() - asked < _POLL_SECONDS:
            await asyncio.sleep(quick)
            quick = min(2 * quick, _POLL_SECONDS)


def _decode(session: Session, operation: Operation[T], response: httpx.Response) -> T:
    if PROTOBUF in response.headers.get("content-type", "") and operation.result in _BINARY:
        try:
            decoded: T = _BINARY[operation.result](response.content)
        except InvalidMessage as error:
            where = f"{response.url.path}: the result of {operation.name} is malformed"
            raise session.connection.not_a_tinker_server(f"{where}: {error}") from error
    else:
        message = session.connection.json(response)
        if "error" in message:
            raise _failure(message)
        decoded = session.connection.parse(operation.result, response)
    if isinstance(decoded, ForwardBackwardOutput) and (reason := _defect(session, operation, decoded)):
        raise session.connection.not_a_tinker_server(f"{response.url.path}: {reason}")
    if isinstance(decoded, OptimStepResponse) and decoded.metrics:
        return replace(decoded, metrics={_METRICS.get(name, name): value for name, value in decoded.metrics.items()})
    return decoded


def _defect(session: Session, operation: Operation[Any], output: ForwardBackwardOutput) -> str | None:
    """Returns what is wrong with the result of a pass, such as the result of another operation in its place.

    A backward may come without log-probabilities: its gradient is accumulated, and only its loss is not known.
    """
    is_forward = operation.name == "forward"
    is_bare = not is_forward and not output.loss_fn_outputs and bool(output.metrics)
    if operation.datums and len(output.loss_fn_outputs) != operation.datums and not is_bare:
        return f"loss_fn_outputs has {len(output.loss_fn_outputs)} entries for {operation.datums} datums"
    for name in output.metrics if not session.dialect.deduplicates else ():
        if ":" not in name:
            return (
                f"metrics: {name!r} has no colon, so how to combine it is unknown; write it as {name}:sum, :mean, ..."
            )
    for i, (targets, tensors) in enumerate(zip(operation.targets or (), output.loss_fn_outputs, strict=False)):
        field = f"loss_fn_outputs[{i}].logprobs"
        if "logprobs" not in tensors:
            if not is_forward:
                continue
            return f"{field}: missing; there is only {', '.join(tensors) or 'nothing'}"
        if (found := math.prod(tensors["logprobs"].shape)) != targets:
            return f"{field}: has {found} values for {targets} targets"
    return None


def _failure(message: dict[str, Any]) -> TinkerLightningError:
    error = str(message["error"])
    is_users = message.get("category") == "user"
    return input_error(message.get("error_class"))(error) if is_users else OperationFailed(error)


def _accept(operation: Operation[Any]) -> str:
    return f"{PROTOBUF}, {JSON}" if operation.result in _BINARY else JSON
