"""Regularizers: the `Regularizer` record, and ready-made functions for it, whose settings `functools.partial` binds.

The functions count the tokens whose `weights` entry is nonzero, or all tokens of a datum without weights.

Functions that *estimate* a quantity assume tokens sampled from the model. The value is then unbiased, and the gradient
is the gradient of the expected value, not of the value itself, because the probability of the tokens also changes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from tinker_lightning.losses.batch import Batch, check_each_counts, groups, mean_where
from tinker_lightning.losses.kl import k2, k3
from tinker_lightning.losses.regularizers.composition import Regularizer

if TYPE_CHECKING:
    from tinker_lightning.losses.batch import Loss

__all__ = [
    "Regularizer",
    "consistency",
    "entropy",
    "forward_kl",
    "length",
    "reverse_kl",
    "sparsity",
    "symmetric_kl",
    "topology",
]


def entropy(data: list[Any], logprobs: list[Tensor]) -> Loss:
    """Estimates minus the entropy per token, so that a positive weight keeps the model from becoming overconfident.

    With `[T, K]` targets it is the sum over the K alternatives, and exact if these are the whole vocabulary.

    Metrics: `entropy`.

    >>> from tinker_lightning import Datum
    >>> entropy([Datum.from_tokens([1, 2, 3])], [torch.tensor([-1.0, -3.0])])[0]
    tensor(-2.)
    """
    counted, p = _counted(data, logprobs)
    loss = _mean(p.exp() * p if p.dim() == 3 else _estimate(p, 0.5 * p**2), counted)
    return loss, {"entropy": -loss.detach()}


def reverse_kl(data: list[Any], logprobs: list[Tensor]) -> Loss:
    """Estimates KL(model ‖ reference) per token, from the `reference_logprobs` of the datums.

    Keeps the model within the modes of the reference, but lets it drop some. With `[T, K]` targets it sums over the K
    alternatives.

    Metrics: `kl`.

    >>> from tinker_lightning import Datum
    >>> data = [Datum.from_targets([5], [6], reference_logprobs=[-2.0])]
    >>> reverse_kl(data, [torch.tensor([-1.0])])[0]
    tensor(0.3679)
    """
    counted, p, r = _with_reference(data, logprobs)
    return _as_kl(_reverse(p, r), counted)


def forward_kl(data: list[Any], logprobs: list[Tensor]) -> Loss:
    """Estimates KL(reference ‖ model) per token, from the `reference_logprobs` of the datums.

    Makes the model cover all modes of the reference. With `[T, K]` targets it sums over the K alternatives.

    Metrics: `kl`.

    >>> from tinker_lightning import Datum
    >>> data = [Datum.from_targets([5], [6], reference_logprobs=[-2.0])]
    >>> forward_kl(data, [torch.tensor([-1.0])])[0]
    tensor(0.2642)
    """
    counted, p, r = _with_reference(data, logprobs)
    return _as_kl(_forward(p, r), counted)


def symmetric_kl(data: list[Any], logprobs: list[Tensor]) -> Loss:
    """Estimates the sum of both divergences (Jeffreys 1946, doi:10.1098/rspa.1946.0056).

    Metrics: `kl`.

    >>> from tinker_lightning import Datum
    >>> data = [Datum.from_targets([5], [6], reference_logprobs=[-2.0])]
    >>> symmetric_kl(data, [torch.tensor([-1.0])])[0]
    tensor(0.6321)
    """
    counted, p, r = _with_reference(data, logprobs)
    return _as_kl(_reverse(p, r) + _forward(p, r), counted)


def consistency(data: list[Any], logprobs: list[Tensor]) -> Loss:
    """Returns the squared difference between the mean log-probabilities of the members of a pair.

    Consecutive datums are pairs: the same response to two wordings of a prompt, or a text and its paraphrase.

    Metrics: `gap`, the mean absolute difference.

    >>> from tinker_lightning import Datum
    >>> pair = [Datum.from_tokens([1, 2, 3]), Datum.from_tokens([4, 3])]
    >>> consistency(pair, [torch.tensor([-1.0, -3.0]), torch.tensor([-5.0])])[0]
    tensor(9.)
    """
    counted, p = _counted(data, logprobs, one_target=True)
    check_each_counts(counted.any(-1).tolist())
    means = torch.where(counted, p, 0.0).sum(-1) / counted.sum(-1)
    first, second = groups(means, 2).unbind(-1)
    gap = first - second
    return (gap**2).mean(), {"gap": gap.detach().abs().mean()}


def length(data: list[Any], logprobs: list[Tensor], *, limit: int = 0) -> Loss:
    """Estimates how many tokens responses that the model sampled have beyond a limit.

    Makes long responses less likely than the others of the batch (REINFORCE with a leave-one-out baseline: Kool et al.
    2019), because the length itself does not depend on the log-probabilities.

    Metrics: `length`.

    >>> from tinker_lightning import Datum
    >>> length([Datum.from_tokens([1, 2, 3]), Datum.from_tokens([4, 3])], [torch.zeros(2), torch.zeros(1)])[0]
    tensor(1.5000)
    """
    counted, p = _counted(data, logprobs, one_target=True)
    lengths = counted.sum(-1).to(p.dtype)
    excess = (lengths - limit).clamp(min=0)
    others = (excess.sum() - excess) / max(len(data) - 1, 1)
    chance = torch.where(counted, p, 0.0).sum(-1)
    return _estimate(excess, (excess - others) * chance).mean(), {"length": lengths.mean()}


def sparsity(data: list[Any], logprobs: list[Tensor], *, scale: float = 1.0) -> Loss:
    """Returns the mean of `log(1 + s/scale)` over the surprisals `s` of tokens, which concentrates surprise in few.

    The log-sum penalty (Candès et al. 2008, doi:10.1007/s00041-008-9045-x): its gradient is larger for small values,
    and at most `1/scale`.

    Metrics: `active`, the share of tokens whose surprisal is above the scale.

    >>> from tinker_lightning import Datum
    >>> sparsity([Datum.from_tokens([1, 2, 3])], [torch.tensor([0.0, -3.0])])[0]
    tensor(0.6931)
    """
    counted, p = _counted(data, logprobs, one_target=True)
    surprisal = -p / scale
    active = (surprisal.detach() > 1).to(p.dtype)
    # Rounding may leave a log-probability a little above 0.
    return mean_where(surprisal.clamp(min=0).log1p(), counted), {"active": mean_where(active, counted)}


def topology(data: list[Any], logprobs: list[Tensor]) -> Loss:
    """Returns how rugged the curve of surprisals along a text is: its total persistence per token, a mean over datums.

    As a level rises through the curve, a component is born at each valley and dies where it meets a deeper one; the
    sum of the lifetimes is the persistence in dimension 0 (Edelsbrunner & Harer 2010, Computational Topology, VII.1).
    It is small for smooth curves; speakers also tend to spread surprise evenly (Wei et al. 2021, arXiv:2105.07144).

    Metrics: `peaks` per datum.

    >>> from tinker_lightning import Datum
    >>> topology([Datum.from_tokens(range(6))], [-torch.tensor([1.0, 4.0, 2.0, 3.0, 0.0])])
    (tensor(0.8000), {'peaks': tensor(2.)})
    """
    counted, p = _counted(data, logprobs, one_target=True)
    each = [_persistence(-row[tokens]) for row, tokens in zip(p, counted, strict=True)]
    lives, peaks = zip(*each, strict=True)
    return torch.stack(lives).mean(), {"peaks": torch.stack(peaks).to(p.dtype).mean()}


def _persistence(curve: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the total persistence of a curve per point, and the number of its peaks.

    Each valley but the deepest starts a lifetime and each peak between two valleys ends one, so their sum needs no
    pairing. Of equal neighbors the first counts as the lower.
    """
    if not curve.numel():
        return curve.sum(), curve.new_zeros((), dtype=torch.int64)
    rises = curve[1:] >= curve[:-1]
    end = rises.new_ones(1)
    from_above, to_above = torch.cat([end, ~rises]), torch.cat([rises, end])
    valleys, peaks = from_above & to_above, ~(from_above | to_above)
    lives = curve[peaks].sum() - curve[valleys].sum() + curve[valleys].min()
    return lives / curve.numel(), peaks.sum()


