"""Preference losses, against formulas written pair by pair and the numbers of another library."""

from __future__ import annotations

import math
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.functional import cross_entropy

from tests.helpers.loss_cases import assert_same, batch, entry, value_and_gradient
from tinker_lightning.errors import InvalidDatum
from tinker_lightning.losses import contrastive, dpo, ipo, kto, orpo, preference_nll

if TYPE_CHECKING:
    from tinker_lightning import Datum


def dpo_by_hand(
    data: list[Datum],
    logprobs: list[Tensor],
    *,
    beta: float = 0.1,
    margin: float = 0.0,
    label_smoothing: float = 0.0,
    length_normalized: bool = False,
    reference_free: bool = False,
) -> Tensor:
    rewards = []
    for datum, p in zip(data, logprobs, strict=True):
        gain = p[1:] if reference_free else p[1:] - entry(datum, "reference_logprobs")[1:]
        rewards.append(beta * (gain.mean() if length_normalized else gain.sum()))
    terms = []
    for chosen, rejected in zip(rewards[::2], rewards[1::2], strict=True):
        wins = 1 / (1 + torch.exp(-(chosen - rejected - margin)))
        terms.append(-(1 - label_smoothing) * wins.log() - label_smoothing * (1 - wins).log())
    return torch.stack(terms).mean()


SETTINGS: dict[str, dict[str, Any]] = {
    "as in the paper": {},
    "a large beta": {"beta": 1.5},
    "with a margin": {"margin": 0.7},
    "with label smoothing": {"label_smoothing": 0.2},
    "by length": {"length_normalized": True},
    "without a reference": {"reference_free": True},
    "SimPO": {"beta": 2.0, "margin": 1.0, "length_normalized": True, "reference_free": True},
    "all at once": {"beta": 0.5, "margin": 0.3, "label_smoothing": 0.1, "length_normalized": True},
}


@pytest.mark.parametrize("what", SETTINGS)
@pytest.mark.parametrize("seed", range(3))
def test_dpo_equals_its_formula_pair_by_pair(what: str, seed: int) -> None:  # R3.5, R4.3
    got = value_and_gradient(partial(dpo, **SETTINGS[what]), *batch(seed))
    assert_same(got, value_and_gradient(partial(dpo_by_hand, **SETTINGS[what]), *batch(seed)))


@pytest.mark.parametrize(
    ("settings", "value", "norm"),
    [
        ({"beta": 0.1}, 0.6573099150902824, 0.07364712419886398),
        ({"beta": 2.0}, 0.5468087379421104, 1.4623417623832726),
        ({"beta": 0.1, "length_normalized": True}, 0.6776260542540133, 0.02571640476197687),
        ({"beta": 2.0, "length_normalized": True}, 0.46093547083570924, 0.39865396511826356),
        ({**SETTINGS["SimPO"], "label_smoothing": 0.1}, 0.6674244245245152, 0.3387767601045972),
    ],
)
def test_dpo_has_the_numbers_of_trl(settings: dict[str, Any], value: float, norm: float) -> None:
    # TRL 1.16.0 on the same inputs: DPO with loss_type "sigmoid" and "sigmoid_norm", CPO with "simpo".
    got = value_and_gradient(partial(dpo, **settings), *batch())
    assert (got[0], got[1].norm().item()) == pytest.approx((value, norm), rel=1e-9)


def test_dpo_logs_what_trl_logs() -> None:
    _, metrics = dpo(*batch(), beta=2.0)
    assert {name: value.item() for name, value in metrics.items()} == pytest.approx(
        {
            "rewards/chosen": -0.04216939390025468,
            "rewards/rejected": -1.56255942264598,
            "rewards/margins": 1.5203900287457255,
            "rewards/accuracies": 2 / 3,
            "chosen_nll": -torch.stack([p[1:].mean() for p in batch()[1][::2]]).mean().item(),
        }
    )


@pytest.mark.parametrize("loss", [partial(dpo, length_normalized=True), ipo, partial(ipo, length_normalized=False)])
def test_rewards_are_sums_over_tokens_as_in_trl_also_if_the_loss_compares_means(loss: Any) -> None:
    data, logprobs = batch()
    names = ("rewards/chosen", "rewards/rejected", "rewards/margins", "rewards/accuracies")
    _, expected = dpo(data, logprobs, beta=0.3)
    _, metrics = loss(data, logprobs, beta=0.3)
    assert [metrics[name] for name in names] == [expected[name] for name in names]


