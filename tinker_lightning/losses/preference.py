"""Losses on groups of responses to one prompt: the better ones become more likely than the others."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from tinker_lightning.errors import InvalidInput
from tinker_lightning.losses.batch import (
    Batch,
    Data,
    Logprobs,
    Loss,
    groups,
    log_complement,
    sequence_sums,
)

if TYPE_CHECKING:
    from torch import Tensor


def preference_nll(chosen: Tensor, rejected: Tensor, *, margin: float = 0.0, label_smoothing: float = 0.0) -> Tensor:
    """Returns `-log σ(chosen - rejected - margin)`: the Bradley-Terry model of which of two rewards wins.

    Label smoothing assumes that a share ε of the preferences is wrong: `(1-ε)·(-log σ(x)) + ε·(-log σ(-x))`.

    >>> preference_nll(torch.tensor([1.0]), torch.tensor([1.0]))
    tensor([0.6931])
    """
    x = chosen - rejected - margin
    zero = torch.zeros_like(x)
    return (1 - label_smoothing) * torch.logaddexp(zero, -x) + label_smoothing * torch.logaddexp(zero, x)


def dpo(
    data: Data,
    logprobs: Logprobs,
    *,
    beta: float = 0.1,
    margin: float = 0.0,
    label_smoothing: float = 0.0,
    length_normalized: bool = False,
    reference_free: bool = False,
) -> Loss:
    """Returns the mean over pairs of `-log σ(β·Δ - margin)`; Δ is the chosen response's gain minus the rejected one's.

    Direct preference optimization (Rafailov et al. 2023, arXiv:2305.18290, eq. 7). Consecutive datums are pairs:
    chosen, rejected, chosen, rejected.

    Metrics: `rewards/chosen` and `rewards/rejected`, β times the gain over the reference, summed over the tokens of a
    response; without a reference, the scores that the loss compares. `rewards/margins` and `rewards/accuracies`;
    `chosen_nll`, the mean over pairs of the chosen response's negative log-likelihood per token, which rises if both
    responses become less likely.

    Args:
        data: Pairs with `weights` (1 on the response) and `reference_logprobs`.
        logprobs: The log-probabilities of the model.
        beta: The strength of the pull towards the reference model.
        margin: The margin by which the chosen reward must win (Amini et al. 2024, arXiv:2402.10571).
        label_smoothing: The share of pairs whose labels may be wrong (Mitchell 2023, https://ericmitchell.ai/cdpo.pdf).
        length_normalized: Divides each response's gain by its length (Lambert et al. 2024, arXiv:2411.15124, eq. 6).
        reference_free: Ignores the reference. With a margin and length normalization this is SimPO (Meng et al. 2024,
            arXiv:2405.14734).

    >>> from tinker_lightning import Datum
    >>> chosen = Datum.from_targets([5], [6], weights=[1.0], reference_logprobs=[-1.0])
    >>> rejected = Datum.from_targets([5], [7], weights=[1.0], reference_logprobs=[-2.0])
    >>> loss, metrics = dpo([chosen, rejected], [torch.tensor([-0.5]), torch.tensor([-3.5])], beta=1.0)
    >>> loss, metrics["rewards/margins"]
    (tensor(0.1269), tensor(2.))
    """
    if not beta > 0:
        raise InvalidInput(f"beta must be above 0, got {beta}")
    if not 0 <= label_smoothing < 0.5:
        raise InvalidInput(f"label_smoothing must lie in [0, 0.5), got {label_smoothing}")
    batch = Batch(data, logprobs, rank=1)
    weights = batch.weights(per_datum=True)
    gains = batch.logprobs if reference_free else batch.logprobs - batch.tokens("reference_logprobs")
    scores = groups(beta * sequence_sums(gains, weights, mean=length_normalized), 2)
    loss = preference_nll(scores[:, 0], scores[:, 1], margin=margin, label_smoothing=label_smoothing).mean()
    rewards = scores if reference_free else groups(beta * sequence_sums(gains, weights), 2)
    return loss, _metrics(rewards, batch, weights)


def ipo(data: Data, logprobs: Logprobs, *, beta: float = 0.1, length_normalized: bool = True) -> Loss:
    """Returns the mean over pairs of `(Δ - 1/(2β))²`; Δ is the chosen response's gain minus the rejected one's.

    Identity preference optimization (Azar et al. 2023, arXiv:2310.12036, eq. 17): a gap to reach, which does not grow
    without bound if the preferences are certain. Consecutive datums are pairs, with the metrics of `dpo`.

    Args:
        data: Pairs with `weights` (1 on the response) and `reference_logprobs`.
        logprobs: The log-probabilities of the model.
        beta: The strength of the pull towards the reference model; lower values ask for a larger gap.
        length_normalized: Divides each response's gain by its length, as its authors recommend for texts.

    >>> from tinker_lightning import Datum
    >>> data = [Datum.from_targets([5], [6], weights=[1.0], reference_logprobs=[-1.0]) for _ in range(2)]
    >>> ipo(data, [torch.tensor([-1.0]), torch.tensor([-2.0])], beta=0.5)[0]
    tensor(0.)
    """
    if not beta > 0:
        raise InvalidInput(f"beta must be above 0, got {beta}")
    batch = Batch(data, logprobs, rank=1)
    weights = batch.weights(per_datum=True)
    gains = batch.logprobs - batch.tokens("reference_logprobs")
    scores = groups(sequence_sums(gains, weights, mean=length_normalized), 2)
    loss = (scores[:, 0] - scores[:, 1] - 1 / (2 * beta)).square().mean()
    return loss, _metrics(groups(beta * sequence_sums(gains, weights), 2), batch, weights)


def orpo(data: Data, logprobs: Logprobs, *, beta: float = 0.1) -> Loss:
    """Returns the chosen responses' negative log-likelihood, plus β times `-log σ` of the logarithm of the odds ratio.

    Odds ratio preference optimization (Hong et al. 2024, arXiv:2403.07691, eq. 6): fine-tuning and preferences at once,
    without a reference. Likelihoods are means over the tokens of a response. Consecutive datums are pairs, with the
    metrics of `dpo`, where the reward is β times the mean log-probability.

    Args:
        data: Pairs with `weights` (1 on the response).
        logprobs: The log-probabilities of the model.
        beta: The weight of the preferences, λ in the paper.

    >>> from tinker_lightning import Datum
    >>> data = [Datum.from_targets([5], [6], weights=[1.0]) for _ in range(2)]
    >>> orpo(data, [torch.tensor([-1.0]), torch.tensor([-1.0])], beta=1.0)[0]
    tensor(1.6931)
    """
    if not beta >= 0:
        raise InvalidInput(f"beta must be at least 0, got {beta}")
    batch = Batch(data, logprobs, rank=1)
    weights = batch.weights(per_datum=True)
    means = groups(sequence_sums(batch.logprobs, weights, mean=True), 2)
    odds = means - log_complement(means)
    loss = (beta * preference_nll(odds[:, 0], odds[:, 1]) - means[:, 0]).mean()
    return loss, _metrics(beta * means, batch, weights)


def _metrics(rewards: Tensor, batch: Batch, weights: Tensor) -> dict[str, Tensor]:
    chosen, rejected = rewards.detach()[:, 0], rewards.detach()[:, 1]
    return {
        "rewards/chosen": chosen.mean(),
        "rewards/rejected": rejected.mean(),
        "rewards/margins": (chosen - rejected).mean(),
        "rewards/accuracies": (chosen > rejected).float().mean(),
        # A mean over answers, so that means over batches do not depend on how pairs are split.
        "chosen_nll": -sequence_sums(batch.logprobs.detach()[0::2], (weights[0::2] != 0).float(), mean=True).mean(),
    }


def contrastive(
    data: Data,
    logprobs: Logprobs,
    *,
    group_size: int = 2,
    temperature: float = 1.0,
    length_normalized: bool = True,
) -> Loss:
    """Returns the mean over groups of `-log softmax(s/τ)` at the first datum; `s` is a sequence's log-probability.

    InfoNCE (van den Oord et al. 2018, arXiv:1807.03748, eq. 4) with the likelihood of the model as the score.
    Consecutive datums are groups: the right response, then `group_size - 1` wrong ones.

    Metrics: `accuracy`, how often the right response scores highest; `score_margin`, its lead over the best other.

    Args:
        data: Groups with `weights` (1 on the response).
        logprobs: The log-probabilities of the model.
        group_size: The number of datums in a group.
        temperature: The softmax temperature; lower values focus on the hardest wrong response.
        length_normalized: Uses means over tokens as scores, not sums, which would favor short responses.

    >>> from tinker_lightning import Datum
    >>> data = [Datum.from_targets([5], [token], weights=[1.0]) for token in (6, 7, 8)]
    >>> contrastive(data, [torch.tensor([-1.0])] * 3, group_size=3)[0]
    tensor(1.0986)
    """
    if group_size < 2 or not temperature > 0:
        raise InvalidInput(f"group_size must be at least 2 and temperature above 0, got {group_size} and {temperature}")
    batch = Batch(data, logprobs, rank=1)
    scores = groups(sequence_sums(batch.logprobs, batch.weights(per_datum=True), mean=length_normalized), group_size)
    loss = -(scores / temperature).log_softmax(-1)[:, 0].mean()
    margin = scores.detach()[:, 0] - scores.detach()[:, 1:].amax(-1)
    return loss, {"accuracy": (margin > 0).float().mean(), "score_margin": margin.mean()}
