"""Protobuf bodies: the protocol's own vectors, the official SDK's reader and writer, and bytes of any kind."""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any

import hypothesis.extra.numpy as hnp
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.helpers.fuzzing import examples
from tests.helpers.protobuf_messages import CSR, FORWARD, OUTPUT, PPO, SAMPLE, batched
from tinker_lightning.types import (
    Datum,
    DmelChunk,
    EncodedTextChunk,
    ForwardBackwardOutput,
    ImageChunk,
    ModelInput,
    PromptAltTokens,
    ProvenanceSpan,
    SampledSequence,
    SampleResponse,
    TensorData,
)
from tinker_lightning.types.requests import ForwardBackwardRequest
from tinker_lightning.wire import tinker_pb2 as pb
from tinker_lightning.wire.protobuf import (
    decode_forward_backward,
    decode_output,
    decode_sample,
    encode_forward_backward,
    encode_output,
    encode_sample,
)


def test_golden_forward_request() -> None:
    request = ForwardBackwardRequest("m", 1, [Datum.from_targets([1, 2], [2, 3])], "cross_entropy", forward_only=True)
    assert decode_forward_backward(FORWARD) == request
    assert encode_forward_backward(request) == FORWARD


def test_golden_request_with_weights_and_config() -> None:
    data = [Datum.from_targets([1, 2], [2, 3], weights=[1, 0])]
    request = ForwardBackwardRequest("m", 1, data, "ppo", {"clip_low_threshold": 0.9, "note": "x"})
    assert decode_forward_backward(PPO) == request
    # The order of a map's entries is free, so the messages are compared and not the bytes.
    assert pb.ForwardBackwardRequest.FromString(
        encode_forward_backward(request)
    ) == pb.ForwardBackwardRequest.FromString(PPO)


def test_golden_csr_tensor() -> None:
    message = pb.ForwardBackwardRequest(seq_id=1)
    message.data.add().loss_fn_inputs["routing"].ParseFromString(CSR)
    request = decode_forward_backward(message.SerializeToString())
    tensor = request.data[0].loss_fn_inputs["routing"]
    assert tensor.is_sparse
    assert tensor == TensorData([[0, 0, 0.5], [0.25, 0, 0]])
    assert encode_forward_backward(request) == message.SerializeToString()


def test_golden_output() -> None:
    output = ForwardBackwardOutput(
        [{"logprobs": TensorData([-1.0, -2.0])}, {"logprobs": TensorData([-3.0])}], {"loss:sum": 1.5}
    )
    assert decode_output(OUTPUT) == output
    assert encode_output(output) == OUTPUT


def test_golden_sample() -> None:
    response = SampleResponse([SampledSequence([7, 8], [-0.5, -0.25], "length")], [None, -1.0])
    assert decode_sample(SAMPLE) == response
    assert encode_sample(response) == SAMPLE


@pytest.fixture(scope="module")
def sdk() -> SimpleNamespace:
    return SimpleNamespace(
        pb=pytest.importorskip("tinker.proto.tinker_public_pb2"),
        write=pytest.importorskip("tinker.proto.request_conv"),
        read=pytest.importorskip("tinker.proto.response_conv"),
        types=pytest.importorskip("tinker.types"),
        spans=pytest.importorskip("tinker.types.provenance_spans"),
    )


SPANS = [ProvenanceSpan("prompt", "s1", 3, 1), ProvenanceSpan("sampled", "s2", 0, 1)]


def rich_request(sparse: TensorData) -> ForwardBackwardRequest:
    """Every kind of chunk, tensor, span and setting that a pass can carry."""
    several = ModelInput([EncodedTextChunk([1, 2]), EncodedTextChunk([3])])
    mixed = ModelInput(
        [
            EncodedTextChunk([1]),
            ImageChunk(b"\x89PNG", "png", 4),
            ImageChunk(b"\xff", "jpeg"),
            DmelChunk(b"\x03\x01\x02"),
        ]
    )
    return ForwardBackwardRequest(
        "model",
        7,
        [
            Datum(several, {"target_tokens": [2, 3, 4], "weights": [0, 0.5, 1], "advantages": [1, 2, 3]}),
            Datum.from_targets([1, 2], np.array([[2, 3], [4, 5]]), weights=np.array([[0.5, 0.5], [1, 0]])),
            Datum.from_targets(range(8), np.tile(np.arange(9), (8, 1)), weights=sparse),
            Datum(mixed, {"target_tokens": [1, 2]}),
            Datum(ModelInput.from_ints([1, 2]), {"target_tokens": [2, 3]}, SPANS, SPANS[::-1]),
        ],
        "stable_reinforce",
        {"kl_coeff": 0.25, "beta": 2.0, "mode": "strict"},
    )


