"""JSON bodies: every message comes back equal, what the official SDK sends is read, and errors name the field."""

from __future__ import annotations

import itertools
import json
from contextlib import suppress
from typing import Any

import hypothesis.extra.numpy as hnp
import numpy as np
import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.helpers.fuzzing import examples
from tinker_lightning.errors import InvalidInput, InvalidMessage
from tinker_lightning.types import (
    AdamParams,
    Datum,
    DmelChunk,
    EncodedTextChunk,
    ForwardBackwardOutput,
    ImageAssetPointerChunk,
    ImageChunk,
    LoraConfig,
    ModelInput,
    ModelInputChunk,
    OptimStepResponse,
    ProvenanceSpan,
    SampledSequence,
    SampleResponse,
    SamplingParams,
    TensorData,
)
from tinker_lightning.types.requests import (
    CreateModelRequest,
    ForwardBackwardRequest,
    OptimStepRequest,
    SampleRequest,
    SessionHeartbeatRequest,
)
from tinker_lightning.wire.json import dumps, forward_backward_body, loads, parse, parse_forward_backward


def test_a_pass_has_the_envelope_of_the_protocol() -> None:
    datum = Datum.from_targets(np.array([1, 9, 2, 9], np.int32)[::2], [2, 3], weights=[1, 0])
    request = ForwardBackwardRequest("m", 1, [datum], "ppo", {"clip_low_threshold": 0.9})
    content = {
        "data": [
            {
                "loss_fn_inputs": {
                    "target_tokens": {"data": [2, 3], "dtype": "int64", "shape": [2]},
                    "weights": {"data": [1.0, 0.0], "dtype": "float32", "shape": [2]},
                },
                "model_input": {"chunks": [{"type": "encoded_text", "tokens": [1, 2]}]},
            }
        ],
        "loss_fn": "ppo",
        "loss_fn_config": {"clip_low_threshold": 0.9},
    }
    envelope = {"forward_backward_input": content, "model_id": "m", "seq_id": 1}
    assert json.loads(forward_backward_body(request)) == envelope
    forward = ForwardBackwardRequest("m", 1, [datum], "ppo", forward_only=True)
    del content["loss_fn_config"]
    assert json.loads(forward_backward_body(forward)) == {"forward_input": content, "model_id": "m", "seq_id": 1}


def test_absent_fields_are_left_out_and_the_type_is_named() -> None:
    assert json.loads(dumps(SessionHeartbeatRequest("s"))) == {"session_id": "s", "type": "session_heartbeat"}
    body = json.loads(dumps(CreateModelRequest("s", 0, "base", LoraConfig(rank=4))))
    assert body["lora_config"] == {"rank": 4, "train_unembed": True, "train_mlp": True, "train_attn": True}
    assert "user_metadata" not in body
    with pytest.raises(TypeError):
        dumps({"a": object()})


@pytest.mark.parametrize(
    ("cls", "body", "expected"),
    [
        # SDKs before 0.18 send neither defaults nor types; null is absent, and unknown fields are no error.
        (AdamParams, {"learning_rate": 1}, AdamParams(learning_rate=1.0)),
        (SamplingParams, {"max_tokens": 5, "stop": None}, SamplingParams(max_tokens=5)),
        (SamplingParams, {"stop": []}, SamplingParams(stop=[])),
        (SamplingParams, {"stop": [1, 2]}, SamplingParams(stop=[1, 2])),
        (SamplingParams, {"stop": ["a"]}, SamplingParams(stop=["a"])),
        (SamplingParams, {"stop": "a"}, SamplingParams(stop="a")),
        (OptimStepResponse, {"metrics": None}, OptimStepResponse()),
        (OptimStepRequest, {"model_id": "m", "seq_id": 1, "new": [{}]}, OptimStepRequest("m", 1)),
        (
            SampleResponse,
            {"sequences": [{"tokens": [1], "stop_reason": "stop"}], "prompt_logprobs": [None, -1]},
            SampleResponse([SampledSequence([1], None, "stop")], [None, -1.0]),
        ),
        (
            ForwardBackwardOutput,
            {"loss_fn_outputs": [{"logprobs": {"data": [-1, -2.5], "dtype": "float32"}}], "metrics": {"loss:sum": 1}},
            ForwardBackwardOutput([{"logprobs": TensorData([-1, -2.5])}], {"loss:sum": 1.0}),
        ),
    ],
)
def test_reads_what_servers_and_clients_of_all_eras_send(cls: type[Any], body: dict[str, Any], expected: Any) -> None:
    assert parse(cls, orjson.dumps(body)) == expected


