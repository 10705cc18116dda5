"""Samples from a model with a key-value cache.

Shapes: S sequences still being sampled, T prompt positions, V vocabulary.
"""

from __future__ import annotations

import copy
import hashlib
import secrets
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from tinker_lightning.errors import InvalidInput, OperationFailed
from tinker_lightning.server.engine.base import BaseModel
from tinker_lightning.server.engine.logprobs import LOGITS_BYTES
from tinker_lightning.server.engine.passes import read_tokens
from tinker_lightning.server.engine.prompt_scores import PromptScores, PromptScoring, check_size, score_prompt
from tinker_lightning.types import SampledSequence, SampleResponse, SamplingParams

if TYPE_CHECKING:
    from collections.abc import Callable, Generator

    from tinker_lightning.server.engine.lora import LoraWeights
    from tinker_lightning.types import ModelInput
    from tinker_lightning.types.responses import TopkLogprobs

MAX_SAMPLES = 256


@dataclass(frozen=True, slots=True)
class SamplingShape:
    """What the memory of a sampling request depends on, in bytes."""

    prompt: int  # the pass over the prompt, and its scores
    sequence: int  # the cache of a sequence at its full length, and its logits

    @classmethod
    def of(cls, base: BaseModel, prompt_tokens: int, max_tokens: int | None) -> SamplingShape:
        """Returns the shape of a request."""
        prompt_tokens = min(prompt_tokens, base.max_context_length)
        room = base.max_context_length - prompt_tokens
        tokens = prompt_tokens + min(room, room if max_tokens is None else max_tokens)
        # A step needs the logits, their scaled and their sorted copies with 8-byte indices, and the probabilities. The
        # cache of one layer at a time exists twice.
        logits = 10 * base.vocab_size * base.head_itemsize
        scores = 4 * min(prompt_tokens * base.vocab_size * base.head_itemsize, LOGITS_BYTES)
        prompt = base.forward_bytes(prompt_tokens) + base.cache_bytes(prompt_tokens) + scores
        return cls(prompt, base.cache_bytes(tokens) * 9 // 8 + logits)

    def wave(self, num_samples: int, memory: int) -> int:
        """Returns how many sequences fit into the memory at a time, at least one."""
        return max(1, min(num_samples, (memory - self.prompt) // self.sequence))

    def bytes(self, wave: int) -> int:
        """Returns the memory of a request."""
        return self.prompt + wave * self.sequence


@torch.no_grad()
def sample(
    base: BaseModel,
    weights: LoraWeights | None,
    prompt: ModelInput,
    params: SamplingParams,
    *,
    num_samples: int = 1,
    scoring: PromptScoring = PromptScoring(),  # noqa: B008  # immutable
    topk_sample_logprobs: int = 0,
    unseeded: str | None = None,
    wave: int = MAX_SAMPLES,
    raise_if_cancelled: Callable[[], None] = lambda: None,
    should_pause: Callable[[], bool] = lambda: False,
) -> Generator[None, None, SampleResponse]:
    """Samples continuations of a prompt, which is processed once for all of them; yields where it pauses.

    Temperature, top-k and top-p affect the choice of tokens but not the returned log-probabilities, which are
    comparable with those of a forward pass. Without a seed in `params`, draws follow from `unseeded`, or are random.
    `raise_if_cancelled` and `should_pause` are called before each token; the model is free for other work in a pause.
    At most `wave` sequences are sampled at a time; each has its own random numbers, so that they do not depend on the
    waves.
    """
    raise_if_cancelled()
    tokens_T = read_tokens("prompt", prompt, base)
    room = base.max_context_length - len(tokens_T)
    # A prompt that fills the context can be scored but not continued.
    budget = min(room, params.max_tokens if params.max_tokens is not None else room)
    if budget == 0 and not scoring:
        raise InvalidInput(f"prompt: its {len(tokens_T)} tokens fill the context and leave no room for a continuation")
    check_size("topk_sample_logprobs", num_samples * budget * topk_sample_logprobs)
    decoder = base.model.get_decoder()
    with base.lora.use(weights):
        output = decoder(input_ids=tokens_T[None], use_cache=True)
        hidden_TD = output.last_hidden_state[0]
        scores = PromptScores()
        if scoring:
            generator = _generator(params.seed, unseeded, -1)
            scores = score_prompt(base, hidden_TD, tokens_T, scoring, params.temperature, generator)
    sequences = [_Sequence(_generator(params.seed, unseeded, i)) for i in range(num_samples)]
    if budget:
        cache, last_D = output.past_key_values, hidden_TD[-1].clone()
        del output, hidden_TD  # frees the hidden states of the prompt
        run = _Run(base, decoder, params, topk_sample_logprobs)
        for start in range(0, num_samples, wave):
            part = sequences[start : start + wave]
            # The last wave needs the cache of the prompt no more.
            own = cache if start + wave >= num_samples else copy.deepcopy(cache)
            own.batch_repeat_interleave(len(part))
            steps = run.continue_all(own, last_D.expand(len(part), -1), part, budget)
            del own
            while True:
                with base.lora.use(weights):
                    for _ in steps:
                        raise_if_cancelled()
                        if should_pause():
                            break
                    else:
                        break
                yield
                raise_if_cancelled()
    return scores.response([sequence.result(topk_sample_logprobs) for sequence in sequences])


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


@dataclass(frozen=True, slots=True)
class _Run:
    """The part of a request that all its tokens share."""

    base: BaseModel
    decoder: Any
    params: SamplingParams
    topk: int

    def continue_all(
        self, cache: Any, hidden_SD: Tensor, sequences: list[_Sequence], budget: int
    ) -> Generator[None, None, None]:
        """Appends tokens to the sequences until all are stopped or the budget is used up; yields before each token."""
        stop = _Stop(self.base, self.params)
        active = sequences
        for step in range(budget):
            yield
            chosen_S = self._next(hidden_SD, active)
            for sequence in active:
                sequence.stopped = stop.reached(sequence.tokens)
            going = [i for i, sequence in enumerate(active) if not sequence.stopped]
            if not going or step + 1 == budget:
                return
            if len(going) < len(active):
                # Finished sequences are removed from the batch to speed up the others.
                kept = torch.tensor(going)
                cache.batch_select_indices(kept)
                chosen_S = chosen_S[kept]
                active = [active[i] for i in going]
            output = self.decoder(input_ids=chosen_S[:, None], past_key_values=cache, use_cache=True)
            cache, hidden_SD = output.past_key_values, output.last_hidden_state[:, -1]

    def _next(self, hidden_SD: Tensor, active: list[_Sequence]) -> Tensor:
        """Appends a token to each sequence and returns the tokens."""
        logits_SV = self.base.head(hidden_SD).to(torch.promote_types(hidden_SD.dtype, torch.float32))
        if not logits_SV.isfinite().all():
            raise OperationFailed("the model's logits are not finite, so no token can be sampled")
        chosen_S = _choose(logits_SV, self.params, [sequence.generator for sequence in active])
        total_S = logits_SV.logsumexp(-1)
        logprobs_S = (logits_SV.gather(-1, chosen_S[:, None])[:, 0] - total_S).tolist()
        for sequence, token, logprob in zip(active, chosen_S.tolist(), logprobs_S, strict=True):
            sequence.tokens.append(token)
            sequence.logprobs.append(logprob)
        if self.topk:
            top = logits_SV.topk(min(self.topk, logits_SV.shape[-1]))
            rows = zip(active, top.indices.tolist(), (top.values - total_S[:, None]).tolist(), strict=True)
            for sequence, ids, values in rows:
                sequence.top.append(list(zip(ids, values, strict=True)))
        return chosen_S


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


def _generator(seed: int | None, unseeded: str | None, index: int) -> torch.Generator:
    if seed is None and unseeded is None:
        return torch.Generator().manual_seed(secrets.randbits(63))
    if seed is None:
        digest = hashlib.blake2b(f"{unseeded}/{index}".encode(), digest_size=8).digest()
        return torch.Generator().manual_seed(int.from_bytes(digest) >> 1)
    # Seeds are spread far apart, so that sample i of seed s differs from sample 0 of seed s + i.
    return torch.Generator().manual_seed((seed * 1_000_003 + index * 0x9E3779B97F4A7C15) % 2**63)


class _Stop:
    """Checks whether a sequence ends with a stop token or stop string."""

    def __init__(self, base: BaseModel, params: SamplingParams) -> None:
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
