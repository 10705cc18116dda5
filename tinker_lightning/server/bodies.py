"""Request bodies: their limits and encodings, and the memory that is charged while they arrive."""

from __future__ import annotations

import asyncio
import functools
from collections import deque
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Self, TypeVar

from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from tinker_lightning.errors import (
    InvalidMessage,
    MemoryLimitExceeded,
    MessageTooLarge,
    TrainerClosed,
    UnsupportedMediaType,
)
from tinker_lightning.server.http import JSON, content_type
from tinker_lightning.server.trainer.memory import format_size
from tinker_lightning.threads.background import call_soon
from tinker_lightning.wire import compression, protobuf
from tinker_lightning.wire import json as wire_json

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable
    from types import TracebackType

    from starlette.requests import Request

    from tinker_lightning.server.trainer.memory import Charge
    from tinker_lightning.server.trainer.trainer import EmbeddedTrainer

MAX_BODY_BYTES = 256 << 20
# The limit for JSON is lower, because parsing JSON blocks all other threads.
MAX_JSON_BYTES = 64 << 20
# Bodies of at least this many bytes are parsed on another thread, so that they do not block other requests.
_LARGE_BODY = 1 << 17

# A body is rejected if fewer than this many bytes of it arrive in this many seconds: 16 KiB per second.
BODY_SECONDS = 30.0
_LEAST_BYTES = 480 << 10
# Its rate is measured every few seconds. Below 1 MiB per second, its memory can be evicted.
_LOOK_SECONDS = 5.0
_FAST_BYTES = 5 << 20

T = TypeVar("T")


@asynccontextmanager
async def receive_body(
    request: Request, limit: int | None = None, *, may_be_compressed: bool = False
) -> AsyncIterator[bytes]:
    """Yields the decompressed body; memory for it, and for its parsed form, is charged until the end of the block.

    Args:
        request: The request.
        limit: The most bytes, by default `MAX_JSON_BYTES` for JSON, otherwise `MAX_BODY_BYTES`.
        may_be_compressed: Whether zstd is accepted. Only passes are large enough to need it.
    """
    trainer: EmbeddedTrainer = request.app.state.trainer
    with trainer.memory.charge("the body of this request", 0, "messages") as charge:
        arrival = Arrival(charge)
        with trainer.closing.waking(arrival.close):
            body = await read_body(request, limit, arrival, may_be_compressed=may_be_compressed)
        is_json = JSON in request.headers.get("content-type", "").lower()
        charge.resize(len(body) + (wire_json if is_json else protobuf).estimate_parsed_bytes(body))
        yield body


async def read_body(
    request: Request, limit: int | None = None, arrival: Arrival | None = None, *, may_be_compressed: bool = True
) -> bytes:
    """Returns the decompressed body. `arrival` charges the memory that it takes, and may raise."""
    is_json = JSON in request.headers.get("content-type", "").lower()
    fix = "split the batch" if limit is None else "send less"
    limit = limit or (min(MAX_JSON_BYTES, MAX_BODY_BYTES) if is_json else MAX_BODY_BYTES)
    encoding = request.headers.get("content-encoding", "").strip().lower() or "identity"
    if encoding not in ("identity", "zstd"):
        raise UnsupportedMediaType(f"content encoding {encoding} is not supported; send zstd or none")
    if encoding == "zstd" and not may_be_compressed:
        raise UnsupportedMediaType("content encoding zstd is supported for passes only; send none")
    arrival = arrival or Arrival()
    parts: list[bytes] = []
    size = 0
    try:
        async with arrival:
            async for part in request.stream():
                size += len(part)
                if size > limit:
                    raise MessageTooLarge(f"the body exceeds the limit of {limit} bytes; {fix}")
                arrival.grow(size)
                parts.append(part)
    except ClientDisconnect as error:
        raise InvalidMessage(f"the connection was closed after {size} bytes of the body; send it again") from error
    body = b"".join(parts)
    del parts
    if encoding == "identity":
        return body
    # On another thread even if the body is small, because its decompressed size is unknown.
    return await run_in_threadpool(compression.decompress, body, limit, lambda grown: arrival.charge(size + grown))


