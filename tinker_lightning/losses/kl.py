"""Estimators of the Kullback-Leibler divergence from single tokens, and a loss that is regularized by one.

The estimators are Schulman's (2020, http://joschu.net/blog/kl-approx.html), of KL(model ‖ reference) from tokens that
the model has sampled. In a loss, only their gradient matters (Tang & Munos 2025, arXiv:2506.09477): on such tokens the
gradient of k1 is zero on average, so it has no effect; k2 has the gradient of KL(model ‖ reference), which grows with
the distance; k3 has the gradient of KL(reference ‖ model), which never exceeds 1 where the model is above the
reference.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, TypeAlias

import torch

from tinker_lightning.errors import check_choice
from tinker_lightning.losses import builtin
from tinker_lightning.losses.batch import Batch, Data, Logprobs, Loss, mean_where
from tinker_lightning.losses.likelihood import likelihood_metrics

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from torch import Tensor

Estimator: TypeAlias = Literal["k1", "k2", "k3"]


def k1(logprobs: Tensor, reference: Tensor) -> Tensor:
    """Returns `p - r`: unbiased, of either sign.

    >>> import torch
    >>> k1(torch.tensor([-1.0, -3.0]), torch.tensor([-2.0, -2.0]))
    tensor([ 1., -1.])
    """
    return logprobs - reference


def k2(logprobs: Tensor, reference: Tensor) -> Tensor:
    """Returns `(p - r)²/2`: never negative, with a small bias where the two are close.

    >>> import torch
    >>> k2(torch.tensor([-1.0, -3.0]), torch.tensor([-2.0, -2.0]))
    tensor([0.5000, 0.5000])
    """
    return 0.5 * (logprobs - reference) ** 2


def k3(logprobs: Tensor, reference: Tensor) -> Tensor:
    """Returns `exp(r - p) - 1 - (r - p)`: unbiased and never negative.

    >>> import torch
    >>> k3(torch.tensor([-1.0, -3.0]), torch.tensor([-2.0, -2.0]))
    tensor([0.3679, 0.7183])
    """
    difference = reference - logprobs
    return difference.expm1() - difference


ESTIMATORS: Mapping[str, Callable[[Tensor, Tensor], Tensor]] = {"k1": k1, "k2": k2, "k3": k3}


def kl_estimate(logprobs: Tensor, reference: Tensor, estimator: Estimator) -> Tensor:
    """Returns an estimate of the divergence from the reference at each token."""
    check_choice("estimator", estimator, ESTIMATORS)
    return ESTIMATORS[estimator](logprobs, reference)


def kl_regularized(data: Data, logprobs: Logprobs, *, beta: float = 0.1, estimator: Estimator = "k2") -> Loss:
    """Returns `Σ w·(-p + β·k(p, r))`: cross-entropy with a penalty on the distance from a reference model.

    Metrics: as `cross_entropy`, and `kl` per token.

    Args:
        data: Datums with `weights` and `reference_logprobs`. Targets may be `[T]` or `[T, K]`, as in `cross_entropy`.
        logprobs: The log-probabilities of the model.
        beta: The weight of the penalty. With k2 a token stops rising at `1/β` above the reference.
        estimator: `k2`, or `k3`, whose gradient on tokens that the model has learned never exceeds `β`.

    >>> import torch
    >>> from tinker_lightning import Datum
    >>> data = [Datum.from_targets([5], [6], weights=[1.0], reference_logprobs=[-3.0])]
    >>> kl_regularized(data, [torch.tensor([-1.0])], beta=0.5)[0]
    tensor(2.)
    """
    check_choice("estimator", estimator, ESTIMATORS)
    batch = Batch(data, logprobs)
    p, weights = batch.logprobs, batch.weights()
    counted = weights != 0
    # Values on the prompt must not overflow: infinity times 0 is NaN.
    kl = kl_estimate(p, torch.where(counted, batch.tokens("reference_logprobs"), p.detach()), estimator)
    loss = (builtin.cross_entropy(p, weights) + beta * weights * kl).sum()
    return loss, {**likelihood_metrics(p, weights), "kl": mean_where(kl.detach(), counted)}