def sdk_request(sdk: SimpleNamespace, sparse: torch.Tensor) -> Any:
    """The same as `rich_request`, in the SDK's types."""
    t = sdk.types
    prompt = sdk.spans.PromptProvenanceSpan(sequence_id="s1", offset=3, length=1)
    sampled = sdk.spans.SampledProvenanceSpan(sequence_id="s2", length=1)

    def text(tokens: list[int]) -> Any:
        return t.EncodedTextChunk(tokens=tokens)

    image = t.ImageChunk(data=b"\x89PNG", format="png", expected_tokens=4)
    chunks = [text([1]), image, t.ImageChunk(data=b"\xff", format="jpeg"), t.DmelChunk(dmel=b"\x03\x01\x02")]
    data = [
        t.Datum(
            model_input=t.ModelInput(chunks=[text([1, 2]), text([3])]),
            loss_fn_inputs={"target_tokens": [2, 3, 4], "weights": [0, 0.5, 1], "advantages": [1.0, 2.0, 3.0]},
        ),
        t.Datum(
            model_input=t.ModelInput.from_ints([1, 2]),
            loss_fn_inputs={
                "target_tokens": np.array([[2, 3], [4, 5]]),
                "weights": torch.tensor([[0.5, 0.5], [1, 0]]),
            },
        ),
        t.Datum(
            model_input=t.ModelInput.from_ints(list(range(8))),
            loss_fn_inputs={"target_tokens": np.tile(np.arange(9), (8, 1)), "weights": sparse},
        ),
        t.Datum(model_input=t.ModelInput(chunks=chunks), loss_fn_inputs={"target_tokens": [1, 2]}),
        t.Datum(model_input=t.ModelInput.from_ints([1, 2]), loss_fn_inputs={"target_tokens": [2, 3]}).with_provenance(
            [prompt, sampled], [sampled, prompt]
        ),
    ]
    config = {"kl_coeff": 0.25, "beta": 2.0, "mode": "strict"}
    content = t.ForwardBackwardInput(data=data, loss_fn="stable_reinforce", loss_fn_config=config)
    return sdk.write.forward_backward_request_to_proto(
        t.ForwardBackwardRequest(forward_backward_input=content, model_id="model", seq_id=7)
    )


def test_requests_are_the_official_sdks(sdk: SimpleNamespace) -> None:  # R5.4, R5.5
    dense = torch.zeros(8, 9)
    dense[1, 4], dense[7, 0] = 0.5, 0.25
    sparse = TensorData(
        [0.5, 0.25], shape=[8, 9], sparse_crow_indices=[0, 0, 1, 1, 1, 1, 1, 1, 2], sparse_col_indices=[4, 0]
    )
    theirs, ours = sdk_request(sdk, dense), rich_request(sparse)
    decoded = decode_forward_backward(theirs.SerializeToString())
    assert decoded == ours
    assert decoded.data[2].loss_fn_inputs["weights"].is_sparse
    assert sdk.pb.ForwardBackwardRequest.FromString(encode_forward_backward(ours)) == theirs


def test_outputs_are_read_by_the_official_sdk(sdk: SimpleNamespace) -> None:  # R5.5
    widths = [None, 2, 3, 3, None, 2]
    outputs = [
        {
            "logprobs": TensorData(np.random.default_rng(i).normal(size=(i, k) if k else i)),
            "counts": TensorData(np.arange(i)),
        }
        for i, k in enumerate(widths, start=1)
    ]
    read = sdk.read.deserialize_forward_backward_output(
        encode_output(ForwardBackwardOutput(outputs, {"loss:sum": 1.5}))
    )
    assert read.metrics == {"loss:sum": 1.5}
    assert read.loss_fn_output_type == "ArrayRecord"
    assert len(read.loss_fn_outputs) == len(outputs)
    for theirs, ours in zip(read.loss_fn_outputs, outputs, strict=True):
        for name, tensor in ours.items():
            assert (theirs[name].dtype, theirs[name].shape) == (tensor.dtype, tensor.shape)
            np.testing.assert_array_equal(theirs[name].to_numpy(), tensor.to_numpy())


