"""Losses that raise the likelihood of given targets: cross-entropy, and distillation from a teacher's top tokens."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from tinker_lightning.errors import InvalidDatum, InvalidInput
from tinker_lightning.losses import builtin
from tinker_lightning.losses.batch import Batch, Data, Logprobs, Loss, drop_nan, log_complement, mean_where

# The most that the K probabilities of a teacher may add up to, with log-probabilities rounded to bfloat16.
_MOST_MASS = 1.05


def cross_entropy(data: Data, logprobs: Logprobs) -> Loss:
    """Returns `-Σ w·p`, as the protocol's `cross_entropy`; targets may be `[T]` or `[T, K]`.

    A datum without `weights` counts all of its tokens.

    Metrics: `nll` and `perplexity`, averaged by weight, and `tokens`, how many have a weight.

    >>> from tinker_lightning import Datum
    >>> data = [Datum.from_targets([5, 6], [6, 7], weights=[0, 1])]
    >>> cross_entropy(data, [torch.tensor([-3.0, -2.0])])[0]
    tensor(2.)
    """
    batch = Batch(data, logprobs)
    weights = batch.tokens_filled("weights", 1.0)
    loss = builtin.cross_entropy(batch.logprobs, weights).sum()
    return loss, likelihood_metrics(batch.logprobs, weights)


def likelihood_metrics(logprobs: Tensor, weights: Tensor) -> dict[str, Tensor]:
    """Returns `nll`, `perplexity` and `tokens` of the weighted targets."""
    return likelihood_scores(-(weights * logprobs.detach()).sum(), weights)


def likelihood_scores(loss: Tensor, weights: Tensor) -> dict[str, Tensor]:
    """Returns `nll`, `perplexity` and `tokens`, given the sum of the loss over the weighted targets.

    The mean is by weight: it divides by the sum of the weights, as `reduction="mean"` and `val_nll` do.
    """
    nll = loss / weights.sum()  # NaN if no token has a weight
    return drop_nan({"nll": nll, "perplexity": nll.exp(), "tokens": (weights != 0).sum()})


def topk_distillation(
    data: Data, logprobs: Logprobs, *, tail: Literal["bucket", "renormalize", "ignore"] = "bucket"
) -> Loss:
    """Returns `Σ w·KL(teacher ‖ student)` over positions, from the teacher's K most likely tokens: targets `[T, K]`.

    The idea is from Hinton et al. 2015, arXiv:1503.02531. The K tokens do not have all of the probability; ignoring the
    rest makes the student overconfident (Anshumann et al. 2025, arXiv:2503.16870).

    Metrics: `teacher_mass` and `student_mass`, the probability that each assigns to the K tokens; `agreement`, how
    often both rank the same token first.

    Args:
        data: Datums with `teacher_logprobs` and `weights`, both `[T, K]`; a weight of 0 masks an alternative.
        logprobs: The log-probabilities of the student.
        tail: How to treat all other tokens: `bucket` as a single token (a lower bound of the full KL), `renormalize`
            by comparing the K among themselves, `ignore` not at all (the gradient of `cross_entropy` weighted by the
            teacher's probabilities).

    >>> from tinker_lightning import Datum
    >>> half = torch.full((1, 2), 0.5).log()
    >>> data = [Datum.from_targets([5], [[6, 7]], weights=[[1.0, 1.0]], teacher_logprobs=half)]
    >>> topk_distillation(data, [half - 1], tail="ignore")[0]
    tensor(1.)
    """
    if tail not in ("bucket", "renormalize", "ignore"):
        raise InvalidInput(f"tail must be 'bucket', 'renormalize' or 'ignore', got {tail!r}")
    batch = Batch(data, logprobs, rank=2)
    weights, teacher = batch.weights(), batch.tokens("teacher_logprobs")
    _check_mass(batch)
    hidden = torch.where(weights != 0, 0.0, -1e9)  # -inf would turn a row into NaN
    student, teacher = batch.logprobs + hidden, teacher + hidden
    student_mass, teacher_mass = student.logsumexp(-1), teacher.logsumexp(-1)
    counted = weights.amax(-1) != 0
    metrics = {
        "teacher_mass": mean_where(teacher_mass.exp(), counted),
        "student_mass": mean_where(student_mass.detach().exp(), counted),
        "agreement": mean_where(student.argmax(-1) == teacher.argmax(-1), counted),
    }
    if tail == "renormalize":
        student, teacher = student.log_softmax(-1), teacher.log_softmax(-1)
    loss = (weights * teacher.exp() * (teacher - student)).sum()
    if tail == "bucket":
        student_rest, teacher_rest = log_complement(student_mass), log_complement(teacher_mass)
        loss = loss + (weights.amax(-1) * teacher_rest.exp() * (teacher_rest - student_rest)).sum()
    return loss, metrics


def _check_mass(batch: Batch) -> None:
    """Raises `InvalidDatum` if the teacher's probabilities at a position sum to more than 1."""
    for i, datum in batch.each():
        counted = datum.tokens("weights") != 0
        mass = torch.where(counted, datum.tokens("teacher_logprobs").exp(), 0.0).sum(-1).flatten()
        if mass.max() > _MOST_MASS:
            raise InvalidDatum(
                f"datum {i}: teacher_logprobs: the targets at position {int(mass.argmax())} have a total probability "
                f"of {mass.max().item():.3g}, but it can be 1 at most. Pass log-probabilities (0 is certainty), each "
                "token once, and a weight of 0 for spare alternatives."
            )