@pytest.mark.parametrize(
    ("chunk", "expected"),
    [
        ({"tokens": [1, 2]}, EncodedTextChunk([1, 2])),
        ({"data": "iVA=", "format": "png"}, ImageChunk(b"\x89P", "png")),
        (
            {"location": "tinker://a", "format": "jpeg", "expected_tokens": 3},
            ImageAssetPointerChunk("tinker://a", "jpeg", 3),
        ),
        ({"type": "dmel", "dmel": "AwEC"}, DmelChunk(b"\x03\x01\x02")),
    ],
)
def test_chunks_are_known_by_their_keys(chunk: dict[str, Any], expected: Any) -> None:
    body = {"sampling_session_id": "s", "seq_id": 0, "sampling_params": {}, "prompt": {"chunks": [chunk]}}
    assert parse(SampleRequest, orjson.dumps(body)).prompt == ModelInput([expected])


def test_requests_of_the_official_sdk_are_read() -> None:  # R5.5
    types = pytest.importorskip("tinker.types")
    tensor = pytest.importorskip("tinker.types._pydantic_types.tensor_data").TensorData
    image = types.ImageChunk(data=b"\x89PNG", format="png", expected_tokens=4)
    pointer = types.ImageAssetPointerChunk(location="tinker://a", format="jpeg")
    theirs = types.SampleRequest(
        sampling_session_id="s",
        seq_id=10**18,
        num_samples=2,
        prompt=types.ModelInput(chunks=[types.EncodedTextChunk(tokens=[1, 2]), image, pointer]),
        sampling_params=types.SamplingParams(max_tokens=5, stop=["\n"], temperature=0.5),
        target_prompt_logprobs=tensor(data=[3, -1], dtype="int64", shape=[1, 2]),
    )
    chunks: list[ModelInputChunk] = [
        EncodedTextChunk([1, 2]),
        ImageChunk(b"\x89PNG", "png", 4),
        ImageAssetPointerChunk("tinker://a", "jpeg"),
    ]
    ours = SampleRequest(
        "s",
        10**18,
        ModelInput(chunks),
        SamplingParams(max_tokens=5, stop=["\n"], temperature=0.5),
        num_samples=2,
        target_prompt_logprobs=TensorData([[3, -1]]),
    )
    assert parse(SampleRequest, theirs.model_dump_json(exclude_none=True).encode()) == ours
    assert parse(SampleRequest, theirs.model_dump_json().encode()) == ours
    assert types.SampleRequest.model_validate_json(dumps(ours)) == types.SampleRequest(
        **{**dict(theirs), "prompt_logprobs": False}
    )
    step = types.OptimStepRequest(adam_params=types.AdamParams(learning_rate=0.5), model_id="m", seq_id=3)
    assert parse(OptimStepRequest, step.model_dump_json().encode()) == OptimStepRequest("m", 3, AdamParams(0.5))


# Round trips

floats32 = st.floats(width=32, allow_nan=False, allow_infinity=False)
shapes = hnp.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=4)


@st.composite
def csr_tensors(draw: st.DrawFn) -> TensorData:
    counts = draw(st.lists(st.integers(0, 3), max_size=4))
    columns = [column for count in counts for column in range(count)]
    values = draw(hnp.arrays(np.float32, len(columns), elements=floats32))
    return TensorData(values, "float32", [len(counts), 3], [0, *itertools.accumulate(counts)], columns)


tensors = st.one_of(
    hnp.arrays(np.float32, shapes, elements=floats32).map(TensorData),
    hnp.arrays(np.int64, shapes).map(TensorData),
    csr_tensors(),
)
images = st.sampled_from(["png", "jpeg"]), st.none() | st.integers(0, 2**31 - 1)
chunks = st.one_of(
    st.lists(st.integers(0, 2**31 - 1), max_size=5).map(EncodedTextChunk),
    st.builds(ImageChunk, st.binary(max_size=5), *images),
    st.builds(ImageAssetPointerChunk, st.text(max_size=5), *images),
    st.builds(DmelChunk, st.binary(max_size=5)),
)
spans = st.lists(
    st.builds(
        ProvenanceSpan, st.sampled_from(["prompt", "sampled"]), st.text(max_size=3), *[st.integers(0, 2**63 - 1)] * 2
    ),
    max_size=3,
)


