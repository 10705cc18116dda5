"""Surrogates: the gradient that arrives on a server with known factors is that of the custom loss (R3.3)."""

import itertools
from typing import Any

import pytest
import torch

from tinker_lightning.client.dialects.surrogate import Surrogate, completed, times
from tinker_lightning.errors import InvalidInput
from tinker_lightning.types import Datum, ModelInput

LENGTHS = (3, 5, 2)


def datum(tokens: int, columns: int | None = None) -> Datum:
    shape = (tokens,) if columns is None else (tokens, columns)
    return Datum(ModelInput.from_ints(range(tokens)), {"target_tokens": torch.ones(shape, dtype=torch.int64)})


def server_loss(surrogate: Surrogate, logprobs: list[torch.Tensor], sent: list[Datum], sequences: int) -> torch.Tensor:
    """The surrogate loss as a server with its factors computes it."""
    total = torch.zeros((), dtype=torch.float64)
    for logp, each in zip(logprobs, sent, strict=True):
        given: Any = {name: value.to_torch().double() for name, value in each.loss_fn_inputs.items()}
        if surrogate.loss == "cross_entropy":
            loss = -(given["weights"] * logp).sum()
        else:
            ratio = torch.exp(logp - given["logprobs"])
            if surrogate.loss == "cispo":
                ratio = ratio.clamp(1.0, 1.0).detach() * logp
            loss = -(ratio * given["advantages"]).sum()
        loss = loss / len(logp) if surrogate.per_length else loss
        total = total + (loss if surrogate.per_batch == "no" else loss / sequences)
    return total


@pytest.mark.parametrize(
    ("loss", "per_length", "per_batch"),
    [
        ("cross_entropy", False, "no"),
        *itertools.product(("importance_sampling", "cispo"), (False, True), ("no", "call", "window")),
    ],
)
def test_the_gradient_is_that_of_the_custom_loss(loss: Any, per_length: bool, per_batch: Any) -> None:
    surrogate = Surrogate(loss, per_length, per_batch)
    torch.manual_seed(0)
    logprobs = [(-torch.rand(n, dtype=torch.float64)).requires_grad_() for n in LENGTHS]
    # Opposite signs, a sum of zero, and a token without a gradient.
    gradients = [torch.tensor([1.0, -2.0, 1.0]), torch.randn(5), torch.tensor([0.0, -3.0])]
    sent = surrogate.datums([datum(n) for n in LENGTHS], gradients, logprobs)
    if per_batch != "no":
        sent = times(sent, 7)
    server_loss(surrogate, logprobs, sent, 7).backward()
    for leaf, gradient in zip(logprobs, gradients, strict=True):
        torch.testing.assert_close(leaf.grad, gradient.double(), rtol=1e-6, atol=1e-7)


def test_cispo_needs_no_logprobs() -> None:
    surrogate = Surrogate("cispo", per_length=True)
    logprobs = [(-torch.rand(3, dtype=torch.float64)).requires_grad_()]
    gradient = torch.tensor([1.0, -2.0, 0.5])
    sent = surrogate.datums([datum(3)], [gradient], None)
    server_loss(surrogate, logprobs, sent, 1).backward()
    torch.testing.assert_close(logprobs[0].grad, gradient.double())


def test_an_odd_batch_is_completed_by_a_datum_without_gradient() -> None:
    surrogate = Surrogate("importance_sampling", even_batch=True)
    sent = completed(surrogate.datums([datum(3)], [torch.ones(3)], [torch.zeros(3)]))
    assert len(sent) == 2
    assert not sent[1].loss_fn_inputs["advantages"].to_torch().any()


def test_completed_batches_are_not_counted_in_a_window() -> None:
    with pytest.raises(InvalidInput, match="even_batch: not supported with per_batch='window'"):
        Surrogate("importance_sampling", per_batch="window", even_batch=True)


@pytest.mark.parametrize("factor", [{"per_length": True}, {"per_batch": "call"}, {"even_batch": True}])
def test_cross_entropy_has_no_factors_to_undo(factor: dict[str, Any]) -> None:
    with pytest.raises(InvalidInput, match="surrogate: cross_entropy carries gradients only as a plain sum"):
        Surrogate("cross_entropy", **factor)


def test_several_targets_per_position_need_cross_entropy() -> None:
    gradients, known = [torch.ones(3, 2)], [torch.zeros(3, 2)]
    with pytest.raises(InvalidInput, match=r"datum 0: target_tokens has the shape \[3, 2\]"):
        Surrogate("importance_sampling").datums([datum(3, 2)], gradients, known)
    (sent,) = Surrogate().datums([datum(3, 2)], gradients, known)
    assert sent.loss_fn_inputs["weights"].shape == [3, 2]
