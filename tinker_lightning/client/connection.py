"""HTTP to one server: retries, and errors of our own for everything that can go wrong on the way."""

from __future__ import annotations

import asyncio
import itertools
import logging
import random
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import httpx

from tinker_lightning.errors import (
    ConnectionDropped,
    InvalidInput,
    InvalidMessage,
    NotAnApi,
    NotFound,
    OperationFailed,
    ServerUnreachable,
    TinkerLightningError,
    Unauthorized,
)
from tinker_lightning.wire import json as wire_json

if TYPE_CHECKING:
    from collections.abc import Collection

    from tinker_lightning.client.credentials import Credentials

logger = logging.getLogger("tinker_lightning.client")

JSON = "application/json"
PROTOBUF = "application/x-protobuf"

_LIMITS = httpx.Limits(max_connections=None, max_keepalive_connections=256)
# Servers hold a poll for up to half a minute; some hold it longer, and then it is asked again.
_TIMEOUT = httpx.Timeout(60.0, connect=10.0, pool=None)


@dataclass(frozen=True, slots=True)
class Patience:
    """How long a failing request is tried again."""

    seconds: float
    first_delay: float = 0.5
    longest_delay: float = 10.0

    def delay(self, attempt: int, response: httpx.Response | None) -> float:
        """How long to wait before the next attempt: what the server asks for, or ever longer."""
        if response is not None:
            for header, unit in (("retry-after-ms", 0.001), ("retry-after", 1.0)):
                try:
                    asked = float(response.headers[header]) * unit
                except (KeyError, ValueError):
                    continue
                if 0 < asked <= 60:
                    return asked
        longest: float = min(self.first_delay * 2**attempt, self.longest_delay)
        return longest * random.uniform(0.75, 1.0)  # noqa: S311  # spreads retries, hides nothing


