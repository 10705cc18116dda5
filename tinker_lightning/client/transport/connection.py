"""HTTP requests to one server, with retries and with this library's exceptions."""

from __future__ import annotations

import asyncio
import functools
import itertools
import logging
import os
import textwrap
import time
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any, TypeVar

import httpx

from tinker_lightning.client.transport import answers
from tinker_lightning.client.transport.answers import (
    detail_of,
    is_final_conflict,
    is_json,
    is_token_rejected,
    is_turned_away,
    json_body,
    may_succeed_later,
)
from tinker_lightning.client.transport.retries import FIRST_CONTACT_SECONDS, SILENT, RetryPolicy, Wait, Waits
from tinker_lightning.client.transport.target import HOSTED_URL, password_header, without_password
from tinker_lightning.errors import (
    AnswerLost,
    ClientClosed,
    ConnectionDropped,
    InvalidInput,
    InvalidMessage,
    NotAnApi,
    NotATinkerServer,
    NotFound,
    NotRetained,
    OperationFailed,
    ServerUnreachable,
    TinkerLightningError,
    Unauthorized,
    input_error,
)
from tinker_lightning.types.responses import PRODUCT
from tinker_lightning.wire import json as wire_json

if TYPE_CHECKING:
    import ssl
    from collections.abc import Callable, Mapping
    from contextlib import AbstractAsyncContextManager

    from tinker_lightning.client.transport.recording import OperationRecord
    from tinker_lightning.client.transport.target import Credentials

logger = logging.getLogger("tinker_lightning.client")

T = TypeVar("T")

_LIMITS = httpx.Limits(max_connections=None, max_keepalive_connections=256)
# Servers hold a poll for up to five minutes. The client polls again earlier, because the connection may have died.
_TIMEOUT = httpx.Timeout(60.0, connect=10.0, pool=None)
_CLOSING_SECONDS = 0.05
# What a stranger answers can be long, and its beginning shows what it is.
_MAX_DETAIL = 500
_MAX_REASON = 80
_FIX_URL = "Correct the URL (TINKER_BASE_URL or url=)."
_FIX_VERSION = "Is its version one that this client knows? `tinker-lightning doctor {url}` shows what it speaks."
_FIX_ADDRESS = "Use http://host:port, or 'embedded' for a trainer in this process."

# Failures before the request left.
_NOT_SENT = httpx.ConnectError, httpx.ConnectTimeout, httpx.PoolTimeout, httpx.UnsupportedProtocol
# What OpenSSL says of an answer that is not TLS, by its release.
_NO_TLS = "WRONG_VERSION_NUMBER", "RECORD_LAYER_FAILURE", "PACKET_LENGTH_TOO_LONG"
_MAY_HAVE_RUN = "The server may have executed it, and would do so twice if it were sent again."

# A client uses the same few URLs again and again, and parsing one takes a tenth of a request's time.
_parsed = functools.lru_cache(maxsize=256)(httpx.URL)


@functools.cache
def _tls_context(*_certificates: str | None) -> ssl.SSLContext:
    """Caches the TLS settings, because reading the certificates takes longer than the rest of the setup."""
    return httpx.create_ssl_context()


