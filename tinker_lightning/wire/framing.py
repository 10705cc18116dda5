"""Writes datums as protobuf around the memory of their arrays.

A message object would copy every array three times before it is sent, which takes most of a client's time for a pass.
Only the usual form of a datum is written here, text and dense tensors; `protobuf` serializes all others.
"""

from __future__ import annotations

import functools
import sys
from typing import TYPE_CHECKING, TypeAlias

import numpy as np

from tinker_lightning.types.model_input import EncodedTextChunk
from tinker_lightning.wire import tinker_pb2 as pb

if TYPE_CHECKING:
    from tinker_lightning.types.datum import Datum

    Buffer: TypeAlias = bytes | memoryview

_BYTES = 2  # the wire type of everything that has a length
_IS_LITTLE = sys.byteorder == "little"


def write_datum(parts: list[Buffer], datum: Datum) -> bool:
    """Appends the parts of `ForwardBackwardRequest(data=[datum])`; returns False, without any, for other datums."""
    if datum.model_input_spans is not None or not _IS_LITTLE:
        return False
    own: list[Buffer] = [b""]  # in place of the header, whose length is known last
    size = 0
    for chunk in datum.model_input.chunks:
        if not isinstance(chunk, EncodedTextChunk) or not len(chunk.tokens):
            return False
        tokens = chunk.tokens
        before = _before_tokens(tokens.nbytes)
        own += (before, tokens.data)
        size += len(before) + tokens.nbytes
    for name, tensor in datum.loss_fn_inputs.items():
        if tensor.sparse_crow_indices is not None:
            return False
        values = tensor.values
        before, after = _around_tensor(name, tensor.dtype, values.shape)
        own += (before, values.data, after)
        size += len(before) + values.nbytes + len(after)
    own[0] = _header(pb.ForwardBackwardRequest.DATA_FIELD_NUMBER, size)
    parts += own
    return True


@functools.lru_cache(maxsize=4096)
def _before_tokens(size: int) -> bytes:
    """Returns the bytes before token ids: `Datum.model_input`, `Chunk.encoded_text`, `tokens`."""
    tokens = _header(pb.EncodedTextChunk.TOKENS_FIELD_NUMBER, size)
    text = _header(pb.Chunk.ENCODED_TEXT_FIELD_NUMBER, len(tokens) + size)
    return _header(pb.Datum.MODEL_INPUT_FIELD_NUMBER, len(text) + len(tokens) + size) + text + tokens


@functools.lru_cache(maxsize=4096)
def _around_tensor(name: str, dtype: str, shape: tuple[int, ...]) -> tuple[bytes, bytes]:
    """Returns the bytes before and after the values of a tensor in an entry of `Datum.loss_fn_inputs`."""
    size = int(np.prod(shape, dtype=np.int64)) * np.dtype(dtype).itemsize
    kind = pb.DTYPE_FLOAT32 if dtype == "float32" else pb.DTYPE_INT64
    after = pb.Tensor(dtype=kind, shape=shape).SerializeToString()
    dense = _header(pb.Tensor.DENSE_FIELD_NUMBER, size)
    key = pb.Datum.LossFnInputsEntry(key=name).SerializeToString()
    value = _header(pb.Datum.LossFnInputsEntry.VALUE_FIELD_NUMBER, len(dense) + size + len(after))
    entry = _header(pb.Datum.LOSS_FN_INPUTS_FIELD_NUMBER, len(key) + len(value) + len(dense) + size + len(after))
    return entry + key + value + dense, after


@functools.lru_cache(maxsize=4096)
def _header(field: int, size: int) -> bytes:
    """Returns the tag of a field and the length of its content."""
    return _varint(field << 3 | _BYTES) + _varint(size)


def _varint(number: int) -> bytes:
    """Returns a number in groups of seven bits, lowest first."""
    encoded = bytearray()
    while number > 0x7F:
        encoded.append(number & 0x7F | 0x80)
        number >>= 7
    return bytes((*encoded, number))
