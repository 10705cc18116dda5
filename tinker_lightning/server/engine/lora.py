"""LoRA adapters with peft: any number of them share a base model, and each takes only the memory of its own tensors.

peft's adapters are slots here, one for each shape, and their parameters are empty. `LoraHost.use` puts the tensors of
an adapter into the slot of its shape for the length of a pass:

    adapters, with tensors                          slots of the base model
    a   rank 8,  attn + mlp   [A B] [A B] …   ┌──►  slot0   rank 8,  attn + mlp   [A B] [A B] …   active
    b   rank 8,  attn + mlp   [A B] [A B] …  ─┘     slot1   rank 32, attn         [   ] [   ] …
    c   rank 32, attn         [A B] [A B] …  use(b)

An adapted layer computes `x Wᵀ + 32/rank · (x Aᵀ) Bᵀ` with A and B of the active slot.
"""

from __future__ import annotations

import warnings
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import peft
import torch
from peft.tuners.lora import Linear as PeftLinear
from peft.tuners.lora import LoraLayer
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D
from typing_extensions import override

from tinker_lightning.errors import InvalidInput
from tinker_lightning.server.engine.interface import AdapterWeights
from tinker_lightning.types import LoraConfig
from tinker_lightning.wire.hub import PATCH_LOCK

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

ALPHA = 32
# The maximum rank is the model's width, or this common rank if the model is narrower.
MIN_LARGEST_RANK = 128


@dataclass(frozen=True, slots=True)
class _Slot:
    """A peft adapter of one shape, without weights; `LoraHost.use` inserts the weights of the active adapter."""

    name: str
    peft_config: peft.LoraConfig
    parameters: dict[str, nn.Parameter]
    shapes: dict[str, torch.Size]