@pytest.mark.parametrize("length_normalized", [True, False])
def test_ipo_equals_its_formula_pair_by_pair(length_normalized: bool) -> None:
    def expected(data: list[Datum], logprobs: list[Tensor]) -> Tensor:
        gains = [p[1:] - entry(datum, "reference_logprobs")[1:] for datum, p in zip(data, logprobs, strict=True)]
        scores = [gain.mean() if length_normalized else gain.sum() for gain in gains]
        gaps = [chosen - rejected for chosen, rejected in zip(scores[::2], scores[1::2], strict=True)]
        return torch.stack([(gap - 1 / (2 * 0.3)) ** 2 for gap in gaps]).mean()

    loss = partial(ipo, beta=0.3, length_normalized=length_normalized)
    assert_same(value_and_gradient(loss, *batch()), value_and_gradient(expected, *batch()))


def test_orpo_equals_its_formula_pair_by_pair() -> None:
    def expected(data: list[Datum], logprobs: list[Tensor]) -> Tensor:
        likelihoods = [p[1:].mean().exp() for p in logprobs]
        terms = []
        for chosen, rejected in zip(likelihoods[::2], likelihoods[1::2], strict=True):
            ratio = (chosen / (1 - chosen)) / (rejected / (1 - rejected))
            terms.append(-chosen.log() - 0.7 * torch.log(1 / (1 + torch.exp(-ratio.log()))))
        return torch.stack(terms).mean()

    got = value_and_gradient(partial(orpo, beta=0.7), *batch())
    assert_same(got, value_and_gradient(expected, *batch()))


KTO_SETTINGS: dict[str, dict[str, Any]] = {
    "as in the paper": {},
    "with weights": {"beta": 0.7, "desirable_weight": 1.5, "undesirable_weight": 0.6},
    "only desirable": {"undesirable_weight": 0.0},
    "APO-zero": {"beta": 0.7, "kl": False, "desirable_weight": 1.3},
}


def kto_of_trl(
    data: list[Datum],
    logprobs: list[Tensor],
    *,
    beta: float = 0.1,
    desirable_weight: float = 1.0,
    undesirable_weight: float = 1.0,
    kl: bool = True,
) -> Tensor:
    """The formulas of `kto` and `apo_zero_unpaired` in TRL's documentation, for each class of answers on its own."""
    gains = [(p - entry(datum, "reference_logprobs"))[1:].sum() for datum, p in zip(data, logprobs, strict=True)]
    labels = [entry(datum, "label").item() for datum in data]
    nothing = 0 * torch.stack(gains).sum()  # a gradient for answers that have none
    if kl:
        z = torch.stack(gains[1::2]).mean().detach().clamp(min=0)
        gains, labels = gains[::2], labels[::2]
    else:
        z = torch.zeros((), dtype=torch.float64)
    chosen = [1 - 1 / (1 + torch.exp(-beta * (gain - z))) for gain, label in zip(gains, labels, strict=True) if label]
    rejected = [
        1 - 1 / (1 + torch.exp(-beta * (z - gain))) for gain, label in zip(gains, labels, strict=True) if not label
    ]
    terms = [desirable_weight * each for each in chosen] + [undesirable_weight * each for each in rejected]
    return torch.stack(terms).mean() + nothing


@pytest.mark.parametrize("what", KTO_SETTINGS)
@pytest.mark.parametrize("seed", range(4))
def test_kto_equals_the_formula_of_trl(what: str, seed: int) -> None:  # R3.5, R4.3
    got = value_and_gradient(partial(kto, **KTO_SETTINGS[what]), *batch(seed))
    assert_same(got, value_and_gradient(partial(kto_of_trl, **KTO_SETTINGS[what]), *batch(seed)))


def test_both_signs_of_the_kl_estimate_are_tested() -> None:
    assert {kto(*batch(seed))[1]["kl"].item() > 0 for seed in range(4)} == {True, False}


def test_the_mismatched_answers_of_kto_have_no_gradient() -> None:
    data, logprobs = batch()
    leaves = [each.clone().requires_grad_() for each in logprobs]
    gradients = torch.autograd.grad(kto(data, leaves)[0], leaves)
    assert [bool(gradient.any()) for gradient in gradients] == [True, False] * 3


