"""Checks that a server samples from the model that is trained, with log-probabilities."""

from __future__ import annotations

import logging
import warnings
from typing import TYPE_CHECKING, Any

import torch

from tinker_lightning.errors import InvalidInput, NotFound, OperationFailed, TinkerLightningError, Unsupported
from tinker_lightning.recipes.references import NAME, References
from tinker_lightning.rl.policy import SamplerPolicy
from tinker_lightning.types import ModelInput, SamplingParams

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from tinker_lightning.client.futures import TinkerFuture
    from tinker_lightning.recipes.policy_scores import Scored
    from tinker_lightning.remote.lm import RemoteLM

logger = logging.getLogger("tinker_lightning.rl")

_TARGETS = "target_tokens"
# How many tokens are sampled to see what comes back.
_PROBED = 4
# The largest mean difference between the log-probabilities of sampler and trainer that rounding explains.
_ROUNDING = 0.1
# A sampler whose distance from the base model is below this share of the trainer's has not learned what it did.
_SHARE = 0.1
# A sampler of earlier weights may be close to the base model, unless they had taken this many times as many steps.
_TIMES = 3


class SamplerCheck:
    """Raises `Unsupported` if the server cannot sample from the model, or samples from its base model.

    Some servers create a sampler of saved weights that ignores them. Training would then silently continue on samples
    of the base model.

    Args:
        lm: The model that is trained.
        recipe: What errors call the recipe.
    """

    def __init__(self, lm: RemoteLM, recipe: str) -> None:
        self._lm = lm
        self._recipe = recipe
        self._has_sampled = False
        self._is_decided = False

    def start(self, submit: Callable[[], TinkerFuture[Any]], tokenizer: Callable[[], Any]) -> TinkerFuture[Any]:
        """Returns the sampler that is submitted; the first one must return tokens with their log-probabilities."""
        if self._has_sampled:
            return submit()
        remote = self._lm.handle.remote
        try:
            future = submit()
            sampler = remote.wait(future)
        except (InvalidInput, NotFound, OperationFailed) as error:
            raise Unsupported(
                f"{self._recipe} samples from the model that it trains, but {self._lm.backend.server} cannot: {error}. "
                "Train on a server with save_weights_for_sampler; `tinker-lightning doctor URL` lists what a server "
                "offers."
            ) from error
        policy = SamplerPolicy(sampler, tokenizer())
        prompt, params = ModelInput.from_ints([1]), SamplingParams(max_tokens=_PROBED, seed=0)
        answers = [sampler.sample(prompt, 1, params) for _ in range(2)]
        # Raises without log-probabilities.
        first, second = [policy.completion(remote.wait(answer).sequences[0]).tokens for answer in answers]
        if first != second:
            logger.warning(
                "%s: samples of the same prompt and seed differ, so this run cannot be repeated exactly, nor resumed "
                "with the same samples",
                self._lm.backend.server,
            )
        self._has_sampled = True
        return future

    def observe(self, scores: Sequence[Scored]) -> None:
        """Compares sampler and trainer until a difference is explained: by older weights, arithmetic or the server."""
        for scored in scores:
            is_told_apart = scored.version > _TIMES * scored.age and len(scored.trainer)
            if not self._is_decided and is_told_apart and _distance(scored.trainer, scored.sampler) > _ROUNDING:
                self._is_decided = True
                self._decide(scored)

    def _decide(self, scored: Scored) -> None:
        gap = _distance(scored.trainer, scored.sampler)
        differ = (
            f"{self._lm.backend.server}: sampler and trainer give the same tokens log-probabilities that differ by "
            f"{gap:.2g} on average, after {scored.version + scored.age} optimizer steps"
        )
        base = self._of_base(scored)
        if base is not None and _distance(scored.sampler, base) < _SHARE * _distance(scored.trainer, base):
            raise Unsupported(
                f"{differ}, because the sampler has those of the base model: this server samples without the adapter "
                f"that is trained. {self._recipe} would train on samples of another model. Update the server or its "
                "configuration; `tinker-lightning doctor URL` shows whether sampler and trainer agree."
            )
        if scored.age == 0:
            warnings.warn(
                f"{differ}, though both should have the same weights. Losses correct for it by the ratio of the two; "
                "bound it with max_ratio. `tinker-lightning doctor URL` shows whether sampler and trainer agree.",
                stacklevel=2,
            )

    def _of_base(self, scored: Scored) -> torch.Tensor | None:
        """Returns the base model's log-probabilities of sampled tokens; None if the server does not compute them."""
        plain = [datum.with_only_inputs({_TARGETS: datum.loss_fn_inputs[_TARGETS]}) for datum in scored.data]
        try:
            data = References(self._lm, "base", None, keep=False).add_to(plain)
        except TinkerLightningError:
            return None
        found = zip(data, scored.known, strict=True)
        return torch.cat([datum.loss_fn_inputs[NAME].to_torch()[known] for datum, known in found])


def _distance(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a - b).abs().mean())
