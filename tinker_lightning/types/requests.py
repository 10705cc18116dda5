"""Requests of the protocol as plain data; `type` is the literal that the protocol expects in a body."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any, ClassVar

from tinker_lightning.errors import InvalidInput
from tinker_lightning.types.datum import Datum
from tinker_lightning.types.model_input import ModelInput
from tinker_lightning.types.params import AdamParams, LoraConfig, SamplingParams
from tinker_lightning.types.tensor import TensorData


@dataclass(frozen=True, slots=True)
class ClientConfigRequest:
    """Requests the settings that the server recommends to its clients."""

    sdk_version: str = ""


@dataclass(frozen=True, slots=True)
class CreateSessionRequest:
    """Opens a session, which owns the models and samplers created in it."""

    type: ClassVar[str] = "create_session"
    tags: list[str] = field(default_factory=list)
    user_metadata: dict[str, Any] | None = None
    sdk_version: str = ""
    display_name: str | None = None
    project_id: str | None = None


@dataclass(frozen=True, slots=True)
class SessionHeartbeatRequest:
    """Keeps a session alive."""

    type: ClassVar[str] = "session_heartbeat"
    session_id: str


@dataclass(frozen=True, slots=True)
class CreateModelRequest:
    """Creates a new adapter on a base model; (session_id, model_seq_id) makes retries idempotent."""

    type: ClassVar[str] = "create_model"
    session_id: str
    model_seq_id: int
    base_model: str
    lora_config: LoraConfig | None = None
    user_metadata: dict[str, Any] | None = None
    optimizer_config: dict[str, Any] | None = None


@dataclass(frozen=True, slots=True)
class GetInfoRequest:
    """Requests the description of a model."""

    type: ClassVar[str] = "get_info"
    model_id: str


@dataclass(frozen=True, slots=True)
class UnloadModelRequest:
    """Unloads a model; its checkpoints are kept."""

    type: ClassVar[str] = "unload_model"
    model_id: str


@dataclass(frozen=True, slots=True)
class WeightsInfoRequest:
    """Requests the base model and adapter of saved weights."""

    tinker_path: str


@dataclass(frozen=True, slots=True)
class ModelRequest:
    """A request to a model; the server runs a model's requests in the order of their numbers, from 1 on."""

    model_id: str
    seq_id: int

    def __post_init__(self) -> None:
        if not 1 <= self.seq_id < 2**31:
            raise InvalidInput(f"seq_id must lie in 1..{2**31 - 1}: a model's requests count from 1, got {self.seq_id}")


@dataclass(frozen=True, slots=True)
class ForwardBackwardRequest(ModelRequest):
    """Runs one pass over a batch; with `forward_only`, no gradient is accumulated.

    `loss_fn_inputs` of the whole batch and the `scale` of the gradient extend the protocol. They require a server that
    announces `server_losses`.
    """

    data: list[Datum]
    loss_fn: str
    loss_fn_config: dict[str, float | str] = field(default_factory=dict)
    forward_only: bool = False
    loss_fn_inputs: dict[str, TensorData] = field(default_factory=dict)
    scale: float = 1.0

    def __post_init__(self) -> None:
        ModelRequest.__post_init__(self)  # super() does not work in a dataclass with slots
        if not math.isfinite(self.scale):
            raise InvalidInput(f"scale must be a finite number, got {self.scale}")


@dataclass(frozen=True, slots=True)
class CustomLossInput:
    """An input of a custom loss and its number of dimensions."""

    name: str
    rank: int


@dataclass(frozen=True, slots=True)
class CreateCustomLossRequest:
    """Uploads a per-datum loss as a graph; (session_id, custom_loss_seq_id) makes retries idempotent."""

    type: ClassVar[str] = "create_custom_loss"
    session_id: str
    custom_loss_seq_id: int
    name: str
    inputs: list[CustomLossInput]
    graph: dict[str, Any]


