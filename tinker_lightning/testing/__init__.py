"""For your own tests: a real trainer in the process, and transports that record requests or make the network fail.

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

from tinker_lightning.client.connection import PROTOBUF
from tinker_lightning.client.retry_policy import RetryPolicy
from tinker_lightning.client.service import ServiceClient
from tinker_lightning.wire import compression, protobuf
from tinker_lightning.wire import json as wire_json

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from tinker_lightning.server import EmbeddedTrainer

Fault: TypeAlias = Literal["reset", "500", "429", "408", "lost answer", "duplicate"]


@contextlib.contextmanager
def embedded_service(
    trainer: EmbeddedTrainer | None = None,
    *,
    wrap: Callable[[httpx.AsyncBaseTransport], httpx.AsyncBaseTransport] | None = None,
    retry_policy: RetryPolicy = RetryPolicy(300.0),  # noqa: B008  # immutable
    extended: bool = True,
) -> Iterator[ServiceClient]:
    """A client of a real trainer in this process; both end with the block, and nothing is left on disk.

    Args:
        trainer: The trainer to use, which stays yours to close; a new one with `tiny` if not given.
        wrap: Puts a transport of yours around the one that leads to the trainer.
        retry_policy: How long failing requests are tried again.
        extended: Whether the server has what goes beyond the protocol.
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
        client = ServiceClient("http://embedded", transport=transport, retry_policy=retry_policy, in_process=register)
        yield stack.enter_context(client)


@dataclass(frozen=True, slots=True)
class RecordedRequest:
    """A request as it was sent."""

    method: str
    path: str
    headers: dict[str, str]
    body: bytes

    @property
    def message(self) -> Any:
        """What the body says: a `ForwardBackwardRequest`, or the JSON object; None without a body."""
        if not self.body:
            return None
        zstd = self.headers.get("content-encoding") == "zstd"
        body = compression.decompress(self.body, sys.maxsize) if zstd else self.body
        if self.headers.get("content-type") == PROTOBUF:
            return protobuf.decode_forward_backward(body)
        return wire_json.loads(body)


class RecordingTransport(httpx.AsyncBaseTransport):
    """Passes requests on and keeps them in `requests`."""

    def __init__(self, inner: httpx.AsyncBaseTransport) -> None:
        self.requests: list[RecordedRequest] = []
        self._inner = inner

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        """Keeps the request and passes it on."""
        body = await request.aread()
        self.requests.append(RecordedRequest(request.method, request.url.path, dict(request.headers), body))
        return await self._inner.handle_async_request(request)

    async def aclose(self) -> None:
        """Closes the inner transport."""
        await self._inner.aclose()


class FaultyTransport(httpx.AsyncBaseTransport):
    """Passes requests on, and makes some of them fail as networks and servers do; the same ones for the same seed.

    Args:
        inner: Where requests go.
        rate: The share of requests that meet a fault.
        seed: Which ones.
        faults: Which faults there are: a connection that breaks before the request arrives (`reset`) or after it was
            carried out (`lost answer`), a request that arrives twice (`duplicate`), or an error status.
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
        self._random = random.Random(seed)  # noqa: S311  # repeatable, not secret
        self._faults = faults

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        """Passes the request on, or not."""
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

    async def aclose(self) -> None:
        """Closes the inner transport."""
        await self._inner.aclose()
