"""zstd compression of request bodies, with a limit on the decompressed size."""

from __future__ import annotations

from typing import TYPE_CHECKING

import zstandard

from tinker_lightning.errors import InvalidMessage, MessageTooLarge

if TYPE_CHECKING:
    from collections.abc import Callable

# The size is checked after each step. A step decompresses to at most 32 MiB (zstd can write 128 KiB in 4 bytes), which
# is how far a decompression bomb can exceed the limit.
_STEP = 1 << 10
_STEP_BYTES = 32 << 20


def compress(body: bytes, level: int = 3) -> bytes:
    """Compresses a body into one zstd frame."""
    return zstandard.ZstdCompressor(level=level).compress(body)


def decompress(body: bytes, limit: int, on_growth: Callable[[int], object] = lambda _: None) -> bytes:
    """Decompresses a zstd body; raises `MessageTooLarge` if the result exceeds `limit` bytes.

    `on_growth` is called with the memory that the result takes so far, and may raise.
    """
    parts: list[bytes] = []
    size = 0
    # A frame's window is allocated before anything is decompressed, so it is limited as well, to RFC 9659's 8 MiB.
    decompressor = zstandard.ZstdDecompressor(max_window_size=1 << 23)
    # `stream_reader` does not detect truncated bodies.
    frame = decompressor.decompressobj()
    try:
        for start in range(0, len(body), _STEP):
            piece = body[start : start + _STEP]
            while piece:
                if frame.eof:  # a body may contain several frames
                    frame = decompressor.decompressobj()
                part = frame.decompress(piece)
                piece = frame.unused_data
                size += len(part)
                if size > limit:
                    raise MessageTooLarge(f"the body decompresses to more than the limit of {limit} bytes")
                on_growth(size + _STEP_BYTES)
                parts.append(part)
    except zstandard.ZstdError as error:
        raise InvalidMessage(f"the body is not zstd: {error}. Send one zstd frame, or no Content-Encoding.") from error
    if not frame.eof:
        raise InvalidMessage(f"the zstd body of {len(body)} bytes is truncated. Send all of it.")
    on_growth(2 * size)
    return b"".join(parts)
