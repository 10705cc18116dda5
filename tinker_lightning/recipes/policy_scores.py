"""What trainer, sampler and reference give to sampled tokens, and the metrics that compare them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tinker_lightning.losses.kl import Estimator, k3, kl_estimate
from tinker_lightning.recipes.references import NAME
from tinker_lightning.types import Datum


@dataclass(frozen=True, eq=False)
class Scored:
    """The log-probabilities of the sampled tokens of a group.

    Args:
        data: Its datums.
        known: Which targets of each datum are scored.
        version: How many optimizer steps the weights of the sampler had taken.
        age: How many more the weights of the trainer had taken.
        trainer: By the model that is trained, one for each sampled token.
        sampler: By the sampler.
        reference: By the reference model; None if it was not asked.
    """

    data: Sequence[Datum]
    known: Sequence[Tensor]
    version: int
    age: int
    trainer: Tensor
    sampler: Tensor
    reference: Tensor | None

    @classmethod
    def of(cls, data: Sequence[Datum], logprobs: Sequence[Tensor], version: int, age: int) -> Scored:
        """Returns the scores of datums, given the trainer's log-probabilities of all their targets.

        Some servers return 0 where a loss does not depend on a token. Such tokens are left out.
        """
        masks, trainer, sampler, reference = [], [], [], []
        for datum, own in zip(data, logprobs, strict=True):
            inputs = {name: tensor.to_torch() for name, tensor in datum.loss_fn_inputs.items()}
            known = (inputs["mask"] != 0) & ((own != 0) | (inputs["logprobs"] == 0))
            masks.append(known)
            trainer.append(own.detach()[known])
            sampler.append(inputs["logprobs"][known])
            if NAME in inputs:
                reference.append(inputs[NAME][known])
        is_complete = len(reference) == len(trainer) > 0
        none = torch.empty(0)
        return cls(
            data,
            masks,
            version,
            age,
            torch.cat(trainer or [none]),
            torch.cat(sampler or [none]),
            torch.cat(reference) if is_complete else None,
        )


def metrics_of(scores: Sequence[Scored]) -> dict[str, float]:
    """Returns estimates from sampled tokens: the entropy, and the divergence of the trainer from the sampler."""
    trainer = torch.cat([each.trainer for each in scores]) if scores else torch.empty(0)
    if not len(trainer):
        return {}
    sampler = torch.cat([each.sampler for each in scores])
    return {"policy/entropy": -trainer.mean().item(), "policy/kl_sampler": k3(sampler, trainer).mean().item()}


def kl_reference_of(scores: Sequence[Scored], estimator: Estimator) -> dict[str, float]:
    """Returns the divergence of the trainer from the reference, over the groups that it has scored."""
    values = [kl_estimate(each.trainer, each.reference, estimator) for each in scores if each.reference is not None]
    values = [each for each in values if len(each)]
    return {"policy/kl_reference": torch.cat(values).mean().item()} if values else {}
