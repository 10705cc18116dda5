"""What a server answers, as plain data."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

from tinker_lightning.types.tensor import TensorData


@dataclass(frozen=True, slots=True)
class FutureResponse:
    """The answer to a submission: under which id its result will be found."""

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
    """What a model is made of."""

    arch: str | None = None
    model_name: str | None = None
    tokenizer_id: str | None = None


@dataclass(frozen=True, slots=True)
class GetInfoResponse:
    """What a model is."""

    type: ClassVar[str] = "get_info"
    model_id: str
    model_data: ModelData
    is_lora: bool = True
    lora_rank: int | None = None
    model_name: str | None = None


@dataclass(frozen=True, slots=True)
class WeightsInfoResponse:
    """Which base model and adapter a saved path needs."""

    base_model: str
    is_lora: bool = True
    lora_rank: int | None = None
    train_unembed: bool | None = None
    train_mlp: bool | None = None
    train_attn: bool | None = None


@dataclass(frozen=True, slots=True)
class SupportedModel:
    """A base model that a server has."""

    model_name: str | None = None
    max_context_length: int | None = None
    trainable: bool | None = None
    sampleable: bool | None = None


@dataclass(frozen=True, slots=True)
class ServerCapabilities:
    """What a server has."""

    supported_models: list[SupportedModel]
    extensions: list[str] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class ForwardBackwardOutput:
    """The result of a pass: for each datum its named tensors (`logprobs` always), and metrics of the batch."""

    loss_fn_outputs: list[dict[str, TensorData]]
    metrics: dict[str, float] = field(default_factory=dict)
    loss_fn_output_type: str = "ArrayRecord"


@dataclass(frozen=True, slots=True)
class CreateCustomLossResponse:
    """The id under which passes of the same session find an uploaded loss."""

    type: ClassVar[str] = "create_custom_loss"
    loss_id: str


@dataclass(frozen=True, slots=True)
class LossListing:
    """The losses that a session can use by name, and what each is."""

    available_loss_functions: list[str]
    descriptions: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class OptimStepResponse:
    """The result of a step."""

    metrics: dict[str, float] | None = None


@dataclass(frozen=True, slots=True)
class SaveWeightsResponse:
    """Where weights were saved."""

    type: ClassVar[str] = "save_weights"
    path: str


@dataclass(frozen=True, slots=True)
class LoadWeightsResponse:
    """Which weights were loaded."""

    type: ClassVar[str] = "load_weights"
    path: str | None = None
    model_id: str | None = None


@dataclass(frozen=True, slots=True)
class SaveWeightsForSamplerResponse:
    """Where weights to sample from are: a path, or a sampling session for an unnamed snapshot."""

    type: ClassVar[str] = "save_weights_for_sampler"
    path: str | None = None
    sampling_session_id: str | None = None


@dataclass(frozen=True, slots=True)
class SaveWeightsExternalResponse:
    """Where weights to download are."""

    type: ClassVar[str] = "save_weights_external"
    path: str
    size_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class ExternalWeightsUrlsResponse:
    """Where each file of such weights can be downloaded, and until when."""

    urls: dict[str, str]
    expires: str


@dataclass(frozen=True, slots=True)
class UnloadModelResponse:
    """The model that was freed."""

    type: ClassVar[str] = "unload_model"
    model_id: str


@dataclass(frozen=True, slots=True)
class CreateSamplingSessionResponse:
    """A new sampler."""

    sampling_session_id: str


@dataclass(frozen=True, slots=True)
class GetSamplerResponse:
    """What a sampler samples from."""

    sampler_id: str
    base_model: str
    model_path: str | None = None
    model_name: str | None = None  # not of the protocol: what the server calls the base model


@dataclass(frozen=True, slots=True)
class SampledSequence:
    """One sampled sequence, the token or string that ended it included, and its log-probabilities."""

    tokens: list[int]
    logprobs: list[float] | None
    stop_reason: Literal["stop", "length"]


@dataclass(frozen=True, slots=True)
class SampleResponse:
    """The result of sampling; `prompt_logprobs` begins with None, for the first token is never predicted."""

    type: ClassVar[str] = "sample"
    sequences: list[SampledSequence]
    prompt_logprobs: list[float | None] | None = None


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """Something saved, as listings show it."""

    checkpoint_id: str
    checkpoint_type: Literal["training", "sampler", "external"]
    time: str
    tinker_path: str
    size_bytes: int | None = None
    public: bool = False
    user_metadata: dict[str, str] | None = None
    expires_at: str | None = None


@dataclass(frozen=True, slots=True)
class Cursor:
    """Which part of a listing an answer holds."""

    offset: int
    limit: int
    total_count: int


@dataclass(frozen=True, slots=True)
class CheckpointsList:
    """A listing of what was saved."""

    checkpoints: list[Checkpoint]
    cursor: Cursor | None = None


@dataclass(frozen=True, slots=True)
class TrainingRun:
    """A model and the last of what was saved of it."""

    training_run_id: str
    base_model: str
    model_owner: str
    is_lora: bool
    last_request_time: str
    corrupted: bool = False
    lora_rank: int | None = None
    last_checkpoint: Checkpoint | None = None
    last_sampler_checkpoint: Checkpoint | None = None
    user_metadata: dict[str, Any] | None = None


@dataclass(frozen=True, slots=True)
class TrainingRunsList:
    """A listing of models."""

    training_runs: list[TrainingRun]
    cursor: Cursor | None = None
