"""The HTTP app of an `EmbeddedTrainer`, for uvicorn or `httpx.ASGITransport`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.routing import Mount

from tinker_lightning.errors import InvalidInput, TinkerLightningError
from tinker_lightning.server.endpoints import checkpoints, extensions, futures, handshake, sampling, training
from tinker_lightning.server.endpoints.checkpoints import Signer
from tinker_lightning.server.http import ApiKey, on_crash, on_error, on_http_error

if TYPE_CHECKING:
    from tinker_lightning.server.trainer.trainer import EmbeddedTrainer


def create_app(trainer: EmbeddedTrainer, *, api_key: str | None = None, extended: bool = True) -> Starlette:
    """Creates the HTTP app of a trainer.

    Args:
        trainer: The trainer, which the caller has to close.
        api_key: The key that clients must send as `X-API-Key`, or None to allow all clients.
        extended: Whether to provide extensions of the protocol under `/ext/v1/`.
    """
    if api_key == "":
        raise InvalidInput("api_key must not be empty; pass a key, or None to allow all clients")
    parts = (handshake, training, sampling, futures, checkpoints)
    app = Starlette(
        routes=[
            Mount("/api/v1", routes=[route for part in parts for route in part.routes]),
            *([Mount("/ext/v1", routes=extensions.routes)] if extended else []),
        ],
        middleware=[] if api_key is None else [Middleware(ApiKey, api_key=api_key)],
        exception_handlers={
            TinkerLightningError: on_error,
            HTTPException: on_http_error,
            Exception: on_crash,
        },
    )
    app.state.trainer = trainer
    app.state.signer = Signer()
    app.state.extensions = list(extensions.NAMES) if extended else []
    return app
