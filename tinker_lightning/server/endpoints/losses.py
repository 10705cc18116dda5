"""Endpoints for custom losses: the protocol's per-datum losses, and named batch-level losses as an extension."""

from __future__ import annotations

from typing import TYPE_CHECKING

from starlette.concurrency import run_in_threadpool
from starlette.routing import Route

from tinker_lightning.errors import InvalidInput
from tinker_lightning.server.bodies import read
from tinker_lightning.server.endpoints import trainer_of
from tinker_lightning.server.endpoints.futures import Submission, answer_receipt
from tinker_lightning.server.http import answer
from tinker_lightning.server.trainer.jobs import Job
from tinker_lightning.types import requests as rq
from tinker_lightning.types import responses as rs

if TYPE_CHECKING:
    from starlette.requests import Request
    from starlette.responses import Response

# Even a graph with the maximum number of nodes is far smaller than this.
MAX_BYTES = 4 << 20


async def create_custom_loss(request: Request) -> Submission:
    message = await read(request, rq.CreateCustomLossRequest, MAX_BYTES)
    if message.custom_loss_seq_id < 0:
        raise InvalidInput(f"custom_loss_seq_id must be at least 0, got {message.custom_loss_seq_id}")
    trainer = trainer_of(request)
    trainer.registry.session(message.session_id, must_be_open=True)
    # Not on the trainer's thread, because this needs no model and must not delay training.
    loss_id = await run_in_threadpool(trainer.losses.create, message)
    answered = rs.CreateCustomLossResponse(loss_id)
    job = Job(f"{loss_id}:create", "create_custom_loss", lambda: answered, owner=message.session_id)
    job.execute()
    return Submission(trainer.scheduler.submit(job), rs.FutureResponse(job.request_id))


async def register_loss(request: Request) -> Response:
    message = await read(request, rq.RegisterLossRequest, MAX_BYTES)
    trainer = trainer_of(request)
    trainer.registry.session(message.session_id, must_be_open=True)
    return answer(rs.CreateCustomLossResponse(await run_in_threadpool(trainer.losses.register, message)))


async def list_losses(request: Request) -> Response:
    trainer, session_id = trainer_of(request), request.query_params.get("session_id")
    if session_id is not None:
        trainer.registry.session(session_id)
    listed = trainer.losses.listing(session_id)
    return answer(rs.LossListing(list(listed), listed))


submissions = {"/create_custom_loss": create_custom_loss}
routes = [Route(path, answer_receipt(submit), methods=["POST"]) for path, submit in submissions.items()]
extensions = [
    Route("/losses", register_loss, methods=["POST"]),
    Route("/losses", list_losses, methods=["GET"]),
]
