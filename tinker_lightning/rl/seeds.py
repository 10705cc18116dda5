"""Seeds of samples, which depend on what is sampled and not on when."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tinker_lightning.rl.environment import Policy, Prompt
    from tinker_lightning.rl.trajectory import Completion
    from tinker_lightning.types import SamplingParams


def derive(*parts: int) -> int:
    """Returns a seed of 31 bits that depends on all parts and on their order.

    >>> derive(0, 1, 2) == derive(0, 1, 2), derive(0, 1, 2) == derive(0, 2, 1)
    (True, False)
    """
    digest = hashlib.blake2b("/".join(map(str, parts)).encode(), digest_size=8).digest()
    return int.from_bytes(digest) >> 33


class SeededPolicy:
    """A policy whose requests have seeds: of the run, the task, the sample and the number of the request.

    Args:
        policy: The policy to sample from.
        params: How tokens are chosen where a call does not say.
        parts: What the seeds derive from.
    """

    def __init__(self, policy: Policy, params: SamplingParams, *parts: int) -> None:
        self._policy = policy
        self._params = params
        self._parts = parts
        self._requests = 0

    @property
    def tokenizer(self) -> Any:
        """The tokenizer of the model."""
        return self._policy.tokenizer

    @property
    def version(self) -> int:
        """How many optimizer steps its weights have taken."""
        return self._policy.version

    async def sample(
        self, prompt: Prompt, *, num_samples: int = 1, params: SamplingParams | None = None
    ) -> list[Completion]:
        """Returns completions of a prompt; a seed among the parameters is kept."""
        params = params or self._params
        if params.seed is None:
            params = replace(params, seed=derive(*self._parts, self._requests))
        self._requests += 1
        return await self._policy.sample(prompt, num_samples=num_samples, params=params)