@dataclass(frozen=True, slots=True)
class RegisterLossRequest:
    """Registers a batch loss under a name: as graphs, or as a pickled function if the server allows it.

    This request extends the protocol. It requires a server that announces `server_losses`.
    """

    session_id: str
    loss: dict[str, Any]
    pickled: bytes | None = None


@dataclass(frozen=True, slots=True)
class ImportAdapterRequest:
    """Uploads a PEFT adapter: its safetensors file, and the factor by which peft multiplies its product.

    This request extends the protocol. It requires a server that announces `import_adapter`.
    """

    MAX_BYTES: ClassVar[int] = 190 << 20  # as base64, it has to fit into the body of a request

    session_id: str
    base_model: str
    scaling: float
    weights: bytes
    rank: int | None = None  # which the scaling was computed from

    def __post_init__(self) -> None:
        if not math.isfinite(self.scaling):
            raise InvalidInput(f"scaling must be a finite number, got {self.scaling}")


@dataclass(frozen=True, slots=True)
class OptimStepRequest(ModelRequest):
    """Applies the accumulated gradient and clears it."""

    type: ClassVar[str] = "optim_step"
    adam_params: AdamParams | None = None
    optimizer_params: dict[str, Any] | None = None


@dataclass(frozen=True, slots=True)
class SaveWeightsRequest(ModelRequest):
    """Saves weights and optimizer state under a name."""

    type: ClassVar[str] = "save_weights"
    path: str | None = None
    ttl_seconds: int | None = None
    overwrite: bool = False
    user_metadata: dict[str, str] | None = None

    def __post_init__(self) -> None:
        ModelRequest.__post_init__(self)
        _check_ttl(self.ttl_seconds)


@dataclass(frozen=True, slots=True)
class LoadWeightsRequest(ModelRequest):
    """Loads saved weights into a model, optionally with the optimizer state."""

    type: ClassVar[str] = "load_weights"
    path: str
    optimizer: bool = False
    weights_access_token: str | None = None


@dataclass(frozen=True, slots=True)
class CreateFromWeightsRequest:
    """Creates a model with the adapter of saved weights: `load_weights` for a session instead of a model."""

    type: ClassVar[str] = "load_weights"
    session_id: str
    model_seq_id: int
    path: str
    optimizer: bool = False
    base_model: str | None = None
    user_metadata: dict[str, Any] | None = None
    optimizer_config: dict[str, Any] | None = None
    weights_access_token: str | None = None

    @property
    def model_id(self) -> str:
        """The id of the new model, which clients derive as well."""
        return f"{self.session_id}:train:{self.model_seq_id}"


@dataclass(frozen=True, slots=True)
class SaveWeightsForSamplerRequest(ModelRequest):
    """Saves weights for sampling: under a name, or as an unnamed snapshot in a sampling session."""

    type: ClassVar[str] = "save_weights_for_sampler"
    path: str | None = None
    sampling_session_seq_id: int | None = None
    ttl_seconds: int | None = None
    user_metadata: dict[str, str] | None = None
    kind: str | None = None  # "snapshot", the default, or "inflight": weights that later saves replace

    def __post_init__(self) -> None:
        ModelRequest.__post_init__(self)
        _check_ttl(self.ttl_seconds)
        if self.path is None and self.sampling_session_seq_id is None:
            raise InvalidInput("give a path to save under a name, or a sampling_session_seq_id to sample immediately")


@dataclass(frozen=True, slots=True)
class SaveWeightsExternalRequest(ModelRequest):
    """Saves weights under a name for download, in a format that other programs can read."""

    type: ClassVar[str] = "save_weights_external"
    path: str
    ttl_seconds: int | None = None
    age_encryption_recipients: list[str] | None = None

    def __post_init__(self) -> None:
        ModelRequest.__post_init__(self)
        _check_ttl(self.ttl_seconds)


