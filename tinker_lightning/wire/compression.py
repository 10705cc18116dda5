"""zstd request bodies, with a bound on what they may unfold to."""

from __future__ import annotations

import zstandard

from tinker_lightning.errors import InvalidMessage, MessageTooLarge

_STEP = 1 << 20


def compress(body: bytes, level: int = 3) -> bytes:
    """The body as one zstd frame."""
    return zstandard.ZstdCompressor(level=level).compress(body)


def decompress(body: bytes, limit: int) -> bytes:
    """What a zstd body holds, reading no further than `limit` bytes: a few kilobytes can claim to be terabytes."""
    parts: list[bytes] = []
    size = 0
    try:
        # The window is bounded too: a frame may ask for one of gigabytes before it yields a byte.
        decompressor = zstandard.ZstdDecompressor(max_window_size=1 << 27)
        with decompressor.stream_reader(body, read_across_frames=True) as reader:
            while part := reader.read(_STEP):
                size += len(part)
                if size > limit:
                    raise MessageTooLarge(f"the body unfolds to more than the {limit} bytes that are taken")
                parts.append(part)
    except zstandard.ZstdError as error:
        raise InvalidMessage(f"the body is not whole zstd: {error}") from error
    return b"".join(parts)
