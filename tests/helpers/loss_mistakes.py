"""Batches that a loss rejects, with the message for each."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from tests.helpers.loss_cases import batch
from tinker_lightning import Datum, losses

if TYPE_CHECKING:
    from collections.abc import Callable


def broken(i: int, **changes: Any) -> list[Datum]:
    """The usual datums, one of them with other inputs; None takes one away."""
    data, _ = batch()
    inputs = {name: value for name, value in {**data[i].loss_fn_inputs, **changes}.items() if value is not None}
    data[i] = Datum(data[i].model_input, inputs)
    return data


def alternatives(i: int | None = None, **changes: Any) -> list[Datum]:
    """The same with three targets at each position; those of datum i with other inputs."""
    data, _ = batch()
    for j, datum in enumerate(data):
        inputs = {
            name: tensor if name in ("reward", "label") else tensor.to_torch()[:, None].repeat(1, 3)
            for name, tensor in datum.loss_fn_inputs.items()
        }
        inputs["teacher_logprobs"] = torch.tensor([0.5, 0.3, 0.1]).log().repeat(datum.model_input.length, 1)
        data[j] = Datum(datum.model_input, {**inputs, **(changes if j == i else {})})
    return data


def without_weights(*which: int) -> list[Datum]:
    data, _ = batch()
    for i in which:
        data[i] = broken(i, weights=torch.zeros(data[i].model_input.length))[i]
    return data


OF = "of its tokens"
ONE_TARGET_ONLY = ("dpo", "contrastive", "grpo", "gspo", "reinforce")
ONE_TARGET = (
    "datum 0: its targets have the shape [5, 3], but this loss takes one target per position, [T]: the token that"
)
NO_WEIGHT = "has a weight, so it cannot be compared with the others of its group. Leave the group out, or give"
NOTHING = "none of the tokens of these 6 datums has a weight, so there is nothing to train on. Leave them out, or give"
BOUNDS = (
    "clip_low_threshold must lie in [0, 1] and clip_high_threshold must be at least 1, got {} and {}: they are bounds "
    "on the ratio itself, 0.8 and 1.2, not 0.2"
)
MISTAKES: dict[str, tuple[Callable[..., Any], list[Datum], str]] = {
    "regularized cross-entropy without weights": (
        losses.kl_regularized,
        broken(2, weights=None),
        "datum 2: weights: missing; Datum.from_tokens(tokens, weights) sets it: 0 on the prompt, 1 on the response.",
    ),
    "a policy loss without the sampler's log-probabilities": (
        losses.ppo,
        broken(0, logprobs=None),
        "datum 0: logprobs: missing; pass the log-probabilities that the sampler returned with its tokens, and 0 on "
        "the prompt.",
    ),
    "DPO without a reference": (
        losses.dpo,
        broken(3, reference_logprobs=None),
        "datum 3: reference_logprobs: missing; pass those of the reference model, e.g. from its compute_logprobs, "
        "and 0 on the prompt. Datum.from_targets(..., reference_logprobs=...) takes it.",
    ),
    "REINFORCE without a reward": (losses.reinforce, broken(1, reward=None), "datum 1: reward: missing; pass one"),
    "a reward for each token": (
        losses.reinforce,
        broken(1, reward=[1.0, 2.0]),
        "datum 1: reward has the shape [2], but it must have one number",
    ),
    "a reference that slid against its tokens": (
        losses.dpo,
        broken(4, reference_logprobs=[0.0] * 5),
        "datum 4: reference_logprobs has the shape [5], but it must have the shape of the log-probabilities, [6]",
    ),
    "a reference of None on the prompt": (
        losses.kl_regularized,
        broken(0, reference_logprobs=[float("nan"), 0.0, 0.0, 0.0, 0.0]),
        "datum 0: reference_logprobs has NaN or infinite entries; pass any finite value where there is none, and a "
        "weight of 0",
    ),
    "distillation on [T] targets": (
        losses.topk_distillation,
        broken(0, teacher_logprobs=[-1.0] * 5),
        "datum 0: its targets have the shape [5], but this loss takes K alternatives per position, [T, K]: the "
        "most likely tokens of a teacher. For one target per position use cross_entropy.",
    ),
    "distillation without a teacher": (
        losses.topk_distillation,
        [Datum(d.model_input, {n: t for n, t in d.loss_fn_inputs.items() if "teach" not in n}) for d in alternatives()],
        "datum 0: teacher_logprobs: missing; pass the teacher's log-probability of each of the [T, K] targets.",
    ),
    "a teacher that rules tokens out": (
        losses.topk_distillation,
        alternatives(1, teacher_logprobs=torch.tensor([0.5, 0.5, 0.0]).log().repeat(2, 1)),
        "datum 1: teacher_logprobs has NaN or infinite entries; pass any finite value where there is none, and a "
        "weight of 0",
    ),
    "a teacher that is certain of several tokens": (
        losses.topk_distillation,
        alternatives(1, teacher_logprobs=[[-1.0, -1.0, -1.0], [-1.0, 0.0, 0.0]]),
        "datum 1: teacher_logprobs: the targets at position 1 have a total probability of 2.37, but it can be 1 at "
        "most. Pass log-probabilities (0 is certainty), each token once, and a weight of 0 for spare alternatives.",
    ),
    **{
        f"{loss.__name__} on [T, K] targets": (loss, alternatives(), ONE_TARGET)
        for loss in (getattr(losses, name) for name in ONE_TARGET_ONLY)
    },
    "a pair whose rejected response has no weight": (losses.dpo, without_weights(3), f"datum 3: none {OF} {NO_WEIGHT}"),
    "a pair without any weight": (losses.dpo, without_weights(2, 3), f"datum 2: none {OF} {NO_WEIGHT}"),
    "a group of which one has no weight": (losses.contrastive, without_weights(1), f"datum 1: none {OF} {NO_WEIGHT}"),
    **{
        f"{loss.__name__} without any weight": (loss, without_weights(*range(6)), NOTHING)
        for loss in (losses.grpo, losses.reinforce, losses.kl_regularized)
    },
    "a threshold of a token that is no bound on the ratio": (
        losses.ppo,
        broken(4, clip_high_threshold=[1.2, 1.2, 0.3, 1.2, 1.2, 1.2]),
        "datum 4: " + BOUNDS.format(0.8, 0.3),
    ),
    "thresholds of a token that are swapped": (
        losses.grpo,
        broken(1, clip_high_threshold=[0.0, 0.8], clip_low_threshold=[0.0, 1.2]),
        "datum 1: " + BOUNDS.format(1.2, 0.8),
    ),
    "half a pair": (losses.dpo, broken(0)[:5], "5 datums are not a whole number of groups of 2. The datums of a group"),
    "half a group": (
        partial(losses.contrastive, group_size=4),
        broken(0),
        "6 datums are not a whole number of groups of 4. The datums of a group are consecutive: let each item",
    ),
    "no datums": (losses.cross_entropy, [], "a loss needs one tensor per datum, got 0 for 0 datums"),
    "a group of one": (
        losses.reinforce,
        broken(0)[:1],
        "a group of one has nothing to compare with: sample several responses to each prompt",
    ),
}
