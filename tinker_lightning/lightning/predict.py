"""Samples continuations from the current weights of a remote model."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tinker_lightning.lightning.batches import prompts_of

if TYPE_CHECKING:
    from tinker_lightning.remote.lm import RemoteLM
    from tinker_lightning.types import SamplingParams


class Samples:
    """Samples from a model with one sampling client per version of its weights."""

    def __init__(self, lm: RemoteLM) -> None:
        self._lm = lm
        self._made: tuple[int, Any, Any] | None = None

    def of(self, batch: Any, params: SamplingParams) -> list[dict[str, Any]]:
        """Returns a continuation of each prompt of a batch: `tokens`, `logprobs`, `stop_reason` and `text`."""
        sampler, tokenizer = self._sampler()
        futures = [sampler.sample(prompt, 1, params) for prompt in prompts_of(batch, tokenizer)]
        sequences = [future.result().sequences[0] for future in futures]
        return [
            {
                "tokens": sequence.tokens,
                "logprobs": sequence.logprobs,
                "stop_reason": sequence.stop_reason,
                "text": tokenizer.decode(sequence.tokens, skip_special_tokens=True),
            }
            for sequence in sequences
        ]

    def forget(self) -> None:
        """Drops the sampling client: a model that the user passed may have been trained elsewhere."""
        self._made = None

    def _sampler(self) -> tuple[Any, Any]:
        version, backend = self._lm.handle.remote.version, self._lm.backend
        if self._made is None or self._made[0] != version:
            sampler = backend.save_weights_and_get_sampling_client()
            self._made = (version, sampler, backend.get_tokenizer())
        return self._made[1:]
