"""Submissions and their results, which are either fetched by a later request or returned directly."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias

from starlette.concurrency import run_in_threadpool
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from tinker_lightning.server.bodies import read
from tinker_lightning.server.endpoints import trainer_of
from tinker_lightning.server.http import JSON, PROTOBUF, answer, error_fields, error_text, submits_in_turn
from tinker_lightning.server.trainer.jobs import Job
from tinker_lightning.server.trainer.sizes import encoded_bytes, result_bytes
from tinker_lightning.threads.background import call_soon
from tinker_lightning.types import ForwardBackwardOutput, SampleResponse
from tinker_lightning.types import requests as rq
from tinker_lightning.types.responses import FutureResponse
from tinker_lightning.wire import json as wire_json
from tinker_lightning.wire import protobuf

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterable, Iterator

    from starlette.requests import Request
    from starlette.types import Receive, Scope, Send

    from tinker_lightning.server.trainer.memory import Charge
    from tinker_lightning.server.trainer.trainer import EmbeddedTrainer

    Submit: TypeAlias = Callable[[Request], Awaitable["Submission"]]
    Endpoint: TypeAlias = Callable[[Request], Awaitable[Response]]

# Shorter than the 30 s after which common proxies time out.
LONG_POLL_SECONDS = 25.0
# While a request with a lower number is missing, so that clients soon hear about it.
_BLOCKED_POLL_SECONDS = 2.0
# Results of at least this many bytes are encoded on another thread, and JSON in parts.
_LARGE_RESULT = 1 << 20
# Encoded results of more bytes than this are charged and sent in parts, so that they do not pile up where clients ask
# for them and do not read.
_SENT_BYTES = 1 << 18


@dataclass(frozen=True, slots=True)
class Submission:
    """A queued job and the protocol's response to its submission."""

    job: Job
    receipt: FutureResponse


def receipt_endpoint(submit: Submit) -> Endpoint:
    """Creates a protocol endpoint that returns a receipt; clients fetch the result later."""

    async def endpoint(request: Request) -> Response:
        return answer((await submit(request)).receipt)

    return endpoint


def result_endpoint(submit: Submit) -> Endpoint:
    """Creates an extension endpoint that waits for the result and returns it, with the request id in a header."""

    async def endpoint(request: Request) -> Response:
        job = (await submit(request)).job
        response = await _result(request, job)
        response.headers["x-request-id"] = job.request_id
        return response

    return endpoint


async def retrieve_future(request: Request) -> Response:
    body = await read(request, rq.RetrieveFutureRequest)
    return await _result(request, trainer_of(request).jobs.find(body.request_id))


async def _result(request: Request, job: Job) -> Response:
    scheduler = trainer_of(request).scheduler
    missing = scheduler.missing_before(job, submits_in_turn=submits_in_turn(request))
    seconds = LONG_POLL_SECONDS if missing is None else min(_BLOCKED_POLL_SECONDS, LONG_POLL_SECONDS)
    if not await wait_until_done(job, trainer_of(request), seconds):
        if missing is not None:  # concurrent submissions may have overtaken each other and arrived by now
            missing = scheduler.missing_before(job, submits_in_turn=False)
        return try_again(job, missing)
    response = await _outcome(request, job)
    # Only now, because fetched results are evicted first, and one that was not sent to its end is still needed.
    if isinstance(response, _StreamedResponse | _ChargedResponse):
        response.on_sent = partial(scheduler.mark_fetched, job)
    else:
        scheduler.mark_fetched(job)
    # The standard header for what a server measures, which clients that look for it read.
    response.headers["server-timing"] = (
        f"queue;dur={1000 * job.queue_seconds:.3f}, run;dur={1000 * job.run_seconds:.3f}"
    )
    return response


async def _outcome(request: Request, job: Job) -> Response:
    error = job.future.exception()
    if error is not None:
        return answer({"error": error_text(error), **error_fields(error)})
    result = job.future.result()
    if PROTOBUF in request.headers.get("accept", ""):
        if isinstance(result, ForwardBackwardOutput):
            return await _binary(request, job, protobuf.encode_output)
        if isinstance(result, SampleResponse):
            return await _binary(request, job, protobuf.encode_sample)
    if encoded_bytes(result) < _LARGE_RESULT:
        return answer(result)
    return _StreamedResponse(job)


async def _binary(request: Request, job: Job, encode: Callable[[Any], bytes]) -> Response:
    result = job.future.result()
    size = result_bytes(result)
    if size < _SENT_BYTES:
        return Response(encode(result), media_type=PROTOBUF)
    # The message and its encoded form.
    charge = trainer_of(request).memory.charge("the encoded result", 2 * size, "messages", owner=job.owner)
    try:
        content = encode(result) if size < _LARGE_RESULT else await run_in_threadpool(encode, result)
        charge.resize(min(charge.size, len(content)))
    except BaseException:
        charge.release()
        raise
    return _ChargedResponse(content, charge)


