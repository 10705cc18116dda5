"""Receives request bodies: limits, encodings, and the memory that they take."""

from __future__ import annotations

import functools
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, TypeVar

from starlette.concurrency import run_in_threadpool
from starlette.requests import ClientDisconnect

from tinker_lightning.errors import InvalidMessage, MessageTooLarge, UnsupportedMediaType
from tinker_lightning.server.arrival import Arrival
from tinker_lightning.server.http import JSON, content_type
from tinker_lightning.wire import compression, protobuf
from tinker_lightning.wire import json as wire_json

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    from starlette.requests import Request

    from tinker_lightning.server.trainer.trainer import EmbeddedTrainer

MAX_BODY_BYTES = 256 << 20
# The limit for JSON is lower, because parsing JSON blocks all other threads.
MAX_JSON_BYTES = 64 << 20
# Bodies of at least this many bytes are parsed on another thread, so that they do not block other requests.
_LARGE_BODY = 1 << 17

T = TypeVar("T")


@asynccontextmanager
async def received(
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
        with trainer.waking(arrival.close):
            body = await read_body(request, limit, arrival, may_be_compressed=may_be_compressed)
        is_json = JSON in request.headers.get("content-type", "").lower()
        charge.resize(len(body) + (wire_json if is_json else protobuf).parsed_bytes(body))
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
    async with received(request, limit) as body:
        return await parse_body(functools.partial(wire_json.parse, cls), body)
