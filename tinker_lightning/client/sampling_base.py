"""Sampling as the SDK's users call it: the part that our client and the official SDK's adapter share."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any

from tinker_lightning.client.async_names import awaited
from tinker_lightning.client.futures import UnreadFailures
from tinker_lightning.client.sdk import inputs

if TYPE_CHECKING:
    from tinker_lightning.client.futures import TinkerFuture
    from tinker_lightning.types import SampleResponse, SamplingParams


class BaseSamplingClient(ABC):
    """Samples from fixed weights. Sampling methods return a future at once."""

    def __init__(self) -> None:
        self.unread = UnreadFailures()

    def sample(
        self,
        prompt: Any,
        num_samples: int,
        sampling_params: Any,
        include_prompt_logprobs: bool = False,
        topk_prompt_logprobs: int = 0,
        topk_sample_logprobs: int = 0,
        target_prompt_logprobs: Any = None,
        prompt_alt_tokens_k: int = 0,
        prompt_logprobs_last_n: int | None = None,
    ) -> TinkerFuture[SampleResponse]:
        """Samples continuations of a prompt of T tokens.

        Args:
            prompt: The tokens.
            num_samples: The number of independent continuations.
            sampling_params: How tokens are chosen.
            include_prompt_logprobs: Whether to return the log-probabilities of the prompt's tokens.
            topk_prompt_logprobs: How many of the most likely tokens to return at each position of the prompt.
            topk_sample_logprobs: How many of the most likely tokens to return at each sampled position.
            target_prompt_logprobs: Token ids `[T - 1, K]` to score in place of the prompt's tokens from the second on;
                -1 skips an entry.
            prompt_alt_tokens_k: How many tokens to draw in place of each token of the prompt from the second on.
            prompt_logprobs_last_n: Limits the log-probabilities and most likely tokens of the prompt to its last n.

        Raises:
            Unsupported: If an option is given that the installed version of the official SDK does not have.
        """
        targets = None if target_prompt_logprobs is None else inputs.to_tensor(target_prompt_logprobs)
        options = {
            "prompt_logprobs": include_prompt_logprobs,
            "topk_prompt_logprobs": topk_prompt_logprobs,
            "topk_sample_logprobs": topk_sample_logprobs,
            "target_prompt_logprobs": targets,
            "prompt_alt_tokens_k": prompt_alt_tokens_k,
            "prompt_logprobs_last_n": prompt_logprobs_last_n,
        }
        params = inputs.to_sampling_params(sampling_params)
        return self.unread.add(self._sample(prompt, num_samples, params, options))

    sample_async = awaited(sample)

    @abstractmethod
    def _sample(
        self, prompt: Any, num_samples: int, params: SamplingParams, options: dict[str, Any]
    ) -> TinkerFuture[SampleResponse]:
        """Sends a request; the names of the options are those of `SampleRequest`."""
