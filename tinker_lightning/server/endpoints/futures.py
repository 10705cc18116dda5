"""Submissions and their results, which are either fetched by a later request or returned directly."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

from starlette.responses import Response
from starlette.routing import Route

from tinker_lightning.server.core.jobs import Job
from tinker_lightning.server.endpoints import trainer_of
from tinker_lightning.server.http import PROTOBUF, answer, error_fields, error_text, read, submits_in_turn
from tinker_lightning.types import ForwardBackwardOutput, SampleResponse
from tinker_lightning.types import requests as rq
from tinker_lightning.types.responses import FutureResponse
from tinker_lightning.wire import protobuf

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from starlette.requests import Request

    from tinker_lightning.server.core.trainer import EmbeddedTrainer

    Submit: TypeAlias = Callable[[Request], Awaitable["Submission"]]
    Endpoint: TypeAlias = Callable[[Request], Awaitable[Response]]

# Shorter than the 30 s after which common proxies time out.
LONG_POLL_SECONDS = 25.0
# While a request with a lower number is missing, so that clients soon hear about it.
_BLOCKED_POLL_SECONDS = 2.0


@dataclass(frozen=True, slots=True)
class Submission:
    """A queued job and the protocol's response to its submission."""

    job: Job
    receipt: FutureResponse


def answer_receipt(submit: Submit) -> Endpoint:
    """Creates a protocol endpoint that returns a receipt; clients fetch the result later."""

    async def endpoint(request: Request) -> Response:
        return answer((await submit(request)).receipt)

    return endpoint


def answer_result(submit: Submit) -> Endpoint:
    """Creates an extension endpoint that waits for the result and returns it, with the request id in a header."""

    async def endpoint(request: Request) -> Response:
        job = (await submit(request)).job
        response = await _result(request, job)
        response.headers["x-request-id"] = job.request_id
        return response

    return endpoint


async def retrieve_future(request: Request) -> Response:
    body = await read(request, rq.RetrieveFutureRequest)
    return await _result(request, trainer_of(request).scheduler.find(body.request_id))


async def _result(request: Request, job: Job) -> Response:
    scheduler = trainer_of(request).scheduler
    missing = scheduler.missing_before(job, submits_in_turn=submits_in_turn(request))
    seconds = LONG_POLL_SECONDS if missing is None else min(_BLOCKED_POLL_SECONDS, LONG_POLL_SECONDS)
    if not await finished(job, trainer_of(request), seconds):
        if missing is not None:  # concurrent submissions may have overtaken each other and arrived by now
            missing = scheduler.missing_before(job, submits_in_turn=False)
        return pending(job, missing)
    job.mark_fetched()
    response = _outcome(request, job)
    # The standard header for what a server measures, which clients that look for it read.
    response.headers["server-timing"] = f"queue;dur={1000 * job.queued:.3f}, run;dur={1000 * job.ran:.3f}"
    return response


def _outcome(request: Request, job: Job) -> Response:
    error = job.future.exception()
    if error is not None:
        return answer({"error": error_text(error), **error_fields(error)})
    result = job.future.result()
    if PROTOBUF in request.headers.get("accept", ""):
        if isinstance(result, ForwardBackwardOutput):
            return Response(protobuf.encode_output(result), media_type=PROTOBUF)
        if isinstance(result, SampleResponse):
            return Response(protobuf.encode_sample(result), media_type=PROTOBUF)
    return answer(result)


def pending(job: Job, missing: int | None = None) -> Response:
    """Returns a response that asks the client to retry. The status is 408 because the official SDK warns on 200."""
    body = {"type": "try_again", "request_id": job.request_id, "queue_state": "active"}
    if missing is not None:
        reason = f"waiting for request {missing} of {job.line}, which has not arrived"
        body.update(queue_state="paused_capacity", queue_state_reason=reason)
    return answer(body, 408)


async def finished(job: Job, trainer: EmbeddedTrainer, seconds: float | None = None) -> bool:
    """Waits for a job until the long-poll timeout or the server's shutdown; returns whether the job is finished."""
    if not job.future.done():
        woken, wake = _alarm()
        job.future.add_done_callback(wake)
        with trainer.waking(wake), suppress(TimeoutError):
            await asyncio.wait_for(woken.wait(), LONG_POLL_SECONDS if seconds is None else seconds)
    return job.future.done()


async def retrieve_futures(request: Request) -> Response:
    """Returns which sampling requests have finished after a cursor; waits if there are none."""
    body = await read(request, rq.RetrieveFuturesRequest)
    trainer = trainer_of(request)
    completions = trainer.sampling.completions
    target = body.target.sampling_session_id, body.target.cloned_sampler_id
    woken, wake = _alarm()
    with completions.waking(target, wake), trainer.waking(wake), suppress(TimeoutError):
        if not (found := completions.after(target, body.prev_cursor)):
            await asyncio.wait_for(woken.wait(), LONG_POLL_SECONDS)
            found = completions.after(target, body.prev_cursor)
    listed = [
        {"state": "finished" if succeeded else "failed", "request_id": request_id} for _, request_id, succeeded in found
    ]
    return answer({"completions": listed, "cursor": found[-1][0] if found else body.prev_cursor})


async def cancel_future(request: Request) -> Response:
    trainer_of(request).sampling.cancel((await read(request, rq.CancelFutureRequest)).request_id)
    return answer({})


def _alarm() -> tuple[asyncio.Event, Callable[..., None]]:
    """Returns an event of the running loop, and a function that sets it from any thread."""
    loop, woken = asyncio.get_running_loop(), asyncio.Event()

    def wake(_: object = None) -> None:
        with suppress(RuntimeError):  # the loop is closed, so nobody is waiting
            loop.call_soon_threadsafe(woken.set)

    return woken, wake


routes = [
    Route("/retrieve_future", retrieve_future, methods=["POST"]),
    Route("/retrieve_futures", retrieve_futures, methods=["POST"]),
    Route("/cancel_future", cancel_future, methods=["POST"]),
]