def test_samples_are_read_by_the_official_sdk(sdk: SimpleNamespace) -> None:  # R5.5
    sequences = [SampledSequence([7, 8], [-0.5, -0.25], "stop"), SampledSequence([9], None, "length")]
    read = sdk.read.deserialize_sample_response(encode_sample(SampleResponse(sequences, [None, -1.0, None])))
    assert [(s.tokens, s.logprobs, s.stop_reason) for s in read.sequences] == [
        (s.tokens, s.logprobs, s.stop_reason) for s in sequences
    ]
    assert read.prompt_logprobs == [None, -1.0, None]
    assert sdk.read.deserialize_sample_response(encode_sample(SampleResponse(sequences))).prompt_logprobs is None


def test_options_of_sampling_are_read_by_the_official_sdk(sdk: SimpleNamespace) -> None:  # R5.5
    top: Any = [[(3, -0.5), (0, -1.5)], [(4, -0.25), (5, -2.0)]]
    sparse = TensorData([-1.0, -2.0], "float32", [2, 9], [0, 1, 2], [8, 0])
    drawn = PromptAltTokens(TensorData([[1, 2], [3, 4]]), TensorData([[-1.0, -2.0], [-3.0, -4.0]]))
    sequences = [SampledSequence([7, 8], [-0.5, -0.25], "stop", top)]
    response = SampleResponse(sequences, [None, -1.0, -3.0], [None, *top], sparse, drawn, 2)
    assert decode_sample(encode_sample(response)) == response
    read = sdk.read.deserialize_sample_response(encode_sample(response))
    assert read.prompt_cache_hit_tokens == 2
    assert read.sequences[0].topk_logprobs == top
    assert read.topk_prompt_logprobs == [None, *top]
    assert read.target_prompt_logprobs.sparse_col_indices == [8, 0]
    assert read.target_prompt_logprobs.to_torch().tolist() == sparse.tolist()
    assert read.prompt_alt_tokens.tokens.to_torch().tolist() == drawn.tokens.tolist()
    assert read.prompt_alt_tokens.logprobs.to_torch().tolist() == drawn.logprobs.tolist()


floats32 = st.floats(width=32)


@st.composite
def csr_tensors(draw: st.DrawFn) -> TensorData:
    rows, columns = draw(st.integers(0, 4)), draw(st.integers(1, 4))
    cells = sorted(draw(st.sets(st.tuples(st.integers(0, rows - 1), st.integers(0, columns - 1))))) if rows else []
    crow = [0, *itertools.accumulate(sum(row == i for row, _ in cells) for i in range(rows))]
    return TensorData(
        draw(hnp.arrays(np.float32, len(cells), elements=floats32)),
        "float32",
        [rows, columns],
        crow,
        [c for _, c in cells],
    )


shapes = hnp.array_shapes(min_dims=1, max_dims=3, min_side=0, max_side=4)

tensors = st.one_of(
    hnp.arrays(np.float32, shapes, elements=floats32).map(TensorData),
    hnp.arrays(np.int64, shapes).map(TensorData),
    csr_tensors(),
)

