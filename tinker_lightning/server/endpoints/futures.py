"""Submissions and their results: fetched by a later request, or waited for by the submission itself."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

from starlette.responses import Response
from starlette.routing import Route

from tinker_lightning.server.core.scheduler import Job
from tinker_lightning.server.endpoints import trainer_of
from tinker_lightning.server.http import PROTOBUF, answer, error_fields, error_text, read
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

# Shorter than the 30 s after which common proxies lose retry_policy.
LONG_POLL_SECONDS = 25.0


@dataclass(frozen=True, slots=True)
class Submission:
    """A job that was queued, and what the protocol answers to that."""

    job: Job
    receipt: FutureResponse


def answer_receipt(submit: Submit) -> Endpoint:
    """The protocol's way: the answer names the result, which is fetched later."""

    async def endpoint(request: Request) -> Response:
        return answer((await submit(request)).receipt)

    return endpoint


def answer_result(submit: Submit) -> Endpoint:
    """The shorter way: the answer is what fetching would answer, and a header names it as a receipt would."""

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
    if not await finished(job, trainer_of(request)):
        return pending(job)
    job.mark_fetched()
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


def pending(job: Job) -> Response:
    """Tells a client to ask again. Also 200 would do, but then the official SDK warns its user each time."""
    return answer({"type": "try_again", "request_id": job.request_id, "queue_state": "active"}, 408)


async def finished(job: Job, trainer: EmbeddedTrainer) -> bool:
    """Waits for a job, no longer than a poll may take and the server lives; says whether it is finished."""
    if not job.future.done():
        loop, woken = asyncio.get_running_loop(), asyncio.Event()

        def wake(_: object = None) -> None:
            with suppress(RuntimeError):  # the loop is gone, and with it who waited
                loop.call_soon_threadsafe(woken.set)

        job.future.add_done_callback(wake)
        with trainer.waking(wake), suppress(TimeoutError):
            await asyncio.wait_for(woken.wait(), LONG_POLL_SECONDS)
    return job.future.done()


routes = [Route("/retrieve_future", retrieve_future, methods=["POST"])]
