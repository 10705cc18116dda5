"""zstd request bodies, with a bound on what they may unfold to."""

from __future__ import annotations

import zstandard

from tinker_lightning.errors import InvalidMessage, MessageTooLarge

# One step of input unfolds to at most 32 MiB (zstd writes 128 KiB in 4 bytes), so that is how far a bomb gets past the
# limit.
_STEP = 1 << 10


def compress(body: bytes, level: int = 3) -> bytes:
    """The body as one zstd frame."""
    return zstandard.ZstdCompressor(level=level).compress(body)


def decompress(body: bytes, limit: int) -> bytes:
    """What a zstd body holds, reading no further than `limit` bytes: a few kilobytes can claim to be terabytes."""
    parts: list[bytes] = []
    size = 0
    # The window is bounded too, for it is memory that a frame asks for before it yields a byte; 8 MiB is RFC 9659's.
    decompressor = zstandard.ZstdDecompressor(max_window_size=1 << 23)
    # Not `stream_reader`: it takes a body that was cut short for a whole one.
    frame = decompressor.decompressobj()
    try:
        for start in range(0, len(body), _STEP):
            piece = body[start : start + _STEP]
            while piece:
                if frame.eof:  # a body may be several frames
                    frame = decompressor.decompressobj()
                part = frame.decompress(piece)
                piece = frame.unused_data
                size += len(part)
                if size > limit:
                    raise MessageTooLarge(f"the body unfolds to more than the {limit} bytes that are taken")
                parts.append(part)
    except zstandard.ZstdError as error:
        raise InvalidMessage(f"the body is not zstd: {error}. Send one zstd frame, or no Content-Encoding.") from error
    if not frame.eof:
        raise InvalidMessage(f"the zstd body of {len(body)} bytes was cut short. Send it again, whole.")
    return b"".join(parts)
