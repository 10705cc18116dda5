"""Parameters of requests: optimizer, sampling and LoRA."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, ClassVar, TypeAlias, TypeVar

from tinker_lightning.errors import InvalidInput, Unsupported

P = TypeVar("P", bound="AdamParams | DimuonParams | SamplingParams")


@dataclass(frozen=True, slots=True)
class AdamParams:
    """AdamW hyperparameters for one step; a `grad_clip_norm` of 0 disables clipping."""

    kind: ClassVar[str] = "adamw"  # the protocol's name of the optimizer
    config: ClassVar[Mapping[str, Any]] = MappingProxyType({"type": "adamw"})  # with which a model is created for it

    learning_rate: float = 1e-4
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-12
    weight_decay: float = 0.0
    grad_clip_norm: float = 0.0

    def __post_init__(self) -> None:
        _check("adam_params", self, ("learning_rate", "eps", "weight_decay", "grad_clip_norm"), ("beta1", "beta2"))


@dataclass(frozen=True, slots=True)
class DimuonParams:
    """DiMuon hyperparameters for one step, on servers that offer this optimizer."""

    kind: ClassVar[str] = "dimuon"
    config: ClassVar[Mapping[str, Any]] = MappingProxyType({"type": "dimuon", "version": 1})

    learning_rate: float = 1e-4
    grad_clip_norm: float = 0.0
    beta1: float = 0.9

    def __post_init__(self) -> None:
        _check("optimizer_params", self, ("learning_rate", "grad_clip_norm"), ("beta1",))


OptimParams: TypeAlias = AdamParams | DimuonParams
# The settings of each optimizer that this library trains with, by the protocol's name of the optimizer.
OPTIMIZERS: Mapping[str, type[OptimParams]] = MappingProxyType({each.kind: each for each in (AdamParams, DimuonParams)})


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


def _check(where: str, params: OptimParams, positive: Sequence[str], fractions: Sequence[str]) -> None:
    for name in positive:
        value = _number(f"{where}.{name}", getattr(params, name))
        if not (math.isfinite(value) and value >= 0):
            raise InvalidInput(f"{where}.{name} must be a finite number of at least 0, got {value}")
    for name in fractions:
        if not 0 <= _number(f"{where}.{name}", getattr(params, name)) < 1:
            raise InvalidInput(f"{where}.{name} must lie in [0, 1), got {getattr(params, name)}")


def _number(name: str, value: Any) -> Any:
    """Returns a number, also a tensor or array of one; raises `InvalidInput` for a string, as YAML reads 1e-4."""
    if isinstance(value, str):
        raise InvalidInput(f"{name} must be a number, got the string {value!r}. Write 1.0e-4 in YAML, or float(...).")
    return value


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Sampling parameters; the defaults sample from the unmodified distribution up to the end-of-text token.

    Args:
        max_tokens: The maximum number of tokens; None for the rest of the context.
        seed: Makes sampling reproducible for a given prompt and weights; None for a new seed each time.
        stop: Strings or token ids that end a sequence, in addition to the end-of-text token, which `[]` disables.
        temperature: The softmax temperature; 0 is greedy.
        top_k: Restricts sampling to the k most likely tokens; -1 for all.
        top_p: Restricts sampling to the most likely tokens whose probabilities add up to this value.
    """

    max_tokens: int | None = None
    seed: int | None = None
    stop: str | list[str] | list[int] | None = None
    temperature: float = 1.0
    top_k: int = -1
    top_p: float = 1.0

    def __post_init__(self) -> None:
        if self.max_tokens is not None and self.max_tokens < 1:
            raise InvalidInput(f"sampling_params.max_tokens must be at least 1, got {self.max_tokens}")
        if not (math.isfinite(self.temperature) and self.temperature >= 0):
            raise InvalidInput(f"sampling_params.temperature must be at least 0, got {self.temperature}")
        if self.top_k < -1 or self.top_k == 0:
            raise InvalidInput(f"sampling_params.top_k must be -1 (off) or at least 1, got {self.top_k}")
        if not 0 < self.top_p <= 1:
            raise InvalidInput(f"sampling_params.top_p must lie in (0, 1], got {self.top_p}")
        if self.stop == "" or (isinstance(self.stop, list) and "" in self.stop):
            raise InvalidInput("sampling_params.stop contains an empty string, which would end every sequence")


@dataclass(frozen=True, slots=True)
class LoraConfig:
    """The configuration of a new model's LoRA adapter."""

    rank: int = 32
    seed: int | None = None
    train_unembed: bool = True
    train_mlp: bool = True
    train_attn: bool = True

    def __post_init__(self) -> None:
        if not isinstance(self.rank, int):
            raise InvalidInput(f"lora_config.rank must be a whole number, got {self.rank!r}")
        if self.rank < 1:
            raise InvalidInput(f"lora_config.rank must be at least 1, got {self.rank}")
        if not (self.train_unembed or self.train_mlp or self.train_attn):
            raise InvalidInput("lora_config trains nothing: set train_unembed, train_mlp or train_attn")
        if self.seed is not None and not -(2**63) <= self.seed < 2**64:
            raise InvalidInput(f"lora_config.seed must fit into 64 bits, got {self.seed}")


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
