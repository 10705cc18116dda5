"""Converts the official SDK's objects to ours, without importing the SDK.

Its datums, tensors and inputs are read by their public attributes. Arrays are copied as a whole, because the SDK's
tensors share the caller's memory, and a pass may be sent after the caller has reused it.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from tinker_lightning.client.futures import TinkerFuture
from tinker_lightning.errors import InvalidDatum, InvalidInput, Unsupported
from tinker_lightning.types import (
    AdamParams,
    Datum,
    DimuonParams,
    DmelChunk,
    EncodedTextChunk,
    ImageAssetPointerChunk,
    ImageChunk,
    ModelInput,
    ProvenanceSpan,
    SamplingParams,
    TensorData,
)
from tinker_lightning.types.params import OPTIMIZERS, OptimParams

if TYPE_CHECKING:
    from tinker_lightning.types import ModelInputChunk

logger = logging.getLogger("tinker_lightning.client")

P = TypeVar("P", bound=AdamParams | DimuonParams | SamplingParams)


def batch(data: Iterable[Any]) -> list[Any]:
    """Returns the caller's datums as a list; raises `InvalidDatum` for a single datum or an empty batch."""
    if hasattr(data, "model_input") or not isinstance(data, Iterable):
        raise InvalidDatum(f"data must be a list of datums, got one {type(data).__name__}; write [datum]")
    given = list(data)
    if not given:
        raise InvalidDatum("data: the batch is empty; pass at least one datum")
    return given


def loss_name(loss_fn: Any) -> str:
    """Returns the name of a server-side loss; raises `InvalidInput` for anything else."""
    if isinstance(loss_fn, TinkerFuture):
        raise InvalidInput("loss_fn is a future; pass its result: create_custom_loss(...).result()")
    if not isinstance(loss_fn, str):
        raise InvalidInput(
            f"loss_fn must be the name of a loss, e.g. 'cross_entropy', got {type(loss_fn).__name__}. For a Python "
            "function, call forward_backward_custom(data, loss_fn)."
        )
    return loss_fn


def check_loss_type(loss_type_input: Any) -> None:
    """Raises `InvalidInput` if a custom loss is to be computed from anything but log-probabilities."""
    if isinstance(loss_type_input, Sequence | Mapping) and not isinstance(loss_type_input, str):
        raise InvalidInput(
            "the third argument of forward_backward_custom is loss_type_input, as in the official SDK; pass "
            "regularizers by keyword: forward_backward_custom(data, loss_fn, regularizers=[...])"
        )
    if loss_type_input not in (None, "logprobs"):
        raise InvalidInput(f"loss_type_input must be 'logprobs', got {loss_type_input!r}")


def check_sampler_options(retry_config: Any, record_stability_info: bool) -> None:
    """Checks those arguments of the SDK's sampling clients that ours does not use.

    Raises:
        Unsupported: If hosted Tinker is to record data about the stability of sampling.
    """
    if retry_config is not None:
        logger.info("retry_config is not used: requests are retried as ServiceClient(retry_policy=...) says")
    if record_stability_info:
        raise Unsupported("record_stability_info is not supported: use the official SDK's sampling client for it")


def optimizer_kind(optimizer: Any) -> str:
    """Returns the name of an optimizer, given by name, as the SDK's or the protocol's configuration, or not at all.

    Raises:
        Unsupported: If this client does not train with it.
    """
    kind = optimizer.get("type") if isinstance(optimizer, Mapping) else getattr(optimizer, "type", optimizer)
    if kind is None:
        return AdamParams.kind
    if kind not in OPTIMIZERS:
        raise Unsupported(f"optimizer: this client trains with {', '.join(OPTIMIZERS)}, got {kind!r}; leave it out")
    return str(kind)


def to_datums(data: Iterable[Any]) -> list[Datum]:
    """Converts a batch of our or the SDK's datums to ours; raises `InvalidDatum` that names an invalid one."""
    converted = []
    for i, datum in enumerate(batch(data)):
        try:
            converted.append(to_datum(datum))
        except InvalidInput as error:
            raise InvalidDatum(f"datum {i}: {error}") from error
    return converted