class Connection:
    """Requests to one server. All methods run on the client's event loop.

    Raises:
        InvalidInput: If the URL is not an HTTP URL.
    """

    def __init__(
        self,
        url: str,
        credentials: Credentials,
        transport: httpx.AsyncBaseTransport | None,
        retry_policy: RetryPolicy,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        parsed = _check_url(url)
        self.url = without_password(url).rstrip("/")  # also what messages show
        self.credentials = credentials
        self.waits = Waits(self.url, retry_policy.seconds)
        self.billing_pause_seconds = retry_policy.seconds
        self.has_session = False  # whether the server has answered like a Tinker server
        self._retry_policy = retry_policy
        self._reached = False
        self._closed = False
        self._headers = {**password_header(parsed), **(headers or {})}
        # A transport of the caller's own brings its own settings.
        paths = os.environ.get("SSL_CERT_FILE"), os.environ.get("SSL_CERT_DIR")
        tls = _tls_context(*paths) if transport is None else True
        self._client = httpx.AsyncClient(
            transport=transport,
            verify=tls,
            http2=True,
            limits=_LIMITS,
            timeout=_TIMEOUT,
            headers={"User-Agent": PRODUCT},
            event_hooks={"request": [self._add_headers]} if self._headers else None,
        )
        self._origin = _origin(httpx.URL(self.url))

    async def close(self) -> None:
        """Closes the connections; requests in flight end with `ClientClosed`."""
        self._closed = True
        await self._client.aclose()

    async def get(self, path: str, result: type[T]) -> T:
        """Gets a resource."""
        return self.parse(result, await self.send("GET", path))

    async def post(self, path: str, message: Any, result: type[T]) -> T:
        """Posts a JSON request and parses the response."""
        return self.parse(result, await self.send("POST", path, wire_json.dumps(message)))

    async def send(
        self,
        method: str,
        path: str,
        body: bytes | None = None,
        *,
        headers: dict[str, str] | None = None,
        raw_key: bool = False,
        accept: Callable[[httpx.Response], bool] | None = None,
        seconds: float | None = None,
        repeatable: bool = True,
        is_poll: bool = False,
        record: OperationRecord | None = None,
        wait: Wait | None = None,
        timeout: float | None = None,
        most: int = answers.MAX_BYTES,
    ) -> httpx.Response:
        """Sends a request, retrying where that may help, and returns a response that is not an error.

        Args:
            method: GET, POST, …
            path: The path below the server's URL.
            body: The content of the request.
            headers: Headers in addition to the usual ones.
            raw_key: Whether to send the API key itself instead of a token.
            accept: Returns whether the caller handles a response with an error status.
            seconds: How long to retry; by default as the retry policy says.
            repeatable: Whether the request may be sent again after the server may have received it.
            is_poll: Whether the server may hold the request longer than the read timeout, which is raised at once then.
            record: Counts the request and its bytes.
            wait: The operation that the request belongs to; without one, the request is a wait of its own.
            timeout: How long to wait for the response, in seconds.
            most: The most bytes that the response may have.

        Raises:
            AnswerLost: If the server may have received a request that is not repeatable.
            TinkerLightningError: If the request fails.
        """
        content = {"Content-Type": wire_json.CONTENT_TYPE} if body is not None else {}
        started = time.monotonic()
        is_replayed = raw_key  # with another token, which is tried once
        with self.waits.waiting(f"{method} {path}", is_quick=True) if wait is None else nullcontext(wait) as wait:
            for attempt in itertools.count():
                if self._closed:
                    raise ClientClosed("the client was closed before the result arrived")
                credentials = self.credentials.key_header() if raw_key else await self.credentials.header()
                response: httpx.Response | None = None
                try:
                    request = self._client.build_request(
                        method,
                        _parsed(self.url + path),
                        content=body,
                        headers={"Accept": wire_json.CONTENT_TYPE, **content, **credentials, **(headers or {})},
                        timeout=_TIMEOUT if timeout is None else timeout,
                    )
                    response, received = await answers.read(await self._client.send(request, stream=True), most)
                    self.waits.heard()
                    if record is not None:
                        record.add(body, response, received)
                except httpx.TransportError as cause:
                    if record is not None:
                        record.add(body, None)
                    error: TinkerLightningError = self._transport_error(method, path, cause, timeout or _TIMEOUT.read)
                    error.__cause__ = cause
                    if is_poll and isinstance(cause, httpx.ReadTimeout):
                        raise error from cause
                    if not repeatable and not isinstance(cause, _NOT_SENT):
                        raise AnswerLost(f"{error} {_MAY_HAVE_RUN}") from cause
                except httpx.RequestError as cause:
                    reason = f"{self.url}{path} sent a response that cannot be decoded: {cause}."
                    if not repeatable:
                        raise AnswerLost(f"{reason} {_MAY_HAVE_RUN}") from cause
                    raise NotAnApi(f"{reason} {_FIX_URL}") from cause
                else:
                    self._reached = self._reached or response.is_success or is_json(response)
                    if response.status_code == 500:
                        # A server that crashes closes the connection after its answer. If the next request were sent on
                        # it before the end is noticed, that request would look as if its answer were lost.
                        await asyncio.sleep(_CLOSING_SECONDS)
                    if response.is_success or (accept is not None and accept(response)):
                        if wait.is_fault:
                            wait.resume()
                        return response
                    if not is_replayed and is_token_rejected(response) and await self.credentials.replaced(credentials):
                        is_replayed = True
                        continue
                    error = self._status_error(method, path, response)
                    if not may_succeed_later(response):
                        raise error
                    if not repeatable and not is_turned_away(response):
                        raise AnswerLost(f"{error} {_MAY_HAVE_RUN}")
                delay, limit = self._retry_policy.delay(attempt, response), self._limit(response, seconds)
                if time.monotonic() - started + delay > limit:
                    raise error
                wait.hold(_short_reason(response, error), started + limit, is_fault=True)
                logger.debug("%s; trying again in %.1f s", error, delay)
                await asyncio.sleep(delay)
        raise AssertionError("unreachable")

    def stream(self, url: str) -> AbstractAsyncContextManager[httpx.Response]:
        """Streams any URL. Neither the API key nor the user's headers are sent to other servers."""
        return self._client.stream("GET", url, headers={"Accept-Encoding": "identity"}, follow_redirects=True)

    async def _add_headers(self, request: httpx.Request) -> None:
        """Adds the user's headers to a request, or takes them off if a redirect leads to another server."""
        if _origin(request.url) == self._origin:
            request.headers.update(self._headers)
        else:
            for name in self._headers:
                request.headers.pop(name, None)

    def parse(self, result: type[T], response: httpx.Response) -> T:
        """Parses the JSON of a response into a dataclass."""
        if not is_json(response):
            raise self._not_an_api(response)
        try:
            return wire_json.parse(result, response.content)
        except InvalidInput as error:
            raise self.not_a_tinker_server(f"{response.url.path}: {error}") from error

    def json(self, response: httpx.Response) -> dict[str, Any]:
        """Returns the JSON object of a response."""
        if not is_json(response):
            raise self._not_an_api(response)
        try:
            return wire_json.loads(response.content)
        except InvalidMessage as error:
            if any(word in response.content for word in (b"NaN", b"Infinity")):
                raise OperationFailed(
                    f"{self.url}{response.url.path} returned a result with NaN or infinity, which JSON cannot contain. "
                    "Look for a token id that the model does not have, or for weights that are no longer finite."
                ) from error
            raise self.not_a_tinker_server(f"{response.url.path}: {error}") from error

    def not_a_tinker_server(self, detail: str) -> NotATinkerServer:
        """Returns the error for a server that speaks another protocol, or another version of it."""
        fix = _FIX_VERSION.format(url=self.url) if self.has_session else _FIX_URL
        short = textwrap.shorten(detail, _MAX_DETAIL, placeholder=" ...").rstrip(".")
        return NotATinkerServer(f"{self.url} answers, but not like a Tinker server: {short}. {fix}")

    def _limit(self, response: httpx.Response | None, seconds: float | None) -> float:
        if seconds is not None:
            return seconds
        if response is not None and response.status_code == 402:
            return self.billing_pause_seconds
        return self._retry_policy.seconds if self._reached else min(FIRST_CONTACT_SECONDS, self._retry_policy.seconds)

    def _transport_error(
        self, method: str, path: str, cause: httpx.TransportError, timeout: float | None
    ) -> TinkerLightningError:
        what = f"{method} {self.url}{path}"
        reason = str(cause) or type(cause).__name__
        if isinstance(cause, httpx.RemoteProtocolError | httpx.ReadError | httpx.WriteError):
            return ConnectionDropped(
                f"{what}: the connection was lost before the response was complete ({reason}). Check the log of the "
                "server, and of the proxy if there is one."
            )
        if self.url.startswith("https:") and any(words in reason for words in _NO_TLS):
            return ServerUnreachable(
                f"{self.url} does not speak TLS. Is it an http server? Then write http:// in place of https://."
            )
        if isinstance(cause, httpx.ReadTimeout | httpx.WriteTimeout):
            return ServerUnreachable(f"{what}: no response within {timeout:g} s. Is the server overloaded?")
        if self.url == HOSTED_URL:
            return ServerUnreachable(
                f"nothing answers at {self.url} ({reason}). Check the network, set TINKER_BASE_URL to the URL of "
                "another server, or pass base_url='embedded', or unset TINKER_API_KEY and TINKER_BASE_URL, to train in "
                "this process."
            )
        return ServerUnreachable(
            f"nothing answers at {self.url} ({reason}). Is the server running? Start one with "
            "`tinker-lightning serve --model tiny`, correct TINKER_BASE_URL, or unset it to train in this process."
        )

    def _status_error(self, method: str, path: str, response: httpx.Response) -> TinkerLightningError:
        status = response.status_code
        body = json_body(response)
        if status in (401, 403):
            detail = detail_of(body) or "no reason given"
            return Unauthorized(f"{self.url} rejected the API key ({detail}). Set TINKER_API_KEY, or pass api_key=.")
        if body is None and (status == 501 or not may_succeed_later(response)):  # 501: of a server of files
            return self._not_an_api(response)
        if body is None and status in (502, 503, 504):
            return ServerUnreachable(
                f"a proxy answers at {self.url}, but not the server behind it (HTTP {status}). Is that server running?"
            )
        message = f"{method} {self.url}{path}: {detail_of(body) or response.text[:200] or 'no reason given'}"
        if status == 404:
            return NotFound(message)
        if status == 410 and (body or {}).get("error_class") == NotRetained.__name__:
            return NotRetained(message)
        if status == 409 and is_final_conflict(response):
            return OperationFailed(message)
        if 400 <= status < 500 and not may_succeed_later(response):
            message += f" (HTTP {status})" if status in (405, 415) else ""
            return input_error((body or {}).get("error_class"))(message)
        return OperationFailed(f"{message} (HTTP {status})")

    def _not_an_api(self, response: httpx.Response) -> NotAnApi:
        kind = response.headers.get("content-type", "no content type")
        return NotAnApi(
            f"{self.url} is not a Tinker server: {response.request.method} {response.url.path} returned HTTP "
            f"{response.status_code} and {kind}: {response.text[:60]!r}. {_FIX_URL}"
        )


def _short_reason(response: httpx.Response | None, error: TinkerLightningError) -> str:
    """Returns why a request is sent again, in a few words."""
    if response is not None:
        detail = textwrap.shorten(detail_of(json_body(response)), _MAX_REASON, placeholder=" ...")
        return f"the server answers HTTP {response.status_code}" + (f" ({detail})" if detail else "")
    if isinstance(error.__cause__, httpx.TimeoutException):
        return SILENT
    return "the server drops connections" if isinstance(error, ConnectionDropped) else "nothing answers"


def _origin(url: httpx.URL) -> tuple[str, str, int | None]:
    return url.scheme, url.host, url.port


def _check_url(url: str) -> httpx.URL:
    try:
        parsed = httpx.URL(url)
    except (httpx.InvalidURL, TypeError) as error:
        # What comes before the last @ may be a password, whatever is wrong with it.
        shown, cause = (url, error) if "@" not in str(url) else (f"...@{url.rpartition('@')[2]}", None)
        raise InvalidInput(
            f"{shown!r} is not the URL of a server{f': {cause}' if cause else ''}. {_FIX_ADDRESS}"
        ) from cause
    if parsed.scheme not in ("http", "https") or not parsed.host or (parsed.port or 0) > 65535:
        raise InvalidInput(f"{without_password(url)!r} is not the URL of a server. {_FIX_ADDRESS}")
    return parsed
