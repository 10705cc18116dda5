"""Scores of a prompt, compared with the logits of a plain transformers model."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from tests.helpers.sampling import sample
from tinker_lightning.errors import OperationFailed
from tinker_lightning.server.engine import logprobs
from tinker_lightning.server.engine.interface import PromptScoring
from tinker_lightning.types import ModelInput, SampleResponse, SamplingParams, TensorData

if TYPE_CHECKING:
    from tinker_lightning.server.engine.causal_lm import CausalLM

PROMPT = list(b"hello there")
ROWS = len(PROMPT) - 1


@pytest.fixture(scope="module")
def expected(tiny: CausalLM) -> Tensor:
    """The log-probabilities [T, V] of a forward of transformers alone."""
    model = AutoModelForCausalLM.from_pretrained(tiny.tokenizer_id, dtype=torch.float32).eval()
    with torch.no_grad():
        logprobs: Tensor = model(torch.tensor([PROMPT])).logits[0].log_softmax(-1)
    return logprobs


@pytest.fixture(params=["one chunk", "chunks"], autouse=True)
def _chunks(request: pytest.FixtureRequest, tiny: CausalLM, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "chunks":
        monkeypatch.setattr(logprobs, "LOGITS_BYTES", 3 * tiny.vocab_size * 4)


def score(base: CausalLM, temperature: float = 1.0, seed: int = 0, **scoring: Any) -> SampleResponse:
    params = SamplingParams(max_tokens=1, temperature=temperature, seed=seed)
    return sample(base, None, ModelInput.from_ints(PROMPT), params, scoring=PromptScoring(**scoring))


@pytest.mark.parametrize("last_n", [None, 1, 4, ROWS])
def test_logprobs_and_most_likely_tokens(tiny: CausalLM, expected: Tensor, last_n: int | None) -> None:
    response = score(tiny, logprobs=True, topk=3, last_n=last_n)
    first = len(PROMPT) - (last_n or ROWS)
    assert response.prompt_logprobs is not None
    assert response.prompt_logprobs[:first] == [None] * first
    own = [expected[i - 1, PROMPT[i]].item() for i in range(first, len(PROMPT))]
    assert response.prompt_logprobs[first:] == pytest.approx(own, rel=1e-4)
    assert response.topk_prompt_logprobs is not None
    assert response.topk_prompt_logprobs[:first] == [None] * first
    for i, row in enumerate(response.topk_prompt_logprobs[first:], first):
        top = expected[i - 1].topk(3)
        assert row is not None
        assert [token for token, _ in row] == top.indices.tolist()
        assert [logprob for _, logprob in row] == pytest.approx(top.values.tolist(), rel=1e-4)


def test_more_likely_tokens_than_there_are(tiny: CausalLM) -> None:
    response = score(tiny, topk=1000)
    assert response.topk_prompt_logprobs is not None
    assert [len(row or ()) for row in response.topk_prompt_logprobs] == [0] + [tiny.vocab_size] * ROWS
    assert response.prompt_logprobs is None


def test_requested_tokens_dense_and_sparse(tiny: CausalLM, expected: Tensor) -> None:
    ids = torch.full((ROWS, 4), -1)
    ids[3] = torch.tensor([7, -1, 9, 7])
    ids[8, 2] = 0
    wanted = torch.zeros(ROWS, 4)
    for row, column in (ids != -1).nonzero().tolist():
        wanted[row, column] = expected[row, ids[row, column]]
    dense = score(tiny, targets=TensorData.from_data(ids)).target_prompt_logprobs
    assert dense is not None
    assert not dense.is_sparse
    torch.testing.assert_close(dense.to_torch(), wanted, rtol=1e-4, atol=0)
    crow = [0, *(ids != -1).sum(-1).cumsum(-1).tolist()]
    columns = (ids != -1).nonzero()[:, 1].tolist()
    request = TensorData(ids[ids != -1].numpy(), "int64", [ROWS, 4], crow, columns)
    sparse = score(tiny, targets=request).target_prompt_logprobs
    assert sparse is not None
    assert sparse.sparse_col_indices is not None
    assert sparse.sparse_col_indices.tolist() == columns
    torch.testing.assert_close(sparse.to_torch(), wanted, rtol=1e-4, atol=0)


def test_alternatives_are_drawn_at_the_temperature(tiny: CausalLM, expected: Tensor) -> None:
    drawn = score(tiny, temperature=0.7, alt_tokens=400).prompt_alt_tokens
    assert drawn is not None
    assert drawn.tokens.shape == drawn.logprobs.shape == [ROWS, 400]
    tokens = drawn.tokens.to_torch()
    torch.testing.assert_close(drawn.logprobs.to_torch(), expected[:-1].gather(-1, tokens), rtol=1e-4, atol=1e-5)
    # The mean log-probability of 4000 draws is that of the sharpened distribution.
    sharpened = (expected[:-1] / 0.7).softmax(-1)
    mean = (sharpened * expected[:-1]).sum(-1).mean()
    spread = (sharpened * expected[:-1].square()).sum(-1).mean().sub(mean.square()).sqrt() / (ROWS * 400) ** 0.5
    assert abs(drawn.logprobs.to_torch().mean() - mean) < 5 * spread
    assert max(Counter(tokens[0].tolist()).values()) < 400


def test_alternatives_repeat_with_a_seed_and_are_greedy_at_temperature_zero(tiny: CausalLM, expected: Tensor) -> None:
    runs = [score(tiny, seed=seed, alt_tokens=5).prompt_alt_tokens for seed in (1, 1, 2)]
    assert runs[0] == runs[1] != runs[2]
    greedy = score(tiny, temperature=0.0, alt_tokens=2).prompt_alt_tokens
    assert greedy is not None
    assert greedy.tokens.tolist() == expected[:-1].argmax(-1, keepdim=True).expand(-1, 2).tolist()


def test_most_likely_tokens_of_samples(tiny: CausalLM) -> None:
    params = SamplingParams(max_tokens=4, seed=3, stop=[])
    (sequence,) = sample(tiny, None, ModelInput.from_ints(PROMPT), params, topk_sample_logprobs=2).sequences
    model = AutoModelForCausalLM.from_pretrained(tiny.tokenizer_id, dtype=torch.float32).eval()
    with torch.no_grad():
        logprobs = model(torch.tensor([PROMPT + sequence.tokens])).logits[0].log_softmax(-1)
    assert sequence.topk_logprobs is not None
    assert len(sequence.topk_logprobs) == 4
    for position, row in enumerate(sequence.topk_logprobs, len(PROMPT) - 1):
        top = logprobs[position].topk(2)
        assert row is not None
        assert [token for token, _ in row] == top.indices.tolist()
        assert [value for _, value in row] == pytest.approx(top.values.tolist(), rel=1e-4)


def test_a_prompt_of_one_token_has_nothing_to_score(tiny: CausalLM) -> None:
    scoring = PromptScoring(logprobs=True, topk=2, alt_tokens=3)
    response = sample(tiny, None, ModelInput.from_ints([65]), SamplingParams(max_tokens=1), scoring=scoring)
    assert (response.prompt_logprobs, response.topk_prompt_logprobs) == ([None], [None])
    assert response.prompt_alt_tokens is not None
    assert response.prompt_alt_tokens.tokens.shape == [0, 3]


def test_a_cancelled_request_stops_at_the_next_token(tiny: CausalLM) -> None:
    calls = 0

    def is_cancelled() -> bool:
        nonlocal calls
        calls += 1
        return calls == 3  # after the prompt, then after each token

    def cancel() -> None:
        raise OperationFailed("cancelled")

    params = SamplingParams(max_tokens=50, stop=[])
    with pytest.raises(OperationFailed, match="cancelled"):
        sample(tiny, None, ModelInput.from_ints(PROMPT), params, should_pause=is_cancelled, in_pauses=cancel)
    assert calls == 3
