"""A second model to compare the engine's with: LoRA written out as `W + 32/r·B·A`, for plain autograd to go through."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeAlias

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM
from transformers.pytorch_utils import Conv1D

from tinker_lightning.server.engine.adapter import LoraAdapter
from tinker_lightning.types import LoraConfig

if TYPE_CHECKING:
    from tinker_lightning.server.engine.causal_lm import CausalLM

MakeAdapter: TypeAlias = Callable[..., LoraAdapter]


class Reference:
    """The untouched Hugging Face model; its logits are whole, its sequences are never padded nor batched."""

    def __init__(self, path: str, dtype: torch.dtype) -> None:
        self.model: Any = AutoModelForCausalLM.from_pretrained(path, dtype=dtype).eval().requires_grad_(False)

    def logprobs(self, tokens: Tensor, tensors: dict[str, Tensor], rank: int) -> Tensor:
        """Log-probabilities of the whole vocabulary at each position, differentiable in the adapter's tensors."""
        merged: dict[str, Tensor] = {}
        for name in tensors:
            if name.endswith(".lora_A.weight"):
                layer = name.removeprefix("base_model.model.").removesuffix(".lora_A.weight")
                module = self.model.get_submodule(layer)
                delta = 32 / rank * tensors[name.replace("lora_A", "lora_B")] @ tensors[name]
                merged[f"{layer}.weight"] = module.weight + (delta.T if isinstance(module, Conv1D) else delta)
        kwargs = {"input_ids": tokens[None], "use_cache": False}
        output = torch.func.functional_call(self.model, merged, kwargs=kwargs, tie_weights=False)
        return output.logits[0].log_softmax(-1)  # type: ignore[no-any-return]

    def gradient(
        self, adapter: LoraAdapter, loss: Callable[[Callable[[Tensor], Tensor]], Tensor]
    ) -> tuple[float, dict[str, Tensor]]:
        """The value and the gradient of `loss(logprobs_of_tokens)` by plain autograd."""
        leaves = {name: tensor.detach().clone().requires_grad_() for name, tensor in adapter.weights.tensors.items()}
        value = loss(lambda tokens: self.logprobs(tokens, leaves, adapter.weights.config.rank))
        grads = torch.autograd.grad(value, list(leaves.values()), allow_unused=True, materialize_grads=True)
        return value.item(), dict(zip(leaves, grads, strict=True))


@pytest.fixture(scope="session")
def reference64(tiny64: CausalLM) -> Reference:
    """`tiny` in float64, as transformers loads it."""
    return Reference(tiny64.tokenizer_id, torch.float64)


@pytest.fixture(scope="session")
def make_reference() -> Callable[[str, torch.dtype], Reference]:
    """Loads another model as a reference."""
    return Reference


@pytest.fixture(scope="session")
def make_adapter() -> MakeAdapter:
    """Makes adapters whose B is not zero, so that every gradient is alive; `scale` sets how far they go."""

    def make(base: CausalLM, *, scale: float = 0.02, **config: Any) -> LoraAdapter:
        weights = base.lora.new_weights(LoraConfig(**{"rank": 4, "seed": 1, **config}))
        generator = torch.Generator().manual_seed(2)
        for name, tensor in weights.tensors.items():
            if "lora_B" in name:
                tensor.copy_(torch.randn(tensor.shape, generator=generator, dtype=tensor.dtype) * scale)
        return LoraAdapter(weights)

    return make


@pytest.fixture(scope="session")
def assert_same_gradient() -> Callable[..., None]:
    """Compares two gradients over all parameters together: ‖g − g′‖ ≤ rtol·‖g′‖."""

    def check(got: dict[str, Tensor], expected: dict[str, Tensor], rtol: float = 1e-9) -> None:
        assert got.keys() == expected.keys()
        difference = sum(float((got[name] - expected[name]).square().sum()) for name in expected) ** 0.5
        norm = sum(float(grad.square().sum()) for grad in expected.values()) ** 0.5
        assert difference <= rtol * norm

    return check
