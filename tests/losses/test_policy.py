"""Policy losses, against formulas written datum by datum and the numbers of another library."""

from __future__ import annotations

import re
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from tests.helpers.loss_cases import assert_same, batch, entry, value_and_gradient
from tinker_lightning import Datum, losses
from tinker_lightning.errors import InvalidInput
from tinker_lightning.losses import grpo, gspo, importance_sampling, ppo, reinforce

if TYPE_CHECKING:
    from collections.abc import Callable


def summed(terms: Callable[[Tensor, Callable[[str], Tensor]], Tensor]) -> Callable[..., Tensor]:
    """A loss from the terms of one datum's tokens."""

    def loss(data: list[Datum], logprobs: list[Tensor]) -> Tensor:
        each = [terms(p, partial(entry, d)).sum() for d, p in zip(data, logprobs, strict=True)]
        return torch.stack(each).sum()

    return loss


def clipped(p: Tensor, x: Callable[[str], Tensor], low: float = 0.8, high: float = 1.2) -> Tensor:
    """PPO by cases: where the ratio has gone far enough, a constant."""
    ratio, advantages = torch.exp(p) / torch.exp(x("logprobs")), x("advantages")
    too_high, too_low = (advantages > 0) & (ratio > high), (advantages < 0) & (ratio < low)
    bound = torch.where(too_high, torch.full_like(p, high), torch.full_like(p, low))
    return -torch.where(too_high | too_low, bound, ratio) * advantages


def weighed(p: Tensor, x: Callable[[str], Tensor]) -> Tensor:
    ratio = torch.exp(p.detach() - x("logprobs"))
    return -torch.clip(ratio, 0.8, 1.2) * p * x("advantages")


def by_sequence(p: Tensor, x: Callable[[str], Tensor]) -> Tensor:
    """GSPO by its gradient: the ratio's value at every token, times its own log-probability's slope."""
    counted = x("sequence_ratio_mask").bool()
    ratio = torch.exp((p.detach() - x("logprobs"))[counted].mean())
    advantages = x("advantages")
    free = torch.where(advantages > 0, ratio <= 1.2, ratio >= 0.8)
    value = torch.where(free, ratio, ratio.clip(0.8, 1.2)) * advantages
    return -(value + torch.where(free, value, 0.0) * (p - p.detach()))


SERVER_LOSSES: dict[str, tuple[Callable[..., Any], Callable[..., Tensor]]] = {
    "importance_sampling": (
        importance_sampling,
        summed(lambda p, x: -torch.exp(p) / torch.exp(x("logprobs")) * x("advantages")),
    ),
    "ppo": (ppo, summed(clipped)),
    "cispo": (losses.cispo, summed(weighed)),
    "dro": (
        losses.dro,
        summed(lambda p, x: -p * x("advantages") + 0.025 * (p - x("logprobs")) * (p - x("logprobs"))),
    ),
    "gspo": (gspo, summed(by_sequence)),
}


@pytest.mark.parametrize("name", SERVER_LOSSES)
@pytest.mark.parametrize("seed", range(5))
def test_a_loss_equals_its_formula_datum_by_datum(name: str, seed: int) -> None:  # R3.3
    loss, formula = SERVER_LOSSES[name]
    case = batch(seed)
    assert_same(value_and_gradient(loss, *case), value_and_gradient(formula, *case))


@given(seed=st.integers(0, 1000))
def test_at_the_policy_that_sampled_ppo_and_gspo_are_importance_sampling(seed: int) -> None:
    data, _ = batch(seed)
    logprobs = [entry(datum, "logprobs") for datum in data]
    expected = value_and_gradient(importance_sampling, data, logprobs)
    for loss in (ppo, gspo, partial(grpo, beta=0.0, reduction="sum")):
        assert_same(value_and_gradient(loss, data, logprobs), expected)


def test_thresholds_may_come_with_the_datums() -> None:
    (datum, other), logprobs = batch(lengths=(5, 5))
    own = Datum(datum.model_input, {**datum.loss_fn_inputs, "clip_low_threshold": [0.99] * 5})
    low, usual = partial(ppo, clip_low_threshold=0.99), ppo
    value, gradient = value_and_gradient(ppo, [own, other], logprobs)
    first, second = (
        value_and_gradient(low, [datum], logprobs[:1]),
        value_and_gradient(usual, [other], logprobs[1:]),
    )
    assert_same((value, gradient), (first[0] + second[0], torch.cat([first[1], second[1]])), tolerance=1e-7)
    assert gradient.ne(value_and_gradient(ppo, [datum, other], logprobs)[1]).any()


