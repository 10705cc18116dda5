"""The official SDK's training and sampling clients, with the methods, types and errors of ours.

Imported only where such a client is at hand, so that `tinker` stays an extra.
"""

from __future__ import annotations

import asyncio
import functools
from concurrent.futures import Future as ConcurrentFuture
from typing import TYPE_CHECKING, Any, TypeVar

import tinker
from tinker import types as sdk

from tinker_lightning.client import official
from tinker_lightning.client.custom import CustomLosses, CustomLossFuture
from tinker_lightning.client.futures import TinkerFuture
from tinker_lightning.client.loop import BackgroundLoop
from tinker_lightning.custom_loss import SURROGATE
from tinker_lightning.errors import (
    InvalidInput,
    NotFound,
    OperationFailed,
    ServerUnreachable,
    TinkerLightningError,
    Unauthorized,
)
from tinker_lightning.types import (
    Datum,
    EncodedTextChunk,
    ForwardBackwardOutput,
    GetInfoResponse,
    ImageChunk,
    LoadWeightsResponse,
    ModelInput,
    OptimStepResponse,
    SampledSequence,
    SampleResponse,
    SaveWeightsForSamplerResponse,
    SaveWeightsResponse,
    TensorData,
)
from tinker_lightning.types.model_input import DmelChunk
from tinker_lightning.types.responses import ModelData

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from tinker_lightning.custom_loss import LossFn
    from tinker_lightning.types import ModelInputChunk, ProvenanceSpan

T = TypeVar("T")


class OfficialTrainingClient:
    """The official SDK's `TrainingClient` behind our methods; takes and gives our types, and takes its own too."""

    def __init__(self, client: tinker.TrainingClient) -> None:
        self.client = client
        self.model_id = str(client.model_id)
        self._custom = CustomLosses(
            lambda data: self.forward(data, SURROGATE), lambda data: self.forward_backward(data, SURROGATE)
        )

    def forward(
        self, data: Sequence[Any], loss_fn: Any, loss_fn_config: Mapping[str, float | str] | None = None
    ) -> TinkerFuture[ForwardBackwardOutput]:
        """The log-probabilities of every target, and the loss; no gradient."""
        return _future("forward", lambda: self.client.forward(_datums(data), loss_fn, loss_fn_config), _output)

    def forward_backward(
        self, data: Sequence[Any], loss_fn: Any, loss_fn_config: Mapping[str, float | str] | None = None
    ) -> TinkerFuture[ForwardBackwardOutput]:
        """A pass with one of the server's losses."""
        send = self.client.forward_backward
        return _future("forward_backward", lambda: send(_datums(data), loss_fn, loss_fn_config), _output)

    def forward_backward_custom(self, data: Sequence[Any], loss_fn: LossFn) -> CustomLossFuture:
        """A pass with a loss of one's own, evaluated on the caller's thread when its value is needed."""
        return self._custom.add(data, loss_fn)

    def optim_step(self, optim_params: Any = None) -> TinkerFuture[OptimStepResponse]:
        """A step of AdamW on the gathered gradient."""
        self._custom.flush()
        ours = official.to_adam_params(optim_params) if optim_params is not None else None
        params = sdk.AdamParams() if ours is None else sdk.AdamParams(**{n: getattr(ours, n) for n in ours.__slots__})
        return _future("optim_step", lambda: self.client.optim_step(params), lambda r: OptimStepResponse(r.metrics))

    def save_state(
        self,
        name: str,
        ttl_seconds: int | None = None,
        overwrite: bool = False,
        user_metadata: dict[str, str] | None = None,
    ) -> TinkerFuture[SaveWeightsResponse]:
        """Saves weights and optimizer under a name."""
        self._custom.flush()
        return _future(
            "save_state",
            lambda: self.client.save_state(name, ttl_seconds, overwrite, user_metadata),
            lambda r: SaveWeightsResponse(r.path),
        )

    def load_state(self, path: str) -> TinkerFuture[LoadWeightsResponse]:
        """Puts saved weights into this model."""
        self._custom.flush()
        return _future("load_state", lambda: self.client.load_state(path), lambda r: LoadWeightsResponse(r.path))

    def load_state_with_optimizer(self, path: str) -> TinkerFuture[LoadWeightsResponse]:
        """Puts saved weights and AdamW's state into this model."""
        self._custom.flush()
        load = self.client.load_state_with_optimizer
        return _future("load_state_with_optimizer", lambda: load(path), lambda r: LoadWeightsResponse(r.path))

    def save_weights_for_sampler(
        self, name: str, ttl_seconds: int | None = None, user_metadata: dict[str, str] | None = None
    ) -> TinkerFuture[SaveWeightsForSamplerResponse]:
        """Saves weights to sample from under a name."""
        self._custom.flush()
        return _future(
            "save_weights_for_sampler",
            lambda: self.client.save_weights_for_sampler(name, ttl_seconds, user_metadata),
            lambda r: SaveWeightsForSamplerResponse(path=r.path),
        )

    def save_weights_and_get_sampling_client(self, name: str | None = None) -> OfficialSamplingClient:
        """A client that samples from this model as it is now."""
        self._custom.flush()
        return OfficialSamplingClient(_translated(lambda: self.client.save_weights_and_get_sampling_client(name)))

    def get_info(self) -> GetInfoResponse:
        """What the model is."""
        info = _translated(self.client.get_info)
        data = ModelData(info.model_data.arch, info.model_data.model_name, info.model_data.tokenizer_id)
        return GetInfoResponse(info.model_id, data, bool(info.is_lora), info.lora_rank, info.model_name)

    def get_tokenizer(self) -> Any:
        """The model's tokenizer."""
        return _translated(self.client.get_tokenizer)