def to_datum(datum: Any) -> Datum:
    """Converts our or the SDK's datum to ours."""
    if isinstance(datum, Datum):
        return datum
    if not (hasattr(datum, "model_input") and hasattr(datum, "loss_fn_inputs")):
        check_not_mapped(datum)
        raise InvalidDatum(f"got {type(datum).__name__}; build datums with Datum.from_tokens(...) or tinker.Datum(...)")
    return Datum(
        to_model_input(datum.model_input),
        {name: to_tensor(tensor) for name, tensor in datum.loss_fn_inputs.items()},
        _to_spans(getattr(datum, "model_input_spans", None)),
        _to_spans(getattr(datum, "loss_fn_input_spans", None)),
    )


def check_not_mapped(value: Any) -> None:
    """Raises `InvalidDatum` for a datum that Hugging Face `datasets` has turned into nested dicts."""
    if isinstance(value, Mapping) and {"model_input", "loss_fn_inputs"} <= value.keys():
        raise InvalidDatum(
            "got a dict with model_input and loss_fn_inputs: datasets.map stores columns of numbers and text, and "
            "turns a Datum that its function returns into nested dicts. Return columns such as tokens and weights "
            "from map, and build the datums in the collate_fn or with set_transform."
        )


def to_tensor(tensor: Any) -> TensorData:
    """Converts our or the SDK's tensor to ours."""
    if isinstance(tensor, TensorData):
        return tensor
    if getattr(tensor, "sparse_crow_indices", None) is not None:
        return TensorData(
            tensor.data, tensor.dtype, tensor.shape, tensor.sparse_crow_indices, tensor.sparse_col_indices
        )
    array = tensor.to_numpy() if hasattr(tensor, "to_numpy") else tensor
    return TensorData.wrap(array.copy()) if type(array) is np.ndarray else TensorData.from_data(array)


def to_model_input(model_input: Any) -> ModelInput:
    """Converts our or the SDK's model input to ours."""
    if isinstance(model_input, ModelInput):
        return model_input
    if not hasattr(model_input, "chunks"):
        raise InvalidDatum(f"an input must be a ModelInput, got {type(model_input).__name__}; use ModelInput.from_ints")
    return ModelInput([_to_chunk(chunk) for chunk in model_input.chunks])


def to_optim_params(params: Any, kind: str | None = None) -> OptimParams:
    """Converts our or the SDK's settings of a step to ours; None stands for the defaults.

    Args:
        params: The settings.
        kind: The optimizer of the model; None if it is not known.

    Raises:
        InvalidInput: If they are the settings of another optimizer.
    """
    given = getattr(params, "kind", None) or getattr(params, "type", None) or kind or AdamParams.kind
    cls = OPTIMIZERS[kind or optimizer_kind(given)]
    if kind is not None and given != kind:
        raise InvalidInput(
            f"optim_step: the settings are for {given}, but this model was created for {kind}. Pass "
            f"{cls.__name__}, or create a model with optimizer={given!r}."
        )
    return cls() if params is None else _to_params(cls, params, "optim_step", "learning_rate")


def to_sampling_params(params: Any) -> SamplingParams:
    """Converts our or the SDK's sampling settings to ours."""
    return _to_params(SamplingParams, params, "sample", "max_tokens")


def _to_params(cls: type[P], params: Any, method: str, example: str) -> P:
    if isinstance(params, cls):
        return params
    values: dict[str, Any] = {name: getattr(params, name) for name in cls.__slots__ if hasattr(params, name)}
    if example not in values:
        given = type(params).__name__
        raise InvalidInput(f"{method} takes {cls.__name__}, got {given}; write {cls.__name__}({example}=...)")
    if isinstance(values.get("stop"), Sequence) and not isinstance(values["stop"], str):
        values["stop"] = list(values["stop"])
    return cls(**values)


def _to_chunk(chunk: Any) -> ModelInputChunk:
    if hasattr(chunk, "tokens"):
        return EncodedTextChunk(chunk.tokens)
    if hasattr(chunk, "dmel"):
        return DmelChunk(chunk.dmel)
    if hasattr(chunk, "location"):
        return ImageAssetPointerChunk(chunk.location, chunk.format, chunk.expected_tokens)
    if hasattr(chunk, "data"):
        return ImageChunk(chunk.data, chunk.format, chunk.expected_tokens)
    raise InvalidDatum(f"model_input: unknown kind of chunk {type(chunk).__name__}")


def _to_spans(spans: Iterable[Any] | None) -> list[ProvenanceSpan] | None:
    if spans is None:
        return None
    return [
        ProvenanceSpan(
            "sampled" if "Sampled" in type(span).__name__ else "prompt", span.sequence_id, span.offset, span.length
        )
        for span in spans
    ]
