"""Hosted Tinker's rule that only a model's first request may load a state, in front of our own trainer.

Read, not run: SkyRL's authors have verified it on the hosted service (their pull request 2071). It answers
`400 LoadWeights is not permitted with seq_id N`, also after a single pass or save.
"""

from __future__ import annotations

import contextlib
import tempfile
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import httpx
import pytest
from starlette.requests import Request
from starlette.responses import JSONResponse

from tests.helpers.soaking import first_only
from tinker_lightning.client import ServiceClient
from tinker_lightning.client.dialects import dialect_named
from tinker_lightning.client.dialects.dialect import NEWER_FIELDS
from tinker_lightning.server import EmbeddedTrainer, create_app
from tinker_lightning.testing import RecordingTransport, embedded_service

if TYPE_CHECKING:
    from collections.abc import Iterator

    from starlette.types import ASGIApp, Message, Receive, Scope, Send

    from tinker_lightning.client.dialects import Dialect

# How states are loaded: into the model, by one request that creates a model, or by the first request of a new model.
Loading: TypeAlias = Literal["in place", "one request", "first request"]
LOADINGS: list[Any] = ["in place", "one request", pytest.param("first request", marks=pytest.mark.soak)]
LOADINGS_IN_SOAK = first_only(["in place", "one request", "first request"])
HOSTED = dialect_named("hosted")
IN_TWO_REQUESTS = HOSTED.but(name="mine", newer_fields=NEWER_FIELDS - {"load_weights.session_id"})


class LoadFirst:
    """Rejects loads into models that have had a request before."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or not scope["path"].endswith("/load_weights"):
            await self._app(scope, receive, send)
            return
        request = Request(scope, receive)
        body: dict[str, Any] = await request.json()
        if body.get("model_id") is not None and body["seq_id"] != 1:
            detail = f"LoadWeights is not permitted with seq_id {body['seq_id']}"
            await JSONResponse({"detail": detail}, 400)(scope, receive, send)
            return
        content = await request.body()

        async def again() -> Message:
            return {"type": "http.request", "body": content}

        await self._app(scope, again, send)


@contextlib.contextmanager
def load_first_service(
    trainer: EmbeddedTrainer | None = None, *, dialect: Dialect = HOSTED, record: bool = False
) -> Iterator[Any]:
    """A client of a trainer with the rule; `record` makes `service.transport` a recording of its requests."""
    with contextlib.ExitStack() as stack:
        if trainer is None:
            folder = stack.enter_context(tempfile.TemporaryDirectory(ignore_cleanup_errors=True))
            trainer = EmbeddedTrainer(["tiny"], data_dir=folder)
            stack.callback(trainer.close)
        transport: httpx.AsyncBaseTransport = httpx.ASGITransport(LoadFirst(create_app(trainer)))
        if record:
            transport = RecordingTransport(transport)
        register = trainer.losses.register_function
        client = ServiceClient(base_url="http://embedded", dialect=dialect, transport=transport, in_process=register)
        service: Any = stack.enter_context(client)
        service.transport = transport
        yield service


@contextlib.contextmanager
def loading(how: Loading, trainer: EmbeddedTrainer | None = None) -> Iterator[ServiceClient]:
    """A client of a trainer, with the rule or without."""
    reach = embedded_service(trainer) if how == "in place" else None
    dialect = HOSTED if how == "one request" else IN_TWO_REQUESTS
    with reach or load_first_service(trainer, dialect=dialect) as service:
        yield service
