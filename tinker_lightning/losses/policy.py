"""Policy gradients: sampled tokens become more or less likely according to their advantage.

`p` are the log-probabilities of the model, `q` the log-probabilities of the policy that sampled the tokens (`logprobs`
of the datum), `A` the `advantages`, `r = exp(p - q)`. The first five are the protocol's losses of the same names: sums
over tokens, in which an advantage of 0 masks a token. `group_advantages` computes advantages from rewards.
"""

from __future__ import annotations

import functools
from numbers import Integral, Real
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor

from tinker_lightning.errors import InvalidDatum, InvalidInput, check_choice
from tinker_lightning.losses import builtin
from tinker_lightning.losses.batch import (
    Batch,
    Data,
    Logprobs,
    Loss,
    drop_nan,
    groups,
    is_traced,
    mean_where,
    sequence_sums,
)
from tinker_lightning.losses.builtin import CLIP_HIGH, CLIP_LOW, DRO_BETA
from tinker_lightning.losses.kl import ESTIMATORS, Estimator, kl_estimate

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence


def importance_sampling(data: Data, logprobs: Logprobs) -> Loss:
    """Returns `-Σ r·A`: the policy gradient, corrected for the policy that sampled.

    Metrics: `ratio` and `kl_old_new` (`q - p`) per token; `action_tokens`, how many have an advantage. Without such a
    token the others are absent.

    >>> from tinker_lightning import Datum
    >>> data = [Datum.from_targets([5, 6], [6, 7], logprobs=[0.0, -2.0], advantages=[0.0, 3.0])]
    >>> importance_sampling(data, [torch.tensor([-1.0, -2.0])])[0]
    tensor(-3.)
    """
    return _summed(builtin.importance_sampling, data, logprobs)


def ppo(
    data: Data, logprobs: Logprobs, *, clip_low_threshold: float = CLIP_LOW, clip_high_threshold: float = CLIP_HIGH
) -> Loss:
    """Returns `-Σ min(r·A, clip(r)·A)` (Schulman et al. 2017, arXiv:1707.06347, eq. 7).

    Metrics: as `importance_sampling`, and `clip_fraction`, the share of tokens outside the thresholds.

    Args:
        data: Datums with `logprobs` and `advantages`; thresholds per token may be among the inputs, under their names.
        logprobs: The log-probabilities of the model.
        clip_low_threshold: The lower bound of the ratio; 0.8, not 0.2.
        clip_high_threshold: The upper bound.

    >>> from tinker_lightning import Datum
    >>> data = [Datum.from_targets([5], [6], logprobs=[-2.0], advantages=[3.0])]
    >>> loss, metrics = ppo(data, [torch.tensor([-1.0])])
    >>> loss, metrics["clip_fraction"]
    (tensor(-3.6000), tensor(1.))
    """
    return _summed(builtin.ppo, data, logprobs, (clip_low_threshold, clip_high_threshold))


def cispo(
    data: Data, logprobs: Logprobs, *, clip_low_threshold: float = CLIP_LOW, clip_high_threshold: float = CLIP_HIGH
) -> Loss:
    """Returns `-Σ sg(clip(r))·p·A` (MiniMax 2025, arXiv:2506.13585): clipped weights, every token keeps its gradient.

    The value is not a measure of progress, because the weights change with the model. It has the metrics and
    arguments of `ppo`.

    >>> from tinker_lightning import Datum
    >>> data = [Datum.from_targets([5], [6], logprobs=[-2.0], advantages=[3.0])]
    >>> cispo(data, [torch.tensor([-1.0])])[0]
    tensor(3.6000)
    """
    return _summed(builtin.cispo, data, logprobs, (clip_low_threshold, clip_high_threshold))


