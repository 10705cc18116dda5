"""Estimates of the memory of requests and results, before the work starts."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from tinker_lightning.server.engine.interface import MAX_SCORES
from tinker_lightning.types import Datum, ForwardBackwardOutput, SampleResponse

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from tinker_lightning.types import TensorData
    from tinker_lightning.types import requests as rq

# Python objects: a tensor with its array and shape, and a datum with its dict and chunks.
_TENSOR, _DATUM = 500, 1000
# A token or log-probability in a list, and a pair of both.
_NUMBER, _PAIR = 40, 140
# The longest text of a float32 in JSON, with its comma.
_JSON_NUMBER = 25


def data_bytes(data: Sequence[Datum], once: Mapping[str, TensorData] | None = None) -> int:
    """Returns the memory of datums, and of tensors that are given once for the batch."""
    tensors = (tensor for datum in data for tensor in datum.loss_fn_inputs.values())
    inputs = 4 * sum(_length(datum) for datum in data)
    return _DATUM * len(data) + inputs + _stored(tensors) + _stored((once or {}).values())


def tensor_bytes(tensor: TensorData | None) -> int:
    """Returns the memory of a tensor as it is stored, dense or sparse."""
    if tensor is None:
        return 0
    indices = (tensor.sparse_crow_indices, tensor.sparse_col_indices)
    return _TENSOR + tensor.values.nbytes + sum(each.nbytes for each in indices if each is not None)


def dense_bytes(data: Sequence[Datum]) -> int:
    """Returns the memory of the inputs of a pass as dense tensors, with padding and log-probabilities.

    A few bytes of sparse rows can declare a large tensor. Targets without weights get some.
    """
    elements = sum(math.prod(tensor.shape) for datum in data for tensor in datum.loss_fn_inputs.values())
    elements += sum(_targets(datum) for datum in data if "weights" not in datum.loss_fn_inputs)
    lengths = [max(1, _length(datum)) for datum in data]
    # Targets and log-probabilities are padded to the largest number of alternatives.
    width = max((-(-_targets(datum) // length) for datum, length in zip(data, lengths, strict=True)), default=0)
    return 12 * elements + 24 * width * sum(lengths)


def pass_result_bytes(data: Sequence[Datum]) -> int:
    """Returns the memory of the result of a pass: a log-probability for each target."""
    return sum(_TENSOR + 4 * _targets(datum) for datum in data)


def sample_result_bytes(request: rq.SampleRequest, context: int) -> int:
    """Returns the most memory that a sampling result takes, for a model with this context length."""
    prompt = request.prompt.length if request.prompt.is_text else 0
    room = max(0, context - prompt)
    tokens = request.num_samples * min(room, room if (most := request.sampling_params.max_tokens) is None else most)
    targets = 0 if request.target_prompt_logprobs is None else math.prod(request.target_prompt_logprobs.shape)
    # Requests for more are rejected when they run.
    pairs = [tokens * request.topk_sample_logprobs, prompt * request.topk_prompt_logprobs]
    numbers = [prompt * request.prompt_alt_tokens_k, targets]
    size = sum(_PAIR * min(count, MAX_SCORES) for count in pairs) + sum(
        12 * min(count, MAX_SCORES) for count in numbers
    )
    return size + _NUMBER * (2 * tokens + prompt) + _TENSOR * request.num_samples


def result_bytes(result: Any) -> int:
    """Returns the memory of a result."""
    if isinstance(result, ForwardBackwardOutput):
        tensors = (tensor for datum in result.loss_fn_outputs for tensor in datum.values())
        return _stored(tensors) + 100 * len(result.metrics)
    if isinstance(result, SampleResponse):
        return sum(_NUMBER * count for count in _numbers(result)) + _TENSOR * len(result.sequences)
    return 0


def encoded_bytes(result: Any) -> int:
    """Returns the most memory that a result takes as JSON."""
    if isinstance(result, ForwardBackwardOutput):
        tensors = [tensor for datum in result.loss_fn_outputs for tensor in datum.values()]
        return sum(200 + _JSON_NUMBER * tensor.values.size for tensor in tensors) + 200 * len(result.metrics)
    if isinstance(result, SampleResponse):
        return sum(_JSON_NUMBER * count for count in _numbers(result)) + 200 * len(result.sequences)
    return 0


def _numbers(result: SampleResponse) -> Iterable[int]:
    """Yields how many numbers the parts of a sampling result have; a pair counts as four."""
    for sequence in result.sequences:
        yield len(sequence.tokens) + len(sequence.logprobs or ())
        yield sum(4 * len(row or ()) for row in sequence.topk_logprobs or ())
    yield len(result.prompt_logprobs or ())
    yield sum(4 * len(row or ()) for row in result.topk_prompt_logprobs or ())
    for tensor in (result.target_prompt_logprobs, *(_alternatives(result))):
        yield 0 if tensor is None else tensor.values.size


def _alternatives(result: SampleResponse) -> tuple[TensorData, ...]:
    drawn = result.prompt_alt_tokens
    return () if drawn is None else (drawn.tokens, drawn.logprobs)


def _length(datum: Datum) -> int:
    return datum.model_input.length if datum.model_input.is_text else 0


def _targets(datum: Datum) -> int:
    targets = datum.loss_fn_inputs.get("target_tokens")
    return 0 if targets is None else math.prod(targets.shape)


def _stored(tensors: Iterable[TensorData]) -> int:
    return sum(tensor_bytes(tensor) for tensor in tensors)