class Connection:
    """Requests to one server. All methods run on the client's event loop.

    Args:
        url: Where the server is.
        credentials: What the requests carry.
        transport: How they get there; None for the network.
        patience: How long failing requests are tried again, once the server has answered at all; before, it is a
            few seconds, for then the address is likely wrong.
    """

    def __init__(
        self,
        url: str,
        credentials: Credentials,
        transport: httpx.AsyncBaseTransport | None,
        patience: Patience,
    ) -> None:
        self.url = url.rstrip("/")
        self.credentials = credentials
        self._patience = patience
        self._reached = False
        self._client = httpx.AsyncClient(transport=transport, http2=True, limits=_LIMITS, timeout=_TIMEOUT)

    async def close(self) -> None:
        """Closes the connections."""
        await self._client.aclose()

    async def get(self, path: str) -> dict[str, Any]:
        """A JSON object."""
        return self.json(await self.send("GET", path))

    async def post(self, path: str, message: Any) -> dict[str, Any]:
        """The JSON object that answers a JSON request."""
        return self.json(await self.send("POST", path, wire_json.dumps(message)))

    async def send(
        self,
        method: str,
        path: str,
        body: bytes | None = None,
        *,
        headers: dict[str, str] | None = None,
        raw_key: bool = False,
        pending: Collection[int] = (),
    ) -> httpx.Response:
        """Sends a request, again where that may help, and returns an answer that is not an error.

        Args:
            method: GET, POST, …
            path: Behind the server's URL.
            body: What is sent.
            headers: Beside the usual ones.
            raw_key: Send the key itself, not a token made of it.
            pending: Statuses that the caller understands.

        Raises:
            TinkerLightningError: The class says what kind of error, the message what to do about it.
        """
        content = {"Content-Type": JSON} if body is not None else {}
        deadline = time.monotonic() + (self._patience.seconds if self._reached else min(3.0, self._patience.seconds))
        for attempt in itertools.count():
            credentials = self.credentials.key_header() if raw_key else await self.credentials.header()
            response: httpx.Response | None = None
            try:
                response = await self._client.request(
                    method,
                    self.url + path,
                    content=body,
                    headers={"Accept": JSON, **content, **credentials, **(headers or {})},
                )
            except (httpx.InvalidURL, httpx.UnsupportedProtocol) as cause:
                raise InvalidInput(f"{self.url!r} is no address of a server: {cause}. Use http://host:port.") from cause
            except httpx.TransportError as cause:
                error: TinkerLightningError = self._transport_error(method, path, cause)
                error.__cause__ = cause
            else:
                self._reached = True
                if response.is_success or response.status_code in pending:
                    return response
                error = self._status_error(method, path, response)
                if not _may_help(response):
                    raise error
            delay = self._patience.delay(attempt, response)
            if time.monotonic() + delay > deadline:
                raise error
            logger.debug("%s %s: %s; trying again in %.1f s", method, path, error, delay)
            await asyncio.sleep(delay)
        raise AssertionError("unreachable")

    def json(self, response: httpx.Response) -> dict[str, Any]:
        """The JSON object of an answer."""
        if not response.headers.get("content-type", "").split(";")[0].strip().endswith("json"):
            raise self._not_an_api(response)
        try:
            return wire_json.loads(response.content)
        except InvalidMessage as error:
            raise NotAnApi(f"{self.url}{response.url.path} answered with broken JSON: {error}") from error

    def _transport_error(self, method: str, path: str, cause: httpx.TransportError) -> TinkerLightningError:
        what = f"{method} {self.url}{path}"
        if isinstance(cause, httpx.RemoteProtocolError | httpx.ReadError | httpx.WriteError):
            return ConnectionDropped(f"{what}: the connection broke ({cause or type(cause).__name__})")
        if isinstance(cause, httpx.ReadTimeout | httpx.WriteTimeout):
            return ServerUnreachable(f"{what}: no answer within {_TIMEOUT.read:.0f} s")
        return ServerUnreachable(
            f"nothing answers at {self.url} ({cause or type(cause).__name__}). Is the server running? Start one with "
            "`tinker-lightning serve --model tiny`, correct TINKER_BASE_URL, or unset it to train in this process."
        )

    def _status_error(self, method: str, path: str, response: httpx.Response) -> TinkerLightningError:
        status = response.status_code
        try:
            body = wire_json.loads(response.content)
        except InvalidMessage:
            body = None
        if status in (401, 403):
            detail = _detail(body) or "no reason given"
            return Unauthorized(f"{self.url} refused the API key ({detail}). Set TINKER_API_KEY, or pass api_key=.")
        if body is None and not _may_help(response):
            return self._not_an_api(response)
        message = f"{method} {path}: {_detail(body) or response.text[:200] or 'no reason given'}"
        if status == 404:
            return NotFound(message)
        if 400 <= status < 500 and not _may_help(response):
            return InvalidInput(message)
        return OperationFailed(f"{message} (HTTP {status})")

    def _not_an_api(self, response: httpx.Response) -> NotAnApi:
        kind = response.headers.get("content-type", "no content type")
        return NotAnApi(
            f"{self.url} is no Tinker server: {response.request.method} {response.url.path} was answered with HTTP "
            f"{response.status_code} and {kind}: {response.text[:60]!r}. Correct the URL (TINKER_BASE_URL or url=)."
        )


def _may_help(response: httpx.Response) -> bool:
    """Whether the same request may succeed later."""
    asked = response.headers.get("x-should-retry")
    if asked in ("true", "false"):
        return bool(asked == "true")
    status = response.status_code
    # An empty 400 comes from a proxy in between, not from the server.
    return status in (402, 408, 409, 429) or status >= 500 or (status == 400 and not response.content)


def _detail(body: dict[str, Any] | None) -> str:
    if body is None:
        return ""
    for key in ("detail", "error", "message"):
        if body.get(key):
            return str(body[key])
    return ""
