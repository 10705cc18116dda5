"""Samples continuations from the current weights of a remote model."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any

from tinker_lightning.lightning.batches import prompts_of

if TYPE_CHECKING:
    from tinker_lightning.remote.lm import RemoteLM
    from tinker_lightning.types import SamplingParams


class Samples:
    """Samples from a model with one sampling client per version of its weights."""

    def __init__(self, lm: RemoteLM) -> None:
        self._lm = lm
        self._made: tuple[int, Any] | None = None
        self._tokenizer: Any = None

    def of(self, batch: Any, params: SamplingParams) -> list[dict[str, Any]]:
        """Returns a continuation of each prompt of a batch: `tokens`, `logprobs`, `stop_reason` and `text`.

        Without a tokenizer, which some servers do not name, prompts must be tokens, and there is no `text`.
        """
        sampler = self._sampler()
        futures = [sampler.sample(prompt, 1, params) for prompt in prompts_of(batch, self._fetch_tokenizer)]
        sequences = [future.result().sequences[0] for future in futures]
        try:
            tokenizer = self._fetch_tokenizer()
        except Exception as error:  # of transformers, of its hub, or of the server
            warnings.warn(f"predictions have no text, because there is no tokenizer: {error}", stacklevel=2)
            tokenizer = None
        return [
            {
                "tokens": sequence.tokens,
                "logprobs": sequence.logprobs,
                "stop_reason": sequence.stop_reason,
                **({} if tokenizer is None else {"text": tokenizer.decode(sequence.tokens, skip_special_tokens=True)}),
            }
            for sequence in sequences
        ]

    def forget(self) -> None:
        """Drops the sampling client: a model that the user passed may have been trained elsewhere."""
        self._made = None

    def _fetch_tokenizer(self) -> Any:
        if self._tokenizer is None:
            self._tokenizer = self._lm.backend.get_tokenizer()
        return self._tokenizer

    def _sampler(self) -> Any:
        version, backend = self._lm.handle.remote.version, self._lm.backend
        if self._made is None or self._made[0] != version:
            self._made = version, backend.save_weights_and_get_sampling_client()
        return self._made[1]
