"""HTTP requests to one server, with retries, and with our errors for everything that can go wrong."""

from __future__ import annotations

import asyncio
import functools
import itertools
import logging
import time
from typing import TYPE_CHECKING, Any, TypeVar

import httpx

from tinker_lightning.client.retry_policy import FIRST_CONTACT_SECONDS, RetryPolicy, StatusLog
from tinker_lightning.errors import (
    ClientClosed,
    ConnectionDropped,
    InvalidInput,
    InvalidMessage,
    NotAnApi,
    NotATinkerServer,
    NotFound,
    OperationFailed,
    ServerUnreachable,
    TinkerLightningError,
    Unauthorized,
    told_by_name,
)
from tinker_lightning.wire import json as wire_json

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractAsyncContextManager

    from tinker_lightning.client.credentials import Credentials

logger = logging.getLogger("tinker_lightning.client")

T = TypeVar("T")

JSON = "application/json"
PROTOBUF = "application/x-protobuf"

_LIMITS = httpx.Limits(max_connections=None, max_keepalive_connections=256)
# Servers hold a poll for up to half a minute; some hold it longer, and then it is asked again.
_TIMEOUT = httpx.Timeout(60.0, connect=10.0, pool=None)
# A request that fails for longer than this is shown to the user.
_SILENT_SECONDS = 5.0
_MEND_URL = "Correct the URL (TINKER_BASE_URL or url=)."
_MEND_ADDRESS = "Use http://host:port, or 'embedded' for a trainer in this process."

# A client uses the same few URLs again and again, and parsing one takes a tenth of a request's time.
_parsed = functools.lru_cache(maxsize=256)(httpx.URL)