def _reverse(p: Tensor, r: Tensor) -> Tensor:
    return p.exp() * (p - r) if p.dim() == 3 else _estimate(k3(p, r), k2(p, r))


def _forward(p: Tensor, r: Tensor) -> Tensor:
    ratio = r - p
    return r.exp() * ratio if p.dim() == 3 else _estimate(ratio.exp() * ratio - ratio.expm1(), k3(p, r))


def _as_kl(kl: Tensor, counted: Tensor) -> Loss:
    loss = _mean(kl, counted)
    return loss, {"kl": loss.detach()}


def _estimate(value: Tensor, surrogate: Tensor) -> Tensor:
    """Returns a tensor with the value of `value` and the gradient of `surrogate`."""
    return value.detach() + (surrogate - surrogate.detach())


def _mean(values: Tensor, counted: Tensor) -> Tensor:
    """Returns the mean over the positions that count; alternatives at one position add up."""
    if values.dim() == 3:
        values, counted = torch.where(counted, values, 0.0).sum(-1), counted.any(-1)
    return mean_where(values, counted)


def _counted(data: list[Any], logprobs: list[Tensor], *, one_target: bool = False) -> tuple[Tensor, Tensor]:
    """Returns which tokens count, and the log-probabilities, with one row per datum."""
    batch = Batch(data, logprobs, rank=1 if one_target else None)
    return batch.tokens_filled("weights", 1.0) != 0, batch.logprobs


def _with_reference(data: list[Any], logprobs: list[Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    counted, p = _counted(data, logprobs)
    # Where a token does not count, both are set equal, because values there must not overflow.
    return counted, p, torch.where(counted, Batch(data, logprobs).tokens("reference_logprobs"), p.detach())
