"""Test utilities: a real trainer in the same process, and transports that record requests or inject faults.

@pytest.fixture
def service():
    with tinker_lightning.testing.embedded_service() as service:
        yield service
"""

from __future__ import annotations

import contextlib
import random
import sys
import tempfile
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, get_args

import httpx
from typing_extensions import override

from tinker_lightning.client.service import ServiceClient
from tinker_lightning.client.transport.retries import RetryPolicy
from tinker_lightning.wire import compression, protobuf
from tinker_lightning.wire import json as wire_json

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from tinker_lightning.server import EmbeddedTrainer

__all__ = ["Fault", "FaultyTransport", "RecordedRequest", "RecordingTransport", "embedded_service"]

Fault: TypeAlias = Literal["reset", "500", "429", "408", "lost answer", "duplicate"]


@contextlib.contextmanager
def embedded_service(
    trainer: EmbeddedTrainer | None = None,
    *,
    wrap: Callable[[httpx.AsyncBaseTransport], httpx.AsyncBaseTransport] | None = None,
    retry_policy: RetryPolicy = RetryPolicy(300.0),  # noqa: B008  # immutable
    extended: bool = True,
) -> Iterator[ServiceClient]:
    """Yields a client connected to a real trainer in this process, and closes it afterwards.

    Args:
        trainer: The trainer to use, which the caller closes. By default, a new one that serves `tiny`, and that is
            closed and its files deleted afterwards.
        wrap: Wraps the transport to the trainer in a custom one.
        retry_policy: How long failing requests are retried.
        extended: Whether the server offers its protocol extensions.
    """
    from tinker_lightning.server import EmbeddedTrainer, create_app

    with contextlib.ExitStack() as stack:
        if trainer is None:
            folder = stack.enter_context(tempfile.TemporaryDirectory(ignore_cleanup_errors=True))
            trainer = EmbeddedTrainer(["tiny"], data_dir=folder)
            stack.callback(trainer.close)
        transport: httpx.AsyncBaseTransport = httpx.ASGITransport(create_app(trainer, extended=extended))
        if wrap is not None:
            transport = wrap(transport)
        register = trainer.losses.register_function
        client = ServiceClient(
            base_url="http://embedded", transport=transport, retry_policy=retry_policy, in_process=register
        )
        yield stack.enter_context(client)


@dataclass(frozen=True, slots=True)
class RecordedRequest:
    """A request as the client sent it."""

    method: str
    path: str
    headers: dict[str, str]
    body: bytes

    @property
    def is_pass(self) -> bool:
        """Whether the request is a forward or backward pass; its message is a `ForwardBackwardRequest` then."""
        return self.path.endswith(("forward_backward", "/retained_forward", "/retained_backward"))

    @property
    def message(self) -> Any:
        """The decoded body: a `ForwardBackwardRequest`, a JSON object, or None if there is no body."""
        if not self.body:
            return None
        zstd = self.headers.get("content-encoding") == "zstd"
        body = compression.decompress(self.body, sys.maxsize) if zstd else self.body
        if self.headers.get("content-type") == protobuf.CONTENT_TYPE:
            return protobuf.decode_forward_backward(body)
        return wire_json.loads(body)


class RecordingTransport(httpx.AsyncBaseTransport):
    """Forwards requests and records them in `requests`."""

    def __init__(self, inner: httpx.AsyncBaseTransport) -> None:
        self.requests: list[RecordedRequest] = []
        self._inner = inner

    @override
    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        """Records the request and forwards it."""
        body = await request.aread()
        self.requests.append(RecordedRequest(request.method, request.url.path, dict(request.headers), body))
        return await self._inner.handle_async_request(request)

    @override
    async def aclose(self) -> None:
        """Closes the inner transport."""
        await self._inner.aclose()


class FaultyTransport(httpx.AsyncBaseTransport):
    """Forwards requests and makes some of them fail the way networks and servers do, reproducibly by its seed.

    Args:
        inner: The transport that receives the requests.
        rate: The fraction of requests that fail.
        seed: The seed of the choice of requests and faults.
        faults: The faults to choose from: a connection that breaks before the request arrives (`reset`) or after it
            was executed (`lost answer`), a request that arrives twice (`duplicate`), or an error status.
    """

    def __init__(
        self,
        inner: httpx.AsyncBaseTransport,
        rate: float = 0.1,
        seed: int = 0,
        faults: Sequence[Fault] = get_args(Fault),
    ) -> None:
        self.injected: list[tuple[Fault, str]] = []
        self._inner = inner
        self._rate = rate
        self._random = random.Random(seed)  # noqa: S311  # reproducible, not for cryptography
        self._faults = faults

    @override
    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        """Forwards the request or injects a fault."""
        await request.aread()
        if self._random.random() >= self._rate:
            return await self._inner.handle_async_request(request)
        fault = self._random.choice(self._faults)
        self.injected.append((fault, request.url.path))
        if fault == "reset":
            raise httpx.ConnectError("injected: connection reset", request=request)
        if fault == "lost answer":
            await (await self._inner.handle_async_request(request)).aread()
            raise httpx.ReadError("injected: the answer was lost", request=request)
        if fault == "duplicate":
            await (await self._inner.handle_async_request(request)).aread()
            return await self._inner.handle_async_request(request)
        return httpx.Response(int(fault), json={"detail": "injected"}, headers={"retry-after-ms": "1"})

    @override
    async def aclose(self) -> None:
        """Closes the inner transport."""
        await self._inner.aclose()