@dataclass(frozen=True, slots=True)
class CreateSamplingSessionRequest:
    """Creates a sampler for a base model or saved weights."""

    type: ClassVar[str] = "create_sampling_session"
    session_id: str
    sampling_session_seq_id: int
    base_model: str | None = None
    model_path: str | None = None

    def __post_init__(self) -> None:
        if (self.base_model is None) == (self.model_path is None):
            raise InvalidInput("give either base_model or model_path")


@dataclass(frozen=True, slots=True)
class SampleRequest:
    """Samples from a sampling session."""

    type: ClassVar[str] = "sample"
    sampling_session_id: str
    seq_id: int
    prompt: ModelInput
    sampling_params: SamplingParams
    num_samples: int = 1
    prompt_logprobs: bool = False
    topk_prompt_logprobs: int = 0
    topk_sample_logprobs: int = 0
    target_prompt_logprobs: TensorData | None = None
    prompt_alt_tokens_k: int = 0
    prompt_logprobs_last_n: int | None = None
    record_stability_info: bool | None = None  # whether hosted Tinker records what its loss stable_reinforce needs

    def __post_init__(self) -> None:
        if self.num_samples < 1:
            raise InvalidInput(f"num_samples must be at least 1, got {self.num_samples}")
        for name in ("topk_prompt_logprobs", "topk_sample_logprobs", "prompt_alt_tokens_k"):
            if getattr(self, name) < 0:
                raise InvalidInput(f"{name} must be at least 0, got {getattr(self, name)}")
        last = self.prompt.length - 1 if self.prompt.is_text else 2**31
        if (n := self.prompt_logprobs_last_n) is not None:
            if not self.prompt_logprobs:
                raise InvalidInput("prompt_logprobs_last_n limits prompt_logprobs; request these too")
            if not 1 <= n <= last:
                raise InvalidInput(f"prompt_logprobs_last_n must lie in 1..{last} for this prompt, got {n}")
        if (targets := self.target_prompt_logprobs) is not None and (
            targets.dtype != "int64" or len(targets.shape) != 2 or (self.prompt.is_text and targets.shape[0] != last)
        ):
            raise InvalidInput(f"target_prompt_logprobs must be an int64 tensor of shape [{last}, K], got {targets}")


@dataclass(frozen=True, slots=True)
class RetrieveFutureRequest:
    """Requests a result; the server responds when it is ready, or after a time limit."""

    request_id: str
    allow_metadata_only: bool = False


@dataclass(frozen=True, slots=True)
class FuturesTarget:
    """The sampling requests of one client of a sampler: 0 for the one that created it, or the number of a clone."""

    sampling_session_id: str
    cloned_sampler_id: int = 0


@dataclass(frozen=True, slots=True)
class RetrieveFuturesRequest:
    """Waits until a sampling request finishes that the cursor does not cover yet, at most `timeout` seconds."""

    target: FuturesTarget
    prev_cursor: int = 0
    timeout: float | None = None
    retrieved_request_ids: list[str] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class CancelFutureRequest:
    """Cancels a sampling request whose result nobody waits for."""

    request_id: str


@dataclass(frozen=True, slots=True)
class JoinSamplingSessionRequest:
    """Asks for the number of a further client of a sampler."""

    sampling_session_id: str


@dataclass(frozen=True, slots=True)
class TtlRequest:
    """Sets the time after which a checkpoint is deleted; None keeps it."""

    ttl_seconds: int | None = None

    def __post_init__(self) -> None:
        _check_ttl(self.ttl_seconds)


@dataclass(frozen=True, slots=True)
class TelemetryRequest:
    """Reports client events."""

    events: list[Any] = field(default_factory=list)


def _check_ttl(ttl_seconds: int | None) -> None:
    if ttl_seconds is not None and not 1 <= ttl_seconds <= 10 * 366 * 86400:
        raise InvalidInput(f"ttl_seconds must lie between a second and ten years, got {ttl_seconds}")
