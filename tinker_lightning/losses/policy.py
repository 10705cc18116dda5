"""Policy gradients: sampled tokens become likelier or less likely by their advantage.

`p` are the model's log-probabilities, `q` those of the policy that sampled the tokens (`logprobs` of the datum), `A`
the `advantages`, `r = exp(p - q)`. The first five are the server's losses of the same names: sums over tokens, where an
advantage of 0 hides a token.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from tinker_lightning.errors import InvalidDatum, InvalidInput
from tinker_lightning.losses import builtin
from tinker_lightning.losses.advantages import check_grouping, group_advantages
from tinker_lightning.losses.batch import Batch, Data, Logprobs, Loss, is_traced, mean_where, sequence_sums, with_value
from tinker_lightning.losses.kl import Estimator, check_estimator, kl_estimate


def importance_sampling(data: Data, logprobs: Logprobs) -> Loss:
    """`-Σ r·A`: the policy gradient, corrected for the policy that sampled.

    Metrics: `ratio` and `kl_old_new` (`q - p`) by token; `action_tokens`, those with an advantage.

    >>> from tinker_lightning import Datum
    >>> data = [Datum.from_targets([5, 6], [6, 7], logprobs=[0.0, -2.0], advantages=[0.0, 3.0])]
    >>> importance_sampling(data, [torch.tensor([-1.0, -2.0])])[0]
    tensor(-3.)
    """
    batch = Batch(data, logprobs)
    old, advantages = batch.tokens("logprobs"), batch.tokens("advantages")
    loss = builtin.importance_sampling(batch.logprobs, old, advantages).sum()
    return loss, _metrics(batch.logprobs - old, advantages != 0)


def ppo(data: Data, logprobs: Logprobs, *, clip_low_threshold: float = 0.8, clip_high_threshold: float = 1.2) -> Loss:
    """`-Σ min(r·A, clip(r)·A)` (Schulman et al. 2017, arXiv:1707.06347, eq. 7).

    Metrics: those of `importance_sampling`, and `clip_fraction`, the share of tokens outside the thresholds.

    Args:
        data: Datums with `logprobs` and `advantages`; thresholds by token may be among the inputs, under their names.
        logprobs: The model's.
        clip_low_threshold: The least ratio that counts; 0.8, not 0.2.
        clip_high_threshold: The largest.

    >>> from tinker_lightning import Datum
    >>> data = [Datum.from_targets([5], [6], logprobs=[-2.0], advantages=[3.0])]
    >>> loss, metrics = ppo(data, [torch.tensor([-1.0])])
    >>> loss, metrics["clip_fraction"]
    (tensor(-3.6000), tensor(1.))
    """
    _check_thresholds(clip_low_threshold, clip_high_threshold)
    batch = Batch(data, logprobs)
    old, advantages = batch.tokens("logprobs"), batch.tokens("advantages")
    low, high = _thresholds(batch, clip_low_threshold, clip_high_threshold)
    loss = builtin.ppo(batch.logprobs, old, advantages, low, high).sum()
    return loss, _metrics(batch.logprobs - old, advantages != 0, low, high)


def cispo(data: Data, logprobs: Logprobs, *, clip_low_threshold: float = 0.8, clip_high_threshold: float = 1.2) -> Loss:
    """`-Σ sg(clip(r))·p·A` (MiniMax 2025, arXiv:2506.13585): the clipped ratio weighs, every token keeps its gradient.

    The value says little of progress, for the weights change with the model. Metrics and arguments: those of `ppo`.

    >>> from tinker_lightning import Datum
    >>> data = [Datum.from_targets([5], [6], logprobs=[-2.0], advantages=[3.0])]
    >>> cispo(data, [torch.tensor([-1.0])])[0]
    tensor(3.6000)
    """
    _check_thresholds(clip_low_threshold, clip_high_threshold)
    batch = Batch(data, logprobs)
    old, advantages = batch.tokens("logprobs"), batch.tokens("advantages")
    low, high = _thresholds(batch, clip_low_threshold, clip_high_threshold)
    loss = builtin.cispo(batch.logprobs, old, advantages, low, high).sum()
    return loss, _metrics(batch.logprobs - old, advantages != 0, low, high)


def dro(data: Data, logprobs: Logprobs, *, beta: float = 0.05) -> Loss:
    """`-Σ (p·A - β/2·(p - q)²)` (Richemond et al. 2024, arXiv:2405.19107): a quadratic pull towards the old policy.

    Metrics: those of `importance_sampling`. The pull acts on tokens without an advantage too.

    >>> from tinker_lightning import Datum
    >>> data = [Datum.from_targets([5], [6], logprobs=[-2.0], advantages=[3.0])]
    >>> dro(data, [torch.tensor([-1.0])], beta=2.0)[0]
    tensor(4.)
    """
    batch = Batch(data, logprobs)
    old, advantages = batch.tokens("logprobs"), batch.tokens("advantages")
    loss = builtin.dro(batch.logprobs, old, advantages, beta).sum()
    return loss, _metrics(batch.logprobs - old, advantages != 0)


def gspo(data: Data, logprobs: Logprobs, *, clip_low_threshold: float = 0.8, clip_high_threshold: float = 1.2) -> Loss:
    """PPO with one ratio for each sequence, `exp(mean(p - q))` (Zheng et al. 2025, arXiv:2507.18071).

    Metrics: those of `ppo`, of sequences' ratios.

    Args:
        data: Datums with `logprobs`, `advantages`, and `sequence_ratio_mask`, not 0 on tokens that count in the ratio.
        logprobs: The model's.
        clip_low_threshold: The least ratio that counts. The paper's are much nearer to 1 than PPO's: 0.9997.
        clip_high_threshold: The largest; the paper's is 1.0004.

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
    clip_low_threshold: float = 0.8,
    clip_high_threshold: float = 1.2,
    reduction: Literal["sequence", "token", "sum"] = "sequence",
) -> Loss:
    """PPO's term and a pull towards a reference model at each token, averaged over sequences.

    Group relative policy optimization (Shao et al. 2024, arXiv:2402.03300, eq. 3); for its advantages see
    `group_advantages`.

    Metrics: those of `ppo`, and `kl` by token.

    Args:
        data: Datums with `weights` (1 on the response), `logprobs`, `advantages`, and, unless beta is 0,
            `reference_logprobs`.
        logprobs: The model's.
        beta: How hard to pull.
        estimator: Of the divergence from the reference; see `kl` for what their gradients do.
        clip_low_threshold: As in `ppo`.
        clip_high_threshold: As in `ppo`.
        reduction: The mean over sequences of each one's mean over tokens; or the mean over all tokens (Yu et al. 2025,
            arXiv:2503.14476); or the plain sum, to be divided by a constant (Liu et al. 2025, arXiv:2503.20783).

    >>> from tinker_lightning import Datum
    >>> inputs = {"weights": [0.0, 1.0], "logprobs": [0.0, -2.0], "advantages": [0.0, 3.0]}
    >>> data = [Datum.from_targets([5, 6], [6, 7], reference_logprobs=[0.0, -3.0], **inputs)]
    >>> grpo(data, [torch.tensor([-1.0, -2.0])], beta=1.0, estimator="k2")[0]
    tensor(-2.5000)
    """
    if reduction not in ("sequence", "token", "sum"):
        raise InvalidInput(f"reduction must be 'sequence', 'token' or 'sum', got {reduction!r}")
    check_estimator(estimator)
    _check_thresholds(clip_low_threshold, clip_high_threshold)
    batch = Batch(data, logprobs, rank=1)
    p, weights, advantages = batch.logprobs, batch.weights(), batch.tokens("advantages")
    low, high = _thresholds(batch, clip_low_threshold, clip_high_threshold, counting="weights")
    counted = weights != 0
    # What stands on the prompt must not overflow: infinity times 0 is NaN.
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
    """The mean over sequences of `-(R - b)·Σ w·p`: Williams 1992 (doi:10.1007/BF00992696), for tokens sampled just now.

    Metrics: `reward` and `advantage_rms` (root mean square) by sequence; `action_nll` by token, an estimate of the
    policy's entropy.

    Args:
        data: Datums with `weights` (1 on the response) and `reward`, one number.
        logprobs: The model's.
        baseline: The mean reward of the group's other sequences (Ahmadian et al. 2024, arXiv:2402.14740), of all of
            them, or a number; for a baseline of your own subtract it from the rewards and give 0.
        group_size: How many datums, one behind the other, answer the same prompt; all of them if not given.

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


def _check_thresholds(low: float, high: float) -> None:
    if is_traced(low) or is_traced(high):
        return  # they are looked at with each call
    if fault := builtin.threshold_fault(low, high):
        raise InvalidInput(fault)


def _thresholds(
    batch: Batch, low: float, high: float, counting: str = "advantages"
) -> tuple[Tensor | float, Tensor | float]:
    """The setting, or one threshold for each token; `counting` names the input that is 0 where none is needed."""

    def read(batch: Batch) -> tuple[Tensor | float, Tensor | float]:
        return batch.tokens_or("clip_low_threshold", low), batch.tokens_or("clip_high_threshold", high)

    thresholds = read(batch)
    if any(isinstance(bound, Tensor) for bound in thresholds):
        for i, datum in batch.each():
            if fault := builtin.threshold_fault(*read(datum), datum.tokens(counting) != 0):
                raise InvalidDatum(f"datum {i}: {fault}")
    return thresholds


def _metrics(
    log_ratio: Tensor, counted: Tensor, low: Tensor | float | None = None, high: Tensor | float | None = None
) -> dict[str, Tensor]:
    log_ratio = log_ratio.detach()
    ratio, tokens = log_ratio.exp(), counted.sum()

    def mean(values: Tensor) -> Tensor:
        return torch.where(counted, values, 0.0).sum() / tokens  # NaN if no token counts

    metrics = {"ratio": mean(ratio), "kl_old_new": mean(-log_ratio), "action_tokens": tokens}
    if low is not None and high is not None:
        metrics["clip_fraction"] = mean((ratio < low) | (ratio > high))
    return with_value(metrics)
