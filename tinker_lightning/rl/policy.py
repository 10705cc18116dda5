"""Policies that sample from a server."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from tinker_lightning.errors import InvalidInput, Unsupported
from tinker_lightning.rl.trajectory import Completion
from tinker_lightning.rows.formats import RowFormat, is_chat
from tinker_lightning.types import ModelInput, SamplingParams

if TYPE_CHECKING:
    from tinker_lightning.rl.environment import Prompt


class SamplerPolicy:
    """A policy whose weights are those of a sampling client.

    Args:
        sampler: A sampling client.
        tokenizer: The tokenizer of the model; by default the client's.
        version: The number of optimizer steps that its weights have taken.
        params: Default sampling parameters; without them, tokens are drawn from the unmodified distribution.
    """

    def __init__(
        self, sampler: Any, tokenizer: Any = None, *, version: int = 0, params: SamplingParams | None = None
    ) -> None:
        self.sampler = sampler
        self.tokenizer = sampler.get_tokenizer() if tokenizer is None else tokenizer
        self.version = version
        self.params = params or SamplingParams()

    async def sample(
        self, prompt: Prompt, *, num_samples: int = 1, params: SamplingParams | None = None
    ) -> list[Completion]:
        """Returns completions of a prompt: tokens, a chat to answer, or a text to continue."""
        tokens = prompt_tokens(prompt, self.tokenizer)
        if not len(tokens):
            raise InvalidInput("the prompt is empty; it needs at least one token")
        response = await self.sampler.sample(ModelInput.from_ints(tokens), num_samples, params or self.params)
        return [self.completion(sequence) for sequence in response.sequences]

    def completion(self, sequence: Any) -> Completion:
        """Returns a sampled sequence as a completion; raises `Unsupported` if it has no log-probabilities."""
        if sequence.logprobs is None:
            raise Unsupported(
                "the server returned no log-probabilities with its samples, which reinforcement learning needs. Train "
                "on another server; `tinker-lightning doctor` lists what a server offers."
            )
        tokens = list(sequence.tokens)
        text = self.tokenizer.decode(tokens, skip_special_tokens=True)
        return Completion(tokens, np.array(sequence.logprobs, np.float32), sequence.stop_reason, text, self.version)


def prompt_tokens(prompt: Prompt, tokenizer: Any) -> list[int]:
    """Returns the tokens of a prompt: of a chat, up to where the assistant answers; of a text, the text's own."""
    if isinstance(prompt, Sequence) and not isinstance(prompt, str) and not is_chat(prompt):
        return ModelInput.from_ints(prompt).to_ints()
    return RowFormat(tokenizer).prompt(prompt).to_ints()