@st.composite
def datums(draw: st.DrawFn) -> Datum:
    model_input = ModelInput(draw(st.lists(chunks, max_size=3)))
    inputs: dict[str, Any] = draw(st.dictionaries(st.text(max_size=5).map("my {}".format), tensors, max_size=3))
    if model_input.is_text:
        inputs["target_tokens"] = draw(hnp.arrays(np.int64, model_input.length))
        inputs["weights"] = draw(hnp.arrays(np.float32, model_input.length, elements=floats32))
    pair = draw(st.none() | st.tuples(spans, spans))
    return Datum(model_input, inputs, *(pair or ()))


finite = st.floats(allow_nan=False, allow_infinity=False)
requests = st.builds(
    ForwardBackwardRequest,
    st.text(max_size=5),
    st.integers(1, 2**31 - 1),
    st.lists(datums(), max_size=3),
    st.text(max_size=5),
    st.dictionaries(st.text(max_size=3), finite | st.text(max_size=3), max_size=3),
    st.booleans(),
)


@examples(40, 1000)
@given(requests)
def test_a_pass_comes_back_equal(request: ForwardBackwardRequest) -> None:
    assert parse_forward_backward(forward_backward_body(request), forward_only=request.forward_only) == request


tops = st.lists(st.none() | st.lists(st.tuples(st.integers(0, 9), finite), max_size=2), max_size=3)
messages = st.one_of(
    st.builds(
        ForwardBackwardOutput,
        st.lists(st.dictionaries(st.text(max_size=3), tensors, max_size=3), max_size=3),
        st.dictionaries(st.text(max_size=3), finite, max_size=3),
    ),
    st.builds(
        SampleResponse,
        st.lists(
            st.builds(
                SampledSequence,
                st.lists(st.integers(0, 2**31 - 1), max_size=3),
                st.none() | st.lists(finite, max_size=3),
                st.sampled_from(["stop", "length"]),
                st.none() | tops,
            ),
            max_size=3,
        ),
        st.none() | st.lists(st.none() | finite, max_size=3),
        st.none() | tops,
        st.none() | tensors,
    ),
    st.builds(
        SampleRequest,
        st.text(max_size=3),
        st.integers(0, 10**18),
        st.lists(chunks, max_size=2).map(ModelInput),
        st.builds(SamplingParams, stop=st.none() | st.just("a") | st.just(["a"]) | st.just([1])),
    ),
    st.builds(
        SampleRequest,
        st.just("s"),
        st.just(0),
        st.just(ModelInput.from_ints([1, 2, 3])),
        st.just(SamplingParams()),
        topk_prompt_logprobs=st.integers(0, 3),
        target_prompt_logprobs=hnp.arrays(np.int64, st.tuples(st.just(2), st.integers(0, 3))).map(TensorData),
    ),
    st.builds(
        OptimStepRequest, st.text(max_size=3), st.integers(1, 9), st.none() | st.builds(AdamParams, finite.map(abs))
    ),
)


@given(messages)
def test_every_message_comes_back_equal(message: Any) -> None:
    assert parse(type(message), dumps(message)) == message


# Bodies that are wrong


def broken(*path: str | int, value: Any) -> bytes:
    """Two datums, of which one place is changed."""
    tensor = {"data": [0.5, 1], "dtype": "float32", "shape": [2]}
    datum = {
        "loss_fn_inputs": {"target_tokens": {"data": [2, 3], "dtype": "int64"}, "weights": tensor},
        "model_input": {"chunks": [{"tokens": [1, 2]}]},
    }
    content: Any = {"data": [datum, datum], "loss_fn": "cross_entropy", "loss_fn_config": {"a": 1}}
    body: Any = orjson.loads(orjson.dumps({"forward_input": content, "model_id": "m", "seq_id": 1}))
    place = body
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = value
    return json.dumps(body).encode()