def test_kto_logs_what_trl_logs_and_nothing_of_answers_that_are_absent() -> None:
    data, logprobs = batch()
    rewards = [
        0.5 * (p - entry(datum, "reference_logprobs"))[1:].sum().item() for datum, p in zip(data, logprobs, strict=True)
    ]
    z = max(0.0, sum(rewards[1::2]) / 3 / 0.5)
    _, metrics = kto(data, logprobs, beta=0.5)
    chosen, rejected = (rewards[0] + rewards[4]) / 2, rewards[2]
    rights = [rewards[0] > 0.5 * z, rewards[4] > 0.5 * z, rewards[2] < 0.5 * z]
    assert {name: value.item() for name, value in metrics.items()} == pytest.approx(
        {
            "rewards/chosen": chosen,
            "rewards/rejected": rejected,
            "rewards/margins": chosen - rejected,
            "rewards/accuracies": sum(rights) / 3,
            "chosen_nll": -(logprobs[0][1:].mean() + logprobs[4][1:].mean()).item() / 2,
            "kl": z,
        }
    )
    only_rejected = kto(data[2:4], logprobs[2:4])[1]
    assert only_rejected.keys() == {"rewards/rejected", "rewards/accuracies", "kl"}


def test_labels_that_are_no_labels() -> None:
    data, logprobs = batch()
    data[2] = data[2].with_inputs(label=-1.0)
    with pytest.raises(InvalidDatum, match=r"label must be 1 \(desirable\) or 0 \(undesirable\), got \[1\.0, -1\.0"):
        kto(data, logprobs)


@given(seed=st.integers(0, 1000), beta=st.floats(0.01, 5), length_normalized=st.booleans())
def test_dpo_at_the_reference_is_log_2(seed: int, beta: float, length_normalized: bool) -> None:
    data, _ = batch(seed)
    at_the_reference = [entry(datum, "reference_logprobs") for datum in data]
    loss, metrics = dpo(data, at_the_reference, beta=beta, length_normalized=length_normalized)
    assert loss.item() == pytest.approx(math.log(2))
    assert metrics["rewards/accuracies"].item() == 0.0


@given(x=st.floats(-500, 500), label_smoothing=st.floats(0, 0.49))
def test_preferences_of_any_strength_have_a_finite_slope(x: float, label_smoothing: float) -> None:
    chosen = torch.tensor(x, dtype=torch.float64, requires_grad=True)
    loss = preference_nll(chosen, torch.zeros(()), label_smoothing=label_smoothing)
    (slope,) = torch.autograd.grad(loss, chosen)
    wins = 1 / (1 + math.exp(-x)) if x > 0 else math.exp(x) / (1 + math.exp(x))
    assert slope.item() == pytest.approx(wins - 1 + label_smoothing, abs=1e-12)


@given(x=st.floats(-20, 20), margin=st.floats(-3, 3))
def test_a_margin_is_a_head_start_of_the_rejected(x: float, margin: float) -> None:
    chosen, rejected = torch.tensor(x, dtype=torch.float64), torch.zeros((), dtype=torch.float64)
    with_margin = preference_nll(chosen, rejected, margin=margin)
    assert torch.isclose(with_margin, preference_nll(chosen, rejected + margin))


def test_contrastive_picks_the_first_of_each_group() -> None:  # R3.5
    def expected(data: list[Datum], logprobs: list[Tensor]) -> Tensor:
        scores = torch.stack([p[1:].mean() for p in logprobs]).view(2, 3)
        return cross_entropy(scores / 0.5, torch.zeros(2, dtype=torch.int64))

    loss = partial(contrastive, group_size=3, temperature=0.5)
    assert_same(value_and_gradient(loss, *batch()), value_and_gradient(expected, *batch()))


@given(temperature=st.floats(0.1, 5), length_normalized=st.booleans())
def test_contrastive_of_pairs_is_dpo_without_a_reference(temperature: float, length_normalized: bool) -> None:
    pairs = partial(contrastive, temperature=temperature, length_normalized=length_normalized)
    free = partial(dpo, beta=1 / temperature, length_normalized=length_normalized, reference_free=True)
    assert_same(value_and_gradient(pairs, *batch()), value_and_gradient(free, *batch()))


def test_contrastive_tells_how_often_the_right_one_wins() -> None:
    data, _ = batch(lengths=(2,) * 6)
    scores = (-1.0, -2.0, -3.0, -5.0, -4.0, -7.0)
    _, metrics = contrastive(data, [torch.tensor([0.0, score]) for score in scores], group_size=3)
    assert (metrics["accuracy"].item(), metrics["score_margin"].item()) == (0.5, 0.0)
