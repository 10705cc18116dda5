"""Samples from a model with a key-value cache.

Shapes: S sequences still being sampled, T prompt positions, V vocabulary.
"""

from __future__ import annotations

import copy
import hashlib
import secrets
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from tinker_lightning.errors import InvalidInput, OperationFailed
from tinker_lightning.server.engine.datum_pass import read_tokens
from tinker_lightning.server.engine.interface import SamplingMemory
from tinker_lightning.server.engine.logprobs import LOGITS_BYTES, check_size, score_prompt
from tinker_lightning.types import SampledSequence, SampleResponse

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Generator

    from tinker_lightning.server.engine.causal_lm import CausalLM
    from tinker_lightning.server.engine.interface import SamplingRequest
    from tinker_lightning.types import SamplingParams
    from tinker_lightning.types.responses import TopkLogprobs


class CachedSampler:
    """Decodes admitted requests with a key-value cache each, one after the other."""

    def __init__(self, base: CausalLM) -> None:
        self._base = base
        self._decodings: dict[str, _Decoding] = {}

    def memory(self, prompt_tokens: int, max_tokens: int | None) -> SamplingMemory:
        """Estimates the memory of a request."""
        base = self._base
        prompt_tokens = min(prompt_tokens, base.max_context_length)
        room = base.max_context_length - prompt_tokens
        tokens = prompt_tokens + min(room, room if max_tokens is None else max_tokens)
        # A step needs the logits, their scaled and their sorted copies with 8-byte indices, and the probabilities. The
        # cache of one layer at a time exists twice.
        logits = 10 * base.vocab_size * base.head_itemsize
        scores = 4 * min(prompt_tokens * base.vocab_size * base.head_itemsize, LOGITS_BYTES)
        prompt = base.forward_bytes(prompt_tokens) + base.cache_bytes(prompt_tokens) + scores
        return SamplingMemory(prompt, base.cache_bytes(tokens) * 9 // 8 + logits)

    def admit(self, request: SamplingRequest) -> None:
        """Accepts a request; raises `InvalidInput` if its prompt or what it asks for is too long."""
        self._decodings[request.request_id] = _Decoding(self._base, request)

    def step(
        self, request_ids: Collection[str] | None = None, should_stop: Callable[[], bool] = lambda: True
    ) -> dict[str, SampleResponse | Exception]:
        """Advances requests, by default all, and returns the outcomes of those that have ended.

        Each runs until `should_stop`, which is called after the prompt and after each token, returns True. The model is
        free for other work between two calls.
        """
        outcomes: dict[str, SampleResponse | Exception] = {}
        for request_id in list(self._decodings) if request_ids is None else request_ids:
            try:
                outcome: SampleResponse | Exception | None = self._decodings[request_id].advance(should_stop)
            except Exception as error:
                outcome = error
            if outcome is not None:
                self.cancel(request_id)
                outcomes[request_id] = outcome
        return outcomes

    def cancel(self, request_id: str) -> None:
        """Frees the memory of a request. Does nothing if it is not admitted."""
        decoding = self._decodings.pop(request_id, None)
        if decoding is not None:
            decoding.close()


class _Decoding:
    """An admitted request."""

    def __init__(self, base: CausalLM, request: SamplingRequest) -> None:
        self._base = base
        self._decoder: Any = base.model.get_decoder()
        self._request = request
        self._tokens_T = read_tokens("prompt", request.prompt, base)
        length, max_tokens = len(self._tokens_T), request.params.max_tokens
        room = base.max_context_length - length
        # A prompt that fills the context can be scored but not continued.
        self._budget = min(room, max_tokens if max_tokens is not None else room)
        if self._budget == 0 and not request.scoring:
            raise InvalidInput(f"prompt: its {length} tokens fill the context and leave no room for a continuation")
        check_size("topk_sample_logprobs", request.num_samples * self._budget * request.topk_sample_logprobs)
        self._steps = self._run()

    def advance(self, should_stop: Callable[[], bool]) -> SampleResponse | None:
        """Samples until it should stop; returns the response at the end."""
        with self._base.lora.use(self._request.weights):
            while True:
                try:
                    next(self._steps)
                except StopIteration as ended:
                    response: SampleResponse = ended.value
                    return response
                if should_stop():
                    return None

    def close(self) -> None:
        """Frees the cache."""
        self._steps.close()

    @torch.no_grad()
    def _run(self) -> Generator[None, None, SampleResponse]:
        """Processes the prompt once for all sequences and continues it; yields before each token."""
        base, request, params = self._base, self._request, self._request.params
        output = self._decoder(input_ids=self._tokens_T[None], use_cache=True)
        hidden_TD = output.last_hidden_state[0]
        response = SampleResponse([])
        if request.scoring:
            generator = _new_generator(params.seed, request.fallback_seed, -1)
            response = score_prompt(base, hidden_TD, self._tokens_T, request.scoring, params.temperature, generator)
        generators = [_new_generator(params.seed, request.fallback_seed, i) for i in range(request.num_samples)]
        sequences = [_Sequence(generator) for generator in generators]
        if self._budget:
            cache, last_D = output.past_key_values, hidden_TD[-1].clone()
            del output, hidden_TD  # frees the hidden states of the prompt
            wave = request.wave or request.num_samples
            for start in range(0, request.num_samples, wave):
                part = sequences[start : start + wave]
                # The last wave needs the cache of the prompt no more.
                own = cache if start + wave >= request.num_samples else copy.deepcopy(cache)
                own.batch_repeat_interleave(len(part))
                steps = self._continue(own, last_D.expand(len(part), -1), part)
                del own
                yield from steps
        sampled = [sequence.result(request.topk_sample_logprobs) for sequence in sequences]
        return replace(response, sequences=sampled)

    def _continue(self, cache: Any, hidden_SD: Tensor, active: list[_Sequence]) -> Generator[None, None, None]:
        """Appends tokens to the sequences until all are stopped or the budget is used up; yields before each token."""
        stop = _Stop(self._base, self._request.params)
        for step in range(self._budget):
            yield
            chosen_S = self._next(hidden_SD, active)
            for sequence in active:
                sequence.stopped = stop.reached(sequence.tokens)
            going = [i for i, sequence in enumerate(active) if not sequence.stopped]
            if not going or step + 1 == self._budget:
                return
            if len(going) < len(active):
                # Finished sequences are removed from the batch to speed up the others.
                kept = torch.tensor(going)
                cache.batch_select_indices(kept)
                chosen_S = chosen_S[kept]
                active = [active[i] for i in going]
            output = self._decoder(input_ids=chosen_S[:, None], past_key_values=cache, use_cache=True)
            cache, hidden_SD = output.past_key_values, output.last_hidden_state[:, -1]

    def _next(self, hidden_SD: Tensor, active: list[_Sequence]) -> Tensor:
        """Appends a token to each sequence and returns the tokens."""
        logits_SV = self._base.head(hidden_SD).to(torch.promote_types(hidden_SD.dtype, torch.float32))
        if not logits_SV.isfinite().all():
            raise OperationFailed("the model's logits are not finite, so no token can be sampled")
        chosen_S = _choose(logits_SV, self._request.params, [sequence.generator for sequence in active])
        total_S = logits_SV.logsumexp(-1)
        logprobs_S = (logits_SV.gather(-1, chosen_S[:, None])[:, 0] - total_S).tolist()
        for sequence, token, logprob in zip(active, chosen_S.tolist(), logprobs_S, strict=True):
            sequence.tokens.append(token)
            sequence.logprobs.append(logprob)
        if topk := self._request.topk_sample_logprobs:
            top = logits_SV.topk(min(topk, logits_SV.shape[-1]))
            rows = zip(active, top.indices.tolist(), (top.values - total_S[:, None]).tolist(), strict=True)
            for sequence, ids, values in rows:
                sequence.top.append(list(zip(ids, values, strict=True)))
        return chosen_S


class _Sequence:
    """A sequence that is being sampled."""

    def __init__(self, generator: torch.Generator) -> None:
        self.generator = generator
        self.tokens: list[int] = []
        self.logprobs: list[float] = []
        self.top: TopkLogprobs = []
        self.stopped = False

    def result(self, topk: int) -> SampledSequence:
        reason: Literal["stop", "length"] = "stop" if self.stopped else "length"
        return SampledSequence(self.tokens, self.logprobs, reason, self.top if topk else None)


def _choose(logits_SV: Tensor, params: SamplingParams, generators: list[torch.Generator]) -> Tensor:
    """Samples one token per row, each with its own generator, so that sequences do not depend on each other."""
    if params.temperature == 0:
        return logits_SV.argmax(-1)
    # The largest logit is shifted to 0 first, because a small temperature would make it infinite.
    temperature = max(params.temperature, torch.finfo(logits_SV.dtype).tiny)
    scaled_SV = (logits_SV - logits_SV.amax(-1, keepdim=True)) / temperature
    if params.top_k == -1 and params.top_p == 1:
        return _draw(scaled_SV.softmax(-1), generators)
    k = logits_SV.shape[-1] if params.top_k == -1 else min(params.top_k, logits_SV.shape[-1])
    values_SK, tokens_SK = scaled_SV.topk(k, dim=-1)
    probabilities_SK = values_SK.softmax(-1)
    # Keeps the most likely tokens up to and including the one whose cumulative probability reaches top_p.
    before_SK = probabilities_SK.cumsum(-1) - probabilities_SK
    positions_S = _draw(probabilities_SK.masked_fill(before_SK >= params.top_p, 0), generators)
    return tokens_SK.gather(-1, positions_S[:, None])[:, 0]


def _draw(probabilities_SK: Tensor, generators: list[torch.Generator]) -> Tensor:
    rows = zip(probabilities_SK, generators, strict=True)
    return torch.cat([probabilities.multinomial(1, generator=generator) for probabilities, generator in rows])


def _new_generator(seed: int | None, fallback_seed: str | None, index: int) -> torch.Generator:
    if seed is None and fallback_seed is None:
        return torch.Generator().manual_seed(secrets.randbits(63))
    if seed is None:
        digest = hashlib.blake2b(f"{fallback_seed}/{index}".encode(), digest_size=8).digest()
        return torch.Generator().manual_seed(int.from_bytes(digest) >> 1)
    # Seeds are spread far apart, so that sample i of seed s differs from sample 0 of seed s + i.
    return torch.Generator().manual_seed((seed * 1_000_003 + index * 0x9E3779B97F4A7C15) % 2**63)


class _Stop:
    """Checks whether a sequence ends with a stop token or stop string."""

    def __init__(self, base: CausalLM, params: SamplingParams) -> None:
        self._tokenizer = base.tokenizer
        self._tokens: frozenset[int] = frozenset()
        self._strings: list[str] = []
        if params.stop != []:
            # Custom stops are added to the end-of-text tokens, because text after these is useless.
            stops = [params.stop] if isinstance(params.stop, str) else params.stop or []
            self._tokens = base.eos_token_ids | {stop for stop in stops if isinstance(stop, int)}
            self._strings = [stop for stop in stops if isinstance(stop, str)]
        # A token has at least one byte of text, so this many tokens contain any stop string that has just ended.
        self._window = max((len(stop.encode()) for stop in self._strings), default=0) + 4

    def reached(self, tokens: list[int]) -> bool:
        if tokens[-1] in self._tokens:
            return True
        if not self._strings:
            return False
        text = self._tokenizer.decode(tokens[-self._window :], skip_special_tokens=False)
        return any(stop in text for stop in self._strings)
