"""Sampling: which tokens, with which log-probabilities, and until when.

The model memorized a text, so that what it says is known and its distribution is far from uniform.
"""

from __future__ import annotations

import math
from collections import Counter
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from tests.helpers.engine_passes import run_pass
from tests.helpers.sampling import sample
from tinker_lightning.errors import InvalidDatum, InvalidInput, OperationFailed
from tinker_lightning.server.engine.adapter import LoraAdapter
from tinker_lightning.server.engine.interface import PromptScoring, SamplingRequest
from tinker_lightning.server.engine.sampler import _Stop
from tinker_lightning.types import AdamParams, Datum, LoraConfig, ModelInput, SamplingParams

if TYPE_CHECKING:
    from tinker_lightning.server.engine.causal_lm import CausalLM
    from tinker_lightning.server.engine.interface import AdapterWeights
    from tinker_lightning.types import SampledSequence

PROMPT = "Q:"
ANSWER = "the café is öpen → ok"
EOS = 257
GREEDY: dict[str, Any] = {"temperature": 0.0}


def encode(text: str) -> list[int]:
    return list(text.encode())


@pytest.fixture(scope="module")
def memory(tiny: CausalLM) -> LoraAdapter:
    """An adapter that answers the prompt with the text and then ends."""
    adapter = LoraAdapter(tiny.lora.new_weights(LoraConfig(rank=32, seed=0)))
    tokens = [*encode(PROMPT), *encode(ANSWER), EOS]
    datum = Datum.from_tokens(tokens, [0.0] * len(PROMPT) + [1.0] * (len(tokens) - len(PROMPT)))
    for _ in range(80):
        loss = run_pass(tiny, adapter, [datum], "cross_entropy", {}).metrics["loss:sum"]
        adapter.step(AdamParams(learning_rate=5e-3))
    assert loss < 0.5
    return adapter


@pytest.fixture(scope="module")
def unsure(tiny: CausalLM, make_adapter: Any) -> LoraAdapter:
    """An untrained adapter with which a few tens of tokens are likely."""
    adapter: LoraAdapter = make_adapter(tiny, scale=0.3)
    return adapter


def run(
    base: CausalLM,
    weights: AdapterWeights | None,
    *,
    prompt: str | list[int] = PROMPT,
    num_samples: int = 1,
    **params: Any,
) -> list[SampledSequence]:
    tokens = encode(prompt) if isinstance(prompt, str) else prompt
    settings = SamplingParams(**{"max_tokens": 12, **params})
    return sample(base, weights, ModelInput.from_ints(tokens), settings, num_samples=num_samples).sequences


def next_token_logits(base: CausalLM, weights: AdapterWeights | None) -> Tensor:
    with base.lora.use(weights), torch.no_grad():
        return base.head(base.hidden_states(torch.tensor([encode(PROMPT)])))[0, -1].double()


@pytest.mark.parametrize("prompt", ["Q:", "Once upon a time", "ö"])
def test_greedy_is_hugging_faces_generate(tiny: CausalLM, prompt: str) -> None:
    model = AutoModelForCausalLM.from_pretrained(tiny.tokenizer_id, dtype=torch.float32).eval()
    ids = torch.tensor([encode(prompt)])
    expected = model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=20)
    (sequence,) = run(tiny, None, prompt=prompt, max_tokens=20, **GREEDY)
    assert sequence.tokens == expected[0, ids.shape[1] :].tolist()


@pytest.mark.parametrize("params", [GREEDY, {"seed": 3}, {"seed": 3, "temperature": 2.0, "top_k": 5, "top_p": 0.9}])
def test_logprobs_are_those_of_a_forward_pass(tiny: CausalLM, memory: LoraAdapter, params: dict[str, Any]) -> None:
    sequences = run(tiny, memory.weights, num_samples=3, stop=[], **params)
    for sequence in sequences:
        tokens = [*encode(PROMPT), *sequence.tokens]
        output = run_pass(tiny, memory, [Datum.from_tokens(tokens)], "cross_entropy", {}, forward_only=True)
        expected = output.loss_fn_outputs[0]["logprobs"].to_torch()[len(PROMPT) - 1 :]
        torch.testing.assert_close(torch.tensor(sequence.logprobs), expected, rtol=1e-3, atol=1e-4)