DATUM = ("forward_input", "data", 1)
CHUNK = (*DATUM, "model_input", "chunks", 0)
WEIGHTS = (*DATUM, "loss_fn_inputs", "weights")


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        (("model_id",), None, "model_id: missing"),
        (("model_id",), 5, "model_id: must be a string, got int 5"),
        (("seq_id",), "1", "seq_id: must be an integer, got str '1'"),
        (("seq_id",), True, "seq_id: must be an integer, got bool True"),
        (("seq_id",), 0, "seq_id must lie in 1"),
        (("forward_input",), None, "forward_input: must be an object, got nothing"),
        (("forward_input",), [], r"forward_input: must be an object, got list \[\]"),
        (("forward_input", "data"), {}, "data: must be a list, got dict"),
        (("forward_input", "loss_fn"), None, "loss_fn: missing"),
        (("forward_input", "loss_fn_config"), [1], "loss_fn_config: must be an object"),
        (("forward_input", "loss_fn_config", "a"), [1], r"loss_fn_config\.a: must be a number, got list \[1\]"),
        (DATUM, 3, "datum 1: must be an object, got int 3"),
        ((*DATUM, "loss_fn_inputs"), [1], "datum 1: loss_fn_inputs: must be an object"),
        ((*DATUM, "model_input"), None, "datum 1: model_input: must be an object with a list of chunks, got nothing"),
        ((*DATUM, "model_input_spans"), [], "datum 1: set both model_input_spans"),
        (
            (*DATUM, "model_input_spans"),
            [{}],
            r"datum 1: model_input_spans\[0\]\.type: must be one of prompt_tokens, sam",
        ),
        (
            (*DATUM, "model_input_spans"),
            [{"type": "prompt_tokens", "sequence_id": "s", "offset": 0}],
            r"datum 1: model_input_spans\[0\]: length: missing",
        ),
        (
            (*DATUM, "model_input_spans"),
            [{"type": "prompt_tokens", "sequence_id": "s", "offset": -1, "length": 1}],
            r"datum 1: model_input_spans\[0\]: .* must be at least 0",
        ),
        (CHUNK, [], r"datum 1: model_input\.chunks\[0\]: must be an object"),
        (
            CHUNK,
            {"text": "a"},
            r"datum 1: model_input\.chunks\[0\]: a chunk has tokens, data, location or dmel, got text",
        ),
        ((*CHUNK, "tokens"), "ab", r"datum 1: model_input\.chunks\[0\]\.tokens: must be a list of token ids"),
        ((*CHUNK, "tokens"), [2**40], r"datum 1: model_input\.chunks\[0\]: token ids must be between"),
        ((*CHUNK, "tokens"), [1.5], r"datum 1: model_input\.chunks\[0\]: token ids must be integers"),
        ((*CHUNK, "tokens"), [10**30], r"datum 1: model_input\.chunks\[0\]: token ids must be integers"),
        ((*CHUNK, "tokens"), [1], "datum 1: target_tokens has 2 entries but the input has 1 tokens"),
        (CHUNK, {"data": "?", "format": "png"}, r"datum 1: model_input\.chunks\[0\]: data: not base64"),
        (CHUNK, {"data": "é", "format": "png"}, r"datum 1: model_input\.chunks\[0\]: data: not base64"),
        (CHUNK, {"dmel": 5}, r"datum 1: model_input\.chunks\[0\]: dmel: must be a base64 string, got int 5"),
        (CHUNK, {"data": ""}, r"datum 1: model_input\.chunks\[0\]: format: missing"),
        (CHUNK, {"data": "", "format": "gif"}, r"chunks\[0\]: format: must be one of png, jpeg, got str 'gif'"),
        (CHUNK, {"location": "a", "format": "png", "expected_tokens": -1}, r"chunks\[0\]: expected_tokens .* got -1"),
        (WEIGHTS, [1, 0], "datum 1: weights: must be a tensor"),
        ((*WEIGHTS, "data"), None, r"datum 1: weights\.data: must be a list of numbers, got nothing"),
        ((*WEIGHTS, "data"), [1, None], "datum 1: weights: not an array of numbers"),
        ((*WEIGHTS, "data"), [1, [2]], "datum 1: weights: not a rectangular array"),
        ((*WEIGHTS, "data"), [1, 2, 3], r"datum 1: weights: 3 values do not fill the shape \[2\]"),
        ((*WEIGHTS, "data"), [1e300, 0], "datum 1: weights: a value does not fit into float32"),
        ((*WEIGHTS, "dtype"), "int64", "datum 1: weights: must be integers, got floats"),
        ((*WEIGHTS, "dtype"), "float64", "datum 1: weights: dtype 'float64' is not supported"),
        ((*WEIGHTS, "dtype"), ["float32"], "datum 1: weights: dtype .* is not supported"),
        ((*WEIGHTS, "dtype"), {}, "datum 1: weights: dtype .* is not supported"),
        ((*WEIGHTS, "shape"), 2, r"datum 1: weights\.shape: must be a list, got int 2"),
        ((*WEIGHTS, "shape"), [2.0], r"datum 1: weights\.shape\[0\]: must be an integer, got float 2\.0"),
        ((*WEIGHTS, "shape"), [10**400], "the body is not JSON: number is infinity"),
        ((*WEIGHTS, "shape"), [2**63], "datum 1: weights: .* does not fit into memory"),
        ((*WEIGHTS, "shape"), [-2], "datum 1: weights: .* does not fit into memory"),
        ((*WEIGHTS, "sparse_crow_indices"), [0, 1], "datum 1: weights: a CSR tensor needs both"),
    ],
)
def test_wrong_bodies_name_the_datum_and_the_field(
    path: tuple[str | int, ...], value: Any, message: str
) -> None:  # R4.5
    with pytest.raises(InvalidInput, match=message):
        parse_forward_backward(broken(*path, value=value), forward_only=True)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b"", "the body is not JSON"),
        (b"\xff", "the body is not JSON"),
        (b"{", "the body is not JSON"),
        (b'{"a": NaN}', "the body is not JSON"),
        (b'{"a": 1e999}', "the body is not JSON: number is infinity"),
        (b'{"a": "\\ud800"}', "the body is not JSON"),
        (b"[" * 100_000, "the body is not JSON"),
        (b"[1]", "the body must be a JSON object, got list"),
        (b"null", "the body must be a JSON object, got NoneType"),
    ],
)
def test_bodies_that_are_not_json_objects_raise(body: bytes, message: str) -> None:
    with pytest.raises(InvalidMessage, match=message):
        loads(body)


