"""The regularizers of the library: by numbers, in expectation over all tokens, and against another algorithm."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import pytest
import tinker
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from tests.helpers.fuzzing import examples
from tinker_lightning import Datum, ModelInput, Regularizer
from tinker_lightning.errors import InvalidDatum, InvalidInput
from tinker_lightning.losses import regularizers
from tinker_lightning.losses.regularizers import composition

if TYPE_CHECKING:
    from collections.abc import Callable

Fn = Any
VOCABULARY = 6


def datum(n: int, **inputs: Any) -> Datum:
    return Datum(ModelInput.from_ints(range(n)), {"target_tokens": list(range(n)), **inputs})


def logits(seed: int) -> Tensor:
    return torch.randn(VOCABULARY, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


# Estimates, in expectation over all tokens that the model might have sampled.


def exact_negative_entropy(p: Tensor, _: Tensor) -> Tensor:
    return (p.exp() * p).sum()


def exact_reverse(p: Tensor, r: Tensor) -> Tensor:
    return (p.exp() * (p - r)).sum()


def exact_forward(p: Tensor, r: Tensor) -> Tensor:
    return (r.exp() * (r - p)).sum()


EXACT: dict[str, tuple[Fn, Callable[[Tensor, Tensor], Tensor]]] = {
    "entropy": (regularizers.entropy, exact_negative_entropy),
    "reverse KL": (regularizers.reverse_kl, exact_reverse),
    "forward KL": (regularizers.forward_kl, exact_forward),
    "symmetric KL": (regularizers.symmetric_kl, lambda p, r: exact_reverse(p, r) + exact_forward(p, r)),
}


@pytest.mark.parametrize("name", EXACT)
def test_value_and_gradient_are_exact_in_expectation(name: str) -> None:
    fn, exact = EXACT[name]
    weights, reference = logits(0).requires_grad_(), logits(1).log_softmax(-1)
    p = weights.log_softmax(-1)
    expected = exact(p, reference)
    value, gradient = torch.zeros(()), torch.zeros(VOCABULARY)
    for token in range(VOCABULARY):
        loss, _ = fn([datum(1, reference_logprobs=reference[token : token + 1])], [p[token : token + 1]])
        chance = p[token].exp().item()
        value = value + chance * loss.detach()
        gradient = gradient + chance * torch.autograd.grad(loss, weights, retain_graph=True)[0]
    torch.testing.assert_close(value, expected.detach(), check_dtype=False, rtol=1e-6, atol=0)
    torch.testing.assert_close(
        gradient, torch.autograd.grad(expected, weights)[0], check_dtype=False, rtol=1e-5, atol=1e-7
    )


@pytest.mark.parametrize("name", EXACT)
def test_with_all_alternatives_there_is_nothing_to_estimate(name: str) -> None:
    fn, exact = EXACT[name]
    p, r = (torch.stack([logits(k), logits(k + 1)]).log_softmax(-1) for k in (0, 5))
    p = p.requires_grad_()
    given = Datum(
        ModelInput.from_ints([1, 2]),
        {"target_tokens": torch.arange(VOCABULARY).repeat(2, 1), "reference_logprobs": r},
    )
    loss, _ = fn([given], [p])
    expected = (exact(p[0], r[0]) + exact(p[1], r[1])) / 2
    torch.testing.assert_close(loss, expected, rtol=1e-6, atol=0)
    torch.testing.assert_close(
        torch.autograd.grad(loss, p)[0], torch.autograd.grad(expected, p)[0], rtol=1e-5, atol=1e-7
    )


def test_alternatives_without_weight_are_spare() -> None:
    targets: dict[str, Any] = {
        "target_tokens": [[1, 2, 0], [3, 0, 0], [0, 0, 0]],
        "weights": [[0.5, 0.5, 0], [1, 0, 0], [0, 0, 0]],
    }
    p = torch.tensor([[-1.0, -2.0, -9.0], [-3.0, -9.0, -9.0], [-9.0, -9.0, -9.0]])
    loss, _ = regularizers.entropy([Datum(ModelInput.from_ints([1, 2, 3]), targets)], [p])
    p = p.double()
    assert loss.item() == pytest.approx((p[0, :2] * p[0, :2].exp()).sum() / 2 + p[1, 0] * p[1, 0].exp() / 2)


@pytest.mark.parametrize("name", ["reverse KL", "forward KL", "symmetric KL"])
def test_a_divergence_is_never_below_0_and_0_from_itself(name: str) -> None:
    fn, _ = EXACT[name]
    p = logits(3).log_softmax(-1).float()
    assert fn([datum(VOCABULARY, reference_logprobs=p)], [p])[0].item() == 0.0
    for token in range(VOCABULARY):
        r = logits(4).log_softmax(-1).float()[token : token + 1]
        assert fn([datum(1, reference_logprobs=r)], [p[token : token + 1]])[0].item() > 0.0


@pytest.mark.parametrize("name", ["reverse KL", "forward KL", "symmetric KL"])
def test_what_stands_on_the_prompt_cannot_overflow(name: str) -> None:
    fn, _ = EXACT[name]
    p = torch.tensor([-300.0, -1.0]).requires_grad_()
    loss, _ = fn([datum(2, weights=[0, 1], reference_logprobs=[0.0, -2.0])], [p])
    loss.backward()
    assert p.grad is not None
    assert torch.isfinite(p.grad).all()
    assert p.grad[0] == 0.0
    assert p.grad[1] > 0.0


# Tokens that count.


@pytest.mark.parametrize(
    "fn",
    [
        regularizers.entropy,
        regularizers.reverse_kl,
        regularizers.forward_kl,
        regularizers.symmetric_kl,
        regularizers.length,
        regularizers.sparsity,
        regularizers.topology,
        regularizers.consistency,
    ],
)
def test_tokens_without_weight_and_the_ends_of_shorter_datums_do_not_count(fn: Fn) -> None:
    generator = torch.Generator().manual_seed(0)
    whole = [-5 * torch.rand(n, generator=generator) for n in (6, 4)]
    reference = [-5 * torch.rand(n, generator=generator) for n in (6, 4)]
    masks = [torch.tensor([0, 1, 1, 0, 1, 1.0]), torch.tensor([0, 0, 1, 0.5])]
    p = [each.clone().requires_grad_() for each in whole]
    masked, _ = fn([datum(len(q), weights=m, reference_logprobs=q) for m, q in zip(masks, reference, strict=True)], p)
    cut = [(each[mask != 0], q[mask != 0]) for each, q, mask in zip(whole, reference, masks, strict=True)]
    alone, _ = fn([datum(len(q), reference_logprobs=q) for _, q in cut], [each for each, _ in cut])
    torch.testing.assert_close(masked.detach(), alone)
    masked.backward()
    for each, mask in zip(p, masks, strict=True):
        assert each.grad is not None
        assert (each.grad[mask == 0] == 0).all()


@pytest.mark.parametrize(
    "fn", [regularizers.entropy, regularizers.length, regularizers.sparsity, regularizers.topology]
)
def test_a_batch_in_which_nothing_counts_is_0(fn: Fn) -> None:
    p = torch.tensor([-1.0, -2.0]).requires_grad_()
    loss, metrics = fn([datum(2, weights=[0.0, 0.0])], [p])
    loss.backward()
    assert loss.item() == 0.0
    assert p.grad is not None
    assert p.grad.tolist() == [0.0, 0.0]
    assert all(value.item() == 0 for value in metrics.values())


# One by one.


def test_consistency_pulls_the_two_of_a_pair_together() -> None:
    p = [torch.tensor(values).requires_grad_() for values in ([-1.0, -3.0], [-5.0], [-2.0], [-2.0, -2.0])]
    loss, metrics = regularizers.consistency([datum(len(each)) for each in p], p)
    assert loss.item() == (3.0**2 + 0.0) / 2
    assert metrics["gap"].item() == 1.5
    loss.backward()
    assert [each.grad.tolist() for each in p if each.grad is not None] == [[1.5, 1.5], [-3.0], [0.0], [0.0, 0.0]]


def test_consistency_needs_something_to_compare() -> None:
    pair = [datum(2), datum(2, weights=[0.0, 0.0])]
    with pytest.raises(InvalidDatum, match="datum 1: none of its tokens has a weight, so it cannot be compared"):
        regularizers.consistency(pair, [torch.tensor([-1.0, -2.0])] * 2)


def test_length_makes_long_responses_less_likely_than_the_others() -> None:
    p = [torch.full((n,), -1.0).requires_grad_() for n in (2, 3, 7)]
    loss, metrics = regularizers.length([datum(len(each)) for each in p], p, limit=3)
    assert loss.item() == pytest.approx(4 / 3)
    assert metrics["length"].item() == 4.0
    loss.backward()
    # The excess is 0, 0, 4, and each is held against the mean of the others.
    assert [each.grad[0].item() for each in p if each.grad is not None] == pytest.approx([-2 / 3, -2 / 3, 4 / 3])


def test_length_has_the_gradient_of_the_expected_length() -> None:
    # Two responses, of 1 and of 3 tokens; pairs of them are sampled independently.
    weight = torch.tensor(0.3, dtype=torch.float64, requires_grad=True)
    chances = torch.stack([torch.sigmoid(weight), 1 - torch.sigmoid(weight)])
    lengths = (1, 3)
    (expected,) = torch.autograd.grad((chances * torch.tensor(lengths)).sum(), weight, retain_graph=True)
    gradient = torch.zeros(())
    for i in range(2):
        for j in range(2):
            p = [(chances[k].log() / lengths[k]).expand(lengths[k]) for k in (i, j)]
            loss, _ = regularizers.length([datum(len(each)) for each in p], p)
            (each,) = torch.autograd.grad(loss, weight, retain_graph=True)
            gradient = gradient + (chances[i] * chances[j]).detach() * each
    torch.testing.assert_close(gradient, expected)


def test_sparsity_pulls_most_where_little_is_left() -> None:
    p = torch.tensor([-0.1, -1.0, -10.0]).requires_grad_()
    loss, metrics = regularizers.sparsity([datum(3)], [p], scale=0.5)
    loss.backward()
    assert loss.item() == pytest.approx((torch.tensor([1.2, 3.0, 21.0]).log().sum() / 3).item())
    assert metrics["active"].item() == pytest.approx(2 / 3)
    assert p.grad is not None
    assert p.grad.tolist() == pytest.approx([-1 / (3 * (0.5 + s)) for s in (0.1, 1.0, 10.0)])


def lives(curve: list[float]) -> float:
    """The total persistence of dimension 0 the long way: a level rises, components are born and merge."""
    parent: dict[int, int] = {}
    total = 0.0

    def root(i: int) -> int:
        while parent[i] != i:
            i = parent[i]
        return i

    for level, i in sorted((value, i) for i, value in enumerate(curve)):
        parent[i] = i
        for neighbor in (i - 1, i + 1):
            if neighbor in parent:
                one, other = root(i), root(neighbor)
                if one != other:
                    older, younger = sorted((one, other), key=lambda k: (curve[k], k))
                    total += level - curve[younger]
                    parent[younger] = older
    return total


@given(st.lists(st.integers(0, 6).map(float) | st.floats(0, 10, width=32), min_size=1, max_size=30))
def test_topology_is_the_persistence_of_the_surprisals(curve: list[float]) -> None:
    p = -torch.tensor(curve, dtype=torch.float64)
    loss, _ = regularizers.topology([datum(len(curve))], [p])
    assert loss.item() * len(curve) == pytest.approx(lives(curve), abs=1e-9)


@examples(15, 1000)
@given(st.lists(st.floats(0, 10, width=16), min_size=2, max_size=20, unique=True))
def test_topologys_gradient_is_that_of_its_value(curve: list[float]) -> None:
    p = -torch.tensor(curve, dtype=torch.float64)
    assert torch.autograd.gradcheck(
        lambda p: regularizers.topology([datum(len(curve))], [p])[0], p.requires_grad_(), eps=1e-9, atol=1e-5
    )


def test_topology_is_the_mean_over_datums() -> None:
    rugged, smooth = torch.tensor([-1.0, -5.0, -1.0, -5.0]), torch.tensor([-1.0, -2.0, -3.0])
    loss, metrics = regularizers.topology([datum(4), datum(3)], [rugged, smooth])
    assert loss.item() == 4.0 / 4 / 2
    assert metrics["peaks"].item() == 0.5


# Mistakes, and use.


@pytest.mark.parametrize(
    ("fn", "given", "kind", "message"),
    [
        (
            regularizers.reverse_kl,
            [datum(1)],
            InvalidDatum,
            "datum 0: reference_logprobs: missing; pass those of the ref",
        ),
        (
            regularizers.forward_kl,
            [datum(1, reference_logprobs=[-1.0, -2.0])],
            InvalidDatum,
            r"datum 0: reference_logprobs has the shape \[2\]",
        ),
        (regularizers.consistency, [datum(1)], InvalidInput, "1 datums are not a whole number of groups of 2"),
        *(
            (
                fn,
                [Datum(ModelInput.from_ints([1]), {"target_tokens": [[1, 2]]})],
                InvalidDatum,
                r"datum 0: its targets have the shape \[1, 2\], but this loss takes one target per position, \[T\]",
            )
            for fn in (regularizers.consistency, regularizers.length, regularizers.sparsity, regularizers.topology)
        ),
    ],
)
def test_datums_that_do_not_fit_are_named(fn: Fn, given: list[Datum], kind: Any, message: str) -> None:
    p = [torch.full(tuple(each.loss_fn_inputs["target_tokens"].shape), -1.0).requires_grad_() for each in given]
    with pytest.raises(kind, match=f"^regularizer 'mine': {message}"):
        composition.evaluate(given, p, None, [Regularizer(fn, 1.0, "mine")], step=0)


def test_all_of_them_on_the_official_sdks_datums() -> None:  # R5.4
    def official(n: int) -> tinker.Datum:
        inputs: Any = {"target_tokens": list(range(n)), "weights": [1.0] * n, "reference_logprobs": [-2.0] * n}
        inputs = {
            name: tinker.TensorData(data=data, dtype="int64" if name == "target_tokens" else "float32", shape=[n])
            for name, data in inputs.items()
        }
        return tinker.Datum(model_input=tinker.ModelInput.from_ints(list(range(n))), loss_fn_inputs=inputs)

    p = [torch.linspace(-3.0, -1.0, n).requires_grad_() for n in (5, 3)]
    fns: dict[str, Fn] = {
        "entropy": regularizers.entropy,
        "reverse": regularizers.reverse_kl,
        "forward": regularizers.forward_kl,
        "symmetric": regularizers.symmetric_kl,
        "consistency": regularizers.consistency,
        "length": partial(regularizers.length, limit=4),
        "sparsity": regularizers.sparsity,
        "topology": regularizers.topology,
    }
    terms = [Regularizer(fn, 0.1, name) for name, fn in fns.items()]
    _, telemetry = composition.evaluate([official(5), official(3)], p, None, terms, step=0)
    assert telemetry["regularizers"]["length"]["value"] == 0.5
    assert telemetry["regularizers"]["reverse"]["custom"]["kl"] == telemetry["regularizers"]["reverse"]["value"] > 0