def test_metrics_are_of_tokens_with_an_advantage() -> None:
    inputs: dict[str, Any] = {"logprobs": [-9.0, -1.0, -1.0], "advantages": [0.0, 1.0, -1.0]}
    data = [
        Datum.from_targets(range(3), range(3), **inputs),
        Datum.from_targets([1], [2], logprobs=[-2], advantages=[0]),
    ]
    _, metrics = ppo(data, [torch.tensor([-1.0, -1.0, 0.0]), torch.tensor([-1.0])])
    values = {name: value.item() for name, value in metrics.items()}
    assert values == pytest.approx(
        {"ratio": (1 + torch.e) / 2, "kl_old_new": -0.5, "action_tokens": 2, "clip_fraction": 0.5}
    )


@pytest.mark.parametrize("name", ["importance_sampling", "ppo", "cispo", "dro", "gspo"])
def test_metrics_without_a_value_are_absent(name: str) -> None:
    inputs: dict[str, Any] = {"logprobs": [-1.0], "advantages": [0.0], "sequence_ratio_mask": [1.0]}
    _, metrics = getattr(losses, name)([Datum.from_targets([1], [2], **inputs)], [torch.tensor([-1.5])])
    assert metrics == {"action_tokens": torch.tensor(0)}


def grpo_by_hand(estimator: Callable[[Tensor, Tensor], Tensor], beta: float, reduction: str) -> Callable[..., Tensor]:
    def loss(data: list[Datum], logprobs: list[Tensor]) -> Tensor:
        each = [
            (clipped(p, partial(entry, d)) + beta * estimator(p, entry(d, "reference_logprobs")))[1:]
            for d, p in zip(data, logprobs, strict=True)
        ]
        if reduction == "sequence":
            return torch.stack([terms.mean() for terms in each]).mean()
        return torch.cat(each).mean() if reduction == "token" else torch.cat(each).sum()

    return loss


@pytest.mark.parametrize("reduction", ["sequence", "token", "sum"])
@pytest.mark.parametrize(
    ("estimator", "formula"),
    [
        ("k1", lambda p, r: p - r),
        ("k2", lambda p, r: (p - r) ** 2 / 2),
        ("k3", lambda p, r: torch.exp(r) / torch.exp(p) - 1 - r + p),
    ],
)
def test_grpo_equals_its_formula_datum_by_datum(  # R4.3
    estimator: str, formula: Callable[[Tensor, Tensor], Tensor], reduction: str
) -> None:
    loss = partial(grpo, beta=0.3, estimator=estimator, reduction=reduction)  # type: ignore[arg-type]
    expected = grpo_by_hand(formula, 0.3, reduction)
    assert_same(value_and_gradient(loss, *batch()), value_and_gradient(expected, *batch()))


@pytest.mark.parametrize(
    ("settings", "value", "norm"),
    [
        ({"beta": 0.0}, 0.011818928385921931, 0.19915155618703403),
        ({"beta": 0.04}, 0.020480356889643586, 0.1992729487522346),
        ({"beta": 0.5}, 0.12008678468244267, 0.21633121824002854),
        ({"beta": 0.04, "reduction": "token"}, 0.29445989291509433, 0.2717247112206656),
        ({"beta": 0.5, "reduction": "token"}, 0.41494135001884064, 0.2646149208378511),
    ],
)
def test_grpo_has_the_numbers_of_trl(settings: dict[str, Any], value: float, norm: float) -> None:
    # TRL 1.16.0 on the same inputs, with loss_type "grpo" and "bnpo".
    got = value_and_gradient(partial(grpo, **settings), *batch())
    assert (got[0], got[1].norm().item()) == pytest.approx((value, norm), rel=1e-9)


def test_cispo_has_the_numbers_of_trl() -> None:
    # TRL 1.16.0 on the same inputs; it clips from above only.
    got = value_and_gradient(partial(losses.cispo, clip_low_threshold=0.0), *batch())
    assert (got[0], got[1].norm().item()) == pytest.approx((-1.9300203950184294, 5.48099461727441), rel=1e-9)


def test_grpo_without_a_pull_needs_no_reference() -> None:
    data, logprobs = batch()
    without = [
        Datum(d.model_input, {n: t for n, t in d.loss_fn_inputs.items() if n != "reference_logprobs"}) for d in data
    ]
    loss, metrics = grpo(without, logprobs, beta=0.0)
    assert loss.item() == grpo(data, logprobs, beta=0.0)[0].item()
    assert "kl" not in metrics


@pytest.mark.parametrize("filler", [0.0, -1e9, 1e9])
def test_what_stands_on_the_prompt_does_not_matter_to_grpo(filler: float) -> None:
    data, logprobs = batch()
    filled = []
    for datum in data:
        inputs = {name: entry(datum, name) for name in ("logprobs", "reference_logprobs")}
        for values in inputs.values():
            values[0] = filler
        filled.append(Datum(datum.model_input, {**datum.loss_fn_inputs, **inputs}))
    assert_same(value_and_gradient(grpo, filled, logprobs), value_and_gradient(grpo, data, logprobs))


