"""Cross-entropy and distillation, against the distributions they are about."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.distributions import Categorical, kl_divergence

from tests.helpers.loss_cases import assert_same, batch, distillation, entry, value_and_gradient
from tinker_lightning import Datum
from tinker_lightning.losses import cross_entropy, topk_distillation


def weighted_nll(data: list[Datum], logprobs: list[Tensor]) -> Tensor:
    return -torch.stack([(entry(d, "weights") * p).sum() for d, p in zip(data, logprobs, strict=True)]).sum()


@pytest.mark.parametrize("case", [batch(), distillation()], ids=["[T]", "[T, K]"])
def test_cross_entropy_is_minus_the_weighted_sum(case: tuple[list[Datum], list[Tensor]]) -> None:  # R3.3, R4.3
    assert_same(value_and_gradient(cross_entropy, *case), value_and_gradient(weighted_nll, *case))


def test_cross_entropy_tells_the_perplexity_of_what_is_weighted() -> None:
    data, logprobs = batch()
    _, metrics = cross_entropy(data, logprobs)
    responses = torch.cat([each[1:] for each in logprobs])
    assert metrics["nll"].item() == pytest.approx(-responses.mean().item())
    assert metrics["perplexity"].item() == pytest.approx((-responses.mean()).exp().item())
    assert metrics["tokens"].item() == len(responses)


def test_nll_is_a_mean_by_weight_of_either_sign() -> None:
    data = [Datum.from_targets([5, 6], [6, 7], weights=[1.0, -0.5])]
    metrics = cross_entropy(data, [torch.tensor([-3.0, -2.0])])[1]
    assert metrics["nll"].item() == pytest.approx((3.0 - 0.5 * 2.0) / 0.5)


def test_cross_entropy_without_any_weight_is_zero_and_has_no_nll() -> None:
    data = [Datum.from_targets([1], [2], weights=[0.0])]
    loss, metrics = cross_entropy(data, [torch.tensor([-3.0])])
    assert (loss.item(), metrics) == (0.0, {"tokens": torch.tensor(0)})


def kl_with_the_rest_as_one(data: list[Datum], logprobs: list[Tensor]) -> Tensor:
    total = torch.zeros((), dtype=torch.float64)
    for datum, p in zip(data, logprobs, strict=True):
        teacher, student = (
            torch.cat([probs, 1 - probs.sum(-1, keepdim=True)], -1)
            for probs in (entry(datum, "teacher_logprobs").exp(), p.exp())
        )
        total = (
            total + (entry(datum, "weights")[:, 0] * kl_divergence(Categorical(teacher), Categorical(student))).sum()
        )
    return total


def kl_among_the_best(data: list[Datum], logprobs: list[Tensor]) -> Tensor:
    total = torch.zeros((), dtype=torch.float64)
    for datum, p in zip(data, logprobs, strict=True):
        teacher, student = Categorical(logits=entry(datum, "teacher_logprobs")), Categorical(logits=p)
        total = total + (entry(datum, "weights")[:, 0] * kl_divergence(teacher, student)).sum()
    return total


def test_distillation_counts_all_other_tokens_as_one() -> None:
    got = value_and_gradient(topk_distillation, *distillation())
    assert_same(got, value_and_gradient(kl_with_the_rest_as_one, *distillation()))
    # TRL 1.16.0 on the same inputs: forward KL with a tail bucket.
    assert (got[0], got[1].norm().item()) == pytest.approx((14.64730038540157, 1.7854738968393227), rel=1e-9)


def test_distillation_among_the_best_tokens() -> None:
    loss = partial(topk_distillation, tail="renormalize")
    assert_same(value_and_gradient(loss, *distillation()), value_and_gradient(kl_among_the_best, *distillation()))


def test_distillation_that_ignores_the_rest_is_cross_entropy_less_the_teachers_entropy() -> None:
    data, logprobs = distillation()
    as_weights = [
        Datum(d.model_input, {**d.loss_fn_inputs, "weights": entry(d, "teacher_logprobs").exp() * entry(d, "weights")})
        for d in data
    ]
    value, gradient = value_and_gradient(partial(topk_distillation, tail="ignore"), data, logprobs)
    nll, expected = value_and_gradient(cross_entropy, as_weights, logprobs)
    entropy = -sum((entry(d, "weights") * entry(d, "teacher_logprobs")).sum().item() for d in as_weights)
    assert_same((value, gradient), (nll - entropy, expected), tolerance=1e-6)  # weights are stored in float32


@given(seed=st.integers(0, 1000), k=st.integers(1, 8))
def test_distillation_is_a_lower_bound_of_the_whole_divergence(seed: int, k: int) -> None:
    few, all_of_them = (topk_distillation(*distillation(seed, (4,), k))[0].item() for k in (k, 8))
    assert -1e-9 <= few <= all_of_them + 1e-5


@given(seed=st.integers(0, 1000), tail=st.sampled_from(["bucket", "renormalize", "ignore"]))
def test_distillation_of_a_student_like_the_teacher_is_zero(seed: int, tail: str) -> None:
    data, _ = distillation(seed, (4,))
    value, gradient = value_and_gradient(
        partial(topk_distillation, tail=tail),  # type: ignore[arg-type]
        data,
        [entry(data[0], "teacher_logprobs")],
    )
    assert value == pytest.approx(0.0, abs=1e-12)
    if tail == "renormalize":  # the others' gradient is zero only through the softmax, which holds the sum at 1
        assert gradient.norm() < 1e-9


@pytest.mark.parametrize("tail", ["bucket", "renormalize", "ignore"])
def test_alternatives_without_weight_are_as_if_absent(tail: str) -> None:
    (datum,), (p,) = distillation(lengths=(4,))
    wide = Datum.from_targets(
        range(4),
        torch.cat([datum.loss_fn_inputs["target_tokens"].to_torch(), torch.zeros(4, 2, dtype=torch.int64)], -1),
        weights=torch.cat([entry(datum, "weights"), torch.zeros(4, 2)], -1),
        teacher_logprobs=torch.cat([entry(datum, "teacher_logprobs"), torch.full((4, 2), -0.1)], -1),
    )
    loss = partial(topk_distillation, tail=tail)  # type: ignore[arg-type]
    value, gradient = value_and_gradient(loss, [wide], [torch.cat([p, torch.full((4, 2), -0.1)], -1)])
    expected_value, expected = value_and_gradient(loss, [datum], [p])
    assert value == pytest.approx(expected_value)
    assert torch.allclose(gradient.reshape(4, 5)[:, :3], expected.reshape(4, 3))
    assert not gradient.reshape(4, 5)[:, 3:].any()


@pytest.mark.parametrize("tail", ["bucket", "renormalize", "ignore"])
def test_a_position_counts_by_its_weight(tail: str) -> None:
    data, logprobs = distillation()
    half = [Datum(d.model_input, {**d.loss_fn_inputs, "weights": 0.5 * entry(d, "weights")}) for d in data]
    loss = partial(topk_distillation, tail=tail)  # type: ignore[arg-type]
    value, gradient = value_and_gradient(loss, data, logprobs)
    assert_same(value_and_gradient(loss, half, logprobs), (value / 2, gradient / 2))


def test_distillation_tells_how_much_the_best_tokens_hold() -> None:
    data = [Datum.from_targets([1], [[5, 6]], weights=[[1, 1]], teacher_logprobs=torch.tensor([[0.5, 0.25]]).log())]
    _, metrics = topk_distillation(data, [torch.tensor([[0.1, 0.2]]).log()])
    assert {name: round(value.item(), 6) for name, value in metrics.items()} == {
        "teacher_mass": 0.75,
        "student_mass": 0.3,
        "agreement": 0.0,
    }


def test_a_student_that_is_sure_of_the_best_tokens_still_has_a_finite_gradient() -> None:
    data = [Datum.from_targets([1], [[5, 6]], weights=[[1, 1]], teacher_logprobs=torch.tensor([[0.5, 0.25]]).log())]
    value, gradient = value_and_gradient(topk_distillation, data, [torch.tensor([[0.5, 0.5]]).log()])
    assert value > 0
    assert torch.isfinite(gradient).all()
