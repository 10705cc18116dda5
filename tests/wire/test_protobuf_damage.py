"""Protobuf messages that are malformed, damaged or random: one error, or read."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.helpers.fuzzing import examples
from tests.helpers.protobuf_messages import CSR, FORWARD, OUTPUT, PPO, SAMPLE, batched
from tinker_lightning.errors import InvalidInput, InvalidMessage
from tinker_lightning.types import (
    Datum,
    ImageAssetPointerChunk,
    ModelInput,
)
from tinker_lightning.types.requests import ForwardBackwardRequest
from tinker_lightning.wire import tinker_pb2 as pb
from tinker_lightning.wire.protobuf import (
    decode_forward_backward,
    decode_output,
    decode_sample,
    encode_forward_backward,
    read_sequence_number,
)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (batched(bytes(8), []), "x: offsets must rise within the 8 bytes of data"),
        (batched(bytes(8), [0, 12]), "x: offsets must rise"),
        (batched(bytes(8), [0, 8, 4]), "x: offsets must rise"),
        (batched(bytes(8), [-4, 8]), "x: offsets must rise"),
        (batched(bytes(8), [0, 2**62, 2**63 - 1, -(2**63), -1, 8]), "x: offsets must rise"),
        (batched(bytes(8), [0, 2, 8]), "x: offsets must fall on whole values of 4 bytes"),
        (batched(bytes(7), [0, 4]), "x: 7 bytes are not a whole number of float32 values"),
        (batched(bytes(8), [0, 8], 0), "x: dtype 0 is not known"),
        (batched(bytes(8), [0, 8], 9), "x: dtype 9 is not known"),
        (batched(bytes(8), [0, 8], trailing=[3]), "x: cannot reshape"),
        (batched(bytes(8), [0, 8], trailing=[-1]), "x: "),
        (batched(bytes(8), [0, 8], trailing=[0]), "x: cannot reshape"),
        (batched(b"", [0, 0], trailing=[2**62, 2**62]), "x: "),
        (batched(bytes(8), [0, 8], trailing=[1] * 100), "x: "),
        (batched(bytes(8), [0, 8], count=2), "x has 1 entries for 2 datums"),
        (batched(bytes(8), [0, 8], count=-1), r"num_datums must lie in 0\.\."),
        (batched(bytes(8), [0, 8], count=2**62), r"num_datums must lie in 0\.\."),
        (OUTPUT[:-1], "the body is not a ForwardBackwardOutput"),
    ],
)
def test_malformed_outputs_raise(body: bytes, message: str) -> None:
    with pytest.raises(InvalidMessage, match=message):
        decode_output(body)


def broken(**changes: Any) -> bytes:
    """Two datums, of which the second is changed in one place."""
    request = pb.ForwardBackwardRequest.FromString(PPO)
    datum = request.data.add()
    datum.CopyFrom(request.data[0])
    weights = datum.loss_fn_inputs["weights"]
    for name, value in changes.items():
        if name == "tokens":
            datum.model_input[0].encoded_text.tokens = value
        elif name == "shape":
            weights.shape[:] = value
        elif name == "csr":
            weights.sparse_csr.ParseFromString(value)
        elif name == "chunk":
            datum.model_input.add().MergeFrom(value)
        elif name == "span":
            datum.model_input_spans.add().MergeFrom(value)
        else:
            setattr(weights, name, value)
    return request.SerializeToString()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"dense": bytes(7)}, "datum 1: weights: dense: 7 bytes are not a whole number of float32 values"),
        ({"dense": bytes(12)}, r"datum 1: weights: 3 values do not fill the shape \[2\]"),
        ({"dense": bytes(12), "shape": []}, "datum 1: weights has 3 entries but the input has 2 tokens"),
        ({"shape": [2**62]}, r"datum 1: weights: .* does not fit into memory"),
        ({"shape": [2**31] * 20}, r"datum 1: weights: .* does not fit into memory"),
        ({"shape": [-2, -1]}, r"datum 1: weights: .* does not fit into memory"),
        ({"shape": [1] * 10_000}, "datum 1: weights: a tensor has at most 32 dimensions"),
        ({"dtype": 0}, r"datum 1: weights: dtype 0 is not supported; send float32 \(1\) or int64 \(2\)"),
        ({"dtype": pb.DTYPE_BFLOAT16}, "datum 1: weights: dtype 4 is not supported"),
        ({"csr": b""}, "datum 1: weights: a CSR tensor is a matrix"),
        ({"csr": b"", "shape": [2, 3]}, "datum 1: weights: sparse_crow_indices has 0 entries, but 2 rows need 3"),
        ({"tokens": bytes(7)}, "datum 1: model_input: tokens: 7 bytes are not a whole number of int32 values"),
        ({"tokens": b"\xff" * 8}, "datum 1: model_input: token ids must be between 0 and 2147483647, got -1"),
        (
            {"tokens": bytes(4)},
            "datum 1: target_tokens has 2 entries but the input has 1 tokens|datum 1: weights has 2",
        ),
        ({"chunk": pb.Chunk()}, "datum 1: model_input: a chunk is empty"),
        (
            {"chunk": pb.Chunk(image=pb.ImageChunk(format="gif"))},
            "datum 1: model_input: the format of an image must be png or jpeg, got 'gif'",
        ),
        (
            {"chunk": pb.Chunk(image=pb.ImageChunk(format="png", expected_tokens=-5))},
            "datum 1: model_input: expected_tokens .* got -5",
        ),
        ({"span": pb.ProvenanceSpan()}, "datum 1: model_input_spans: a span is empty"),
        (
            {"span": pb.ProvenanceSpan(prompt_tokens=pb.PromptProvenanceSpan(length=-1))},
            "datum 1: model_input_spans: .* must be at least 0, got 0 and -1",
        ),
    ],
)
def test_wrong_requests_name_the_datum_and_the_field(changes: dict[str, Any], message: str) -> None:  # R4.5
    with pytest.raises(InvalidMessage, match=message):
        decode_forward_backward(broken(**changes))


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b"", "seq_id must lie in 1"),
        (b"hello", "the body is not a ForwardBackwardRequest"),
        (FORWARD[:-30], "the body is not a ForwardBackwardRequest"),
        (b"\x0a\x02\xff\xff", "the body is not a ForwardBackwardRequest"),
    ],
)
def test_bytes_that_are_not_a_request_raise(body: bytes, message: str) -> None:
    with pytest.raises(InvalidInput, match=message):
        decode_forward_backward(body)


def test_the_number_of_a_pass_is_known_even_if_its_datums_are_unusable() -> None:
    assert read_sequence_number(broken(dense=bytes(7))) == ("m", 1)
    assert read_sequence_number(b"hello") == ("", 0)


def test_malformed_samples_raise() -> None:
    with pytest.raises(InvalidMessage, match="sequence 0: unknown stop reason 5"):
        decode_sample(pb.SampleResponse(sequences=[pb.SampledSequence(stop_reason=5)]).SerializeToString())  # type: ignore[arg-type]
    with pytest.raises(InvalidMessage, match="sequence 0: tokens: 3 bytes are not a whole number of int32"):
        decode_sample(pb.SampleResponse(sequences=[pb.SampledSequence(tokens=bytes(3))]).SerializeToString())
    with pytest.raises(InvalidMessage, match="prompt_logprobs: 3 bytes"):
        decode_sample(pb.SampleResponse(prompt_logprobs=bytes(3)).SerializeToString())


def test_an_image_that_the_server_must_fetch_cannot_be_trained_on() -> None:
    datum = Datum(ModelInput([ImageAssetPointerChunk("tinker://a", "png")]))
    with pytest.raises(InvalidInput, match="can only be sampled from; training needs the image's bytes"):
        encode_forward_backward(ForwardBackwardRequest("m", 1, [datum], "cross_entropy"))


@st.composite
def damaged(draw: st.DrawFn) -> bytes:
    """A good body with a few bytes changed, cut out or put in."""
    body = bytearray(draw(st.sampled_from([FORWARD, PPO, OUTPUT, SAMPLE, broken(shape=[2, 3], csr=CSR[2:56])])))
    for _ in range(draw(st.integers(1, 4))):
        start = draw(st.integers(0, len(body)))
        body[start : start + draw(st.integers(0, 3))] = draw(st.binary(max_size=3))
    return bytes(body)


@given(damaged() | st.binary(max_size=60))
@examples(100, 5_000)
def test_damaged_bytes_raise_invalid_input_or_are_read(body: bytes) -> None:
    for decode in (decode_forward_backward, decode_output, decode_sample):
        with suppress(InvalidInput):
            decode(body)


numbers = st.integers(-(2**63), 2**63 - 1) | st.integers(-2, 4)

buffers = st.binary(max_size=24) | st.lists(numbers, max_size=4).map(lambda n: np.array(n, "<i8").tobytes())


@given(st.data())
@examples(100, 5_000)
def test_well_formed_random_messages_raise_invalid_input_or_are_read(data: st.DataObject) -> None:
    draw = data.draw
    request = pb.ForwardBackwardRequest(seq_id=1)
    tensor = request.data.add().loss_fn_inputs["mine"]
    csr = pb.SparseCsr(values=draw(buffers), crow_indices=draw(buffers), col_indices=draw(buffers))
    tensor.CopyFrom(pb.Tensor(sparse_csr=csr) if draw(st.booleans()) else pb.Tensor(dense=draw(buffers)))
    tensor.dtype = draw(st.integers(0, 5))  # type: ignore[assignment]
    tensor.shape.extend(draw(st.lists(numbers, max_size=4)))
    with suppress(InvalidInput):
        decode_forward_backward(request.SerializeToString())
    offsets = draw(st.lists(numbers, max_size=5))
    trailing = draw(st.lists(numbers, max_size=3))
    with suppress(InvalidInput):
        decode_output(batched(draw(buffers), offsets, draw(st.integers(0, 5)), trailing, draw(numbers)))
