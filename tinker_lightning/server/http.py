"""Bodies in, bodies out: limits, encodings, content types, and errors as JSON."""

from __future__ import annotations

import functools
import hmac
import ipaddress
import logging
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import urlsplit

from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.responses import JSONResponse, Response

from tinker_lightning.errors import (
    InvalidInput,
    InvalidMessage,
    MessageTooLarge,
    NotFound,
    TinkerLightningError,
    TrainerClosed,
    UnsupportedMediaType,
)
from tinker_lightning.wire import compression
from tinker_lightning.wire import json as wire_json

if TYPE_CHECKING:
    from collections.abc import Callable

    from starlette.requests import Request
    from starlette.types import ASGIApp, Receive, Scope, Send

logger = logging.getLogger("tinker_lightning.server")

JSON = "application/json"
PROTOBUF = "application/x-protobuf"
# Below this path the address itself shows that it was given out by this server; its endpoints check that.
SIGNED = "/signed"
MAX_BODY_BYTES = 256 << 20
# Reading JSON keeps all other threads waiting, so that less of it is taken.
MAX_JSON_BYTES = 64 << 20
# From this many bytes on a body is parsed on another thread, so that meanwhile others are answered.
_LARGE_BODY = 1 << 17

T = TypeVar("T")

_STATUS: tuple[tuple[type[TinkerLightningError], int], ...] = (
    (MessageTooLarge, 413),
    (UnsupportedMediaType, 415),
    (InvalidInput, 400),
    (NotFound, 404),
    (TrainerClosed, 503),
)


def answer(message: Any, status: int = 200) -> Response:
    """A JSON answer."""
    return Response(wire_json.dumps(message), status, media_type=JSON)


def content_type(request: Request, *accepted: str) -> str:
    """The body's type.

    Raises:
        UnsupportedMediaType: If it is not one of the accepted ones. This also keeps web pages out: a browser asks
            before it sends these types to another origin, and is not answered.
    """
    given = request.headers.get("content-type", "").split(";")[0].strip().lower()
    if given not in accepted:
        raise UnsupportedMediaType(f"content type {given or 'none'} is not taken here; send {' or '.join(accepted)}")
    return given


async def read_body(request: Request, limit: int | None = None) -> bytes:
    """The body, unfolded, never more than `limit` of it; if none is given, `MAX_BODY_BYTES`, or `MAX_JSON_BYTES`."""
    is_json = JSON in request.headers.get("content-type", "").lower()
    mend = "split the batch" if limit is None else "send less"
    limit = limit or (min(MAX_JSON_BYTES, MAX_BODY_BYTES) if is_json else MAX_BODY_BYTES)
    encoding = request.headers.get("content-encoding", "").strip().lower() or "identity"
    if encoding not in ("identity", "zstd"):
        raise UnsupportedMediaType(f"content encoding {encoding} is not taken here; send zstd or none")
    parts: list[bytes] = []
    size = 0
    try:
        async for part in request.stream():
            size += len(part)
            if size > limit:
                raise MessageTooLarge(f"the body has more than the {limit} bytes that are taken; {mend}")
            parts.append(part)
    except ClientDisconnect as error:
        raise InvalidMessage(f"the connection was closed after {size} bytes of the body; send it again") from error
    body = b"".join(parts)
    # On another thread even if it is small: how much it unfolds to is not known.
    return await run_in_threadpool(compression.decompress, body, limit) if encoding == "zstd" else body


async def parse_body(parse: Callable[[bytes], T], body: bytes) -> T:
    """What a body says, without keeping other clients waiting for a large one."""
    return parse(body) if len(body) < _LARGE_BODY else await run_in_threadpool(parse, body)


async def read(request: Request, cls: type[T]) -> T:
    """A JSON request as its dataclass."""
    content_type(request, JSON)
    return await parse_body(functools.partial(wire_json.parse, cls), await read_body(request))


def error_category(error: BaseException) -> str:
    """Whose mistake an error is, in the protocol's words: what was foreseen and explained is the caller's to mend."""
    return "user" if isinstance(error, TinkerLightningError) and not isinstance(error, TrainerClosed) else "server"


def error_fields(error: BaseException) -> dict[str, str]:
    """What an answer says of an error beside its text. The protocol knows the category; our clients also the class."""
    known = {"error_class": type(error).__name__} if isinstance(error, TinkerLightningError) else {}
    return {"category": error_category(error), **known}


def error_text(error: BaseException) -> str:
    """What a client is told; a defect of ours often has a message that says nothing without its class."""
    known = isinstance(error, TinkerLightningError)
    return str(error) if known else f"internal error: {type(error).__name__}: {error}"


async def on_error(_: Request, error: Exception) -> Response:
    """Any error of ours as JSON with a fitting status."""
    status = next((code for cls, code in _STATUS if isinstance(error, cls)), 500)
    return JSONResponse({"detail": str(error), **error_fields(error)}, status)


async def on_http_error(request: Request, error: Exception) -> Response:
    """An unknown path or method, as JSON too."""
    assert isinstance(error, HTTPException)  # noqa: S101  # registered for this class
    detail = f"{request.method} {request.url.path}: {error.detail}"
    return JSONResponse({"detail": detail}, error.status_code, error.headers)


async def on_crash(_: Request, error: Exception) -> Response:
    """A defect of this server."""
    logger.exception("a request failed", exc_info=error)
    return JSONResponse({"detail": error_text(error), "category": "server"}, 500)


class LocalHost:
    """Lets through only requests that name this machine as their host.

    A web page can point a name of its own at this machine's loopback address and then speak to it as to its own
    server; its requests still carry that name.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers 403 itself, or passes on."""
        if scope["type"] == "http":
            given = dict(scope["headers"]).get(b"host", b"").decode("latin-1")
            if not _is_this_machine(given):
                detail = f"this server is for this machine only, but was asked as {given!r}. Use http://127.0.0.1, or"
                await JSONResponse({"detail": f"{detail} start it with --api-key."}, 403)(scope, receive, send)
                return
        await self._app(scope, receive, send)


def _is_this_machine(host: str) -> bool:
    try:
        return is_loopback(urlsplit(f"//{host}").hostname or "localhost")
    except ValueError:  # brackets that do not hold an address
        return False


def is_loopback(host: str) -> bool:
    """Whether a host is this machine and nothing else."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


class ApiKey:
    """Lets through only requests that carry the key; health checks and signed addresses need none."""

    def __init__(self, app: ASGIApp, api_key: str) -> None:
        self._app = app
        self._key = api_key.encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers 401 itself, or passes on."""
        # Compared from the root on: what is named healthz deeper down (a checkpoint may be) needs the key.
        path = scope.get("path", "").removeprefix(scope.get("root_path", ""))
        is_open = path == "/api/v1/healthz" or path.startswith(f"/api/v1{SIGNED}/")
        if scope["type"] == "http" and not is_open:
            given = dict(scope["headers"]).get(b"x-api-key", b"")
            if not hmac.compare_digest(given, self._key):
                detail = "the X-API-Key header is wrong" if given else "the X-API-Key header is missing"
                response = JSONResponse({"detail": f"{detail}; set TINKER_API_KEY to the server's --api-key"}, 401)
                await response(scope, receive, send)
                return
        await self._app(scope, receive, send)
