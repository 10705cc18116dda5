"""Losses on preferences: better responses become more likely than others to the prompt, or than the reference."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from tinker_lightning.errors import InvalidDatum, InvalidInput
from tinker_lightning.losses.batch import (
    Batch,
    Data,
    Logprobs,
    Loss,
    drop_nan,
    groups,
    is_traced,
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


def kto(
    data: Data,
    logprobs: Logprobs,
    *,
    beta: float = 0.1,
    desirable_weight: float = 1.0,
    undesirable_weight: float = 1.0,
    kl: bool = True,
) -> Loss:
    """Returns the mean over responses of `λ·σ(∓β·(g - z₀))`; `g` is a response's gain over the reference.

    Kahneman-Tversky optimization (Ethayarajh et al. 2024, arXiv:2402.01306, eq. 8) needs no pairs: a desirable response
    (minus, `label` 1) becomes more likely, an undesirable one (plus, `label` 0) less likely, compared with `z₀`, an
    estimate of how far the model has moved from the reference. `z₀` is the mean gain of mismatched responses, each a
    prompt with the response to another, or 0 if that is negative; it has no gradient. Consecutive datums are a response
    and its mismatched one.

    Metrics: `rewards/chosen` and `rewards/rejected`, β times the gain of desirable and undesirable responses, and
    `rewards/margins`, their difference, each absent if the batch has no such responses; `rewards/accuracies`, how often
    the gain is on the right side of `z₀`; `chosen_nll`, the negative log-likelihood per token of the desirable
    responses; `kl`, which is `z₀`.

    Args:
        data: Responses with `weights` (1 on the response), `label` (1 or 0) and `reference_logprobs`, each followed by
            a mismatched one. Both have `kl_weights`: 1 on the mismatched response, 0 elsewhere.
        logprobs: The log-probabilities of the model.
        beta: The strength of the pull towards the reference model.
        desirable_weight: The weight λ of desirable responses.
        undesirable_weight: The weight λ of undesirable responses.
        kl: Whether to estimate `z₀`. Without it, each datum is a response and `z₀` is 0: the unpaired APO-zero
            (D'Oosterlinck et al. 2024, arXiv:2408.06266).

    >>> from tinker_lightning import Datum
    >>> good = Datum.from_targets([5], [6], weights=[1.0], label=1.0, reference_logprobs=[-1.0])
    >>> bad = Datum.from_targets([5], [7], weights=[1.0], label=0.0, reference_logprobs=[-1.0])
    >>> kto([good, bad], [torch.tensor([-0.5]), torch.tensor([-3.0])], beta=1.0, kl=False)[0]
    tensor(0.2484)
    """
    if not beta > 0:
        raise InvalidInput(f"beta must be above 0, got {beta}")
    if not (desirable_weight >= 0 and undesirable_weight >= 0):
        raise InvalidInput(
            "desirable_weight and undesirable_weight must be at least 0, got "
            f"{desirable_weight} and {undesirable_weight}"
        )
    batch = Batch(data, logprobs, rank=1)
    weights = batch.weights()
    size = 2 if kl else 1
    labels = groups(batch.sequences("label"), size)[:, 0]
    if not is_traced(labels) and not ((labels == 0) | (labels == 1)).all():
        raise InvalidDatum(f"label must be 1 (desirable) or 0 (undesirable), got {labels.tolist()}")
    gains = batch.logprobs - batch.tokens("reference_logprobs")
    shift: Tensor | None = None
    if kl:
        mismatched = sequence_sums(gains.detach(), batch.tokens("kl_weights"))
        shift = groups(mismatched, 2)[:, 1].mean().clamp(min=0)
    gains = groups(sequence_sums(gains, weights), size)[:, 0]
    leads = (2 * labels - 1) * beta * (gains if shift is None else gains - shift)
    scales = undesirable_weight + (desirable_weight - undesirable_weight) * labels
    loss = (scales * torch.sigmoid(-leads)).mean()

    rewards = beta * gains.detach()
    chosen, rejected = ((share * rewards).sum() / share.sum() for share in (labels, 1 - labels))
    nlls = -groups(sequence_sums(batch.logprobs.detach(), (weights != 0).float(), mean=True), size)[:, 0]
    metrics = {
        "rewards/chosen": chosen,
        "rewards/rejected": rejected,
        "rewards/margins": chosen - rejected,
        "rewards/accuracies": (leads.detach() > 0).float().mean(),
        "chosen_nll": (labels * nlls).sum() / labels.sum(),
    }
    return loss, drop_nan(metrics if shift is None else {**metrics, "kl": shift})


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
