"""Group relative policy optimization: reinforcement learning that compares the answers to a prompt."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import torch
from typing_extensions import override

from tinker_lightning.errors import InvalidInput, TinkerLightningError, check_choice
from tinker_lightning.losses.kl import ESTIMATORS, Estimator, kl_estimate
from tinker_lightning.losses.policy import check_grouping, group_advantages
from tinker_lightning.recipes.references import REFERENCE, References
from tinker_lightning.recipes.rollout_metrics import reference_metrics
from tinker_lightning.recipes.rollout_module import RolloutModule

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from torch import Tensor

    from tinker_lightning.lightning.hyperparameters import ModelSettings, Unpack
    from tinker_lightning.recipes.group_loss import Normalize, TrainedGroup
    from tinker_lightning.recipes.rollout_metrics import ScoredGroup
    from tinker_lightning.rl.trajectory import Group
    from tinker_lightning.types import Datum

T = TypeVar("T")


class GRPO(RolloutModule):
    """Raises the likelihood of answers that score higher than the other answers to the same prompt.

    Group relative policy optimization (Shao et al. 2024, arXiv:2402.03300) and its relatives. Takes batches of a
    `RolloutLoader`, which has the prompts, the rewards and the size of a group.

    A group whose rewards are all equal is counted in `groups/zero_variance`. It teaches nothing and is dropped, unless
    there is a `kl_coefficient`: then it is trained with the divergence alone. A fit in which every group of every step
    was dropped raises `LossWithoutGradient` at its end.

    Args:
        model: The name of a base model (default: `TINKER_BASE_MODEL`), or a training client of any SDK.
        loss: `importance_sampling`, `ppo`, `cispo`, `gspo` or `dro`, or a function of datums, which have `advantages`,
            `logprobs` (of the sampler) and `mask` (1 on sampled tokens), and log-probabilities.
        loss_config: The settings of the loss, for example `{"clip_high_threshold": 1.28}`.
        baseline: What a reward is compared with: the `mean` of its group, the mean of the others (`leave_one_out`), or
            a number.
        scale_rewards: Whether to divide advantages by the standard deviation of the group; not if the baseline is a
            number.
        normalize: What the loss of a group is divided by. `token`: the number of its tokens. `sequence`: each answer by
            its own tokens, then the mean over answers, as in the paper. `sum`: nothing, neither here nor by the number
            of groups.
        kl_coefficient: The weight of the divergence from the reference model; 0 for none.
        kl_in: Whether the divergence is part of the `loss`, or subtracted from the `advantage` of each token.
        kl_estimator: The estimator of the divergence in the loss; see `losses.kl`.
        reference: `base` for the base model, or the `tinker://` path of saved sampler weights. Its divergence is
            logged with every step that the trainer logs, which takes a forward pass of that model; None for none.
        max_ratio: Truncated importance sampling: the largest weight of a token that the sampler found less likely than
            the trainer does. None for no limit other than the one of the loss.
        ratio_bounds: Answers are left out if the geometric mean of their tokens' ratios of trainer to sampler lies
            outside of these two bounds.
        truncated: What to do with answers that were cut: `train` on them like on others, `mask` them, or `penalize`
            them by `truncation_penalty`.
        truncation_penalty: What is subtracted from the reward of an answer that was cut.
        **settings: The other arguments of `RemoteModule`: `rank`, `learning_rate`, `schedule`, `predict` and others.
    """

    def __init__(
        self,
        model: Any = None,
        *,
        loss: Any = "importance_sampling",
        loss_config: Mapping[str, float | str] | None = None,
        baseline: float | Literal["leave_one_out", "mean"] = "mean",
        scale_rewards: bool = True,
        normalize: Normalize = "token",
        kl_coefficient: float = 0.0,
        kl_in: Literal["loss", "advantage"] = "loss",
        kl_estimator: Estimator = "k2",
        reference: str | None = "base",
        max_ratio: float | None = None,
        ratio_bounds: tuple[float, float] | None = None,
        truncated: Literal["train", "mask", "penalize"] = "train",
        truncation_penalty: float = 1.0,
        **settings: Unpack[ModelSettings],
    ) -> None:
        super().__init__(model, loss=loss, loss_config=loss_config, normalize=normalize, **settings)
        check_grouping(baseline, None)
        check_choice("estimator", kl_estimator, ESTIMATORS)
        if scale_rewards and not isinstance(baseline, str):
            raise InvalidInput(
                f"a numeric baseline ({baseline}) cannot be combined with scale_rewards=True, because equal or single "
                "rewards have no standard deviation. Pass scale_rewards=False."
            )
        check_choice("kl_in", kl_in, ("loss", "advantage"))
        check_choice("truncated", truncated, ("train", "mask", "penalize"))
        if kl_coefficient < 0:
            raise InvalidInput(f"kl_coefficient must be at least 0, got {kl_coefficient}")
        if kl_coefficient and reference is None:
            raise InvalidInput("kl_coefficient needs a reference: 'base', or the path of saved sampler weights")
        if max_ratio is not None and max_ratio < 1:
            raise InvalidInput(f"max_ratio must be at least 1, got {max_ratio}")
        if ratio_bounds is not None and not 0 <= ratio_bounds[0] < 1 < ratio_bounds[1]:
            raise InvalidInput(f"ratio_bounds must be a number below 1 and one above it, got {ratio_bounds}")
        self.baseline = baseline
        self.scale_rewards = scale_rewards
        self.kl_coefficient = kl_coefficient
        self.kl_in = kl_in
        self.kl_estimator = kl_estimator
        self.max_ratio = max_ratio
        self.ratio_bounds = ratio_bounds
        self.truncated = truncated
        self.truncation_penalty = truncation_penalty
        self._references = None if reference is None else References(self.lm, reference, None, keep=False)

    @override
    def advantages(self, group: Group) -> Sequence[float] | None:
        """Returns how much better each episode is than the others; None to drop the group. Override it.

        Equal rewards give None, or advantages of 0 if there is a penalty on the divergence from the reference.
        """
        scored = group.scored
        penalty = self.truncation_penalty if self.truncated == "penalize" else 0.0
        rewards = [each.reward - penalty * each.truncated for each in scored]
        if not rewards:
            return None
        if isinstance(self.baseline, str) and max(rewards) == min(rewards):
            if len(group.trajectories) < 2:
                raise InvalidInput("a group of one has nothing to compare with: set group_size of the RolloutLoader")
            if not self.kl_coefficient:
                return None
            values = iter([0.0] * len(rewards))
        else:
            values = iter(group_advantages(rewards, baseline=self.baseline, scale=self.scale_rewards).tolist())
        advantages = [next(values) if each.is_scored else torch.nan for each in group.trajectories]
        if self.truncated == "mask":
            pairs = zip(advantages, group.trajectories, strict=True)
            advantages = [torch.nan if each.truncated else advantage for advantage, each in pairs]
        return advantages

    @override
    def request(self, group: Group, data: list[Datum]) -> None:
        """Requests the log-probabilities of the reference model, if they are trained with or logged."""
        del group
        self._try_reference(lambda references: references.request(data))

    def _try_reference(self, call: Callable[[References], T]) -> T | None:
        """Calls the reference model. If that fails, and its metrics are only logged, it is not called again."""
        references = self._references
        if references is None or not (self.kl_coefficient or self.logs_now):
            return None
        try:
            return call(references)
        except TinkerLightningError as error:
            if self.kl_coefficient:
                raise
            self._references = None
            warnings.warn(
                f"policy/kl_reference is not logged, because the reference model failed: {error}", stacklevel=2
            )
            return None

    @override
    def with_inputs(self, trained: TrainedGroup) -> list[Datum]:
        """Returns the datums of a group with their advantages, and what else the loss needs."""
        data = super().with_inputs(trained)
        data = [datum.with_inputs(sequence_ratio_mask=datum.loss_fn_inputs["mask"]) for datum in data]
        data = self._try_reference(lambda references: references.add_to(data)) or data
        return self._with_penalty(data) if self.kl_coefficient and self.kl_in == "advantage" else data

    @property
    @override
    def can_defer(self) -> bool:
        """Whether the loss of a group is `loss` alone, so that a server can compute it in one pass."""
        adds_kl = self.kl_coefficient > 0 and self.kl_in == "loss"
        corrects = self.max_ratio is not None or self.ratio_bounds is not None
        is_own = type(self).group_loss is not GRPO.group_loss
        return self.normalize != "sequence" and not (adds_kl or corrects or is_own or self._holds_all_tokens)

    @override
    def group_loss(
        self, trained: TrainedGroup, data: list[Datum], logprobs: list[Tensor]
    ) -> tuple[Tensor, Mapping[str, Any]]:
        """Returns the loss of a group, with the divergence from the reference if it is part of the loss."""
        data, corrections = self._corrected(trained, data, logprobs)
        loss, metrics = super().group_loss(trained, data, logprobs)
        if self.kl_coefficient and self.kl_in == "loss":
            for datum, p, share in zip(data, logprobs, self.shares(trained), strict=True):
                kl = torch.where(_mask(datum), kl_estimate(p, _input(datum, REFERENCE), self.kl_estimator), 0.0)
                loss = loss + self.kl_coefficient * share * kl.sum()
        return loss, {**metrics, **corrections}

    @override
    def policy_metrics(self, scores: Sequence[ScoredGroup]) -> dict[str, float]:
        """Returns metrics of sampled tokens, with the divergence from the reference model."""
        return {**super().policy_metrics(scores), **reference_metrics(scores, self.kl_estimator)}

    def _with_penalty(self, data: list[Datum]) -> list[Datum]:
        """Subtracts the divergence of the sampler from the reference from each token's advantage, less its mean."""
        gaps = [_input(datum, "logprobs") - _input(datum, REFERENCE) for datum in data]
        mean = torch.cat([gap[_mask(datum)] for datum, gap in zip(data, gaps, strict=True)]).mean()
        return [
            datum.with_inputs(
                advantages=_input(datum, "advantages")
                - self.kl_coefficient * torch.where(_mask(datum), gap - mean, 0.0)
            )
            for datum, gap in zip(data, gaps, strict=True)
        ]

    def _corrected(
        self, trained: TrainedGroup, data: list[Datum], logprobs: list[Tensor]
    ) -> tuple[list[Datum], dict[str, float]]:
        """Corrects for a sampler whose probabilities differ from the trainer's when the group is first trained."""
        if self.max_ratio is None and self.ratio_bounds is None:
            return data, {}
        group, metrics = trained.group, {}
        if group.old_logprobs is None:
            group.old_logprobs = [each.detach().clone() for each in logprobs]
        old, masks = group.old_logprobs, [_mask(datum) for datum in data]
        gaps = [
            torch.where(mask, p - _input(datum, "logprobs"), 0.0)
            for datum, p, mask in zip(data, old, masks, strict=True)
        ]
        if self.ratio_bounds is not None:
            low, high = self.ratio_bounds
            kept = {}
            for episode in set(trained.episodes):
                own = [i for i, each in enumerate(trained.episodes) if each == episode]
                total, tokens = sum(gaps[i].sum() for i in own), sum(masks[i].sum() for i in own)
                kept[episode] = float(low <= float(torch.exp(torch.as_tensor(total / tokens))) <= high)
            metrics["policy/masked_sequences"] = 1 - sum(kept.values()) / len(kept)
            pairs = zip(data, trained.episodes, strict=True)
            data = [datum.with_inputs(advantages=_input(datum, "advantages") * kept[i]) for datum, i in pairs]
        if self.max_ratio is not None:
            ratios = [gap.exp() for gap in gaps]
            above = sum(float((ratio > self.max_ratio).sum()) for ratio in ratios)
            metrics["policy/truncated_ratios"] = above / trained.tokens
            data = [
                datum.with_inputs(
                    advantages=_input(datum, "advantages") * ratio.clamp(max=self.max_ratio),
                    logprobs=torch.where(mask, p, 0.0),
                )
                for datum, ratio, p, mask in zip(data, ratios, old, masks, strict=True)
            ]
        return data, metrics


def _input(datum: Datum, name: str) -> Tensor:
    tensor: Tensor = datum.loss_fn_inputs[name].to_torch()
    return tensor


def _mask(datum: Datum) -> Tensor:
    return _input(datum, "mask") != 0
