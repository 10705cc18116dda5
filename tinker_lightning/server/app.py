"""The HTTP app of an `EmbeddedTrainer`, for uvicorn or `httpx.ASGITransport`."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.routing import Mount, Route

from tinker_lightning.errors import TinkerLightningError
from tinker_lightning.server.endpoints import checkpoints, futures, handshake, sampling, training
from tinker_lightning.server.endpoints.checkpoints import Signer
from tinker_lightning.server.endpoints.futures import result_endpoint
from tinker_lightning.server.http import ApiKey, on_crash, on_error, on_http_error
from tinker_lightning.server.keys import Keys

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from starlette.requests import Request
    from starlette.responses import Response

    from tinker_lightning.server.trainer.trainer import EmbeddedTrainer

# The extensions of the protocol that get_server_capabilities lists. Standard endpoints are not affected.
EXTENSIONS = (
    "counted_logprobs",
    "import_adapter",
    "retained_forwards",
    "server_losses",
    "submit_and_wait",
    "tokenizer_files",
)
# Submissions that respond with the result, which takes one round trip instead of two.
_submissions = {**training.submissions, **training.extensions, **sampling.submissions}
_extension_routes = [
    *training.extension_routes,
    *(Route(path, result_endpoint(submit), methods=["POST"]) for path, submit in _submissions.items()),
]


def create_app(trainer: EmbeddedTrainer, *, api_key: str | Keys | None = None, extended: bool = True) -> Starlette:
    """Creates the HTTP app of a trainer.

    Args:
        trainer: The trainer, which the caller has to close.
        api_key: The key that clients must send as `X-API-Key`, or `Keys`, each of which reaches only its own sessions
            and checkpoints, or None to allow all clients.
        extended: Whether to provide extensions of the protocol under `/ext/v1/`.
    """
    keys = Keys.single(api_key) if isinstance(api_key, str) else api_key
    if keys is not None:
        keys.on_removal(trainer.finish_sessions)
    errors: Counter[int] = Counter()  # responses by status

    def counted(handle: Callable[[Request, Exception], Awaitable[Response]]) -> Any:
        async def handler(request: Request, error: Exception) -> Response:
            response = await handle(request, error)
            errors[response.status_code] += 1
            return response

        return handler

    parts = (handshake, training, sampling, futures, checkpoints)
    app = Starlette(
        routes=[
            Route("/metrics", handshake.metrics, methods=["GET"]),
            Mount("/api/v1", routes=[route for part in parts for route in part.routes]),
            *([Mount("/ext/v1", routes=_extension_routes)] if extended else []),
        ],
        middleware=[] if keys is None else [Middleware(ApiKey, keys=keys, errors=errors)],
        exception_handlers={
            TinkerLightningError: counted(on_error),
            HTTPException: counted(on_http_error),
            Exception: counted(on_crash),
        },
    )
    app.state.trainer = trainer
    app.state.keys = keys
    app.state.errors = errors
    app.state.signer = Signer()
    app.state.extensions = list(EXTENSIONS) if extended else []
    return app
