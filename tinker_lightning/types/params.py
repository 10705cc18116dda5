"""Parameters of requests: optimizer, sampling and LoRA."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, ClassVar, TypeAlias

from tinker_lightning.errors import InvalidInput


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


def _check(where: str, params: OptimParams, positive: Sequence[str], fractions: Sequence[str]) -> None:
    for name in positive:
        value = getattr(params, name)
        if not (math.isfinite(value) and value >= 0):
            raise InvalidInput(f"{where}.{name} must be a finite number of at least 0, got {value}")
    for name in fractions:
        if not 0 <= getattr(params, name) < 1:
            raise InvalidInput(f"{where}.{name} must lie in [0, 1), got {getattr(params, name)}")


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
        if not isinstance(self.rank, int) or self.rank < 1:
            raise InvalidInput(f"lora_config.rank must be at least 1, got {self.rank!r}")
        if not (self.train_unembed or self.train_mlp or self.train_attn):
            raise InvalidInput("lora_config trains nothing: set train_unembed, train_mlp or train_attn")
        if self.seed is not None and not -(2**63) <= self.seed < 2**64:
            raise InvalidInput(f"lora_config.seed must fit into 64 bits, got {self.seed}")
