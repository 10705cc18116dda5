"""The HTTP side of an imitated server."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route

from tests.helpers.imitations.fields import faults
from tests.helpers.imitations.models import Models
from tests.helpers.imitations.samplers import Samplers
from tests.helpers.imitations.saving import Saving
from tests.helpers.imitations.state import Crash, Failure, Refusal, State
from tests.helpers.imitations.submissions import Submissions
from tinker_lightning.errors import InvalidInput, InvalidMessage
from tinker_lightning.server.bodies import read_body
from tinker_lightning.server.http import PROTOBUF, answer
from tinker_lightning.types import ForwardBackwardOutput, SampleResponse
from tinker_lightning.wire import json as wire_json
from tinker_lightning.wire import protobuf

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from starlette.requests import Request
    from starlette.types import ASGIApp, Receive, Scope, Send

    from tests.helpers.imitations.behavior import Behavior
    from tinker_lightning.server import EmbeddedTrainer
    from tinker_lightning.types import requests as rq

# Endpoints with another path than their name.
_PATHS = {
    "finish": "sessions/{session_id}/finish",
    "samplers": "samplers/{sampler_id}",
    "checkpoints": "training_runs/{model_id}/checkpoints",
    "all_checkpoints": "checkpoints",
    "delete": "training_runs/{model_id}/checkpoints/{checkpoint_id:path}",
}
# Submissions for which servers may look up the model or sampler later.
_LATE = (
    "forward_backward",
    "optim_step",
    "save_weights",
    "save_weights_for_sampler",
    "load_weights",
    "asample",
)
_OPEN = ("/openapi.json", "/api/v1/healthz", "/api/v1/get_server_capabilities", "/api/v1/telemetry")


def create_app(behavior: Behavior, trainer: EmbeddedTrainer) -> tuple[Starlette, Submissions]:
    """Creates the app of an imitated server, and its submissions, which the caller has to close."""
    endpoints = _Endpoints(State(behavior, trainer))
    app = Starlette(
        routes=endpoints.routes(),
        middleware=[Middleware(_ApiKey, api_key=behavior.api_key)] if behavior.api_key else [],
        exception_handlers={Refusal: _on_refusal, HTTPException: _on_http_error},
    )
    return app, endpoints.submissions


class _Endpoints:
    """Translates between HTTP and the operations."""

    def __init__(self, state: State) -> None:
        self.submissions = Submissions(state)
        self._models = Models(state, self.submissions)
        self._saving = Saving(state, self.submissions)
        self._samplers = Samplers(state, self.submissions)
        self._behavior = state.behavior
        self._trainer = state.trainer

    def routes(self) -> list[Route]:
        models, saving, samplers = self._models, self._saving, self._samplers
        bodies: dict[str, Callable[[dict[str, Any]], dict[str, Any]]] = {
            "client/config": lambda _: dict(self._behavior.client_config),
            "telemetry": lambda _: {"status": "accepted"},
            "create_session": models.create_session,
            "session_heartbeat": models.session_heartbeat,
            "create_model": models.create_model,
            "get_info": models.get_info,
            "unload_model": models.unload_model,
            "optim_step": models.optim_step,
            "save_weights": saving.save_weights,
            "save_weights_for_sampler": saving.save_weights_for_sampler,
            "load_weights": saving.load_weights,
            "weights_info": saving.weights_info,
            "create_sampling_session": samplers.create_sampling_session,
            "asample": samplers.asample,
        }
        found: dict[str, tuple[str, Callable[[Request], Awaitable[Response]]]] = {
            **{name: ("POST", self._post(name, call)) for name, call in bodies.items()},
            "forward": ("POST", self.forward),
            "forward_backward": ("POST", self.forward_backward),
            "retrieve_future": ("POST", self.retrieve_future),
            "finish": ("POST", self.finish),
            "healthz": ("GET", self.healthz),
            "get_server_capabilities": ("GET", self.capabilities),
            "samplers": ("GET", self.sampler),
            "checkpoints": ("GET", self.checkpoints),
            "all_checkpoints": ("GET", self.checkpoints),
            "delete": ("DELETE", self.delete),
        }
        routes = [
            Route(f"/api/v1/{_PATHS.get(name, name)}", endpoint, methods=[method])
            for name, (method, endpoint) in found.items()
            if name not in self._behavior.lacks
        ]
        return [*routes, Route("/openapi.json", self._openapi(routes))]

    def _openapi(self, routes: list[Route]) -> Callable[[Request], Awaitable[Response]]:
        encoding = PROTOBUF if self._behavior.encoding == "protobuf" else "application/json"
        paths: dict[str, Any] = {}
        for route in routes:
            method = next(iter(route.methods - {"HEAD"})) if route.methods else "GET"
            content = encoding if route.path.endswith("/forward_backward") else "application/json"
            body: dict[str, Any] = {"requestBody": {"content": {content: {}}}} if method == "POST" else {}
            paths.setdefault(route.path.replace(":path", ""), {})[method.lower()] = body
        paths |= {path: {} for path in self._behavior.described}
        info = {"title": self._behavior.title, "version": self._behavior.version}

        async def openapi(_: Request) -> Response:
            return JSONResponse({"openapi": "3.1.0", "info": info, "paths": paths})

        return openapi

    def _post(
        self, name: str, call: Callable[[dict[str, Any]], dict[str, Any]]
    ) -> Callable[[Request], Awaitable[Response]]:
        async def endpoint(request: Request) -> Response:
            body = await self._read(name, request)
            try:
                content = call(body)  # not on another thread, because requests run in order of arrival
            except InvalidInput as error:
                self.submissions.reject(body.get("model_id"), body.get("seq_id"))
                raise _invalid(error) from error
            except Refusal as error:
                self.submissions.reject(body.get("model_id"), body.get("seq_id"))
                content = self._late(name, error)
            return self._answer(name, content)

        return endpoint

    def _late(self, name: str, error: Refusal) -> dict[str, Any]:
        """Returns the answer to a submission whose result is an error, or raises the error."""
        if not (self._behavior.late_errors and error.status == 404 and name in _LATE):
            raise error

        def fail() -> None:
            raise error

        return self.submissions.submit(name, None, fail)

    def _answer(self, name: str, content: dict[str, Any]) -> Response:
        return answer(content, self._behavior.statuses.get(name, 200))

    async def _read(self, name: str, request: Request) -> dict[str, Any]:
        try:
            body = wire_json.loads(await read_body(request))
        except InvalidMessage as error:
            raise _invalid(error) from error
        if wrong := faults(self._behavior, name, body):
            self.submissions.reject(body.get("model_id"), body.get("seq_id"))
            raise Refusal(422, wrong)
        return body

    async def forward(self, request: Request) -> Response:
        return await self._pass("forward", request)

    async def forward_backward(self, request: Request) -> Response:
        return await self._pass("forward_backward", request)

    async def _pass(self, name: str, request: Request) -> Response:
        b = self._behavior
        given = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        is_protobuf = given == PROTOBUF
        if is_protobuf != (b.encoding == "protobuf"):
            if b.wrong_encoding == 500:
                return _crash()
            if b.wrong_encoding == 415:
                raise Refusal(415, f"Unsupported Content-Type {given!r}; expected {PROTOBUF}")
            raise Refusal(
                422, [{"type": "model_attributes_type", "loc": ["body"], "msg": "Input should be a valid dictionary"}]
            )
        try:
            message, number = await (self._protobuf(request) if is_protobuf else self._json(name, request))
        except InvalidInput as error:
            raise _invalid(error, f"Invalid protobuf request: {error}" if is_protobuf else None) from error
        try:
            self._check_loss(message)
            return self._answer(name, self._models.run_pass(message, number))
        except Refusal as error:
            self.submissions.reject(message.model_id, number)
            return self._answer(name, self._late(name, error))

    async def _protobuf(self, request: Request) -> tuple[rq.ForwardBackwardRequest, int | None]:
        message = protobuf.decode_forward_backward(await read_body(request))
        return message, message.seq_id

    async def _json(self, name: str, request: Request) -> tuple[rq.ForwardBackwardRequest, int | None]:
        body = await self._read(name, request)
        number = body.get("seq_id")
        encoded = wire_json.dumps({**body, "seq_id": number or 1})
        return wire_json.parse_forward_backward(encoded, forward_only=name == "forward"), number

    def _check_loss(self, message: rq.ForwardBackwardRequest) -> None:
        b = self._behavior
        if message.loss_fn not in b.losses and b.unknown_loss == "rejected":
            if b.encoding == "protobuf":
                raise Refusal(422, f"Invalid protobuf request: Unsupported loss_fn: {message.loss_fn!r}")
            expected = " or ".join(map(repr, b.losses))
            raise Refusal(422, [_fault("literal_error", "loss_fn", f"Input should be {expected}", message.loss_fn)])
        known = ("clip_low_threshold", "clip_high_threshold") if message.loss_fn in ("ppo", "cispo") else ()
        if b.rejects_loss_config and (wrong := sorted(set(message.loss_fn_config) - set(known))):
            text = f"Value error, Invalid loss_fn_config keys for loss_fn={message.loss_fn!r}: {wrong}."
            raise Refusal(422, [_fault("value_error", "loss_fn_config", text, dict(message.loss_fn_config))])

    async def retrieve_future(self, request: Request) -> Response:
        b = self._behavior
        request_id = (await self._read("retrieve_future", request))["request_id"]
        future = self.submissions.futures.get(request_id)
        if future is None and b.knows_futures:
            raise Refusal(404, "Future not found")
        if future is None:
            await asyncio.sleep(b.hold)
            return self._pending(request_id)
        if not future.done():
            await asyncio.wait({asyncio.wrap_future(future)}, timeout=b.hold)
        if not future.done():
            return self._pending(request_id)
        outcome = future.result()
        if isinstance(outcome, Failure):
            return self._failed(outcome)
        if b.encoding == "protobuf" and PROTOBUF in request.headers.get("accept", ""):
            if isinstance(outcome, ForwardBackwardOutput):
                return Response(protobuf.encode_output(outcome), media_type=PROTOBUF)
            if isinstance(outcome, SampleResponse):
                return Response(protobuf.encode_sample(outcome), media_type=PROTOBUF)
        return answer(outcome)

    def _pending(self, request_id: str) -> Response:
        if self._behavior.pending_status == 408:
            return JSONResponse({"detail": "Timeout waiting for result"}, 408)
        return JSONResponse({"type": "try_again", "request_id": request_id, "queue_state": "active"})

    def _failed(self, outcome: Failure) -> Response:
        form = self._behavior.failure
        if outcome.status == 500:
            return _crash()
        if form == "error":
            return JSONResponse({"error": outcome.detail, "category": "server"})
        if form == "error_message":
            return JSONResponse({"type": "RequestFailedResponse", "error_message": outcome.detail}, 400)
        if form == "400":
            return JSONResponse({"detail": outcome.detail}, 400)
        if outcome.status is None:
            return JSONResponse({"detail": f"Future failed: Server error: {outcome.detail}"}, 422)
        return JSONResponse({"detail": f"Failed to retrieve future: {outcome.detail}"}, outcome.status)

    async def finish(self, _: Request) -> Response:
        return JSONResponse({})

    async def healthz(self, _: Request) -> Response:
        return JSONResponse({"status": "ok"})

    async def capabilities(self, _: Request) -> Response:
        return JSONResponse({"supported_models": [{"model_name": name} for name in self._trainer.catalog.names]})

    async def sampler(self, request: Request) -> Response:
        return JSONResponse(self._samplers.describe(request.path_params["sampler_id"]))

    async def checkpoints(self, request: Request) -> Response:
        return JSONResponse(self._saving.listing(request.path_params.get("model_id")))

    async def delete(self, request: Request) -> Response:
        self._saving.delete(request.path_params["model_id"], request.path_params["checkpoint_id"])
        return Response(status_code=self._behavior.statuses.get("delete", 200))


class _ApiKey:
    """Middleware that rejects requests without the API key, as TuFT does."""

    def __init__(self, app: ASGIApp, api_key: str) -> None:
        self._app = app
        self._key = api_key.encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] not in _OPEN:
            given = dict(scope["headers"]).get(b"x-api-key")
            if given != self._key:
                status, detail = (403, "Invalid API key") if given else (401, "Missing API key")
                await JSONResponse({"detail": detail}, status)(scope, receive, send)
                return
        await self._app(scope, receive, send)


def _fault(kind: str, name: str, message: str, given: Any) -> dict[str, Any]:
    return {"type": kind, "loc": ["body", "forward_backward_input", name], "msg": message, "input": given}


def _invalid(error: Exception, detail: str | None = None) -> Refusal:
    return Refusal(422, detail or [{"type": "value_error", "loc": ["body"], "msg": str(error)}])


def _crash() -> Response:
    return _Crashing("Internal Server Error", 500)


class _Crashing(PlainTextResponse):
    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await super().__call__(scope, receive, send)
        raise Crash


async def _on_refusal(_: Request, error: Exception) -> Response:
    assert isinstance(error, Refusal)  # registered for this class
    return _crash() if error.status == 500 else JSONResponse({"detail": error.detail}, error.status)


async def _on_http_error(_: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)  # registered for this class
    return JSONResponse({"detail": error.detail}, error.status_code)
