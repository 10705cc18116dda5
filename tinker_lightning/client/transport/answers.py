"""HTTP answers of a server: bounded while they arrive, and whether the same request may succeed later.

A server, or whoever answers in its place, can neither fill the memory of this process nor keep it waiting byte by byte.
"""

from __future__ import annotations

import time
import zlib
from typing import TYPE_CHECKING, Any

import httpx

from tinker_lightning.errors import InvalidMessage, MessageTooLarge
from tinker_lightning.wire import compression, protobuf
from tinker_lightning.wire import json as wire_json

if TYPE_CHECKING:
    from collections.abc import Iterator

# The most that an answer may have, as it arrives and decompressed.
MAX_BYTES = 256 << 20
# After these seconds, an answer must have arrived at this rate, in bytes per second.
PATIENCE_SECONDS = 30.0
MIN_RATE = 16 << 10

# Statuses by which a server says that it did not take a request. A 503 may also come from a proxy that has lost the
# connection to the server.
_NOT_ACCEPTED = frozenset({402, 429, 503})


async def read(response: httpx.Response, most: int) -> tuple[httpx.Response, int]:
    """Reads a streamed response; returns it with its decompressed content, and the number of bytes that arrived.

    Raises:
        httpx.ReadError: If it arrives too slowly.
        httpx.DecodingError: If it is larger than `most` bytes, or cannot be decompressed.
    """
    if response.is_closed:  # a transport in this process has made it, with its content
        return response, response.num_bytes_downloaded
    parts: list[bytes] = []
    size = 0
    started = time.monotonic()
    try:
        async for part in response.aiter_raw():
            parts.append(part)
            size += len(part)
            if size > most:
                raise httpx.DecodingError(_too_large(most), request=response.request)
            seconds = time.monotonic() - started
            if seconds > PATIENCE_SECONDS and size < MIN_RATE * seconds:
                raise httpx.ReadError(
                    f"after {seconds:.0f} s, {size} bytes have arrived, which is too slow", request=response.request
                )
    finally:
        await response.aclose()
    content = b"".join(parts)
    try:
        for encoding in _encodings(response):
            content = _decompress(content, encoding, most)
    except (MessageTooLarge, InvalidMessage, zlib.error) as error:
        raise httpx.DecodingError(str(error), request=response.request) from error
    headers = [(name, value) for name, value in response.headers.raw if name.lower() != b"content-encoding"]
    answer = httpx.Response(
        response.status_code,
        headers=headers,
        content=content,
        request=response.request,
        extensions=response.extensions,
    )
    return answer, size


def _encodings(response: httpx.Response) -> Iterator[str]:
    """Returns the encodings of a response, the last one that was applied first."""
    names = response.headers.get_list("content-encoding", split_commas=True)
    return (name.strip().lower() for name in reversed(names))


def _decompress(content: bytes, encoding: str, most: int) -> bytes:
    if encoding == "identity" or not content:
        return content
    if encoding == "zstd":
        return compression.decompress(content, most)
    if encoding not in ("gzip", "x-gzip", "deflate"):
        raise InvalidMessage(f"its encoding {encoding!r:.40} was not asked for")
    # With either header. Some servers send deflate without one.
    bare = encoding == "deflate" and content[0] & 0x0F != 8
    decompressor = zlib.decompressobj(-zlib.MAX_WBITS if bare else zlib.MAX_WBITS | 32)
    decompressed = decompressor.decompress(content, most + 1)
    if len(decompressed) > most:
        raise MessageTooLarge(_too_large(most))
    if not decompressor.eof:
        raise InvalidMessage(f"its {encoding} body of {len(content)} bytes is truncated")
    return decompressed


def _too_large(most: int) -> str:
    return f"it is larger than the limit of {most >> 20} MiB"


def is_json(response: httpx.Response) -> bool:
    """Returns whether a response says that it is JSON."""
    kind: str = response.headers.get("content-type", "")
    return kind.split(";")[0].strip().endswith("json")


def json_body(response: httpx.Response) -> dict[str, Any] | None:
    """Returns the JSON object of a response, or None if it is something else."""
    try:
        return wire_json.loads(response.content)
    except InvalidMessage:
        return None


def is_token_rejected(response: httpx.Response) -> bool:
    """Returns whether the server wants another token."""
    return response.status_code == 401 and 'error="invalid_token"' in response.headers.get("www-authenticate", "")


def is_turned_away(response: httpx.Response) -> bool:
    """Returns whether the server did not take a request; a proxy that answers may have passed it on."""
    return response.status_code in _NOT_ACCEPTED and (response.status_code != 503 or json_body(response) is not None)


def may_succeed_later(response: httpx.Response) -> bool:
    """Returns whether the same request may succeed later."""
    asked = response.headers.get("x-should-retry")
    if asked in ("true", "false"):
        return bool(asked == "true")
    status = response.status_code
    if status == 409 and is_final_conflict(response):
        return False
    # An empty 400 comes from a proxy in between, not from the server.
    return status in (402, 408, 409, 429) or status >= 500 or (status == 400 and not response.content)


def is_final_conflict(response: httpx.Response) -> bool:
    """Returns whether a 409 stays one: a name that is taken, or a number that the server does not expect."""
    return any(words in response.text.lower() for words in ("already exists", "sequence conflict"))


def pending(response: httpx.Response) -> dict[str, Any] | None:
    """Returns the message of an answer that asks to poll again; None for a result."""
    if protobuf.CONTENT_TYPE in response.headers.get("content-type", ""):
        return None
    message = json_body(response) or {}
    return message if response.status_code == 408 or message.get("type") == "try_again" else None


def is_receipt(response: httpx.Response) -> bool:
    """Returns whether a 408 confirms the submission, instead of being a timeout of a proxy in between."""
    return response.status_code == 408 and bool((pending(response) or {}).get("request_id"))


def detail_of(body: dict[str, Any] | None) -> str:
    """Returns what the body of an error says."""
    if body is None:
        return ""
    for key in ("detail", "error", "error_message", "message"):
        if isinstance(body.get(key), list):  # one entry for each wrong field, as FastAPI writes it
            return "; ".join(_field_error(entry) for entry in body[key])
        if body.get(key):
            return str(body[key])
    return ""


def _field_error(entry: Any) -> str:
    if not isinstance(entry, dict):
        return str(entry)
    field = ".".join(str(part) for part in entry.get("loc", ()) if part != "body")
    return f"{field}: {entry.get('msg', 'invalid')}" if field else str(entry.get("msg", entry))
