"""Responses of the protocol as plain data."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import datetime
from typing import TYPE_CHECKING, Any, ClassVar, Literal, TypeAlias

import numpy as np

from tinker_lightning.types.tensor import TensorData

if TYPE_CHECKING:
    from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class FutureResponse:
    """The id under which the result of a submitted request can be retrieved."""

    request_id: str
    model_id: str | None = None
    sample_sequence_ids: list[str] | None = None


@dataclass(frozen=True, slots=True)
class CreateModelResponse:
    """A new model."""

    type: ClassVar[str] = "create_model"
    model_id: str


@dataclass(frozen=True, slots=True)
class ModelData:
    """Architecture, name and tokenizer of a model."""

    arch: str | None = None
    model_name: str | None = None
    tokenizer_id: str | None = None


@dataclass(frozen=True, slots=True)
class GetInfoResponse:
    """The description of a model."""

    type: ClassVar[str] = "get_info"
    model_id: str
    model_data: ModelData
    is_lora: bool = True
    lora_rank: int | None = None
    model_name: str | None = None
    optimizer_config: dict[str, Any] | None = None
    lora_parameters: int | None = None  # the size of the adapter, which only our server reports


@dataclass(frozen=True, slots=True)
class WeightsInfoResponse:
    """The base model and adapter of saved weights."""

    base_model: str
    is_lora: bool = True
    lora_rank: int | None = None
    train_unembed: bool | None = None
    train_mlp: bool | None = None
    train_attn: bool | None = None
    optimizer_config: dict[str, Any] | None = None


@dataclass(frozen=True, slots=True)
class SupportedModel:
    """A base model that a server supports."""

    model_name: str | None = None
    max_context_length: int | None = None
    trainable: bool | None = None
    sampleable: bool | None = None


# The name that the server reports, and that the client sends as its user agent.
PRODUCT = "tinker-lightning"


@dataclass(frozen=True, slots=True)
class ServerCapabilities:
    """The models and protocol extensions that a server supports."""

    supported_models: list[SupportedModel]
    extensions: list[str] = field(default_factory=list)
    server: str | None = None  # the software, where it names itself


@dataclass(frozen=True, slots=True)
class ForwardBackwardOutput:
    """The result of a pass: named tensors for each datum, always including `logprobs`, and metrics of the batch."""

    loss_fn_outputs: list[dict[str, TensorData]]
    metrics: dict[str, float] = field(default_factory=dict)
    loss_fn_output_type: str = "ArrayRecord"
    # The forwards that the server keeps for a backward, as (number, datums) of each request. Set by the client.
    retained: tuple[tuple[int, int], ...] | None = None


@dataclass(frozen=True, slots=True)
class CreateCustomLossResponse:
    """The id of an uploaded loss, valid within its session."""

    type: ClassVar[str] = "create_custom_loss"
    loss_id: str


@dataclass(frozen=True, slots=True)
class LossListing:
    """The losses that a session can use by name, with descriptions."""

    available_loss_functions: list[str]
    descriptions: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class OptimStepResponse:
    """The result of an optimizer step."""

    metrics: dict[str, float] | None = None


@dataclass(frozen=True, slots=True)
class SaveWeightsResponse:
    """The path of saved weights."""

    type: ClassVar[str] = "save_weights"
    path: str


@dataclass(frozen=True, slots=True)
class LoadWeightsResponse:
    """The path of loaded weights."""

    type: ClassVar[str] = "load_weights"
    path: str | None = None
    model_id: str | None = None


@dataclass(frozen=True, slots=True)
class SaveWeightsForSamplerResponse:
    """The path of weights saved for sampling, or the sampling session of an unnamed snapshot."""

    type: ClassVar[str] = "save_weights_for_sampler"
    path: str | None = None
    sampling_session_id: str | None = None


@dataclass(frozen=True, slots=True)
class SaveWeightsExternalResponse:
    """The path and size of weights saved for download."""

    type: ClassVar[str] = "save_weights_external"
    path: str
    size_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class ExternalWeightsUrlsResponse:
    """Download URLs of the files of saved weights, and their expiry time."""

    urls: dict[str, str]
    expires: datetime


@dataclass(frozen=True, slots=True)
class UnloadModelResponse:
    """The id of an unloaded model."""

    type: ClassVar[str] = "unload_model"
    model_id: str


@dataclass(frozen=True, slots=True)
class CreateSamplingSessionResponse:
    """A new sampler."""

    sampling_session_id: str


@dataclass(frozen=True, slots=True)
class GetSamplerResponse:
    """The base model and weights of a sampler."""

    sampler_id: str
    base_model: str
    model_path: str | None = None
    model_name: str | None = None  # extends the protocol: the server's name for the base model


# The most likely tokens of each position with their log-probabilities; None where they were not computed.
TopkLogprobs: TypeAlias = list[list[tuple[int, float]] | None]


@dataclass(frozen=True, slots=True)
class SampledSequence:
    """One sampled sequence, including the token or string that ended it, and its log-probabilities."""

    tokens: list[int]
    logprobs: list[float] | None
    stop_reason: Literal["stop", "length"]
    topk_logprobs: TopkLogprobs | None = None
    # The server's name for it, which spans of datums can refer to. Set by the client.
    sequence_id: str = field(default="", compare=False)

    @property
    def tokens_np(self) -> NDArray[np.int32]:
        """The tokens as an array."""
        return np.asarray(self.tokens, np.int32)

    @property
    def logprobs_np(self) -> NDArray[np.float32] | None:
        """The log-probabilities as an array."""
        return None if self.logprobs is None else np.asarray(self.logprobs, np.float32)


@dataclass(frozen=True, slots=True)
class PromptAltTokens:
    """Alternative tokens drawn for a prompt, with log-probabilities, `[T - 1, k]`: row i replaces token i + 1."""

    tokens: TensorData
    logprobs: TensorData


@dataclass(frozen=True, slots=True)
class SampleResponse:
    """The result of sampling; `prompt_logprobs` starts with None because the first token is never predicted."""

    type: ClassVar[str] = "sample"
    sequences: list[SampledSequence]
    prompt_logprobs: list[float | None] | None = None
    topk_prompt_logprobs: TopkLogprobs | None = None
    target_prompt_logprobs: TensorData | None = None
    prompt_alt_tokens: PromptAltTokens | None = None
    prompt_cache_hit_tokens: int = 0  # tokens of the prompt whose keys and values the server still had

    @property
    def prompt_logprobs_np(self) -> NDArray[np.float32] | None:
        """The log-probabilities of the prompt as an array, NaN where there is none."""
        return None if self.prompt_logprobs is None else np.asarray(self.prompt_logprobs, np.float32)


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A checkpoint in a listing."""

    checkpoint_id: str
    checkpoint_type: Literal["training", "sampler", "external"]
    time: datetime
    tinker_path: str
    size_bytes: int | None = None
    public: bool = False
    user_metadata: dict[str, str] | None = None
    expires_at: datetime | None = None


