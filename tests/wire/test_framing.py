"""Datums written around their arrays are the messages that protobuf would write."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from tinker_lightning.types import Datum, DmelChunk, EncodedTextChunk, ModelInput, TensorData
from tinker_lightning.types.datum import ProvenanceSpan
from tinker_lightning.types.requests import ForwardBackwardRequest
from tinker_lightning.wire import framing, protobuf
from tinker_lightning.wire import tinker_pb2 as pb

if TYPE_CHECKING:
    from tinker_lightning.wire.framing import Buffer


def parsed(datum: Datum) -> Any:
    parts: list[Buffer] = []
    assert framing.write_datum(parts, datum)
    return pb.ForwardBackwardRequest.FromString(b"".join(parts))


# Lengths around those at which the length of a length changes.
@pytest.mark.parametrize("length", [1, 7, 8, 15, 16, 31, 32, 1023, 1024, 2047, 2048, 300_000])
def test_the_message_is_that_of_protobuf(length: int) -> None:
    random = np.random.default_rng(length)
    inputs: dict[str, Any] = {
        "target_tokens": random.integers(0, 150_000, (length, 2)),
        "weights": random.random((length, 2), np.float32),
        "advantages": random.random((length, 2), np.float32)[:, ::-1],  # not in C order
        "reward": 0.5,
        "nothing": np.zeros((0, 3), np.float32),
        "ein Näme": [1, 2, 3],
    }
    datum = Datum.from_targets(random.integers(0, 150_000, length), **inputs)
    message = pb.ForwardBackwardRequest()
    protobuf._fill_datum(message.data.add(), datum)
    assert parsed(datum) == message


def test_a_body_of_every_kind_of_datum_is_read_as_it_was_written() -> None:
    ids = [1, 2, 3]
    sparse = TensorData([1.0], "float32", [3, 9], [0, 1, 1, 1], [4])
    span = [ProvenanceSpan("prompt", "a", 0, 3)]
    data = [
        Datum.from_tokens([5, 6, 7, 8]),
        Datum(ModelInput([EncodedTextChunk(ids), EncodedTextChunk(ids[:2])]), {"target_tokens": [1] * 5}),
        Datum(ModelInput.from_ints([]), {}),
        Datum(ModelInput.from_ints(ids), {"teacher": sparse}),
        Datum(ModelInput.from_ints(ids), {"target_tokens": ids}, span, span),
        Datum(ModelInput([DmelChunk(b"\x00" * 8)]), {}),
    ]
    request = ForwardBackwardRequest("m", 7, data, "cross_entropy", {"beta": 0.1}, scale=0.5)
    assert protobuf.decode_forward_backward(protobuf.encode_forward_backward(request)) == request


def test_arrays_that_change_after_a_request_do_not_change_its_body() -> None:
    weights = np.ones(3, np.float32)
    datum = Datum.from_targets([1, 2, 3], [2, 3, 4], weights=weights)
    body = protobuf.encode_forward_backward(ForwardBackwardRequest("m", 1, [datum], "cross_entropy"))
    weights[:] = 0
    read = protobuf.decode_forward_backward(body).data[0].loss_fn_inputs["weights"]
    assert read.tolist() == [1.0, 1.0, 1.0]