chunks = st.one_of(
    st.lists(st.integers(0, 2**31 - 1), max_size=5).map(EncodedTextChunk),
    st.builds(
        ImageChunk, st.binary(max_size=5), st.sampled_from(["png", "jpeg"]), st.none() | st.integers(0, 2**31 - 1)
    ),
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
    free = st.dictionaries(st.text(max_size=5).map("my {}".format), tensors, max_size=3)
    inputs: dict[str, Any] = draw(free)
    if model_input.is_text:
        inputs["target_tokens"] = draw(hnp.arrays(np.int64, model_input.length))
        inputs["weights"] = draw(hnp.arrays(np.float32, model_input.length, elements=floats32))
    pair = draw(st.none() | st.tuples(spans, spans))
    return Datum(model_input, inputs, *(pair or ()))


requests = st.builds(
    ForwardBackwardRequest,
    st.text(max_size=5),
    st.integers(1, 2**31 - 1),
    st.lists(datums(), max_size=3),
    st.text(max_size=5),
    st.dictionaries(st.text(max_size=3), st.floats(allow_nan=False) | st.text(max_size=3), max_size=3),
    st.booleans(),
)


@examples(40, 1000)
@given(requests)
def test_a_request_comes_back_equal(request: ForwardBackwardRequest) -> None:
    decoded = decode_forward_backward(encode_forward_backward(request))
    assert decoded == request
    for datum, original in zip(decoded.data, request.data, strict=True):
        for name, tensor in original.loss_fn_inputs.items():
            assert datum.loss_fn_inputs[name].is_sparse == tensor.is_sparse


def test_a_scalar_arrives_as_one_value() -> None:
    """Protobuf writes no shape for it, and none means a vector."""
    request = ForwardBackwardRequest("m", 1, [Datum.from_targets([1], [2], beta=0.5)], "custom")
    assert decode_forward_backward(encode_forward_backward(request)).data[0].loss_fn_inputs["beta"] == TensorData([0.5])


rows = hnp.array_shapes(min_dims=1, max_dims=2, min_side=1, max_side=4)

records = st.dictionaries(
    st.sampled_from(["logprobs", "values", "counts"]),
    hnp.arrays(np.float32, rows, elements=floats32).map(TensorData) | hnp.arrays(np.int64, rows).map(TensorData),
)


@given(st.lists(records, max_size=5), st.dictionaries(st.text(max_size=5), st.floats(allow_nan=False)), st.text("ab"))
def test_an_output_comes_back_equal(datums: list[dict[str, TensorData]], metrics: dict[str, float], kind: str) -> None:
    output = ForwardBackwardOutput(datums, metrics, kind)
    assert decode_output(encode_output(output)) == output


sequences = st.builds(
    SampledSequence,
    st.lists(st.integers(0, 2**31 - 1)),
    st.none() | st.lists(st.floats(allow_nan=False, width=32), min_size=1),
    st.sampled_from(["stop", "length"]),
)


@given(
    st.lists(sequences, max_size=3), st.none() | st.lists(st.none() | st.floats(allow_nan=False, width=32), min_size=1)
)
def test_a_sample_comes_back_equal(samples: list[SampledSequence], prompt: list[float | None] | None) -> None:
    response = SampleResponse(samples, prompt, prompt_cache_hit_tokens=3)
    assert decode_sample(encode_sample(response)) == response


def test_arrays_are_read_from_the_message_and_not_copied_again() -> None:
    request = decode_forward_backward(
        encode_forward_backward(ForwardBackwardRequest("m", 1, [Datum.from_tokens([1, 2])], "l"))
    )
    datum = request.data[0]
    for array in (datum.model_input.tokens(), datum.loss_fn_inputs["weights"].to_numpy()):
        assert not array.flags.owndata
        assert not array.flags.writeable


@pytest.mark.parametrize(
    ("dtype", "raw", "expected"),
    [
        (pb.DTYPE_INT32, np.array([1, -2], "<i4"), TensorData([1, -2])),
        (pb.DTYPE_BFLOAT16, np.array([0x3F80, 0xC000], "<u2"), TensorData([1.0, -2.0])),
    ],
)
def test_narrow_results_are_widened(dtype: Any, raw: Any, expected: TensorData) -> None:
    assert decode_output(batched(raw.tobytes(), [0, raw.nbytes], dtype)).loss_fn_outputs == [{"x": expected}]


def test_datums_may_be_counted_without_fields() -> None:
    message = pb.ForwardBackwardOutput()
    message.loss_fn_outputs.add().num_datums = 2
    assert decode_output(message.SerializeToString()).loss_fn_outputs == [{}, {}]


def test_the_output_type_is_shown_without_its_module() -> None:
    body = pb.ForwardBackwardOutput(loss_fn_output_type="a.b:ArrayRecord").SerializeToString()
    assert decode_output(body).loss_fn_output_type == "ArrayRecord"
