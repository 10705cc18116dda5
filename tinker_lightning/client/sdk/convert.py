"""Converts our types to the official SDK's, and its results to ours."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tinker import types as sdk

from tinker_lightning.client.sdk import inputs
from tinker_lightning.types import (
    Datum,
    DmelChunk,
    EncodedTextChunk,
    ForwardBackwardOutput,
    ImageChunk,
    SampledSequence,
    SampleResponse,
    TensorData,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tinker_lightning.types import ModelInputChunk, ProvenanceSpan


def datum(datum: Datum) -> sdk.Datum:
    """Converts a datum to the SDK's type."""
    result = sdk.Datum(
        model_input=model_input(datum.model_input),
        loss_fn_inputs={name: _tensor(tensor) for name, tensor in datum.loss_fn_inputs.items()},
    )
    if datum.model_input_spans is None or datum.loss_fn_input_spans is None:
        return result
    return result.with_provenance(_spans(datum.model_input_spans), _spans(datum.loss_fn_input_spans))


def _tensor(tensor: TensorData) -> sdk.TensorData:
    crow, col = tensor.sparse_crow_indices, tensor.sparse_col_indices
    return sdk.TensorData(
        data=tensor.values,
        dtype=tensor.dtype,
        shape=tensor.shape,
        sparse_crow_indices=None if crow is None else crow.tolist(),
        sparse_col_indices=None if col is None else col.tolist(),
    )


def model_input(given: Any) -> sdk.ModelInput:
    """Converts an input to the SDK's type."""
    if isinstance(given, sdk.ModelInput):
        return given
    return sdk.ModelInput(chunks=[_chunk(chunk) for chunk in inputs.to_model_input(given).chunks])


def _chunk(chunk: ModelInputChunk) -> sdk.ModelInputChunk:
    if isinstance(chunk, EncodedTextChunk):
        return sdk.EncodedTextChunk(tokens=chunk.tokens.tolist())
    if isinstance(chunk, ImageChunk):
        return sdk.ImageChunk(data=chunk.data, format=chunk.format, expected_tokens=chunk.expected_tokens)
    if isinstance(chunk, DmelChunk):
        return sdk.DmelChunk(dmel=chunk.dmel)
    return sdk.ImageAssetPointerChunk(
        location=chunk.location, format=chunk.format, expected_tokens=chunk.expected_tokens
    )


def _spans(spans: Sequence[ProvenanceSpan]) -> list[Any]:
    kinds = {"prompt": sdk.PromptProvenanceSpan, "sampled": sdk.SampledProvenanceSpan}
    return [kinds[s.source](sequence_id=s.sequence_id, offset=s.offset, length=s.length) for s in spans]


def output(result: sdk.ForwardBackwardOutput) -> ForwardBackwardOutput:
    """Converts the result of a pass to our type."""
    outputs = [{name: inputs.to_tensor(tensor) for name, tensor in datum.items()} for datum in result.loss_fn_outputs]
    return ForwardBackwardOutput(outputs, dict(result.metrics), result.loss_fn_output_type)


def sampled(response: sdk.SampleResponse) -> SampleResponse:
    """Converts the result of sampling to our type."""
    sequences = [
        SampledSequence(list(s.tokens), None if s.logprobs is None else list(s.logprobs), s.stop_reason)
        for s in response.sequences
    ]
    scores = response.prompt_logprobs
    return SampleResponse(sequences, None if scores is None else list(scores))
