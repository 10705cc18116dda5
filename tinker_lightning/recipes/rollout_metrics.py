"""Metrics of rollouts: rewards and lengths of episodes, the fate of groups, and comparisons of policies.

`ScoredGroup` has the log-probabilities of a group's sampled tokens by trainer, sampler and reference model, from which
the metrics of the policy are estimated.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from tinker_lightning.callbacks.generation import prompt_text
from tinker_lightning.losses.kl import Estimator, k3, kl_estimate
from tinker_lightning.recipes.references import REFERENCE
from tinker_lightning.rl import PromptEnvironment
from tinker_lightning.rows.formats import is_chat
from tinker_lightning.types import Datum

if TYPE_CHECKING:
    from collections.abc import Iterable

    from tinker_lightning.recipes.group_loss import TrainedGroup
    from tinker_lightning.rl.trajectory import Group, Trajectory


def reward_metrics(groups: Sequence[Group]) -> dict[str, tuple[float, int]]:
    """Returns means over episodes with their counts: the reward, each reward by name, and other metrics."""
    episodes = [each for group in groups for each in group.trajectories]
    scored = [each for each in episodes if each.is_scored]
    values: dict[str, list[float]] = {"reward": [each.reward for each in scored]}
    for each in episodes:
        for name, value in each.rewards.items():
            values.setdefault(f"reward/{name}", []).append(value)
        for name, value in each.metrics.items():
            values.setdefault(f"episodes/{name}", []).append(float(value))
    values["completions/unscored"] = [float(not each.is_scored) for each in episodes]
    values["completions/truncated"] = [float(each.truncated) for each in episodes]
    values["completions/length"] = [float(_sampled(each)) for each in episodes]
    return {name: (float(np.mean(own)), len(own)) for name, own in values.items() if own}


def batch_metrics(trained: Sequence[TrainedGroup], steps: int) -> dict[str, float]:
    """Returns the metrics of a batch of groups, trained after a number of optimizer steps."""
    groups = [one.group for one in trained]
    metrics = {name: value for name, (value, _) in reward_metrics(groups).items()}
    rewards = [each.reward for group in groups for each in group.scored]
    if rewards:
        metrics |= {"reward/std": float(np.std(rewards)), "reward/max": max(rewards)}
    turns = [turn for group in groups for each in group.trajectories for turn in each.turns]
    reasons = Counter(turn.completion.stop_reason for turn in turns)
    metrics |= {f"completions/stop_{reason}": count / len(turns) for reason, count in sorted(reasons.items())}
    metrics["groups/zero_variance"] = _share(bool(group.scored) and _is_constant(group) for group in groups)
    metrics["groups/dropped"] = _share(one.dropped for one in trained)
    metrics["groups/failed"] = _share(bool(group.failed) for group in groups)
    metrics["policy/staleness"] = float(np.mean([steps - group.version for group in groups]))
    metrics["tokens/sampled"] = float(sum(_sampled(each) for group in groups for each in group.trajectories))
    metrics["tokens/trained"] = float(sum(one.tokens for one in trained if not one.dropped))
    metrics["seconds/sampling"] = max(group.seconds for group in groups)
    return metrics


def drop_reason(trained: Sequence[TrainedGroup]) -> str:
    """Returns why a step has nothing to train on, from the groups of its last batch, and how to fix it."""
    reasons: dict[str, list[Group]] = {}
    for group in (one.group for one in trained):
        if group.failed:
            reason = "the rollouts failed"
        elif not group.scored:
            reason = "no answer has a reward"
        elif _is_constant(group):
            reason = "all answers to a prompt got the same reward"
        else:
            reason = "no answer has tokens to train on and an advantage"
        reasons.setdefault(reason, []).append(group)
    texts = []
    for reason, groups in reasons.items():
        rewards = [each.reward for group in groups for each in group.scored]
        ends = " to ".join(f"{each:g}" for each in sorted({min(rewards), max(rewards)})) if rewards else "none"
        texts.append(f"{reason} (prompts: {len(groups)} of {len(trained)}, rewards: {ends})")
    return (
        f"{'; '.join(texts)}. If rewards are equal, look at the answers and their rewards (callbacks.SampleTable shows "
        "them), raise group_size or the temperature, or choose prompts that the model answers well at times and badly "
        "at others."
    )


def episode_rows(groups: Iterable[Group], tokenizer: Any) -> list[dict[str, Any]]:
    """Returns the first prompt and the last completion of each episode as text, with its reward.

    The prompt of a chat is its last message: the system message and the template are the same in all rows.
    """
    return [
        {
            "prompt": _prompt_text(group, each, tokenizer),
            "text": each.text,
            "stop_reason": each.turns[-1].completion.stop_reason,
            "reward": each.reward,
        }
        for group in groups
        for each in group.trajectories
        if each.turns
    ]


def _prompt_text(group: Group, episode: Trajectory, tokenizer: Any) -> str:
    environment = group.task.environment
    if isinstance(environment, PromptEnvironment):
        row = environment.row
        value = row.get("prompt", row.get("messages"))
        if isinstance(value, str) or is_chat(value):
            return prompt_text(row)
    return str(tokenizer.decode(episode.turns[0].prompt_tokens, skip_special_tokens=True))


def sampled_tokens(data: Iterable[Any]) -> int:
    """Returns the number of sampled tokens of datums."""
    return int(sum(float(datum.loss_fn_inputs["mask"].to_numpy().sum()) for datum in data))


@dataclass(frozen=True, eq=False)
class ScoredGroup:
    """The log-probabilities of the sampled tokens of a group.

    Args:
        data: Its datums.
        masks: A mask of each datum's targets that are scored.
        version: The number of optimizer steps that the weights of the sampler had taken.
        age: The number of further steps that the weights of the trainer had taken.
        trainer: The log-probabilities by the model that is trained, one for each sampled token.
        sampler: The log-probabilities by the sampler.
        reference: The log-probabilities by the reference model; None if they were not requested.
    """

    data: Sequence[Datum]
    masks: Sequence[Tensor]
    version: int
    age: int
    trainer: Tensor
    sampler: Tensor
    reference: Tensor | None

    @classmethod
    def from_logprobs(cls, data: Sequence[Datum], logprobs: Sequence[Tensor], version: int, age: int) -> ScoredGroup:
        """Creates the scores of a group from the trainer's log-probabilities of all its targets.

        Some servers return 0 where a loss does not depend on a token. Such tokens are left out.
        """
        masks, trainer, sampler, reference = [], [], [], []
        for datum, own in zip(data, logprobs, strict=True):
            inputs = {name: tensor.to_torch() for name, tensor in datum.loss_fn_inputs.items()}
            mask = (inputs["mask"] != 0) & ((own != 0) | (inputs["logprobs"] == 0))
            masks.append(mask)
            trainer.append(own.detach()[mask])
            sampler.append(inputs["logprobs"][mask])
            if REFERENCE in inputs:
                reference.append(inputs[REFERENCE][mask])
        own_reference = torch.cat(reference) if len(reference) == len(data) else None
        return cls(data, masks, version, age, torch.cat(trainer), torch.cat(sampler), own_reference)


def policy_metrics(scores: Sequence[ScoredGroup]) -> dict[str, float]:
    """Returns estimates from sampled tokens: the entropy, and the divergence of the trainer from the sampler."""
    trainer = torch.cat([each.trainer for each in scores]) if scores else torch.empty(0)
    if not len(trainer):
        return {}
    sampler = torch.cat([each.sampler for each in scores])
    return {"policy/entropy": -trainer.mean().item(), "policy/kl_sampler": k3(sampler, trainer).mean().item()}


def reference_metrics(scores: Sequence[ScoredGroup], estimator: Estimator) -> dict[str, float]:
    """Returns the divergence of the trainer from the reference, over the groups that it has scored."""
    values = [kl_estimate(each.trainer, each.reference, estimator) for each in scores if each.reference is not None]
    values = [each for each in values if len(each)]
    return {"policy/kl_reference": torch.cat(values).mean().item()} if values else {}


def _sampled(trajectory: Trajectory) -> int:
    return sum(len(turn.completion.tokens) for turn in trajectory.turns)


def _is_constant(group: Group) -> bool:
    rewards = [each.reward for each in group.scored]
    return max(rewards) == min(rewards)


def _share(flags: Iterable[bool]) -> float:
    return float(np.mean(list(flags)))
