"""Low-rank adapters by peft: one base model, any number of adapters, each only the memory of its own tensors."""

from __future__ import annotations

import warnings
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import peft
import torch
from peft.tuners.lora import LoraLayer
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from tinker_lightning.errors import InvalidInput
from tinker_lightning.types import LoraConfig

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

ALPHA = 32
# Ranks up to the model's width are taken, and on the smallest models up to this, which clients commonly ask for.
MIN_LARGEST_RANK = 128


@dataclass(frozen=True, slots=True)
class LoraWeights:
    """The tensors of an adapter, under the names of peft's own files, and what they fit."""

    config: LoraConfig
    tensors: dict[str, Tensor]

    def copy(self) -> LoraWeights:
        """The same weights in memory of their own."""
        return LoraWeights(self.config, {name: tensor.detach().clone() for name, tensor in self.tensors.items()})


@dataclass(frozen=True, slots=True)
class _Slot:
    """A peft adapter of one shape. It owns no weights: those of whoever is in use are put into it."""

    name: str
    peft_config: peft.LoraConfig
    parameters: dict[str, nn.Parameter]
    shapes: dict[str, torch.Size]


class LoraHost:
    """A base model with places for adapters. One adapter, or none, is in use at a time."""

    def __init__(self, model: Any, base_path: str) -> None:
        self._model = model
        self._base_path = base_path
        self._layers = _linear_layers(model)
        self._largest_rank = max(model.get_output_embeddings().weight.shape[1], MIN_LARGEST_RANK)
        self._peft: peft.PeftModel | None = None
        self._slots: dict[tuple[int, bool, bool, bool], _Slot] = {}

    def new_weights(self, config: LoraConfig) -> LoraWeights:
        """Fresh weights as peft makes them: A random by the seed (0 if none is given), B zero."""
        slot = self._slot(config)
        tensors = {name: torch.empty(shape, dtype=slot.parameters[name].dtype) for name, shape in slot.shapes.items()}
        weights = LoraWeights(config, tensors)
        with self.use(weights), torch.random.fork_rng(devices=[]), torch.no_grad():
            torch.manual_seed(config.seed or 0)
            for module in self._model.modules():
                if isinstance(module, LoraLayer) and slot.name in module.lora_A:
                    module.reset_lora_parameters(slot.name, init_lora_weights=True)
        return weights

    def check(self, weights: LoraWeights) -> None:
        """Refuses weights that were made for another model or another rank."""
        expected = self._slot(weights.config).shapes
        missing, unknown = expected.keys() - weights.tensors.keys(), weights.tensors.keys() - expected.keys()
        if missing or unknown:
            name = min(missing or unknown)
            raise InvalidInput(
                f"the adapter does not fit this base model: {'no' if missing else 'unknown'} tensor {name}"
            )
        for name, shape in expected.items():
            if weights.tensors[name].shape != shape:
                got = list(weights.tensors[name].shape)
                raise InvalidInput(f"the adapter does not fit: {name} has the shape {got}, not {list(shape)}")

    def peft_config(self, config: LoraConfig) -> peft.LoraConfig:
        """What peft writes beside the tensors of such an adapter."""
        return self._slot(config).peft_config

    @contextmanager
    def use(self, weights: LoraWeights | None) -> Iterator[dict[str, nn.Parameter]]:
        """Runs the model with these weights, or without an adapter; yields the parameters that receive gradients."""
        if weights is None:
            if self._peft is None:
                yield {}
            else:
                with self._peft.disable_adapter():
                    yield {}
            return
        slot = self._slot(weights.config)
        assert self._peft is not None  # noqa: S101  # the slot was made in it
        self._peft.set_adapter(slot.name)
        try:
            for name, parameter in slot.parameters.items():
                parameter.data = weights.tensors[name].data
            yield slot.parameters
        finally:
            _clear(slot.parameters)

    def _slot(self, config: LoraConfig) -> _Slot:
        if config.rank > self._largest_rank:
            raise InvalidInput(
                f"lora_config: a rank of {config.rank} makes the adapter larger than the layers it adapts; this model "
                f"takes up to {self._largest_rank}"
            )
        key = (config.rank, config.train_attn, config.train_mlp, config.train_unembed)
        if key not in self._slots:
            self._slots[key] = self._add_slot(f"slot{len(self._slots)}", config)
        return self._slots[key]

    def _add_slot(self, name: str, config: LoraConfig) -> _Slot:
        peft_config = peft.LoraConfig(
            r=config.rank,
            lora_alpha=ALPHA,
            lora_dropout=0.0,
            bias="none",
            task_type="CAUSAL_LM",
            base_model_name_or_path=self._base_path,
            target_modules=_target_modules(self._layers, config),
        )
        # Its first weights are replaced; drawing them must not disturb the random numbers of a trainer's own process.
        with warnings.catch_warnings(), torch.random.fork_rng(devices=[]):
            # Only the adapter of the output matrix is trained; the embedding it is tied to stays as it is.
            warnings.filterwarnings("ignore", message=".*tie_word_embeddings.*")
            # peft finds out by itself which layers hold their matrix transposed (GPT-2's Conv1D), and says so.
            warnings.filterwarnings("ignore", message="fan_in_fan_out")
            # peft reads a property that newer releases of transformers have renamed.
            warnings.filterwarnings("ignore", message="`is_gradient_checkpointing` is deprecated")
            if self._peft is None:
                self._peft = peft.PeftModel(self._model, peft_config, adapter_name=name)
                self._model.requires_grad_(False)
            else:
                self._peft.add_adapter(name, peft_config)
        marker = f".{name}."
        parameters = {
            key.replace(marker, "."): parameter for key, parameter in self._peft.named_parameters() if marker in key
        }
        shapes = {key: parameter.shape for key, parameter in parameters.items()}
        _clear(parameters)
        return _Slot(name, peft_config, parameters, shapes)


def _clear(parameters: Mapping[str, nn.Parameter]) -> None:
    for parameter in parameters.values():
        parameter.data = parameter.data.new_empty(0)
        parameter.grad = None


def _linear_layers(model: Any) -> dict[str, str]:
    """The name of each layer that can have an adapter, and its part of the model: unembed, attn, mlp or other."""
    head = model.get_output_embeddings()
    return {
        name: "unembed" if module is head else _part(name)
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear | Conv1D)
    }


def _part(name: str) -> str:
    if "attn" in name or "attention" in name:
        return "attn"
    if any(word in name for word in ("mlp", "feed_forward", "ffn", "expert", ".fc")):
        return "mlp"
    return "other"


def _target_modules(layers: Mapping[str, str], config: LoraConfig) -> list[str]:
    """The layers to train, by the last part of their names where that is enough to tell them from the others."""
    train = {"unembed": config.train_unembed, "attn": config.train_attn, "mlp": config.train_mlp, "other": False}
    wanted = [name for name, part in layers.items() if train[part]]
    if not wanted:
        raise InvalidInput("lora_config: this model has no layers of the kinds that are to be trained")
    endings = {name.rsplit(".", 1)[-1] for name in wanted}
    if any(name.rsplit(".", 1)[-1] in endings for name, part in layers.items() if not train[part]):
        return sorted(wanted)
    return sorted(endings)
