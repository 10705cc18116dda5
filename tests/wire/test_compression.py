"""zstd bodies: what comes out is what went in, or an error, and never more than the limit."""

from __future__ import annotations

import random
import struct
import tracemalloc
from contextlib import suppress

import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from tests.helpers.fuzzing import examples
from tinker_lightning.errors import InvalidInput, InvalidMessage, MessageTooLarge
from tinker_lightning.wire.compression import compress, decompress

NOISE = random.Random(0).randbytes(300_000)  # noqa: S311  # what zstd cannot make smaller


@given(st.binary(max_size=5000), st.integers(1, 3))
def test_round_trip(body: bytes, repeats: int) -> None:
    assert decompress(compress(body * repeats), limit=15_000) == body * repeats


def test_large_bodies_are_read_in_steps() -> None:
    body = NOISE + bytes(5_000_000)
    assert decompress(compress(body), limit=len(body)) == body


def test_several_frames_are_one_body() -> None:
    assert decompress(compress(b"one ") + compress(b"") + compress(b"two"), limit=7) == b"one two"


def test_frames_without_a_size_are_read() -> None:
    stream = zstandard.ZstdCompressor(write_content_size=False, write_checksum=True)
    assert decompress(stream.compress(b"body"), limit=4) == b"body"


def test_the_limit_is_exact() -> None:
    body = compress(bytes(1000))
    assert len(decompress(body, limit=1000)) == 1000
    with pytest.raises(MessageTooLarge, match="decompresses to more than the limit of 999 bytes"):
        decompress(body, limit=999)


def test_a_decompression_bomb_is_stopped_at_the_limit() -> None:
    for bomb in (compress(bytes(1 << 28)), compress(bytes(1 << 24)) * 64):  # 256 MiB and 1 GiB, in some kilobytes
        assert len(bomb) < 1 << 16
        tracemalloc.start()
        with pytest.raises(MessageTooLarge):
            decompress(bomb, limit=1 << 20)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak < 100 << 20


@given(st.data())
@examples(100, 1000)
def test_a_truncated_body_raises(data: st.DataObject) -> None:
    body = compress(NOISE[:200] + bytes(300_000))
    cut = data.draw(st.integers(0, len(body) - 1))
    with pytest.raises(InvalidMessage, match=r"is truncated\. Send all of it\."):
        decompress(body[:cut], limit=1 << 20)


@pytest.mark.parametrize(
    "body", [b'{"model_id": "m"}', bytes(100), compress(b"body") + b"rest", b"\x28\xb5\x2f\xfd\xff\xff\xff\xff"]
)
def test_bodies_that_are_not_zstd_raise(body: bytes) -> None:
    with pytest.raises(
        InvalidMessage, match=r"is not zstd: .* Send one zstd frame, or no Content-Encoding\.|is truncated"
    ):
        decompress(body, limit=1 << 20)


def test_a_frame_with_a_large_window_raises() -> None:
    # Magic, a descriptor without content size, and a window of 2**(10 + 20) bytes; then one empty last block.
    frame = struct.pack("<IBB", zstandard.MAGIC_NUMBER, 0, 20 << 3) + b"\x01\x00\x00"
    assert zstandard.get_frame_parameters(frame).window_size == 1 << 30
    with pytest.raises(InvalidMessage, match=r"is not zstd: .*too much memory"):
        decompress(frame, limit=1 << 20)
    allowed = struct.pack("<IBB", zstandard.MAGIC_NUMBER, 0, 13 << 3) + b"\x01\x00\x00"  # 8 MiB, as RFC 9659 has it
    assert decompress(allowed, limit=1 << 20) == b""


def test_a_wrong_checksum_raises() -> None:
    body = bytearray(zstandard.ZstdCompressor(write_checksum=True).compress(b"body" * 100))
    body[-1] ^= 1
    with pytest.raises(InvalidMessage, match="checksum"):
        decompress(bytes(body), limit=1 << 20)


@given(st.binary(max_size=40), st.integers(0, 400), st.integers(0, 255))
@examples(100, 5_000)
def test_damaged_messages_raise_invalid_input_or_are_harmless(tail: bytes, position: int, byte: int) -> None:
    body = bytearray(compress(bytes(range(200)) + bytes(1000)))
    body[position % len(body)] = byte
    with suppress(InvalidInput):
        assert len(decompress(bytes(body) + tail, limit=1 << 20)) <= 1 << 20
