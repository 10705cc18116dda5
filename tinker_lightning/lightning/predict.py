"""Samples continuations from the current weights of a remote model."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any

from tinker_lightning.remote.calls import tokens_of
from tinker_lightning.rows.batches import prompts_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from tinker_lightning.remote.lm import RemoteLM
    from tinker_lightning.rows.formats import RowFormat
    from tinker_lightning.types import SamplingParams


class Samples:
    """Samples from a model with one sampling client per version of its weights."""

    def __init__(self, lm: RemoteLM, rows: Callable[[], RowFormat]) -> None:
        self._lm = lm
        self._rows = rows
        self._made: tuple[int, Any] | None = None

    def of(self, batch: Any, params: SamplingParams, num_samples: int = 1) -> list[dict[str, Any]]:
        """Returns a continuation of each prompt of a batch: `tokens`, `logprobs`, `stop_reason` and `text`.

        With several samples, which take one request per prompt, these are of the first, and `samples` has all of them.
        Without a tokenizer, which some servers do not name, prompts must be tokens, and there is no `text`.
        """
        sampler = self._sampler()
        prompts = prompts_of(batch, self._rows)
        futures = [sampler.sample(prompt, num_samples, params) for prompt in prompts]
        responses = [future.result() for future in futures]
        count = self._lm.handle.remote.tokens
        count.prefilled += tokens_of(prompts)
        count.sampled += sum(len(one.tokens) for response in responses for one in response.sequences)
        try:
            tokenizer = self._rows().tokenizer
        except Exception as error:  # of transformers, of its hub, or of the server
            warnings.warn(f"predictions have no text, because there is no tokenizer: {error}", stacklevel=2)
            tokenizer = None
        predictions = []
        for response in responses:
            samples = [
                {
                    "tokens": one.tokens,
                    "logprobs": one.logprobs,
                    "stop_reason": one.stop_reason,
                    **({} if tokenizer is None else {"text": tokenizer.decode(one.tokens, skip_special_tokens=True)}),
                }
                for one in response.sequences
            ]
            predictions.append({**samples[0], "samples": samples} if num_samples > 1 else samples[0])
        return predictions

    def forget(self) -> None:
        """Drops the sampling client: a model that the user passed may have been trained elsewhere."""
        self._made = None

    def _sampler(self) -> Any:
        version, backend = self._lm.handle.remote.version, self._lm.backend
        if self._made is None or self._made[0] != version:
            self._made = version, backend.save_weights_and_get_sampling_client()
        return self._made[1]