class OfficialSamplingClient:
    """The official SDK's `SamplingClient` behind our methods."""

    def __init__(self, client: tinker.SamplingClient) -> None:
        self.client = client

    def sample(
        self, prompt: Any, num_samples: int, sampling_params: Any, include_prompt_logprobs: bool = False
    ) -> TinkerFuture[SampleResponse]:
        """Samples continuations of a prompt."""
        ours = official.to_sampling_params(sampling_params)
        params = sdk.SamplingParams(**{name: getattr(ours, name) for name in ours.__slots__})
        send = self.client.sample
        return _future(
            "sample", lambda: send(_model_input(prompt), num_samples, params, include_prompt_logprobs), _sampled
        )

    def compute_logprobs(self, prompt: Any) -> TinkerFuture[list[float | None]]:
        """The log-probability of each token of a prompt."""
        return _future("compute_logprobs", lambda: self.client.compute_logprobs(_model_input(prompt)), list)

    def get_tokenizer(self) -> Any:
        """The tokenizer of the base model."""
        return _translated(self.client.get_tokenizer)


@functools.cache
def _loop() -> BackgroundLoop:
    """Where the SDK's futures are awaited, for all clients of this process."""
    return BackgroundLoop()


def _future(operation: str, send: Callable[[], Any], convert: Callable[[Any], T]) -> TinkerFuture[T]:
    """Sends with the SDK; the result converted, and its errors as ours."""
    source = _translated(send)

    async def wait() -> T:
        try:
            return convert(await (asyncio.wrap_future(source) if isinstance(source, ConcurrentFuture) else source))
        except tinker.TinkerError as error:
            raise _error(error) from error

    return TinkerFuture(_loop().run(wait()), operation)


def _translated(action: Callable[[], T]) -> T:
    try:
        return action()
    except tinker.TinkerError as error:
        raise _error(error) from error


def _error(error: tinker.TinkerError) -> TinkerLightningError:
    kinds: tuple[tuple[type[tinker.TinkerError], type[TinkerLightningError]], ...] = (
        (tinker.AuthenticationError, Unauthorized),
        (tinker.PermissionDeniedError, Unauthorized),
        (tinker.NotFoundError, NotFound),
        (tinker.BadRequestError, InvalidInput),
        (tinker.UnprocessableEntityError, InvalidInput),
        (tinker.APIConnectionError, ServerUnreachable),
    )
    if isinstance(error, tinker.RequestFailedError) and error.category == sdk.RequestErrorCategory.User:
        return InvalidInput(str(error))
    return next((ours for theirs, ours in kinds if isinstance(error, theirs)), OperationFailed)(str(error))


def _datums(data: Sequence[Any]) -> list[sdk.Datum]:
    return [_datum(datum) if isinstance(datum, Datum) else datum for datum in data]


def _datum(datum: Datum) -> sdk.Datum:
    result = sdk.Datum(
        model_input=_model_input(datum.model_input),
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


def _model_input(model_input: Any) -> sdk.ModelInput:
    if not isinstance(model_input, ModelInput):
        return model_input  # type: ignore[no-any-return]  # one of the SDK's
    return sdk.ModelInput(chunks=[_chunk(chunk) for chunk in model_input.chunks])


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


def _output(output: sdk.ForwardBackwardOutput) -> ForwardBackwardOutput:
    outputs = [{name: official.to_tensor(tensor) for name, tensor in datum.items()} for datum in output.loss_fn_outputs]
    return ForwardBackwardOutput(outputs, dict(output.metrics), output.loss_fn_output_type)


def _sampled(response: sdk.SampleResponse) -> SampleResponse:
    sequences = [
        SampledSequence(list(s.tokens), None if s.logprobs is None else list(s.logprobs), s.stop_reason)
        for s in response.sequences
    ]
    scores = response.prompt_logprobs
    return SampleResponse(sequences, None if scores is None else list(scores))
