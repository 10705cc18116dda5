"""HTTP responses, content types, authentication, and errors as JSON."""

from __future__ import annotations

import ipaddress
import logging
import re
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse, Response

from tinker_lightning.errors import (
    InvalidInput,
    MemoryLimitExceeded,
    MessageTooLarge,
    NotFound,
    NotRetained,
    NotStored,
    RequestConflict,
    TinkerLightningError,
    TrainerClosed,
    Unsupported,
    UnsupportedMediaType,
)
from tinker_lightning.types.responses import PRODUCT
from tinker_lightning.wire import json as wire_json

if TYPE_CHECKING:
    from collections import Counter

    from starlette.requests import Request
    from starlette.types import ASGIApp, Receive, Scope, Send

    from tinker_lightning.server.keys import Keys

logger = logging.getLogger("tinker_lightning.server")

JSON = "application/json"
PROTOBUF = "application/x-protobuf"
# URLs under this path carry a signature instead of an API key; the endpoints verify it.
SIGNED = "/signed"

_SDK = re.compile(r"AsyncTinker/Python (\d+)\.(\d+)")

_STATUS: tuple[tuple[type[TinkerLightningError], int], ...] = (
    (MessageTooLarge, 413),
    (MemoryLimitExceeded, 413),
    (UnsupportedMediaType, 415),
    (RequestConflict, 409),
    (InvalidInput, 400),
    (NotRetained, 410),
    (NotFound, 404),
    (Unsupported, 404),
    (TrainerClosed, 503),
)


def answer(message: Any, status: int = 200) -> Response:
    """Returns a JSON response."""
    return Response(wire_json.dumps(message), status, media_type=JSON)


def content_type(request: Request, *accepted: str) -> str:
    """Returns the content type of the body; raises `UnsupportedMediaType` if it is not accepted.

    This also blocks requests from web pages: browsers send these types to another origin only after a CORS preflight
    request, which this server does not allow.
    """
    media_type = request.headers.get("content-type", "").split(";")[0].strip().lower()
    if media_type not in accepted:
        raise UnsupportedMediaType(
            f"content type {media_type or 'none'} is not supported; send {' or '.join(accepted)}"
        )
    return media_type


def submits_in_turn(request: Request) -> bool:
    """Returns whether a client sends a request only after the previous one: every client but ours."""
    return not request.headers.get("user-agent", "").startswith(PRODUCT)


def sdk_release(request: Request, *, default: tuple[int, int]) -> tuple[int, int]:
    """Returns the major and minor version of the official SDK that sent a request, or `default` for other clients."""
    release = _SDK.match(request.headers.get("user-agent", ""))
    return default if release is None else (int(release[1]), int(release[2]))


def error_fields(error: BaseException) -> dict[str, str]:
    """Returns the category, "user" if the caller can fix the error, and, as an extension of the protocol, the class."""
    if not isinstance(error, TinkerLightningError):
        return {"category": "server"}
    return {
        "category": "server" if isinstance(error, NotStored | TrainerClosed) else "user",
        "error_class": type(error).__name__,
    }


def error_text(error: BaseException) -> str:
    """Returns the error message for clients, with the class of internal errors."""
    is_internal = not isinstance(error, TinkerLightningError)
    return f"internal error: {type(error).__name__}: {error}" if is_internal else str(error)


async def on_error(_: Request, error: Exception) -> Response:
    """Converts a `TinkerLightningError` to a JSON response with the matching status code."""
    status = next((code for cls, code in _STATUS if isinstance(error, cls)), 500)
    headers = None
    if isinstance(error, MemoryLimitExceeded) and error.is_temporary:
        status, headers = 429, {"Retry-After": "1"}
    if isinstance(error, RequestConflict):
        headers = {"X-Should-Retry": "false"}  # because clients take 409 for a conflict that passes
    return JSONResponse({"detail": str(error), **error_fields(error)}, status, headers)


async def on_http_error(request: Request, error: Exception) -> Response:
    """Converts an `HTTPException`, such as an unknown path or method, to a JSON response."""
    assert isinstance(error, HTTPException)  # noqa: S101  # registered for this class
    detail = f"{request.method} {request.url.path}: {error.detail}"
    return JSONResponse({"detail": detail}, error.status_code, error.headers)


async def on_crash(_: Request, error: Exception) -> Response:
    """Logs an unexpected exception and converts it to a JSON response."""
    logger.exception("a request failed", exc_info=error)
    return JSONResponse({"detail": error_text(error), "category": "server"}, 500)


class LocalHost:
    """Middleware that rejects requests whose `Host` header is not a loopback address.

    This prevents DNS rebinding: a web page can resolve its own domain to the loopback address to reach this server, but
    its requests still have that domain as their host.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Responds with 403 or calls the app."""
        if scope["type"] == "http":
            host = dict(scope["headers"]).get(b"host", b"").decode("latin-1")
            if not _is_this_machine(host):
                detail = f"the Host header {host!r} is not this machine. Use http://127.0.0.1, or start the server"
                await JSONResponse({"detail": f"{detail} with --api-key."}, 403)(scope, receive, send)
                return
        await self._app(scope, receive, send)


def _is_this_machine(host: str) -> bool:
    try:
        return is_loopback(urlsplit(f"//{host}").hostname or "localhost")
    except ValueError:  # brackets without a valid address
        return False


def is_loopback(host: str) -> bool:
    """Returns whether a host is `localhost` or a loopback address."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


class ApiKey:
    """Middleware that rejects requests without a key, except for health checks and signed URLs.

    The owner that the key belongs to becomes part of the request: `trainer_of` returns what this owner can reach.
    """

    def __init__(self, app: ASGIApp, keys: Keys, errors: Counter[int]) -> None:
        self._app = app
        self._keys = keys
        self._errors = errors

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Responds with 401 or calls the app."""
        # The full path is compared, because other paths that end in healthz, such as a checkpoint's, need the key.
        path = scope.get("path", "").removeprefix(scope.get("root_path", ""))
        is_open = path == "/api/v1/healthz" or path.startswith(f"/api/v1{SIGNED}/")
        if scope["type"] == "http" and not is_open:
            headers = dict(scope["headers"])
            # Programs such as Prometheus send their keys in this form.
            key = headers.get(b"x-api-key") or headers.get(b"authorization", b"").removeprefix(b"Bearer ")
            owner = self._keys.find(key)
            if owner is None:
                detail = "the X-API-Key header is wrong" if key else "the X-API-Key header is missing"
                response = JSONResponse({"detail": f"{detail}; set TINKER_API_KEY to a key of the server"}, 401)
                self._errors[response.status_code] += 1
                await response(scope, receive, send)
                return
            scope["owner"] = owner
        await self._app(scope, receive, send)
