"""Endpoints of samplers and sampling."""

from __future__ import annotations

from typing import TYPE_CHECKING

from starlette.concurrency import run_in_threadpool
from starlette.routing import Route

from tinker_lightning.server.bodies import read
from tinker_lightning.server.endpoints import trainer_of
from tinker_lightning.server.endpoints.futures import Submission, receipt_endpoint
from tinker_lightning.server.http import answer
from tinker_lightning.types import requests as rq
from tinker_lightning.types import responses as rs
from tinker_lightning.wire import json as wire_json

if TYPE_CHECKING:
    from starlette.requests import Request
    from starlette.responses import Response


async def create_sampling_session(request: Request) -> Response:
    body = await read(request, rq.CreateSamplingSessionRequest)
    sampler = await run_in_threadpool(trainer_of(request).sampling.create_sampling_session, body)
    return answer(rs.CreateSamplingSessionResponse(sampler.sampler_id))


async def get_sampler(request: Request) -> Response:
    trainer = trainer_of(request)
    sampler = trainer.registry.sampler(request.path_params["sampler_id"])
    # The official SDK loads the tokenizer from the base model returned here, so this is the tokenizer's folder.
    base = await run_in_threadpool(trainer.catalog.get, sampler.base_model)
    return answer(
        rs.GetSamplerResponse(sampler.sampler_id, base.tokenizer_id, sampler.model_path, model_name=sampler.base_model)
    )


async def asample(request: Request) -> Submission:
    body = await read(request, rq.SampleRequest)
    job = trainer_of(request).sampling.sample(body)
    job.claim(wire_json.digest(body))
    sequence_ids = [f"{job.request_id}:{i}" for i in range(body.num_samples)]
    return Submission(job, rs.FutureResponse(job.request_id, sample_sequence_ids=sequence_ids))


async def join_sampling_session(request: Request) -> Response:
    body = await read(request, rq.JoinSamplingSessionRequest)
    return answer({"client_counter": trainer_of(request).registry.join_sampler(body.sampling_session_id)})


submissions = {"/asample": asample}
routes = [
    Route("/create_sampling_session", create_sampling_session, methods=["POST"]),
    Route("/join_sampling_session", join_sampling_session, methods=["POST"]),
    Route("/samplers/{sampler_id}", get_sampler, methods=["GET"]),
    *(Route(path, receipt_endpoint(submit), methods=["POST"]) for path, submit in submissions.items()),
]
