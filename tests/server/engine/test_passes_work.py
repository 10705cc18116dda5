"""What a pass leaves out: products with the output matrix where a loss needs none, and activations of long datums."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch

from tests.helpers.engine_passes import run_pass
from tinker_lightning.losses.builtin import LOSSES
from tinker_lightning.server.engine.causal_lm import CallSize
from tinker_lightning.server.engine.interface import Activations
from tinker_lightning.server.engine.lora import Matrices
from tinker_lightning.types import Datum

if TYPE_CHECKING:
    from torch import Tensor

    from tinker_lightning.server.engine.causal_lm import CausalLM

PROMPT, ANSWER = 12, 3


def masked_data(loss: str, generator: torch.Generator) -> list[Datum]:
    """Datums of three lengths, with a prompt that the loss masks and an answer."""
    data = []
    for extra in (0, 4, 9):
        length = PROMPT + extra + ANSWER
        tokens, targets = torch.randint(0, 256, (2, length), generator=generator)
        mask = torch.cat([torch.zeros(PROMPT + extra), torch.ones(ANSWER)])
        inputs: dict[str, Any] = {"weights": mask}
        if loss != "cross_entropy":
            inputs = {"logprobs": -5 * mask, "advantages": 0.5 * mask}
        if loss == "gspo":
            inputs["sequence_ratio_mask"] = mask
        data.append(Datum.from_targets(tokens, targets, **inputs))
    return data


class Products:
    """Counts the rows of products with the output matrix, in forwards and in backwards."""

    def __init__(self, base: CausalLM, patch: pytest.MonkeyPatch) -> None:
        self.forward = self.backward = 0
        project, gradients = Matrices.project, Matrices.gradients

        def counted_project(matrices: Matrices, x: Tensor) -> Any:
            self.forward += len(x) if len(matrices.weight_OI) == base.vocab_size else 0
            return project(matrices, x)

        def counted_gradients(matrices: Matrices, grad: Tensor, *args: Any, **kwargs: Any) -> Any:
            self.backward += len(grad) if len(matrices.weight_OI) == base.vocab_size else 0
            return gradients(matrices, grad, *args, **kwargs)

        patch.setattr(Matrices, "project", counted_project)
        patch.setattr(Matrices, "gradients", counted_gradients)


@pytest.mark.parametrize("loss", LOSSES)
def test_positions_that_a_loss_ignores_cost_no_product_with_the_output_matrix(  # R5.7
    tiny64: CausalLM, make_adapter: Any, assert_same_gradient: Any, monkeypatch: pytest.MonkeyPatch, loss: str
) -> None:
    data = masked_data(loss, torch.Generator().manual_seed(0))
    everything = sum(datum.model_input.length for datum in data)
    counted = everything if loss == "dro" else len(data) * ANSWER
    full, part = make_adapter(tiny64), make_adapter(tiny64)
    products = Products(tiny64, monkeypatch)
    expected = run_pass(tiny64, full, data, loss, {})
    assert (products.forward, products.backward) == (everything, counted)
    products.forward = products.backward = 0
    found = run_pass(tiny64, part, data, loss, {}, counted_only=True)
    assert (products.forward, products.backward) == (counted, counted)

    assert_same_gradient(part.gradient, full.gradient)
    assert found.metrics == pytest.approx(expected.metrics, rel=1e-9)
    for one, other in zip(found.loss_fn_outputs, expected.loss_fn_outputs, strict=True):
        got, wanted = one["logprobs"].to_torch(), other["logprobs"].to_torch()
        torch.testing.assert_close(got[-ANSWER:], wanted[-ANSWER:], rtol=2e-7, atol=0)
        if loss != "dro":
            assert not got[:-ANSWER].any()


def test_a_batch_that_counts_nowhere_gives_a_gradient_of_zero(tiny64: CausalLM, make_adapter: Any) -> None:
    adapter = make_adapter(tiny64)
    data = [Datum.from_tokens([1, 2, 3, 4], [0.0] * 4)]
    assert run_pass(tiny64, adapter, data, "cross_entropy", {}, counted_only=True).metrics["loss:sum"] == 0
    assert adapter.gradient.keys() == adapter.weights.tensors.keys()
    assert not any(grad.any() for grad in adapter.gradient.values())


class SavedBytes(torch.autograd.graph.saved_tensors_hooks):
    """Adds up the sizes of the tensors that a graph keeps; those of recomputed layers do not come here."""

    def __init__(self) -> None:
        self.total = 0

        def pack(tensor: Tensor) -> Tensor:
            self.total += tensor.nbytes
            return tensor

        super().__init__(pack, lambda tensor: tensor)


@pytest.mark.parametrize("kept_tokens", [1, 60])  # none of the two layers are kept, or one
@pytest.mark.parametrize("retained", [False, True])
def test_a_recomputed_pass_has_the_same_bits_in_less_memory(  # R5.11
    tiny: CausalLM, make_adapter: Any, monkeypatch: pytest.MonkeyPatch, kept_tokens: int, retained: bool
) -> None:
    draw = torch.Generator().manual_seed(1)
    data = [Datum.from_targets(*torch.randint(0, 256, (2, 61), generator=draw), weights=torch.ones(61))]

    def gradient() -> tuple[dict[str, Tensor], int]:
        adapter = make_adapter(tiny)
        activations = Activations() if retained else None
        saved = SavedBytes()
        with saved:
            if retained:
                run_pass(tiny, adapter, data, "cross_entropy", {}, forward_only=True, activations=activations)
            run_pass(tiny, adapter, data, "cross_entropy", {}, activations=activations)
        return adapter.gradient, saved.total

    expected, all_bytes = gradient()
    estimate = tiny.activation_bytes(61)
    monkeypatch.setattr(tiny, "_call_size", CallSize(kept_tokens))
    found, fewer_bytes = gradient()
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    assert fewer_bytes < all_bytes
    assert tiny.activation_bytes(61) < estimate