def dro(data: Data, logprobs: Logprobs, *, beta: float = DRO_BETA) -> Loss:
    """Returns `-Σ (p·A - β/2·(p - q)²)` (Richemond et al. 2024, arXiv:2405.19107): held close to the old policy.

    Metrics: as `importance_sampling`. The quadratic term also applies to tokens without an advantage.

    >>> from tinker_lightning import Datum
    >>> data = [Datum.from_targets([5], [6], logprobs=[-2.0], advantages=[3.0])]
    >>> dro(data, [torch.tensor([-1.0])], beta=2.0)[0]
    tensor(4.)
    """
    return _summed(functools.partial(builtin.dro, beta=beta), data, logprobs)


def gspo(
    data: Data, logprobs: Logprobs, *, clip_low_threshold: float = CLIP_LOW, clip_high_threshold: float = CLIP_HIGH
) -> Loss:
    """Returns PPO's loss with one ratio per sequence, `exp(mean(p - q))` (Zheng et al. 2025, arXiv:2507.18071).

    Metrics: as `ppo`, from the ratios of sequences.

    Args:
        data: Datums with `logprobs`, `advantages`, and `sequence_ratio_mask`, nonzero on the tokens of the ratio.
        logprobs: The log-probabilities of the model.
        clip_low_threshold: The lower bound of the ratio; much closer to 1 in the paper than PPO's, 0.9997.
        clip_high_threshold: The upper bound; 1.0004 in the paper.

    >>> from tinker_lightning import Datum
    >>> inputs = {"logprobs": [-2.0, -2.0], "advantages": [3.0, 3.0], "sequence_ratio_mask": [1.0, 1.0]}
    >>> gspo([Datum.from_targets([5, 6], [6, 7], **inputs)], [torch.tensor([-1.0, -3.0])])[0]
    tensor(-6.)
    """
    _check_thresholds(clip_low_threshold, clip_high_threshold)
    batch = Batch(data, logprobs, rank=1)
    old, advantages, mask = (batch.tokens(name) for name in ("logprobs", "advantages", "sequence_ratio_mask"))
    low, high = _thresholds(batch, clip_low_threshold, clip_high_threshold)
    loss = builtin.gspo(batch.logprobs, old, advantages, mask, low, high, dim=-1).sum()
    log_ratio = sequence_sums(batch.logprobs - old, (mask != 0).float(), mean=True)[..., None]
    return loss, _metrics(log_ratio, advantages != 0, low, high)


def grpo(
    data: Data,
    logprobs: Logprobs,
    *,
    beta: float = 0.04,
    estimator: Estimator = "k3",
    clip_low_threshold: float = CLIP_LOW,
    clip_high_threshold: float = CLIP_HIGH,
    reduction: Literal["sequence", "token", "sum"] = "sequence",
) -> Loss:
    """Returns PPO's term plus a penalty on the distance from a reference model, averaged over tokens and sequences.

    Group relative policy optimization (Shao et al. 2024, arXiv:2402.03300, eq. 3). `group_advantages` computes its
    advantages.

    Metrics: as `ppo`, and `kl` per token.

    Args:
        data: Datums with `weights` (1 on the response), `logprobs`, `advantages`, and, unless beta is 0,
            `reference_logprobs`.
        logprobs: The log-probabilities of the model.
        beta: The weight of the penalty.
        estimator: The estimator of the divergence from the reference; `losses.kl` describes their gradients.
        clip_low_threshold: As in `ppo`.
        clip_high_threshold: As in `ppo`.
        reduction: `sequence` for the mean over sequences of their means over tokens, `token` for the mean over all
            tokens (Yu et al. 2025, arXiv:2503.14476), `sum` to divide by a constant later (Liu et al. 2025,
            arXiv:2503.20783).

    >>> from tinker_lightning import Datum
    >>> inputs = {"weights": [0.0, 1.0], "logprobs": [0.0, -2.0], "advantages": [0.0, 3.0]}
    >>> data = [Datum.from_targets([5, 6], [6, 7], reference_logprobs=[0.0, -3.0], **inputs)]
    >>> grpo(data, [torch.tensor([-1.0, -2.0])], beta=1.0, estimator="k2")[0]
    tensor(-2.5000)
    """
    if reduction not in ("sequence", "token", "sum"):
        raise InvalidInput(f"reduction must be 'sequence', 'token' or 'sum', got {reduction!r}")
    check_choice("estimator", estimator, ESTIMATORS)
    _check_thresholds(clip_low_threshold, clip_high_threshold)
    batch = Batch(data, logprobs, rank=1)
    p, weights, advantages = batch.logprobs, batch.weights(), batch.tokens("advantages")
    low, high = _thresholds(batch, clip_low_threshold, clip_high_threshold, counting="weights")
    counted = weights != 0
    # Values on the prompt must not overflow: infinity times 0 is NaN.
    old = torch.where(counted, batch.tokens("logprobs"), p.detach())
    terms = builtin.ppo(p, old, advantages, low, high)
    metrics = _metrics(p - old, counted, low, high)
    if beta != 0:
        reference = torch.where(counted, batch.tokens("reference_logprobs"), p.detach())
        kl = kl_estimate(p, reference, estimator)
        terms = terms + beta * kl
        metrics["kl"] = mean_where(kl.detach(), counted)
    if reduction == "sequence":
        return sequence_sums(terms, weights, mean=True).mean(), metrics
    total = (weights * terms).sum()
    return total / counted.sum().clamp(min=1) if reduction == "token" else total, metrics


