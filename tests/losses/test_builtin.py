"""The built-in losses token by token, against numbers and derivatives worked out by hand."""

from __future__ import annotations

import inspect
import math
from functools import partial
from typing import TYPE_CHECKING

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from tinker_lightning import losses
from tinker_lightning.losses import builtin

if TYPE_CHECKING:
    from collections.abc import Callable

NUMBER = st.floats(-3, 3).filter(lambda x: abs(x) > 1e-3)


def value_and_slope(formula: Callable[..., Tensor], logprob: float, *arguments: float) -> tuple[float, float]:
    p = torch.tensor([logprob], dtype=torch.float64, requires_grad=True)
    loss = formula(p, *(torch.tensor([a], dtype=torch.float64) for a in arguments))
    (slope,) = torch.autograd.grad(loss.sum(), p)
    return loss.item(), slope.item()


@given(p=NUMBER, w=NUMBER)
def test_cross_entropy(p: float, w: float) -> None:  # R3.3
    assert value_and_slope(builtin.cross_entropy, p, w) == pytest.approx((-w * p, -w))


@given(p=NUMBER, q=NUMBER, a=NUMBER)
def test_importance_sampling_has_the_policy_gradient_weighted_by_the_ratio(p: float, q: float, a: float) -> None:
    r = math.exp(p - q)
    assert value_and_slope(builtin.importance_sampling, p, q, a) == pytest.approx((-r * a, -r * a))


@pytest.mark.parametrize(
    ("ratio", "advantage", "value", "slope"),
    [
        (1.0, 2.0, -2.0, -2.0),
        (1.5, 2.0, -2.4, 0.0),  # gone far enough: held at 1.2·A
        (0.5, 2.0, -1.0, -1.0),  # gone the wrong way: must be free to come back
        (1.5, -2.0, 3.0, 3.0),
        (0.5, -2.0, 1.6, 0.0),
        (1.5, 0.0, 0.0, 0.0),
    ],
)
def test_ppo_clips_only_what_has_gone_far_enough(ratio: float, advantage: float, value: float, slope: float) -> None:
    got = value_and_slope(builtin.ppo, math.log(ratio), 0.0, advantage)
    assert got == pytest.approx((value, slope))


@pytest.mark.parametrize(("low", "high"), [(1.0, 1.2), (0.8, 1.0), (1.0, 1.0)])
def test_ppo_on_a_threshold_still_learns(low: float, high: float) -> None:
    # At the first step of an iteration every ratio is exactly 1.
    assert value_and_slope(builtin.ppo, -1.0, -1.0, 3.0, low, high) == pytest.approx((-3.0, -3.0))


@pytest.mark.parametrize(("ratio", "weight"), [(1.0, 1.0), (1.1, 1.1), (1.5, 1.2), (0.5, 0.8)])
def test_cispo_clips_the_weight_and_keeps_the_gradient(ratio: float, weight: float) -> None:
    p, a = math.log(ratio), -2.0
    assert value_and_slope(builtin.cispo, p, 0.0, a) == pytest.approx((-weight * p * a, -weight * a))


@given(p=NUMBER, q=NUMBER, a=NUMBER, beta=st.floats(0, 2))
def test_dro_pulls_towards_the_sampling_policy(p: float, q: float, a: float, beta: float) -> None:
    expected = (-p * a + beta / 2 * (p - q) ** 2, -a + beta * (p - q))
    got = value_and_slope(partial(builtin.dro, beta=beta), p, q, a)
    assert got == pytest.approx(expected, abs=1e-12)


def test_gspo_has_one_ratio_for_the_sequence_and_a_gradient_for_each_token() -> None:
    p = torch.tensor([-1.0, -2.0, -0.5], dtype=torch.float64, requires_grad=True)
    q = torch.tensor([-1.2, -1.9, 4.0], dtype=torch.float64)
    advantages = torch.tensor([1.0, -2.0, 3.0], dtype=torch.float64)
    mask = torch.tensor([1.0, 0.5, 0.0], dtype=torch.float64)  # any number but zero counts
    s = math.exp((0.2 - 0.1) / 2)

    loss = builtin.gspo(p, q, advantages, mask, 0.5, 2.0)
    (slope,) = torch.autograd.grad(loss.sum(), p)

    assert loss.tolist() == pytest.approx([-s, 2 * s, -3 * s])
    assert slope.tolist() == pytest.approx([-s, 2 * s, -3 * s])


def test_gspo_clips_the_whole_sequence() -> None:
    p = torch.tensor([1.0, 1.0], dtype=torch.float64, requires_grad=True)
    loss = builtin.gspo(p, torch.zeros(2), torch.tensor([1.0, -1.0]), torch.ones(2))
    (slope,) = torch.autograd.grad(loss.sum(), p)
    assert loss.tolist() == pytest.approx([-1.2, math.e])
    assert slope.tolist() == pytest.approx([0.0, math.e])


def test_gspo_without_counted_tokens_has_the_ratio_one() -> None:
    loss = builtin.gspo(torch.full((2,), -5.0), torch.zeros(2), torch.ones(2), torch.zeros(2))
    assert loss.tolist() == [-1.0, -1.0]


@pytest.mark.parametrize("formula", [builtin.ppo, builtin.cispo])
def test_thresholds_may_be_a_number_and_a_tensor(formula: Callable[..., Tensor]) -> None:
    p, q, advantages = torch.log(torch.tensor([0.5, 1.5])), torch.zeros(2), torch.tensor([-1.0, 1.0])
    mixed = formula(p, q, advantages, 0.9, torch.tensor([1.0, 1.1]))
    each = torch.cat([formula(p[i : i + 1], q[:1], advantages[i : i + 1], 0.9, h) for i, h in enumerate((1.0, 1.1))])
    assert torch.equal(mixed, each)


@pytest.mark.parametrize("name", builtin.LOSSES)
def test_what_is_known_of_a_loss_is_so_of_its_formula_and_of_the_library_s(name: str) -> None:
    known = builtin.LOSSES[name]
    parameters = [*inspect.signature(known.formula).parameters.values()][1:]  # behind the log-probabilities
    taken = [each for each in parameters if each.kind is not inspect.Parameter.KEYWORD_ONLY]
    assert len(taken) == len(known.reads)
    defaults = [each.default for each in taken if each.default is not inspect.Parameter.empty]
    assert defaults == list(known.settings.values())
    of_library = [*inspect.signature(getattr(losses, name)).parameters.values()][2:]
    assert {each.name: each.default for each in of_library} == known.settings
    assert set(known.scaled_by) <= set(known.reads)
