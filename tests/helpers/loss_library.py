"""Every loss of the library, with the inputs that it reads."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from tests.helpers.loss_cases import batch, distillation
from tinker_lightning import Datum, losses

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

POLICY = ("logprobs", "advantages")
# Each loss with settings that use all of its formula, and the inputs that it reads.
LIBRARY: dict[str, tuple[Callable[..., Any], tuple[str, ...]]] = {
    "cross_entropy": (losses.cross_entropy, ("weights",)),
    "topk_distillation": (losses.topk_distillation, ("weights", "teacher_logprobs")),
    "topk_distillation, renormalized": (
        partial(losses.topk_distillation, tail="renormalize"),
        ("weights", "teacher_logprobs"),
    ),
    "kl_regularized": (losses.kl_regularized, ("weights", "reference_logprobs")),
    "importance_sampling": (losses.importance_sampling, POLICY),
    "ppo": (losses.ppo, POLICY),
    "cispo": (losses.cispo, POLICY),
    "dro": (losses.dro, POLICY),
    "gspo": (losses.gspo, (*POLICY, "sequence_ratio_mask")),
    "grpo": (losses.grpo, ("weights", *POLICY, "reference_logprobs")),
    "grpo, by token, k2": (
        partial(losses.grpo, reduction="token", estimator="k2"),
        ("weights", *POLICY, "reference_logprobs"),
    ),
    "reinforce": (losses.reinforce, ("weights", "reward")),
    "reinforce, in groups": (partial(losses.reinforce, group_size=2, baseline="mean"), ("weights", "reward")),
    "dpo": (losses.dpo, ("weights", "reference_logprobs")),
    "dpo, all settings": (
        partial(losses.dpo, beta=1.0, margin=0.1, label_smoothing=0.1, length_normalized=True),
        ("weights", "reference_logprobs"),
    ),
    "ipo": (losses.ipo, ("weights", "reference_logprobs")),
    "orpo": (losses.orpo, ("weights",)),
    "kto": (partial(losses.kto, desirable_weight=0.8), ("weights", "label", "kl_weights", "reference_logprobs")),
    "kto, without KL": (partial(losses.kto, beta=1.0, kl=False), ("weights", "label", "reference_logprobs")),
    "contrastive": (losses.contrastive, ("weights",)),
}


def case_of(name: str, seed: int = 0) -> tuple[list[Datum], list[Tensor]]:
    data, logprobs = distillation(seed) if name.startswith("topk") else batch(seed)
    reads = {"target_tokens", *LIBRARY[name][1]}
    return [Datum(d.model_input, {n: t for n, t in d.loss_fn_inputs.items() if n in reads}) for d in data], logprobs