def reinforce(
    data: Data,
    logprobs: Logprobs,
    *,
    baseline: float | Literal["leave_one_out", "mean"] = "leave_one_out",
    group_size: int | None = None,
) -> Loss:
    """Returns the mean over sequences of `-(R - b)·Σ w·p` for on-policy tokens.

    REINFORCE (Williams 1992, doi:10.1007/BF00992696).

    Metrics: `reward` and `advantage_rms` (root mean square) per sequence; `action_nll` per token, an estimate of the
    policy's entropy.

    Args:
        data: Datums with `weights` (1 on the response) and `reward`, one number.
        logprobs: The log-probabilities of the model.
        baseline: The mean reward of the other sequences of the group (Ahmadian et al. 2024, arXiv:2402.14740), of all
            of them, or a number. To use another baseline, subtract it from the rewards and pass 0.
        group_size: How many consecutive datums answer the same prompt; all of them if not given.

    >>> from tinker_lightning import Datum
    >>> data = [Datum.from_targets([5], [6], weights=[1.0], reward=reward) for reward in (1.0, 0.0)]
    >>> reinforce(data, [torch.tensor([-1.0]), torch.tensor([-3.0])])[0]
    tensor(-1.)
    """
    check_grouping(baseline, group_size)
    batch = Batch(data, logprobs, rank=1)
    weights, rewards = batch.weights(), batch.sequences("reward")
    advantages = group_advantages(rewards, baseline=baseline, group_size=group_size)
    loss = -(advantages * sequence_sums(batch.logprobs, weights)).mean()
    return loss, {
        "reward": rewards.mean(),
        "advantage_rms": (advantages**2).mean().sqrt(),
        "action_nll": -mean_where(batch.logprobs.detach(), weights != 0),
    }


def group_advantages(
    rewards: Tensor | Sequence[float],
    *,
    baseline: float | Literal["leave_one_out", "mean"] = "mean",
    group_size: int | None = None,
    scale: bool = False,
) -> Tensor:
    """Returns how much better each reward is than its group, `[B]`; with `scale` in standard deviations, as in GRPO.

    >>> group_advantages(torch.tensor([1.0, 0.0, 5.0, 5.0]), group_size=2)
    tensor([ 0.5000, -0.5000,  0.0000,  0.0000])
    """
    check_grouping(baseline, group_size)
    rewards = _as_rewards(rewards)
    grouped = rewards[None] if group_size is None else groups(rewards, group_size)
    if isinstance(baseline, str):
        if not is_traced(grouped) and grouped.shape[-1] < 2:
            raise InvalidInput("a group of one has nothing to compare with: sample several responses to each prompt")
        advantages = grouped - grouped.mean(-1, keepdim=True)
        if baseline == "leave_one_out":
            size = torch.ones_like(grouped).sum(-1, keepdim=True)
            advantages = advantages * size / (size - 1)
    else:
        advantages = grouped - baseline
    if scale:
        advantages = advantages / (grouped.std(-1, keepdim=True) + 1e-4)
    return advantages.reshape(-1)


