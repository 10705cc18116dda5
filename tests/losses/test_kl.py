"""The estimators of KL: what they estimate, and what their gradients do, over whole distributions."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.distributions import Categorical, kl_divergence

from tests.helpers.loss_cases import assert_same, batch, entry, value_and_gradient
from tinker_lightning import Datum
from tinker_lightning.losses import cross_entropy, kl_regularized
from tinker_lightning.losses.kl import k1, k2, k3

if TYPE_CHECKING:
    from collections.abc import Callable

LOGPROB = st.floats(-20, 0)


@given(p=LOGPROB, r=LOGPROB)
def test_k2_and_k3_are_never_negative_and_zero_where_both_agree(p: float, r: float) -> None:
    model, reference = torch.tensor(p, dtype=torch.float64), torch.tensor(r, dtype=torch.float64)
    for estimator in (k2, k3):
        assert estimator(model, reference) >= 0
        assert estimator(model, model) == 0


def distributions(seed: int) -> tuple[Tensor, Tensor]:
    random = torch.Generator().manual_seed(seed)
    logits, reference = torch.randn(2, 6, generator=random, dtype=torch.float64)
    return logits.requires_grad_(), reference.log_softmax(-1)


@given(seed=st.integers(0, 10_000))
def test_k1_and_k3_are_unbiased(seed: int) -> None:
    logits, reference = distributions(seed)
    p = logits.log_softmax(-1)
    expected = kl_divergence(Categorical(logits=p), Categorical(logits=reference))
    for estimator in (k1, k3):
        assert torch.allclose((p.exp() * estimator(p, reference)).sum(), expected)


@given(seed=st.integers(0, 10_000))
def test_their_gradients_on_sampled_tokens(seed: int) -> None:
    """As a loss, k1 pulls nowhere, k2 follows KL(model ‖ reference) and k3 follows KL(reference ‖ model)."""
    logits, reference = distributions(seed)

    def slope(term: Tensor) -> Tensor:
        return torch.autograd.grad(term, logits)[0]

    def on_samples(estimator: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
        p = logits.log_softmax(-1)
        return slope((p.detach().exp() * estimator(p, reference)).sum())  # tokens come from p, without its gradient

    model, other = Categorical(logits=logits), Categorical(logits=reference)
    assert torch.allclose(on_samples(k1), torch.zeros(6, dtype=torch.float64), atol=1e-12)
    assert torch.allclose(on_samples(k2), slope(kl_divergence(model, other)))
    assert torch.allclose(on_samples(k3), slope(kl_divergence(other, Categorical(logits=logits))))


@pytest.mark.parametrize(
    ("estimator", "formula"),
    [
        ("k1", lambda p, r: p - r),
        ("k2", lambda p, r: (p - r) ** 2 / 2),
        ("k3", lambda p, r: torch.exp(r) / torch.exp(p) - 1 - r + p),
    ],
)
def test_kl_regularized_is_cross_entropy_and_a_pull(  # R3.5
    estimator: str, formula: Callable[[Tensor, Tensor], Tensor]
) -> None:
    def expected(data: list[Datum], logprobs: list[Tensor]) -> Tensor:
        terms = [
            (entry(d, "weights") * (-p + 0.3 * formula(p, entry(d, "reference_logprobs")))).sum()
            for d, p in zip(data, logprobs, strict=True)
        ]
        return torch.stack(terms).sum()

    loss = partial(kl_regularized, beta=0.3, estimator=estimator)  # type: ignore[arg-type]
    assert_same(value_and_gradient(loss, *batch()), value_and_gradient(expected, *batch()))


def test_kl_regularized_without_a_pull_is_cross_entropy() -> None:
    expected = value_and_gradient(cross_entropy, *batch())
    assert_same(value_and_gradient(partial(kl_regularized, beta=0.0), *batch()), expected)


def test_a_tokens_pull_ends_one_by_beta_above_the_reference() -> None:
    data = [Datum.from_targets([1], [2], weights=[1.0], reference_logprobs=[-6.0])]
    _, gradient = value_and_gradient(partial(kl_regularized, beta=0.25), data, [torch.tensor([-2.0])])
    assert gradient.item() == 0.0


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
@pytest.mark.parametrize("filler", [0.0, -1e9, 1e9])
def test_what_stands_on_the_prompt_does_not_matter(estimator: str, filler: float) -> None:
    data, logprobs = batch()
    filled = []
    for datum in data:
        reference = entry(datum, "reference_logprobs")
        reference[0] = filler
        filled.append(Datum(datum.model_input, {**datum.loss_fn_inputs, "reference_logprobs": reference}))
    loss = partial(kl_regularized, estimator=estimator)  # type: ignore[arg-type]
    assert_same(value_and_gradient(loss, filled, logprobs), value_and_gradient(loss, data, logprobs))


def test_the_divergence_is_logged_by_token() -> None:
    data, logprobs = batch()
    _, metrics = kl_regularized(data, logprobs, estimator="k1")
    each = [(p - entry(d, "reference_logprobs"))[1:] for d, p in zip(data, logprobs, strict=True)]
    assert metrics["kl"].item() == pytest.approx(torch.cat(each).mean().item())
    assert metrics["nll"].item() == pytest.approx(cross_entropy(data, logprobs)[1]["nll"].item())