class Connection:
    """Requests to one server. All methods run on the client's event loop.

    Args:
        url: Where the server is.
        credentials: What the requests carry.
        transport: How they get there; None for the network.
        retry_policy: How long failing requests are tried again, once the server has answered at all.

    Raises:
        InvalidInput: If the URL cannot be one of a server.
    """

    def __init__(
        self,
        url: str,
        credentials: Credentials,
        transport: httpx.AsyncBaseTransport | None,
        retry_policy: RetryPolicy,
    ) -> None:
        self.url = url.rstrip("/")
        self.credentials = credentials
        self.notices = StatusLog()
        self.billing_pause_seconds = retry_policy.seconds
        self._patience = retry_policy
        self._reached = False
        self._closed = False
        _check_url(url)
        self._client = httpx.AsyncClient(transport=transport, http2=True, limits=_LIMITS, timeout=_TIMEOUT)

    async def close(self) -> None:
        """Closes the connections; requests in flight end with `ClientClosed`."""
        self._closed = True
        await self._client.aclose()

    async def get(self, path: str, result: type[T]) -> T:
        """Gets a resource."""
        return self.parse(result, await self.send("GET", path))

    async def post(self, path: str, message: Any, result: type[T]) -> T:
        """Posts a JSON request that is answered at once."""
        return self.parse(result, await self.send("POST", path, wire_json.dumps(message)))

    async def send(
        self,
        method: str,
        path: str,
        body: bytes | None = None,
        *,
        headers: dict[str, str] | None = None,
        raw_key: bool = False,
        understood: Callable[[httpx.Response], bool] | None = None,
        seconds: float | None = None,
    ) -> httpx.Response:
        """Sends a request, retrying where that may help, and returns an answer that is not an error.

        Args:
            method: GET, POST, …
            path: Behind the server's URL.
            body: What is sent.
            headers: Beside the usual ones.
            raw_key: Send the key itself, not a token made of it.
            understood: Which answers with an error status the caller understands.
            seconds: How long to try, if not as long as usual.

        Raises:
            TinkerLightningError: The class says what kind of error, the message what to do about it.
        """
        content = {"Content-Type": JSON} if body is not None else {}
        started = time.monotonic()
        shown = False
        for attempt in itertools.count():
            if self._closed:
                raise ClientClosed("the client was closed before the result came")
            credentials = self.credentials.key_header() if raw_key else await self.credentials.header()
            response: httpx.Response | None = None
            try:
                response = await self._client.request(
                    method,
                    _parsed(self.url + path),
                    content=body,
                    headers={"Accept": JSON, **content, **credentials, **(headers or {})},
                )
            except httpx.TransportError as cause:
                error: TinkerLightningError = self._transport_error(method, path, cause)
                error.__cause__ = cause
            except httpx.RequestError as cause:
                raise NotAnApi(f"{self.url}{path} answers what cannot be decoded: {cause}. {_MEND_URL}") from cause
            else:
                self._reached = self._reached or response.is_success or _is_json(response)
                if response.is_success or (understood is not None and understood(response)):
                    if shown:
                        self.notices.show(self.url, "active")
                    return response
                error = self._status_error(method, path, response)
                if not _may_help(response):
                    raise error
            delay = self._patience.delay(attempt, response)
            waited = time.monotonic() - started
            if waited + delay > self._limit(response, seconds):
                raise error
            if waited + delay > _SILENT_SECONDS or (response is not None and response.status_code in (402, 429)):
                state = type(error).__name__ if response is None else f"HTTP {response.status_code}"
                self.notices.show(self.url, f"waiting because of {state}", str(error))
                shown = True
            logger.debug("%s; trying again in %.1f s", error, delay)
            await asyncio.sleep(delay)
        raise AssertionError("unreachable")

    def stream(self, url: str) -> AbstractAsyncContextManager[httpx.Response]:
        """Streams any URL. The API key is not sent, because the URL may belong to another server."""
        return self._client.stream("GET", url, headers={"Accept-Encoding": "identity"}, follow_redirects=True)

    def parse(self, result: type[T], response: httpx.Response) -> T:
        """Parses the JSON of an answer into a dataclass."""
        if not _is_json(response):
            raise self._not_an_api(response)
        try:
            return wire_json.parse(result, response.content)
        except InvalidInput as error:
            raise self.not_a_tinker_server(f"{response.url.path}: {error}") from error

    def json(self, response: httpx.Response) -> dict[str, Any]:
        """Returns the JSON object of an answer."""
        if not _is_json(response):
            raise self._not_an_api(response)
        try:
            return wire_json.loads(response.content)
        except InvalidMessage as error:
            raise self.not_a_tinker_server(f"{response.url.path}: {error}") from error

    def not_a_tinker_server(self, detail: str) -> NotATinkerServer:
        """Returns the error for answers of another API."""
        return NotATinkerServer(f"{self.url} answers, but not as a Tinker server does: {detail[:200]}. {_MEND_URL}")

    def _limit(self, response: httpx.Response | None, seconds: float | None) -> float:
        if seconds is not None:
            return seconds
        if response is not None and response.status_code == 402:
            return self.billing_pause_seconds
        return self._patience.seconds if self._reached else min(FIRST_CONTACT_SECONDS, self._patience.seconds)

    def _transport_error(self, method: str, path: str, cause: httpx.TransportError) -> TinkerLightningError:
        what = f"{method} {self.url}{path}"
        reason = str(cause) or type(cause).__name__
        if isinstance(cause, httpx.RemoteProtocolError | httpx.ReadError | httpx.WriteError):
            return ConnectionDropped(
                f"{what}: the connection broke before the answer was complete ({reason}). Look into the server's log, "
                "and at the proxy if there is one in between."
            )
        if isinstance(cause, httpx.ReadTimeout | httpx.WriteTimeout):
            return ServerUnreachable(f"{what}: no answer within {_TIMEOUT.read:.0f} s. Is the server overloaded?")
        return ServerUnreachable(
            f"nothing answers at {self.url} ({reason}). Is the server running? Start one with "
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
        if body is None and status in (502, 503, 504):
            return ServerUnreachable(
                f"something answers at {self.url} for a server that does not (HTTP {status}). Is the server behind it "
                "running?"
            )
        message = f"{method} {path}: {_detail(body) or response.text[:200] or 'no reason given'}"
        if status == 404:
            return NotFound(message)
        if 400 <= status < 500 and not _may_help(response):
            return told_by_name((body or {}).get("error_class"))(message)
        return OperationFailed(f"{message} (HTTP {status})")

    def _not_an_api(self, response: httpx.Response) -> NotAnApi:
        kind = response.headers.get("content-type", "no content type")
        return NotAnApi(
            f"{self.url} is no Tinker server: {response.request.method} {response.url.path} was answered with HTTP "
            f"{response.status_code} and {kind}: {response.text[:60]!r}. {_MEND_URL}"
        )


def _check_url(url: str) -> None:
    try:
        parsed = httpx.URL(url)
    except (httpx.InvalidURL, TypeError) as error:
        raise InvalidInput(f"{url!r} is no address of a server: {error}. {_MEND_ADDRESS}") from error
    if parsed.scheme not in ("http", "https") or not parsed.host:
        raise InvalidInput(f"{url!r} is no address of a server. {_MEND_ADDRESS}")


def _is_json(response: httpx.Response) -> bool:
    kind: str = response.headers.get("content-type", "")
    return kind.split(";")[0].strip().endswith("json")


def _may_help(response: httpx.Response) -> bool:
    """Returns whether the same request may succeed later."""
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
