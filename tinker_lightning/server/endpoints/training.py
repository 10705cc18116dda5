"""Endpoints of models, their passes, steps, saved weights and losses."""

from __future__ import annotations

import base64
import functools
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from starlette.concurrency import run_in_threadpool
from starlette.routing import Route

from tinker_lightning.errors import InvalidInput, MemoryLimitExceeded, NotRetained, TinkerLightningError
from tinker_lightning.server.bodies import MAX_BODY_BYTES, parse_body, read, receive_body
from tinker_lightning.server.endpoints import trainer_of
from tinker_lightning.server.endpoints.futures import Submission, receipt_endpoint, try_again, wait_until_done
from tinker_lightning.server.http import JSON, PROTOBUF, answer, content_type, sdk_release
from tinker_lightning.server.trainer.jobs import Job
from tinker_lightning.server.trainer.operations import OPTIMIZER_CONFIG, Training
from tinker_lightning.server.trainer.passes import Passes
from tinker_lightning.types import requests as rq
from tinker_lightning.types import responses as rs
from tinker_lightning.wire import json as wire_json
from tinker_lightning.wire import protobuf

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from starlette.requests import Request
    from starlette.responses import Response

    from tinker_lightning.server.engine.interface import BaseModel


# The limit for an uploaded loss. Even a graph with the maximum number of nodes is far smaller.
MAX_LOSS_BYTES = 4 << 20

T = TypeVar("T")


async def create_model(request: Request) -> Submission:
    message = await read(request, rq.CreateModelRequest)
    job = trainer_of(request).training.create_model(message)
    job.claim(wire_json.digest(message))
    return _submission(job, job.request_id.removesuffix(":create"))


async def unload_model(request: Request) -> Submission:
    body = await read(request, rq.UnloadModelRequest)
    return _submission(trainer_of(request).training.unload_model(body), body.model_id)


async def get_info(request: Request) -> Response:
    body = await read(request, rq.GetInfoRequest)
    model = trainer_of(request).registry.model(body.model_id)
    if not await wait_until_done(model.creation, trainer_of(request)):
        return try_again(model.creation)
    base, adapter = model.ready()
    # From 0.38 on, the samplers of the official SDK load the tokenizer from this name, so it is the model's folder.
    loadable = base.tokenizer_id if sdk_release(request, default=(0, 0)) >= (0, 38) else model.base_model
    data = rs.ModelData(arch=base.arch, model_name=loadable, tokenizer_id=base.tokenizer_id)
    return answer(
        rs.GetInfoResponse(
            model.model_id,
            data,
            lora_rank=model.lora_config.rank,
            model_name=model.base_model,
            optimizer_config=OPTIMIZER_CONFIG,
            lora_parameters=sum(tensor.numel() for tensor in adapter.weights.tensors.values()),
        )
    )


async def tokenizer(request: Request) -> Response:
    """Returns the tokenizer files of a base model, for clients on other machines."""
    base = await run_in_threadpool(trainer_of(request).catalog.get, request.query_params.get("model", ""))
    return answer({"files": await run_in_threadpool(_tokenizer_files, base)})


def _tokenizer_files(base: BaseModel) -> dict[str, str]:
    with tempfile.TemporaryDirectory() as folder:
        base.tokenizer.save_pretrained(folder)
        return {file.name: base64.b64encode(file.read_bytes()).decode() for file in Path(folder).iterdir()}


def _pass(
    submit: Callable[[Passes, rq.ForwardBackwardRequest], Job],
    *accepted: str,
    forward_only: bool = False,
    operation: str = "",
) -> Callable[[Request], Awaitable[Submission]]:
    """Returns the endpoint of a pass whose request has one of these content types.

    An operation of its own is not answered from the record of another one with the same datums.
    """

    async def endpoint(request: Request) -> Submission:
        parse: Callable[[bytes], rq.ForwardBackwardRequest] = protobuf.decode_forward_backward
        if content_type(request, *accepted) == JSON:
            parse = functools.partial(wire_json.parse_forward_backward, forward_only=forward_only)
        run = functools.partial(submit, trainer_of(request).passes)
        return await _submit(request, parse, run, operation, may_be_compressed=True)

    return endpoint


async def load_weights(request: Request) -> Submission:
    """Loads weights into a model, or creates one with them if a session is given instead."""
    content_type(request, JSON)
    training = trainer_of(request).training

    def parse(body: bytes) -> rq.LoadWeightsRequest | rq.CreateFromWeightsRequest:
        message = wire_json.loads(body)
        if message.get("session_id") is not None:
            if message.get("model_id") is not None:
                raise InvalidInput(
                    "load_weights: give either model_id and seq_id, to load into a model, or session_id and "
                    "model_seq_id, to create one"
                )
            return wire_json.parse(rq.CreateFromWeightsRequest, body)
        return wire_json.parse(rq.LoadWeightsRequest, body)

    def submit(message: rq.LoadWeightsRequest | rq.CreateFromWeightsRequest) -> Job:
        if isinstance(message, rq.LoadWeightsRequest):
            return training.load_weights(message)
        return training.create_from_weights(message)

    return await _submit(request, parse, submit)


