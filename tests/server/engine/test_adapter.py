"""The optimizer step, against AdamW and clipping run by hand."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import Tensor, nn

from tinker_lightning.errors import InvalidInput, OperationFailed
from tinker_lightning.server.engine.adapter import LoraAdapter
from tinker_lightning.types import AdamParams, LoraConfig

if TYPE_CHECKING:
    from tinker_lightning.server.engine.causal_lm import CausalLM

SETTINGS = [
    AdamParams(learning_rate=1e-2),
    AdamParams(learning_rate=3e-3, beta1=0.5, beta2=0.9, eps=1e-3),
    AdamParams(learning_rate=3e-3, weight_decay=0.3, grad_clip_norm=0.7),
    AdamParams(learning_rate=0.0, grad_clip_norm=1e9),
    AdamParams(learning_rate=2e-2, beta1=0.0, eps=1e-8, weight_decay=0.01, grad_clip_norm=3.0),
    AdamParams(),
]


def gradients(adapter: LoraAdapter, seed: int) -> dict[str, nn.Parameter]:
    """Parameters as a backward leaves them."""
    generator = torch.Generator().manual_seed(seed)
    found: dict[str, nn.Parameter] = {}
    for name, tensor in adapter.weights.tensors.items():
        found[name] = nn.Parameter(tensor.detach().clone())
        found[name].grad = torch.randn(tensor.shape, generator=generator, dtype=tensor.dtype)
    return found


def gradient_of(parameter: nn.Parameter) -> Tensor:
    assert parameter.grad is not None
    return parameter.grad


def everything(adapter: LoraAdapter) -> dict[str, Tensor]:
    tensors = {**{f"weights/{name}": t for name, t in adapter.weights.tensors.items()}, **adapter.training_state()}
    return {name: tensor.clone() for name, tensor in tensors.items()}


def assert_bit_equal(got: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert got.keys() == expected.keys()
    assert all(torch.equal(got[name], expected[name]) for name in expected)


def test_steps_are_those_of_adamw_and_clip_grad_norm(tiny64: CausalLM, make_adapter: Any) -> None:
    adapter = make_adapter(tiny64)
    parameters = {name: nn.Parameter(tensor.clone()) for name, tensor in adapter.weights.tensors.items()}
    by_hand = torch.optim.AdamW(parameters.values(), foreach=False, fused=False)

    for step, params in enumerate(SETTINGS, start=1):
        calls = [gradients(adapter, seed) for seed in range(step, step + 3)]
        for call in calls:
            adapter.add_gradient(call)
        metrics = adapter.step(params)

        for name, parameter in parameters.items():
            parameter.grad = torch.stack([gradient_of(call[name]) for call in calls]).sum(0)
        norm = torch.nn.utils.clip_grad_norm_(parameters.values(), params.grad_clip_norm or float("inf"))
        group: dict[str, Any] = by_hand.param_groups[0]
        group.update(lr=params.learning_rate, betas=(params.beta1, params.beta2))
        group.update(eps=params.eps, weight_decay=params.weight_decay)
        by_hand.step()

        assert metrics["grad_norm"] == pytest.approx(float(norm), rel=1e-12)  # before clipping
        assert metrics["learning_rate"] == params.learning_rate
        assert adapter.gradient == {}
        assert adapter.steps == step
        for name, parameter in parameters.items():
            torch.testing.assert_close(adapter.weights.tensors[name], parameter.detach(), rtol=1e-12, atol=1e-14)


def test_gradients_gather_as_a_sum_without_touching_what_was_given(tiny64: CausalLM, make_adapter: Any) -> None:
    adapter = make_adapter(tiny64)
    first, second = gradients(adapter, 1), gradients(adapter, 2)
    given = {name: gradient_of(parameter).clone() for name, parameter in first.items()}
    adapter.add_gradient(first)
    adapter.add_gradient(second)
    for name in given:
        assert torch.equal(adapter.gradient[name], given[name] + gradient_of(second[name]))
        assert torch.equal(gradient_of(first[name]), given[name])


def test_parameters_without_a_gradient_count_as_zero(tiny64: CausalLM, make_adapter: Any) -> None:
    partial, explicit = make_adapter(tiny64), make_adapter(tiny64)
    found = gradients(partial, 1)
    for i, parameter in enumerate(found.values()):
        if i % 2:
            parameter.grad = None
    partial.add_gradient(found)
    for parameter in found.values():
        parameter.grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
    explicit.add_gradient(found)
    assert partial.step(AdamParams()) == explicit.step(AdamParams())
    assert_bit_equal(everything(partial), everything(explicit))


def test_a_first_step_without_gradient_leaves_the_weights(tiny: CausalLM, make_adapter: Any) -> None:
    adapter = make_adapter(tiny)
    before = adapter.weights.copy().tensors
    assert adapter.step(AdamParams(learning_rate=0.1))["grad_norm"] == 0
    assert_bit_equal(adapter.weights.tensors, before)


def test_a_later_step_without_gradient_follows_the_momentum_as_adamw_does(tiny: CausalLM, make_adapter: Any) -> None:
    adapter = make_adapter(tiny)
    adapter.add_gradient(gradients(adapter, 1))
    adapter.step(AdamParams(learning_rate=0.1))
    before = adapter.weights.copy().tensors
    adapter.step(AdamParams(learning_rate=0.1))
    assert all(not torch.equal(adapter.weights.tensors[name], before[name]) for name in before)


@pytest.mark.parametrize("steps_before", [0, 2])
@pytest.mark.parametrize(
    "params", [AdamParams(learning_rate=1e38), AdamParams(learning_rate=1e300), AdamParams(eps=0.0)], ids=str
)
def test_a_step_that_would_break_the_weights_is_not_taken(
    tiny: CausalLM, make_adapter: Any, params: AdamParams, steps_before: int
) -> None:
    adapter, untouched = make_adapter(tiny), make_adapter(tiny)
    for each in (adapter, untouched):
        for step in range(steps_before):
            each.add_gradient(zeroed(gradients(each, step)))
            each.step(AdamParams())
        each.add_gradient(zeroed(gradients(each, 7)))
    before = everything(adapter)

    with pytest.raises(OperationFailed, match=r"learning_rate=.*eps=.* not finite. The weights are unchanged"):
        adapter.step(params)
    assert_bit_equal(everything(adapter), before)
    assert adapter.steps == steps_before

    assert adapter.step(AdamParams()) == untouched.step(AdamParams())
    assert_bit_equal(everything(adapter), everything(untouched))


def zeroed(found: dict[str, nn.Parameter]) -> dict[str, nn.Parameter]:
    """With some entries exactly zero, as A's are while B is zero: AdamW divides 0 by eps there."""
    for parameter in found.values():
        gradient_of(parameter)[0] = 0
    return found