class _StreamedResponse(StreamingResponse):
    """A result as JSON, encoded on another thread while it is sent, and never as a whole.

    The result stays charged until all of it was sent.
    """

    on_sent: Callable[[], None]

    def __init__(self, job: Job) -> None:
        super().__init__(self._parts(), media_type=JSON)
        self._job = job

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with self._job.sending():
            await super().__call__(scope, receive, send)

    def _parts(self) -> Iterator[bytes]:
        yield from _join_pieces(wire_json.pieces(self._job.future.result()))
        self.on_sent()


class _ChargedResponse(Response):
    """A response whose content is charged until all of it was sent."""

    on_sent: Callable[[], None]

    def __init__(self, content: bytes, charge: Charge) -> None:
        super().__init__(content, media_type=PROTOBUF)
        self._charge = charge

    async def __call__(self, _: Scope, __: Receive, send: Send) -> None:
        """Sends the content in parts: the server waits before each part until most of the earlier ones are gone."""
        with self._charge:
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            for start in range(0, len(self.body), _SENT_BYTES):
                end = start + _SENT_BYTES
                more = end < len(self.body)
                await send({"type": "http.response.body", "body": bytes(self.body[start:end]), "more_body": more})
        self.on_sent()


def _join_pieces(pieces: Iterable[bytes]) -> Iterator[bytes]:
    """Joins small pieces, because each one is sent by itself."""
    batch: list[bytes] = []
    size = 0
    for piece in pieces:
        batch.append(piece)
        size += len(piece)
        if size >= _SENT_BYTES:
            yield b"".join(batch)
            batch, size = [], 0
    yield b"".join(batch)


def try_again(job: Job, missing: int | None = None) -> Response:
    """Returns a response that asks the client to retry. The status is 408 because the official SDK warns on 200."""
    body = {"type": "try_again", "request_id": job.request_id, "queue_state": "active"}
    if missing is not None:
        reason = f"waiting for request {missing} of {job.queue}, which has not arrived"
        body.update(queue_state="paused_capacity", queue_state_reason=reason)
    return answer(body, 408)


async def wait_until_done(job: Job, trainer: EmbeddedTrainer, seconds: float | None = None) -> bool:
    """Waits for a job until the long-poll timeout or the server's shutdown; returns whether the job is finished."""
    if not job.future.done():
        woken, wake = _wake_event()
        job.future.add_done_callback(wake)
        with trainer.closing.waking(wake), suppress(TimeoutError):
            await asyncio.wait_for(woken.wait(), LONG_POLL_SECONDS if seconds is None else seconds)
    return job.future.done()


async def retrieve_futures(request: Request) -> Response:
    """Returns the sampling requests that have finished after a cursor; waits if there are none."""
    body = await read(request, rq.RetrieveFuturesRequest)
    seconds = LONG_POLL_SECONDS if body.timeout is None else min(body.timeout, LONG_POLL_SECONDS)
    trainer = trainer_of(request)
    trainer.registry.session(body.target.sampling_session_id.partition(":")[0])
    completions = trainer.sampling.completions
    target = body.target.sampling_session_id, body.target.cloned_sampler_id
    woken, wake = _wake_event()
    with completions.wake_on_finish(target, wake), trainer.closing.waking(wake), suppress(TimeoutError):
        if not (completed := completions.after(target, body.prev_cursor)):
            await asyncio.wait_for(woken.wait(), seconds)
            completed = completions.after(target, body.prev_cursor)
    listed = [
        {"state": "finished" if succeeded else "failed", "request_id": request_id}
        for _, request_id, succeeded in completed
    ]
    return answer({"completions": listed, "cursor": completed[-1][0] if completed else body.prev_cursor})


async def cancel_future(request: Request) -> Response:
    trainer_of(request).sampling.cancel((await read(request, rq.CancelFutureRequest)).request_id)
    return answer({})


def _wake_event() -> tuple[asyncio.Event, Callable[..., None]]:
    """Returns an event of the running loop, and a function that sets it from any thread."""
    loop, woken = asyncio.get_running_loop(), asyncio.Event()

    def wake(_: object = None) -> None:
        call_soon(loop, woken.set)

    return woken, wake


routes = [
    Route("/retrieve_future", retrieve_future, methods=["POST"]),
    Route("/retrieve_futures", retrieve_futures, methods=["POST"]),
    Route("/cancel_future", cancel_future, methods=["POST"]),
]