@pytest.mark.parametrize("reduction", ["sequence", "token", "sum"])
def test_a_response_that_was_cut_away_adds_nothing(reduction: Any) -> None:
    data, logprobs = batch(lengths=(4, 4))
    cut = Datum(data[1].model_input, {**data[1].loss_fn_inputs, "weights": torch.zeros(4)})
    loss = partial(grpo, reduction=reduction)
    value, gradient = value_and_gradient(loss, [data[0], cut], logprobs)
    alone, expected = value_and_gradient(loss, data[:1], logprobs[:1])
    share = 2 if reduction == "sequence" else 1  # its empty sequence is still one of two
    assert_same((value, gradient), (alone / share, torch.cat([expected / share, torch.zeros(4)])))


@pytest.mark.parametrize("group_size", [None, 2, 3])
def test_reinforce_compares_each_reward_with_those_of_its_group(group_size: int | None) -> None:
    def expected(data: list[Datum], logprobs: list[Tensor]) -> Tensor:
        size, terms = group_size or len(data), []
        for i, (datum, p) in enumerate(zip(data, logprobs, strict=True)):
            group = range(i - i % size, i - i % size + size)
            others = [entry(data[j], "reward").item() for j in group if j != i]
            advantage = entry(datum, "reward").item() - sum(others) / len(others)
            terms.append(-advantage * (entry(datum, "weights") * p).sum())
        return torch.stack(terms).mean()

    loss = partial(reinforce, group_size=group_size)
    assert_same(value_and_gradient(loss, *batch()), value_and_gradient(expected, *batch()))


@pytest.mark.parametrize("baseline", ["leave_one_out", "mean"])
def test_a_response_that_was_cut_away_is_still_one_to_compare_with(baseline: Any) -> None:
    data, logprobs = batch(lengths=(4, 4))
    cut = Datum(data[1].model_input, {**data[1].loss_fn_inputs, "weights": torch.zeros(4)})
    first, second = (entry(datum, "reward").item() for datum in data)
    advantage = (first - second) * (1.0 if baseline == "leave_one_out" else 0.5)
    loss, metrics = reinforce([data[0], cut], logprobs, baseline=baseline)
    assert loss.item() == pytest.approx(-advantage * (entry(data[0], "weights") * logprobs[0]).sum().item() / 2)
    assert metrics["reward"].item() == pytest.approx((first + second) / 2)


@given(shift=st.floats(-5, 5), baseline=st.sampled_from(["leave_one_out", "mean"]))
def test_reinforce_does_not_care_for_rewards_that_all_have(shift: float, baseline: Any) -> None:
    data, logprobs = batch()
    shifted = [Datum(d.model_input, {**d.loss_fn_inputs, "reward": entry(d, "reward") + shift}) for d in data]
    loss = partial(reinforce, baseline=baseline)
    assert_same(value_and_gradient(loss, shifted, logprobs), value_and_gradient(loss, data, logprobs), tolerance=1e-5)


def test_reinforce_with_a_custom_baseline() -> None:
    data, logprobs = batch()
    loss, metrics = reinforce(data, logprobs, baseline=0.5)
    rewards = [entry(d, "reward").item() for d in data]
    sums = [p[1:].sum().item() for p in logprobs]
    assert loss.item() == pytest.approx(-sum((r - 0.5) * s for r, s in zip(rewards, sums, strict=True)) / len(data))
    assert metrics["reward"].item() == pytest.approx(sum(rewards) / len(rewards))
    assert metrics["action_nll"].item() == pytest.approx(-torch.cat([p[1:] for p in logprobs]).mean().item())


@pytest.mark.parametrize("rewards", [[1, 0, 5, 5], [1.0, 0.0, 5.0, 5.0], torch.tensor([1, 0, 5, 5])])
def test_group_advantages_takes_any_numbers(rewards: Any) -> None:
    assert losses.group_advantages(rewards, group_size=2).tolist() == [0.5, -0.5, 0.0, 0.0]


@pytest.mark.parametrize(
    ("rewards", "message"),
    [
        (["good", "bad"], "rewards must be numbers, one per datum, got ['good', 'bad']"),
        ([[1.0, 0.0], [2.0, 3.0]], "rewards has the shape [2, 2], but there must be one per datum, [B]"),
        ([], "rewards has the shape [0], but"),
        ([1.0, float("nan")], "rewards has NaN or infinite entries; leave those datums out"),
    ],
)
def test_rewards_that_are_none_raise(rewards: Any, message: str) -> None:
    with pytest.raises(InvalidInput, match=re.escape(message)):
        losses.group_advantages(rewards)


def test_group_advantages_in_standard_deviations() -> None:
    rewards = torch.tensor([1.0, 0.0, 0.0, 1.0, 2.0, 9.0])
    got = losses.group_advantages(rewards, group_size=3, scale=True)
    expected = [(r - g.mean()) / (g.std() + 1e-4) for g in rewards.split(3) for r in g]
    assert torch.allclose(got, torch.stack(expected))
    same = losses.group_advantages(torch.ones(4), scale=True)
    assert same.tolist() == [0.0] * 4  # a group that agrees teaches nothing, and divides by nothing
