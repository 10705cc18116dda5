"""Loss functions on log-probabilities: `(data, logprobs) -> (scalar, metrics)`.

Each takes a list of datums and one tensor of log-probabilities per datum, as `RemoteModule.loss` and
`forward_backward_custom` pass them, or the same stacked: a dict of inputs and one tensor, `[B, T]`. Settings are
keywords; `functools.partial` binds them.
"""

from tinker_lightning.losses.batch import Batch
from tinker_lightning.losses.kl import kl_estimate, kl_regularized
from tinker_lightning.losses.likelihood import cross_entropy, topk_distillation
from tinker_lightning.losses.policy import cispo, dro, group_advantages, grpo, gspo, importance_sampling, ppo, reinforce
from tinker_lightning.losses.preference import contrastive, dpo, ipo, kto, orpo, preference_nll

__all__ = [
    "Batch",
    "cispo",
    "contrastive",
    "cross_entropy",
    "dpo",
    "dro",
    "group_advantages",
    "grpo",
    "gspo",
    "importance_sampling",
    "ipo",
    "kl_estimate",
    "kl_regularized",
    "kto",
    "orpo",
    "ppo",
    "preference_nll",
    "reinforce",
    "topk_distillation",
]