def test_deeply_nested_values_raise_and_are_shown_shortened() -> None:
    deep = b'{"model_id": ' + b"[" * 1000 + b"]" * 1000 + b', "seq_id": 1}'
    with pytest.raises(InvalidMessage, match="model_id: must be a string, got list") as caught:
        parse(OptimStepRequest, deep)
    assert len(str(caught.value)) < 200


def test_settings_are_checked_as_they_are_read() -> None:
    with pytest.raises(InvalidInput, match=r"adam_params\.learning_rate must be a finite number"):
        parse(OptimStepRequest, b'{"model_id": "m", "seq_id": 1, "adam_params": {"learning_rate": -1}}')
    with pytest.raises(InvalidMessage, match=r"adam_params\.learning_rate: must be a finite number, got null"):
        parse(OptimStepRequest, b'{"model_id": "m", "seq_id": 1, "adam_params": {"learning_rate": null}}')
    with pytest.raises(InvalidMessage, match=r"adam_params\.beta1: must be a number, got bool True"):
        parse(OptimStepRequest, b'{"model_id": "m", "seq_id": 1, "adam_params": {"beta1": true}}')
    with pytest.raises(InvalidMessage, match="stop_reason: must be one of stop, length, got str 'eos'"):
        parse(SampledSequence, b'{"tokens": [1], "stop_reason": "eos"}')
    with pytest.raises(InvalidMessage, match=r"metrics\.a: must be a number, got nothing"):
        parse(OptimStepResponse, b'{"metrics": {"a": null}}')


numbers = st.integers(-5, 5) | st.integers(-(2**65), 2**65) | st.floats(allow_nan=False, allow_infinity=False)
nonsense = st.recursive(
    st.none() | st.booleans() | numbers | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.sampled_from(["data", "tokens", "a"]), inner),
    max_leaves=6,
)
places = st.sampled_from(
    [
        ("seq_id",),
        ("forward_input", "data"),
        ("forward_input", "loss_fn_config"),
        (*DATUM, "loss_fn_inputs"),
        (*DATUM, "model_input"),
        (*DATUM, "model_input_spans"),
        CHUNK,
        (*CHUNK, "tokens"),
        *((*WEIGHTS, name) for name in ("data", "dtype", "shape", "sparse_crow_indices", "sparse_col_indices")),
    ]
)


@given(places, nonsense, nonsense)
@examples(100, 5_000)
def test_random_bytes_raise_invalid_input_or_are_read(path: tuple[str | int, ...], value: Any, other: Any) -> None:
    body = orjson.loads(broken(*path, value=value))
    sparse = {"data": [], "sparse_crow_indices": value, "sparse_col_indices": other, "shape": [1, 2]}
    datum = {"loss_fn_inputs": {"mine": sparse}, "model_input": {"chunks": []}}
    for attempt in (body, {**body, "forward_input": {"data": [datum], "loss_fn": "cross_entropy"}}):
        with suppress(InvalidInput):
            parse_forward_backward(json.dumps(attempt).encode(), forward_only=True)


@given(st.data())
@examples(100, 5_000)
def test_damaged_bytes_raise_invalid_input_or_are_read(data: st.DataObject) -> None:
    body = bytearray(broken("seq_id", value=1))
    for _ in range(data.draw(st.integers(1, 3))):
        start = data.draw(st.integers(0, len(body)))
        body[start : start + data.draw(st.integers(0, 3))] = data.draw(st.binary(max_size=3))
    with suppress(InvalidInput):
        parse_forward_backward(bytes(body), forward_only=True)
