"""Converts our types to the official SDK's, and its results to ours."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

from tinker import types as sdk

from tinker_lightning.errors import Unsupported
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
from tinker_lightning.types.model_input import to_model_input
from tinker_lightning.types.responses import PromptAltTokens

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tinker_lightning.types import ModelInputChunk, ProvenanceSpan, SamplingParams
    from tinker_lightning.types.params import OptimParams


def build(kind: Any, *args: Any, **values: Any) -> Any:
    """Creates an object of the SDK, or calls a method, without optional arguments that its version does not know.

    Raises:
        Unsupported: If such a field has a value that matters.
    """
    known = inspect.signature(kind).parameters
    if not any(each.kind is each.VAR_KEYWORD for each in known.values()):
        unknown = [name for name, value in values.items() if name not in known and value]
        if unknown:
            raise Unsupported(f"{kind.__name__} of this client has no {', '.join(unknown)}; leave it out")
        values = {name: value for name, value in values.items() if name in known}
    return kind(*args, **values)


def settings(kind: Any, ours: OptimParams | SamplingParams) -> Any:
    """Converts the settings of a step or of sampling to the SDK's type."""
    return build(kind, **{name: getattr(ours, name) for name in ours.__slots__})


def datum(datum: Datum, types: Any = sdk) -> Any:
    """Converts a datum to the SDK's type, or to a vendor's, whose `types` are given."""
    result = types.Datum(
        model_input=model_input(datum.model_input, types),
        loss_fn_inputs={name: tensor(given, types) for name, given in datum.loss_fn_inputs.items()},
    )
    if datum.model_input_spans is None or datum.loss_fn_input_spans is None:
        return result
    return result.with_provenance(_spans(datum.model_input_spans), _spans(datum.loss_fn_input_spans))


def tensor(tensor: TensorData, types: Any = sdk) -> Any:
    """Converts a tensor to the SDK's type, or to a vendor's, whose `types` are given."""
    crow, col = tensor.sparse_crow_indices, tensor.sparse_col_indices
    return build(
        types.TensorData,
        data=tensor.values if types is sdk else tensor.data,
        dtype=tensor.dtype,
        shape=tensor.shape,
        sparse_crow_indices=None if crow is None else crow.tolist(),
        sparse_col_indices=None if col is None else col.tolist(),
    )


def model_input(given: Any, types: Any = sdk) -> Any:
    """Converts an input to the SDK's type, or to a vendor's, whose `types` are given."""
    if isinstance(given, types.ModelInput):
        return given
    return types.ModelInput(chunks=[_chunk(chunk, types) for chunk in to_model_input(given).chunks])


def _chunk(chunk: ModelInputChunk, types: Any) -> Any:
    if isinstance(chunk, EncodedTextChunk):
        return types.EncodedTextChunk(tokens=chunk.tokens.tolist())
    if isinstance(chunk, ImageChunk):
        return types.ImageChunk(data=chunk.data, format=chunk.format, expected_tokens=chunk.expected_tokens)
    if isinstance(chunk, DmelChunk):
        return types.DmelChunk(dmel=chunk.dmel)
    return types.ImageAssetPointerChunk(
        location=chunk.location, format=chunk.format, expected_tokens=chunk.expected_tokens
    )


def _spans(spans: Sequence[ProvenanceSpan]) -> list[Any]:
    kinds = {"prompt": sdk.PromptProvenanceSpan, "sampled": sdk.SampledProvenanceSpan}
    return [kinds[s.source](sequence_id=s.sequence_id, offset=s.offset, length=s.length) for s in spans]


def output(result: sdk.ForwardBackwardOutput) -> ForwardBackwardOutput:
    """Converts the result of a pass to our type."""
    outputs = [{name: TensorData.from_data(each) for name, each in datum.items()} for datum in result.loss_fn_outputs]
    return ForwardBackwardOutput(outputs, dict(result.metrics), result.loss_fn_output_type)


def sampled(response: sdk.SampleResponse) -> SampleResponse:
    """Converts the result of sampling to our type."""
    sequences = [
        SampledSequence(
            list(s.tokens),
            None if s.logprobs is None else list(s.logprobs),
            s.stop_reason,
            _optional(s, "topk_logprobs"),
            _optional(s, "sequence_id") or "",
        )
        for s in response.sequences
    ]
    scores = response.prompt_logprobs
    targets, drawn = _optional(response, "target_prompt_logprobs"), _optional(response, "prompt_alt_tokens")
    read = TensorData.from_data
    return SampleResponse(
        sequences,
        None if scores is None else list(scores),
        _optional(response, "topk_prompt_logprobs"),
        None if targets is None else read(targets),
        None if drawn is None else PromptAltTokens(read(drawn.tokens), read(drawn.logprobs)),
        _optional(response, "prompt_cache_hit_tokens") or 0,
    )


def _optional(result: Any, name: str) -> Any:
    """Returns a field of a result that older versions of the SDK do not have."""
    return getattr(result, name, None)
