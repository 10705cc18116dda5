"""Fetching results."""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING

from starlette.responses import Response
from starlette.routing import Route

from tinker_lightning.server.http import PROTOBUF, answer, error_category, read
from tinker_lightning.server.routes import trainer_of
from tinker_lightning.types import ForwardBackwardOutput, SampleResponse
from tinker_lightning.types import requests as rq
from tinker_lightning.wire import protobuf

if TYPE_CHECKING:
    from starlette.requests import Request

    from tinker_lightning.server.scheduler import Operation
    from tinker_lightning.server.trainer import EmbeddedTrainer

# Shorter than the 30 s after which common proxies lose patience.
LONG_POLL_SECONDS = 25.0


async def retrieve_future(request: Request) -> Response:
    body = await read(request, rq.RetrieveFutureRequest)
    trainer = trainer_of(request)
    operation = trainer.scheduler.find(body.request_id)
    if not await finished(operation, trainer):
        # Also 200 would do, but then the official SDK warns its user each time.
        return answer({"type": "try_again", "request_id": body.request_id, "queue_state": "active"}, 408)
    error = operation.future.exception()
    if error is not None:
        return answer({"error": str(error), "category": error_category(error)})
    result = operation.future.result()
    if PROTOBUF in request.headers.get("accept", ""):
        if isinstance(result, ForwardBackwardOutput):
            return Response(protobuf.encode_output(result), media_type=PROTOBUF)
        if isinstance(result, SampleResponse):
            return Response(protobuf.encode_sample(result), media_type=PROTOBUF)
    return answer(result)


async def finished(operation: Operation, trainer: EmbeddedTrainer) -> bool:
    """Waits for an operation, no longer than a poll may take and the server lives; says whether it is finished."""
    if not operation.future.done():
        waiting = {asyncio.wrap_future(future) for future in (operation.future, trainer.closing)}
        await asyncio.wait(waiting, timeout=LONG_POLL_SECONDS, return_when=asyncio.FIRST_COMPLETED)
        for future in waiting:
            future.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                future.exception()  # else asyncio reports that nobody looked at it
    return operation.future.done()


routes = [Route("/retrieve_future", retrieve_future, methods=["POST"])]