def test_a_seed_reproduces(tiny: CausalLM, memory: LoraAdapter) -> None:
    runs = [run(tiny, memory.weights, seed=seed, temperature=3.0, num_samples=2) for seed in (5, 5, 6)]
    assert runs[0] == runs[1]
    assert runs[0] != runs[2]


@pytest.mark.parametrize("seed", [0, -1, 2**63 - 1])
def test_the_samples_of_one_seed_differ(tiny: CausalLM, seed: int) -> None:
    texts = [tuple(sequence.tokens) for sequence in run(tiny, None, seed=seed, num_samples=4)]
    assert len(set(texts)) == 4


def test_a_sample_does_not_depend_on_how_many_others_there_are(tiny: CausalLM, memory: LoraAdapter) -> None:
    params: dict[str, Any] = {
        "seed": 8,
        "temperature": 1.5,
        "max_tokens": 30,
    }  # some reach EOS and leave the batch, others go on
    many = run(tiny, memory.weights, num_samples=6, **params)
    assert len({len(sequence.tokens) for sequence in many}) > 1
    for n in (1, 3):
        few = run(tiny, memory.weights, num_samples=n, **params)
        assert [sequence.tokens for sequence in few] == [sequence.tokens for sequence in many[:n]]


def test_sample_one_of_a_seed_is_not_sample_zero_of_the_next(tiny: CausalLM) -> None:
    assert run(tiny, None, seed=1, num_samples=2)[1].tokens != run(tiny, None, seed=2)[0].tokens


def test_without_a_seed_every_call_differs(tiny: CausalLM) -> None:
    before = torch.get_rng_state()
    torch.manual_seed(0)
    first = run(tiny, None)
    torch.manual_seed(0)  # the process's own generator has no part in it
    second = run(tiny, None)
    assert first[0].tokens != second[0].tokens
    torch.set_rng_state(before)


@pytest.mark.parametrize("params", [{"top_k": 1}, {"top_p": 1e-9}, {"temperature": 1e-6}, {"temperature": 1e-320}])
def test_the_narrowest_sampling_is_greedy(tiny: CausalLM, memory: LoraAdapter, params: dict[str, Any]) -> None:
    assert run(tiny, memory.weights, seed=1, **params) == run(tiny, memory.weights, **GREEDY)


@pytest.mark.parametrize(
    ("top_k", "top_p", "temperature"), [(4, 1.0, 3.0), (-1, 0.5, 3.0), (6, 0.6, 4.0), (10**9, 1.0, 1.0), (3, 0.99, 0.7)]
)
def test_top_k_and_top_p_never_leave_their_set_and_use_all_of_it(
    tiny: CausalLM, unsure: LoraAdapter, top_k: int, top_p: float, temperature: float
) -> None:
    logits = next_token_logits(tiny, unsure.weights).tolist()
    ranked = sorted(range(len(logits)), key=lambda token: -logits[token])
    ranked = ranked[: len(ranked) if top_k == -1 else top_k]
    weights = [math.exp((logits[token] - logits[ranked[0]]) / temperature) for token in ranked]
    allowed: set[int] = set()
    mass = 0.0
    for token, weight in zip(ranked, weights, strict=True):
        allowed.add(token)
        mass += weight / sum(weights)
        if mass >= top_p:
            break
    drawn = draw(tiny, unsure, 512, temperature=temperature, top_k=top_k, top_p=top_p)
    assert set(drawn) <= allowed
    expected = {t: 512 * w / sum(weights) / mass for t, w in zip(ranked, weights, strict=True) if t in allowed}
    assert {token for token, count in expected.items() if count > 20} <= set(drawn)