async def parse_body(parse: Callable[[bytes], T], body: bytes) -> T:
    """Parses a body, on another thread if it is large."""
    return parse(body) if len(body) < _LARGE_BODY else await run_in_threadpool(parse, body)


async def read(request: Request, cls: type[T], limit: int | None = None) -> T:
    """Parses a JSON request of at most `limit` bytes into its dataclass."""
    content_type(request, JSON)
    async with receive_body(request, limit) as body:
        return await parse_body(functools.partial(wire_json.parse, cls), body)


class Arrival:
    """Charges a body while it is received in an `async with` block, and ends the block if the body is rejected.

    Args:
        charge: The memory of the body, if it is counted.
    """

    def __init__(self, charge: Charge | None = None) -> None:
        self._charge = charge
        self._size = 0
        self._is_slow = False
        self._sizes: deque[int] = deque([0], maxlen=1 + round(BODY_SECONDS / _LOOK_SECONDS))  # at each look
        self._loop = asyncio.get_running_loop()
        self._timer = asyncio.timeout(None)
        self._next_look: asyncio.TimerHandle | None = None
        self._error: Exception | None = None

    async def __aenter__(self) -> Self:
        await self._timer.__aenter__()
        self._next_look = self._loop.call_later(_LOOK_SECONDS, self._look)
        if self._error is not None:  # the server is closing already
            self._timer.reschedule(self._loop.time())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._next_look is not None:
            self._next_look.cancel()
            self._next_look = None
        self._is_slow = False
        if self._charge is not None:
            self._charge.set_evict(None)  # the body is needed now
        try:
            await self._timer.__aexit__(kind, error, trace)
        except TimeoutError:
            if self._error is None:
                raise
            raise self._error from None

    def grow(self, size: int) -> None:
        """Charges the bytes that have arrived; raises `MemoryLimitExceeded` if there is no memory for it."""
        self._size = size
        self.charge(2 * size)  # in parts and joined

    def charge(self, size: int) -> None:
        """Charges the memory of the body. A slow body evicts no other: two of them would evict each other forever."""
        if self._charge is not None:
            self._charge.resize(size, spares_bodies=self._is_slow)

    def close(self) -> None:
        """Ends the block because the server stops; may be called from any thread, also before the block."""
        self._end(TrainerClosed("the server is shutting down; send the request again when it runs"))

    def _look(self) -> None:
        """Measures how much has arrived since the last look."""
        arrived = self._size - self._sizes[-1]
        self._sizes.append(self._size)
        if len(self._sizes) == self._sizes.maxlen and self._size - self._sizes[0] < _LEAST_BYTES:
            detail = (
                f"only {format_size(self._size - self._sizes[0])} of the body arrived in {BODY_SECONDS:g} s; at least "
                f"{format_size(_LEAST_BYTES)} are required. Check the network, or send smaller batches."
            )
            self._end(HTTPException(408, detail, {"Connection": "close"}))
            return
        self._is_slow = arrived < _FAST_BYTES
        if self._charge is not None:
            self._charge.set_evict(self._evict if self._is_slow else None, expendable=True)
        self._next_look = self._loop.call_later(_LOOK_SECONDS, self._look)

    def _evict(self) -> None:
        assert self._charge is not None  # noqa: S101  # which was evicted
        rate = format_size(int(_FAST_BYTES / _LOOK_SECONDS))
        error = MemoryLimitExceeded(
            f"the body of this request arrived at less than {rate} per second, "
            f"and other requests needed the {format_size(2 * self._size)} that it took within the memory limit of "
            f"{format_size(self._charge.limit)}. Send it again later, or send smaller batches."
        )
        error.is_temporary = True
        self._end(error)

    def _end(self, error: Exception) -> None:
        def stop() -> None:
            if self._error is None:
                self._error = error
                if self._next_look is not None:  # within the block
                    self._timer.reschedule(self._loop.time())

        call_soon(self._loop, stop)