class LoraHost:
    """The LoRA layers of a base model. At most one adapter is active at a time."""

    def __init__(self, model: Any, base_path: str) -> None:
        self._model = model
        self._base_path = base_path
        self._layers = _linear_layers(model)
        # Adapters of a half-precision model are float32, as in peft.
        self._dtype = torch.promote_types(model.dtype, torch.float32)
        self._largest_rank = max(model.get_output_embeddings().weight.shape[1], MIN_LARGEST_RANK)
        self._peft: peft.PeftModel | None = None
        self._slots: dict[tuple[int, bool, bool, bool], _Slot] = {}
        self._active: str | None = None

    def new_weights(self, config: LoraConfig) -> AdapterWeights:
        """Initializes weights like peft: A is Kaiming uniform from the seed (0 by default), B is zero."""
        slot = self._slot(config)
        # A private generator, because the user or another trainer may use torch's global one.
        generator = torch.Generator().manual_seed(config.seed or 0)
        tensors = {name: torch.zeros(shape, dtype=slot.parameters[name].dtype) for name, shape in slot.shapes.items()}
        for name, tensor in tensors.items():
            if name.endswith(".lora_A.weight"):
                # kaiming_uniform_(a=sqrt(5)) draws from this range.
                bound = tensor.shape[1] ** -0.5
                tensor.uniform_(-bound, bound, generator=generator)
        return AdapterWeights(config, tensors)

    def weights_bytes(self, config: LoraConfig) -> int:
        """Returns the size of the weights of such an adapter."""
        return sum(shape.numel() for shape in self._slot(config).shapes.values()) * self._dtype.itemsize

    def import_weights(self, tensors: Mapping[str, Tensor], scaling: float) -> AdapterWeights:
        """Returns weights that compute the same as a PEFT adapter whose product is multiplied by `scaling`.

        Layers that the adapter leaves out, but that are trained together with its own, start without an effect.
        """
        # If the output matrix is adapted, peft also saves the frozen matrix itself.
        tensors = {name: tensor for name, tensor in tensors.items() if not name.endswith(".base_layer.weight")}
        ranks, parts = set(), set()
        kinds: dict[str, set[str]] = {}  # by layer
        for name, tensor in tensors.items():
            layer, _, kind = name.removeprefix("base_model.model.").partition(".lora_")
            if layer not in self._layers or kind not in ("A.weight", "B.weight") or tensor.ndim != 2:
                raise InvalidInput(f"the adapter does not match this base model: unknown tensor {name}")
            if not tensor.is_floating_point() or not torch.isfinite(tensor).all():
                wrong = "has entries that are not finite" if tensor.is_floating_point() else f"is {tensor.dtype}"
                raise InvalidInput(f"the adapter is damaged: {name} {wrong}")
            kinds.setdefault(layer, set()).add(kind)
            ranks.add(tensor.shape[0 if kind == "A.weight" else 1])
            parts.add(self._layers[layer])
        if len(ranks) != 1 or not parts <= {"unembed", "attn", "mlp"}:
            raise InvalidInput(f"the adapter must have a single rank and adapt known layers, got ranks {sorted(ranks)}")
        (rank,) = ranks
        for layer, found in kinds.items():
            for kind in {"A.weight", "B.weight"} - found:
                raise InvalidInput(f"the adapter is incomplete: {layer} has no lora_{kind}, which would be random")
        config = LoraConfig(
            rank, train_unembed="unembed" in parts, train_mlp="mlp" in parts, train_attn="attn" in parts
        )
        weights = self.new_weights(config)
        for name, tensor in tensors.items():
            factor = scaling * rank / ALPHA if name.endswith(".lora_B.weight") else 1.0
            weights.tensors[name] = tensor.to(self._dtype) * factor
            if not torch.isfinite(weights.tensors[name]).all():
                raise InvalidInput(f"scaling: {scaling:g} makes {name} infinite")
        self.check(weights)
        return weights

    def check(self, weights: AdapterWeights) -> None:
        """Raises `InvalidInput` if the weights belong to another model or have another rank."""
        expected = self._slot(weights.config).shapes
        missing, unknown = expected.keys() - weights.tensors.keys(), weights.tensors.keys() - expected.keys()
        if missing or unknown:
            name = min(missing or unknown)
            raise InvalidInput(
                f"the adapter does not match this base model: {'no' if missing else 'unknown'} tensor {name}"
            )
        for name, shape in expected.items():
            if weights.tensors[name].shape != shape:
                got = list(weights.tensors[name].shape)
                raise InvalidInput(f"the adapter does not match: {name} has the shape {got}, not {list(shape)}")

    def peft_config(self, config: LoraConfig) -> peft.LoraConfig:
        """Returns the config that peft saves with the tensors of such an adapter."""
        return self._slot(config).peft_config

    @contextmanager
    def use(self, weights: AdapterWeights | None) -> Iterator[dict[str, nn.Parameter]]:
        """Activates these weights, or disables all adapters if None; yields the parameters that receive gradients."""
        if weights is None:
            if self._peft is None:
                yield {}
            else:
                self._active = None
                with self._peft.disable_adapter():
                    yield {}
            return
        slot = self._slot(weights.config)
        assert self._peft is not None  # noqa: S101  # _slot() has created it
        if self._active != slot.name:  # peft would visit every module of the model in each pass
            self._peft.set_adapter(slot.name)
            self._active = slot.name
        try:
            for name, parameter in slot.parameters.items():
                parameter.data = weights.tensors[name].data
            yield slot.parameters
        finally:
            for parameter in slot.parameters.values():
                parameter.data = parameter.data.new_empty(0)
                parameter.grad = None

    def _slot(self, config: LoraConfig) -> _Slot:
        if config.rank > self._largest_rank:
            raise InvalidInput(
                f"lora_config: a rank of {config.rank} makes the adapter larger than the layers it adapts; the maximum "
                f"for this model is {self._largest_rank}"
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
        peft_config._register_custom_module({nn.Linear: LoraLinear})
        # On the meta device peft draws no random numbers. `low_cpu_mem_usage` has the same effect, but patches
        # nn.Module for all threads of the process.
        with PATCH_LOCK, warnings.catch_warnings(), torch.device("meta"):
            # Only the adapter of the output matrix is trained; the tied embedding does not change.
            warnings.filterwarnings("ignore", message=".*tie_word_embeddings.*")
            # peft detects layers with a transposed matrix (GPT-2's Conv1D) and warns about them.
            warnings.filterwarnings("ignore", message="fan_in_fan_out")
            # peft reads a property that was renamed in newer releases of transformers.
            warnings.filterwarnings("ignore", message="`is_gradient_checkpointing` is deprecated")
            if self._peft is None:
                try:
                    self._peft = peft.PeftModel(self._model, peft_config, adapter_name=name)
                except BaseException:
                    _remove_peft(self._model)
                    raise
                self._model.requires_grad_(False)
            else:
                self._peft.add_adapter(name, peft_config)
        self._active = None
        marker = f".{name}."
        parameters: dict[str, nn.Parameter] = {}
        shapes: dict[str, torch.Size] = {}
        for key, on_meta in list(self._peft.named_parameters()):
            if marker in key:
                path, _, attribute = key.rpartition(".")
                parameter = nn.Parameter(torch.empty(0, dtype=self._dtype))
                setattr(self._peft.get_submodule(path), attribute, parameter)
                parameters[key.replace(marker, ".")] = parameter
                shapes[key.replace(marker, ".")] = on_meta.shape
        return _Slot(name, peft_config, parameters, shapes)


def _remove_peft(model: Any) -> None:
    """Removes the layers of a failed injection; otherwise peft would reject the model from then on."""
    for name, module in list(model.named_modules()):
        if isinstance(module, LoraLayer):
            path, _, attribute = name.rpartition(".")
            setattr(model.get_submodule(path), attribute, module.get_base_layer())
    vars(model).pop("peft_config", None)


def _linear_layers(model: Any) -> dict[str, str]:
    """Maps the name of each adaptable layer to its part of the model: unembed, attn, mlp or other."""
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
    """Returns the layers to train, by the last part of their names if that is unambiguous, otherwise by full name."""
    train = {"unembed": config.train_unembed, "attn": config.train_attn, "mlp": config.train_mlp, "other": False}
    names = [name for name, part in layers.items() if train[part]]
    if not names:
        raise InvalidInput("lora_config: this model has no layers of the selected kinds; set train_attn or train_mlp")
    endings = {name.rsplit(".", 1)[-1] for name in names}
    if any(name.rsplit(".", 1)[-1] in endings for name, part in layers.items() if not train[part]):
        return sorted(names)
    return sorted(endings)


@dataclass(frozen=True, slots=True)
class Matrices:
    """The matrices of a linear layer: W, its bias, and A and B of the active adapter if it adapts this layer."""

    weight_OI: Tensor
    bias_O: Tensor | None = None
    a_RI: Tensor | None = None
    b_OR: Tensor | None = None
    scaling: float = 1.0

    @classmethod
    def from_layer(cls, layer: nn.Module) -> Matrices:
        """Returns the matrices of an `nn.Linear`, with or without peft's layer around it."""
        base: Any = layer.get_base_layer() if isinstance(layer, LoraLayer) else layer
        if isinstance(layer, LoraLayer) and not layer.disable_adapters:
            for name in layer.active_adapters:
                if name in layer.lora_A:
                    a: Any = layer.lora_A[name]
                    b: Any = layer.lora_B[name]
                    return cls(base.weight, base.bias, a.weight, b.weight, layer.scaling[name])
        return cls(base.weight, base.bias)

    def project(self, x_NI: Tensor) -> tuple[Tensor, Tensor | None]:
        """Returns the output in the precision of the adapter, and the scaled `x Aᵀ` for the gradient."""
        y_NO = nn.functional.linear(x_NI, self.weight_OI, self.bias_O)
        if self.a_RI is None or self.b_OR is None:
            return y_NO, None
        low_NR = (x_NI.to(self.a_RI.dtype) @ self.a_RI.T).mul_(self.scaling)
        return y_NO.to(low_NR.dtype).addmm_(low_NR, self.b_OR.T), low_NR

    def gradients(
        self, grad_NO: Tensor, x_NI: Tensor, low_NR: Tensor | None, *, needs_input: bool, needs_adapter: bool
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """Returns the gradients of the input, of A and of B; None where one is not needed."""
        grad_x_NI = grad_NO.to(self.weight_OI.dtype) @ self.weight_OI if needs_input else None
        if self.a_RI is None or self.b_OR is None or low_NR is None:
            return grad_x_NI, None, None
        grad_low_NR = (grad_NO @ self.b_OR).mul_(self.scaling)
        if grad_x_NI is not None:
            grad_x_NI = grad_x_NI.to(grad_low_NR.dtype).addmm_(grad_low_NR, self.a_RI).to(x_NI.dtype)
        if not needs_adapter:
            return grad_x_NI, None, None
        return grad_x_NI, grad_low_NR.T @ x_NI.to(grad_low_NR.dtype), grad_NO.T @ low_NR


class LoraLinear(PeftLinear):
    """peft's layer with a forward and backward that make fewer copies. Weights, names and files are peft's."""

    @override
    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Returns the layer's output."""
        if args or kwargs or self.merged or type(self.base_layer) is not nn.Linear:
            adapted: Tensor = super().forward(x, *args, **kwargs)
            return adapted
        matrices = Matrices.from_layer(self)
        if matrices.a_RI is None or matrices.a_RI.dtype != x.dtype:
            plain: Tensor = super().forward(x)
            return plain
        result: Tensor = _Multiply.apply(  # type: ignore[no-untyped-call]
            x, matrices.weight_OI, matrices.bias_O, matrices.a_RI, matrices.b_OR, matrices.scaling
        )
        return result


class _Multiply(torch.autograd.Function):
    """`x Wᵀ + s·(x Aᵀ) Bᵀ`, with gradients of x, A and B."""

    @staticmethod
    @override
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, a: Tensor, b: Tensor, scaling: float) -> Any:
        x_NI = x.reshape(-1, x.shape[-1])
        y_NO, low_NR = Matrices(weight, bias, a, b, scaling).project(x_NI)
        ctx.save_for_backward(x_NI, low_NR, weight, a, b)
        ctx.scaling = scaling
        return y_NO.view(*x.shape[:-1], -1)

    @staticmethod
    @override
    def backward(ctx: Any, *grads: Any) -> Any:
        (grad,) = grads
        x_NI, low_NR, weight, a, b = ctx.saved_tensors
        matrices = Matrices(weight, None, a, b, ctx.scaling)
        grad_NO = grad.reshape(-1, grad.shape[-1])
        needs_input, needs_adapter = ctx.needs_input_grad[0], ctx.needs_input_grad[3]
        grad_x, grad_a, grad_b = matrices.gradients(
            grad_NO, x_NI, low_NR, needs_input=needs_input, needs_adapter=needs_adapter
        )
        grad_x = None if grad_x is None else grad_x.view(*grad.shape[:-1], -1)
        return grad_x, None, None, grad_a, grad_b, None