async def import_adapter(request: Request) -> Submission:
    body = await read(request, rq.ImportAdapterRequest, MAX_BODY_BYTES)
    job = await run_in_threadpool(trainer_of(request).training.import_adapter, body)
    return Submission(job, rs.FutureResponse(job.request_id))


async def create_custom_loss(request: Request) -> Submission:
    message = await read(request, rq.CreateCustomLossRequest, MAX_LOSS_BYTES)
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
    message = await read(request, rq.RegisterLossRequest, MAX_LOSS_BYTES)
    trainer = trainer_of(request)
    trainer.registry.session(message.session_id, must_be_open=True)
    return answer(rs.CreateCustomLossResponse(await run_in_threadpool(trainer.losses.register, message)))


async def list_losses(request: Request) -> Response:
    trainer, session_id = trainer_of(request), request.query_params.get("session_id")
    if session_id is not None:
        trainer.registry.session(session_id)
    listed = trainer.losses.listing(session_id)
    return answer(rs.LossListing(list(listed), listed))


def _numbered(cls: type[T], submit: Callable[[Training, T], Job]) -> Callable[[Request], Awaitable[Submission]]:
    """Returns the endpoint of a numbered job whose request is JSON."""

    async def endpoint(request: Request) -> Submission:
        content_type(request, JSON)
        training = trainer_of(request).training
        return await _submit(request, lambda body: wire_json.parse(cls, body), lambda body: submit(training, body))

    return endpoint


async def _submit(
    request: Request,
    parse: Callable[[bytes], T],
    submit: Callable[[T], Job],
    operation: str = "",
    *,
    may_be_compressed: bool = False,
) -> Submission:
    """Queues a numbered job. If this fails, the number is freed, because the client continues with the next one.

    Only accepted requests are recorded. The number stays open if the client sends it again: a backward whose forward is
    not retained, with the datums, and a request for which there is no memory at the moment.
    """
    async with receive_body(request, may_be_compressed=may_be_compressed) as body:
        try:
            message: Any
            message, digest = await parse_body(lambda body: _identify(parse(body), operation), body)
            job = submit(message)
            job.claim(digest)
        except Exception as error:
            if isinstance(error, NotRetained) or (isinstance(error, MemoryLimitExceeded) and error.is_temporary):
                raise
            number = protobuf.read_sequence_number if content_type(request, JSON, PROTOBUF) == PROTOBUF else _number
            trainer_of(request).jobs.skip(*await parse_body(number, body))
            raise
    return _submission(job, message.model_id)


def _identify(message: T, operation: str) -> tuple[T, str]:
    """Returns a request with its digest."""
    content: Any = message
    if isinstance(message, rq.SaveWeightsForSamplerRequest) and message.path is None:
        content = replace(message, sampling_session_seq_id=0)  # a repeated request has another one
    return message, wire_json.digest(content, operation)


def _number(body: bytes) -> tuple[str, int]:
    """Returns the model and number of a rejected JSON body, or `("", 0)` if they cannot be parsed."""
    try:
        message = wire_json.loads(body)
        model_id, number = message.get("model_id"), message.get("seq_id")
    except TinkerLightningError:
        return "", 0
    return (model_id, number) if isinstance(model_id, str) and type(number) is int else ("", 0)


def _submission(job: Job, model_id: str) -> Submission:
    return Submission(job, rs.FutureResponse(job.request_id, model_id))


submissions = {
    "/create_model": create_model,
    "/unload_model": unload_model,
    "/forward": _pass(Passes.forward_backward, JSON, forward_only=True),
    "/forward_backward": _pass(Passes.forward_backward, JSON, PROTOBUF),
    "/optim_step": _numbered(rq.OptimStepRequest, Training.optim_step),
    "/save_weights": _numbered(rq.SaveWeightsRequest, Training.save_weights),
    "/load_weights": load_weights,
    "/save_weights_for_sampler": _numbered(rq.SaveWeightsForSamplerRequest, Training.save_weights_for_sampler),
    "/create_custom_loss": create_custom_loss,
    "/save_weights_external": _numbered(rq.SaveWeightsExternalRequest, Training.save_weights_external),
}
# Answered with the result only: a receipt would take a second round trip, which is what they are meant to save.
extensions = {
    "/counted_forward_backward": _pass(
        functools.partial(Passes.forward_backward, counted_only=True), PROTOBUF, operation="counted"
    ),
    "/retained_forward": _pass(Passes.retained_forward, PROTOBUF, operation="retained_forward"),
    "/retained_backward": _pass(Passes.retained_backward, PROTOBUF, operation="retained_backward"),
    "/import_adapter": import_adapter,
}
extension_routes = [
    Route("/tokenizer", tokenizer, methods=["GET"]),
    Route("/losses", register_loss, methods=["POST"]),
    Route("/losses", list_losses, methods=["GET"]),
]
routes = [
    Route("/get_info", get_info, methods=["POST"]),
    *(Route(path, receipt_endpoint(submit), methods=["POST"]) for path, submit in submissions.items()),
]