def check_grouping(baseline: object, group_size: object) -> None:
    """Raises `InvalidInput` if the baseline is unknown or the group size is not a positive integer."""
    is_known = baseline in ("leave_one_out", "mean") if isinstance(baseline, str) else isinstance(baseline, Real)
    if not (is_known or is_traced(baseline)):
        raise InvalidInput(f"baseline must be 'leave_one_out', 'mean' or a number, got {baseline!r}")
    is_size = isinstance(group_size, Integral) and int(group_size) > 0
    if not (is_size or group_size is None or is_traced(group_size)):
        raise InvalidInput(f"a group needs at least one datum, got a size of {group_size!r}")


def _summed(
    terms: Callable[..., Tensor], data: Data, logprobs: Logprobs, thresholds: tuple[float, float] | None = None
) -> Loss:
    """Returns the sum of a per-token loss, and the metrics of its ratios."""
    if thresholds is not None:
        _check_thresholds(*thresholds)
    batch = Batch(data, logprobs)
    old, advantages = batch.tokens("logprobs"), batch.tokens("advantages")
    bounds = () if thresholds is None else _thresholds(batch, *thresholds)
    loss = terms(batch.logprobs, old, advantages, *bounds).sum()
    return loss, _metrics(batch.logprobs - old, advantages != 0, *bounds)


def _check_thresholds(low: float, high: float) -> None:
    if is_traced(low) or is_traced(high):
        return  # they are checked with each call
    if reason := builtin.threshold_fault(low, high):
        raise InvalidInput(reason)


def _thresholds(
    batch: Batch, low: float, high: float, counting: str = "advantages"
) -> tuple[Tensor | float, Tensor | float]:
    """Returns the settings, or thresholds per token; `counting` names the input that is 0 where none is needed."""

    def read(batch: Batch) -> tuple[Tensor | float, Tensor | float]:
        return batch.tokens_or("clip_low_threshold", low), batch.tokens_or("clip_high_threshold", high)

    thresholds = read(batch)
    if any(isinstance(bound, Tensor) for bound in thresholds):
        for i, datum in batch.each():
            if reason := builtin.threshold_fault(*read(datum), datum.tokens(counting) != 0):
                raise InvalidDatum(f"datum {i}: {reason}")
    return thresholds


def _metrics(
    log_ratio: Tensor, counted: Tensor, low: Tensor | float | None = None, high: Tensor | float | None = None
) -> dict[str, Tensor]:
    totals = builtin.ratio_totals(log_ratio.detach(), counted, low, high)
    tokens = totals["action_tokens"]
    metrics = {"ratio": totals["ratio"] / tokens, "kl_old_new": totals["kl_old_new"] / tokens, "action_tokens": tokens}
    if "clipped_tokens" in totals:
        metrics["clip_fraction"] = totals["clipped_tokens"] / tokens
    return drop_nan(metrics)  # NaN if no token counts


def _as_rewards(values: Tensor | Sequence[float]) -> Tensor:
    if is_traced(values):
        return values  # type: ignore[return-value]  # a proxy of a tensor
    try:
        rewards = torch.as_tensor(values)
    except (TypeError, ValueError, RuntimeError) as error:
        raise InvalidInput(f"rewards must be numbers, one per datum, got {values!r:.80}") from error
    if rewards.dim() != 1 or not rewards.numel():
        raise InvalidInput(
            f"rewards has the shape {list(rewards.shape)}, but there must be one per datum, [B]: those of a group are "
            "consecutive, with group_size=..."
        )
    if not torch.isfinite(rewards).all():
        raise InvalidInput("rewards has NaN or infinite entries; leave those datums out")
    return rewards if rewards.is_floating_point() else rewards.float()