def test_clipping_is_not_left_in_a_gradient_that_is_kept(tiny: CausalLM, make_adapter: Any) -> None:
    adapter = make_adapter(tiny)
    adapter.add_gradient(gradients(adapter, 1))
    before = everything(adapter)
    with pytest.raises(OperationFailed):
        adapter.step(AdamParams(learning_rate=1e38, grad_clip_norm=1e-3))
    assert_bit_equal(everything(adapter), before)


def test_a_gradient_that_is_not_finite_is_not_added(tiny: CausalLM, make_adapter: Any) -> None:
    adapter = make_adapter(tiny)
    adapter.add_gradient(gradients(adapter, 1))
    before = everything(adapter)
    bad = gradients(adapter, 2)
    gradient_of(list(bad.values())[-1])[0, 0] = float("nan")
    with pytest.raises(OperationFailed, match="not be finite, so the gradient of this batch was not added"):
        adapter.add_gradient(bad)
    assert_bit_equal(everything(adapter), before)


def test_a_loaded_adapter_goes_on_bit_for_bit(tiny: CausalLM, make_adapter: Any) -> None:
    adapter = make_adapter(tiny)
    adapter.add_gradient(gradients(adapter, 1))
    adapter.step(AdamParams())
    adapter.add_gradient(gradients(adapter, 2))  # an unfinished window is part of the state
    saved_weights, saved_state = adapter.weights.copy(), {k: v.clone() for k, v in adapter.training_state().items()}
    resumed = LoraAdapter(tiny.lora.new_weights(LoraConfig(rank=4, seed=9)))
    resumed.load(saved_weights, saved_state)

    for each in (adapter, resumed):
        each.add_gradient(gradients(adapter, 3))
        each.step(AdamParams(weight_decay=0.1))
    assert_bit_equal(everything(resumed), everything(adapter))
    assert resumed.steps == 2


def test_loading_takes_copies(tiny: CausalLM, make_adapter: Any) -> None:
    source, target = make_adapter(tiny), make_adapter(tiny, seed=5)
    source.add_gradient(gradients(source, 1))
    source.step(AdamParams())
    target.load(source.weights, source.training_state())
    before = everything(source)
    target.add_gradient(gradients(target, 2))
    target.step(AdamParams(learning_rate=0.1))
    assert_bit_equal(everything(source), before)


def test_loading_without_training_state_resets_the_optimizer(tiny: CausalLM, make_adapter: Any) -> None:
    adapter, fresh = make_adapter(tiny), make_adapter(tiny)
    adapter.add_gradient(gradients(adapter, 1))
    adapter.step(AdamParams())
    adapter.add_gradient(gradients(adapter, 2))
    adapter.load(fresh.weights, None)
    assert adapter.steps == 0
    assert_bit_equal(everything(adapter), everything(fresh))


@pytest.mark.parametrize("damage", ["missing", "shape"])
def test_a_training_state_that_does_not_fit_changes_nothing(tiny: CausalLM, make_adapter: Any, damage: str) -> None:
    adapter, source = make_adapter(tiny), make_adapter(tiny, seed=5)
    source.add_gradient(gradients(source, 1))
    source.step(AdamParams())
    bad = source.training_state()
    name = [key for key in bad if key.startswith("exp_avg_sq/")][-1]
    if damage == "missing":
        del bad[name]
    else:
        bad[name] = bad[name][:-1]
    before = everything(adapter)
    with pytest.raises(InvalidInput, match=f"does not match the parameter {name.removeprefix('exp_avg_sq/')}"):
        adapter.load(source.weights, bad)
    assert_bit_equal(everything(adapter), before)