def draw(base: CausalLM, adapter: LoraAdapter, n: int, **params: Any) -> Counter[int]:
    """First tokens of `n` samples, 256 to a seed."""
    counts: Counter[int] = Counter()
    for seed in range(n // 256):
        sequences = run(base, adapter.weights, num_samples=256, max_tokens=1, seed=seed, **params)
        counts.update(sequence.tokens[0] for sequence in sequences)
    return counts


def chi_square(counts: Counter[int], probabilities: Tensor) -> tuple[float, int]:
    """Pearson's statistic and its degrees of freedom; tokens expected fewer than 5 times are one class."""
    n = counts.total()
    expected = (probabilities * n).tolist()
    common = [token for token, e in enumerate(expected) if e >= 5]
    rare = n - sum(counts[token] for token in common), n - sum(expected[token] for token in common)
    classes = [(counts[token], expected[token]) for token in common] + ([rare] if rare[1] >= 1 else [])
    return sum((o - e) ** 2 / e for o, e in classes), len(classes) - 1


@pytest.mark.parametrize("temperature", [0.7, 1.0, 2.0])
def test_frequencies_follow_the_softmax_at_the_temperature(
    tiny: CausalLM, unsure: LoraAdapter, temperature: float
) -> None:
    logits = next_token_logits(tiny, unsure.weights)
    counts = draw(tiny, unsure, 4096, temperature=temperature)
    statistic, freedom = chi_square(counts, (logits / temperature).softmax(-1))
    assert freedom >= 5
    bound = freedom + 4 * math.sqrt(2 * freedom) + 4  # a right sampler fails this less than once in ten thousand
    assert statistic < bound
    # The bound has teeth: a temperature a fifth off is detected.
    assert chi_square(counts, (logits / temperature / 1.2).softmax(-1))[0] > bound


def test_it_stops_at_the_end_of_text_which_is_part_of_the_answer(tiny: CausalLM, memory: LoraAdapter) -> None:
    (sequence,) = run(tiny, memory.weights, max_tokens=100, **GREEDY)
    assert sequence.tokens == [*encode(ANSWER), EOS]
    assert sequence.logprobs is not None
    assert len(sequence.logprobs) == len(sequence.tokens)
    assert sequence.stop_reason == "stop"


def test_an_empty_list_never_stops(tiny: CausalLM, memory: LoraAdapter) -> None:
    (sequence,) = run(tiny, memory.weights, max_tokens=60, stop=[], **GREEDY)
    assert EOS in sequence.tokens
    assert len(sequence.tokens) == 60
    assert sequence.stop_reason == "length"


def test_max_tokens_ends_with_the_reason_length(tiny: CausalLM, memory: LoraAdapter) -> None:
    (sequence,) = run(tiny, memory.weights, max_tokens=5, **GREEDY)
    assert (sequence.tokens, sequence.stop_reason) == (encode(ANSWER)[:5], "length")


def test_a_stop_with_the_last_allowed_token_is_a_stop(tiny: CausalLM, memory: LoraAdapter) -> None:
    (sequence,) = run(tiny, memory.weights, max_tokens=3, stop="the", **GREEDY)
    assert (sequence.tokens, sequence.stop_reason) == (encode("the"), "stop")


@pytest.mark.parametrize(
    ("stop", "said"),
    [
        ("é", encode("the café")),  # two bytes, two tokens
        ("é is ö", encode("the café is ö")),
        ("→ ok", encode(ANSWER)),  # a character of three bytes
        (["nothing", "pen", "caf"], encode("the caf")),  # whichever comes first
        ([ord("c")], encode("the c")),
        ([0xC3], [*encode("the caf"), 0xC3]),  # a token in the middle of a character
        ("<|im_end|>", [*encode(ANSWER), EOS]),
    ],
    ids=str,
)
def test_stop_strings_and_tokens(tiny: CausalLM, memory: LoraAdapter, stop: Any, said: list[int]) -> None:
    (sequence,) = run(tiny, memory.weights, max_tokens=100, stop=stop, **GREEDY)
    assert (sequence.tokens, sequence.stop_reason) == (said, "stop")


def test_a_stop_string_may_end_inside_a_token(tiny: CausalLM) -> None:
    (start,) = tiny.tokenizer("<|im_start|>")["input_ids"]
    stop = _Stop(tiny, SamplingParams(stop="?<|im"))
    assert not stop.reached([start])
    assert stop.reached([ord("?"), start])


@pytest.mark.parametrize("stop", ["not said", ["not said"], [0]])
def test_custom_stops_are_added_to_the_end_of_text(tiny: CausalLM, memory: LoraAdapter, stop: Any) -> None:
    (sequence,) = run(tiny, memory.weights, max_tokens=100, stop=stop, **GREEDY)
    assert sequence.tokens[-1] in tiny.eos_token_ids
    assert sequence.stop_reason == "stop"


def test_a_stop_string_in_the_prompt_does_not_count(tiny: CausalLM, memory: LoraAdapter) -> None:
    (sequence,) = run(tiny, memory.weights, max_tokens=4, stop=":t", **GREEDY)
    assert sequence.stop_reason == "length"


def test_prompt_logprobs_are_those_of_a_forward_pass(tiny: CausalLM, memory: LoraAdapter) -> None:
    tokens = encode("the café")
    settings = SamplingParams(max_tokens=1)
    response = sample(
        tiny, memory.weights, ModelInput.from_ints(tokens), settings, scoring=PromptScoring(logprobs=True)
    )
    output = run_pass(tiny, memory, [Datum.from_tokens(tokens)], "cross_entropy", {}, forward_only=True)
    assert response.prompt_logprobs is not None
    assert response.prompt_logprobs[0] is None
    assert response.prompt_logprobs[1:] == pytest.approx(output.loss_fn_outputs[0]["logprobs"].tolist(), rel=1e-4)


def test_prompt_logprobs_come_only_when_asked_for(tiny: CausalLM) -> None:
    assert sample(tiny, None, ModelInput.from_ints([1, 2]), SamplingParams(max_tokens=1)).prompt_logprobs is None


def test_a_prompt_of_one_token(tiny: CausalLM) -> None:
    response = sample(
        tiny,
        None,
        ModelInput.from_ints([65]),
        SamplingParams(max_tokens=2, stop=[]),
        scoring=PromptScoring(logprobs=True),
    )
    assert response.prompt_logprobs == [None]
    assert len(response.sequences[0].tokens) == 2


def test_a_prompt_that_fills_the_context_can_be_scored_but_not_continued(tiny: CausalLM) -> None:
    prompt = ModelInput.from_ints([65] * tiny.max_context_length)
    response = sample(tiny, None, prompt, SamplingParams(max_tokens=1), scoring=PromptScoring(logprobs=True))
    assert response.prompt_logprobs is not None
    assert len(response.prompt_logprobs) == tiny.max_context_length
    assert (response.sequences[0].tokens, response.sequences[0].stop_reason) == ([], "length")
    with pytest.raises(InvalidInput, match="2048 tokens fill the context"):
        sample(tiny, None, prompt, SamplingParams(max_tokens=1))


@pytest.mark.parametrize("max_tokens", [None, 100])
def test_an_answer_ends_where_the_context_does(tiny: CausalLM, max_tokens: int | None) -> None:
    (sequence,) = run(tiny, None, prompt=[65] * (tiny.max_context_length - 3), max_tokens=max_tokens, stop=[])
    assert (len(sequence.tokens), sequence.stop_reason) == (3, "length")


@pytest.mark.parametrize(
    ("tokens", "message"), [([], "no tokens"), ([1, 300], r"token at \[1\] is 300"), ([1] * 2049, "at most 2048")]
)
def test_bad_prompts_are_rejected(tiny: CausalLM, tokens: list[int], message: str) -> None:
    with pytest.raises(InvalidDatum, match=message):
        run(tiny, None, prompt=tokens)


def test_copied_weights_keep_sampling_while_training_goes_on(tiny: CausalLM, memory: LoraAdapter) -> None:
    adapter = LoraAdapter(memory.weights.copy())
    snapshot = adapter.weights.copy()
    before = run(tiny, snapshot, num_samples=2, seed=4)
    for _ in range(5):
        run_pass(tiny, adapter, [Datum.from_tokens(encode("Q:something else"))], "cross_entropy", {})
        adapter.step(AdamParams(learning_rate=3e-2))
    assert run(tiny, snapshot, num_samples=2, seed=4) == before
    assert run(tiny, adapter.weights, **GREEDY) != run(tiny, snapshot, **GREEDY)


def test_logits_that_are_not_finite_are_an_error(tiny: CausalLM, memory: LoraAdapter) -> None:
    weights = memory.weights.copy()
    for tensor in weights.tensors.values():
        tensor.mul_(1e30)
    with pytest.raises(OperationFailed, match="logits are not finite"):
        run(tiny, weights)


def test_pauses_in_which_others_use_the_model_change_nothing(tiny: CausalLM, unsure: LoraAdapter) -> None:
    other = LoraAdapter(tiny.lora.new_weights(LoraConfig(rank=4, seed=3)))

    def train_another() -> None:
        pauses.append(None)
        run_pass(tiny, other, [Datum.from_tokens(encode(PROMPT))], "cross_entropy", {})
        sample(tiny, None, ModelInput.from_ints(encode(PROMPT)), SamplingParams(max_tokens=2))
        assert torch.is_grad_enabled()

    settings = SamplingParams(max_tokens=9, seed=5, temperature=1.0)
    options: dict[str, Any] = {"num_samples": 5, "wave": 2}
    prompt = ModelInput.from_ints(encode(PROMPT))
    expected = sample(tiny, unsure.weights, prompt, settings, **options)
    pauses: list[None] = []
    got = sample(tiny, unsure.weights, prompt, settings, **options, should_pause=lambda: True, in_pauses=train_another)
    assert got == expected
    assert len(pauses) > 9


def test_requests_that_are_admitted_together_sample_as_alone(tiny: CausalLM, memory: LoraAdapter) -> None:
    """R5.11: each group of rows has its adapter, and what runs next to it changes no bit."""
    prompt, weights = ModelInput.from_ints(encode(PROMPT)), (None, memory.weights, memory.weights)
    params = [SamplingParams(max_tokens=length, seed=length, stop=[]) for length in (3, 9, 5)]
    alone = [sample(tiny, each, prompt, settings) for each, settings in zip(weights, params, strict=True)]
    sampler = tiny.new_sampler()
    for name, each, settings in zip("abc", weights, params, strict=True):
        sampler.admit(SamplingRequest(name, prompt, settings, each))
    sampler.admit(SamplingRequest("cancelled", prompt, params[1]))
    order: list[str] = []
    outcomes: dict[str, Any] = {}
    for _ in range(12):
        ended = sampler.step()
        sampler.cancel("cancelled")
        order += ended
        outcomes |= ended
    assert [outcomes[name] for name in "abc"] == alone
    assert order == ["a", "c", "b"]
    assert sampler.step() == {}


def test_only_the_named_requests_advance(tiny: CausalLM) -> None:
    sampler, prompt = tiny.new_sampler(), ModelInput.from_ints(encode(PROMPT))
    for name in ("first", "second"):
        sampler.admit(SamplingRequest(name, prompt, SamplingParams(max_tokens=2, stop=[])))
    assert list(sampler.step(["second"], lambda: False)) == ["second"]
    assert list(sampler.step(should_stop=lambda: False)) == ["first"]


def test_a_request_that_fails_leaves_the_others(tiny: CausalLM, memory: LoraAdapter) -> None:
    sampler, prompt, weights = tiny.new_sampler(), ModelInput.from_ints(encode(PROMPT)), memory.weights.copy()
    for tensor in weights.tensors.values():
        tensor.mul_(1e30)
    settings = SamplingParams(max_tokens=4, stop=[])
    sampler.admit(SamplingRequest("broken", prompt, settings, weights))
    sampler.admit(SamplingRequest("whole", prompt, settings))
    outcomes = sampler.step(should_stop=lambda: False)
    assert isinstance(outcomes["broken"], OperationFailed)
    assert not isinstance(outcomes["whole"], Exception)