@dataclass(frozen=True, slots=True)
class Cursor:
    """The part of a listing that a response contains."""

    offset: int
    limit: int
    total_count: int


@dataclass(frozen=True, slots=True)
class CheckpointsList:
    """A list of checkpoints."""

    checkpoints: list[Checkpoint]
    cursor: Cursor | None = None


@dataclass(frozen=True, slots=True)
class TrainingRun:
    """A model and its latest checkpoints."""

    training_run_id: str
    base_model: str
    model_owner: str
    is_lora: bool
    last_request_time: datetime
    corrupted: bool = False
    lora_rank: int | None = None
    last_checkpoint: Checkpoint | None = None
    last_sampler_checkpoint: Checkpoint | None = None
    user_metadata: dict[str, Any] | None = None


@dataclass(frozen=True, slots=True)
class TrainingRunsList:
    """A list of training runs."""

    training_runs: list[TrainingRun]
    cursor: Cursor | None = None


@dataclass(frozen=True, slots=True)
class GetSessionResponse:
    """The models and samplers of a session."""

    training_run_ids: list[str]
    sampler_ids: list[str]
    user_metadata: dict[str, Any] | None = None
    display_name: str | None = None


@dataclass(frozen=True, slots=True)
class SessionsList:
    """A list of sessions, by their ids."""

    sessions: list[str]
