"""How a batch is cut up inside must not show: not in the gradient, nor in the log-probabilities, nor in their order."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.helpers.engine_passes import run_pass
from tests.helpers.fuzzing import examples
from tests.helpers.soaking import first_only
from tinker_lightning.server.engine import logprobs
from tinker_lightning.server.engine.adapter import LoraAdapter
from tinker_lightning.types import AdamParams, Datum, LoraConfig

if TYPE_CHECKING:
    from tinker_lightning.server.engine.causal_lm import CausalLM


def make_data(vocab_size: int) -> list[Datum]:
    generator = torch.Generator().manual_seed(3)
    ints = partial(torch.randint, 0, vocab_size, generator=generator)
    data: list[Datum] = []
    for length, k in ((3, 0), (11, 4), (1, 0), (7, 0), (11, 2), (4, 1)):
        shape = (length, k) if k else (length,)
        weights = torch.randn(shape, generator=generator)
        data.append(Datum.from_targets(ints((length,)), ints(shape), weights=weights))
    return data


@examples(8, 200)
@given(
    calls=st.permutations(range(6)).flatmap(
        lambda order: st.sets(st.integers(1, 5)).map(
            lambda cuts: [order[a:b] for a, b in zip([0, *sorted(cuts)], [*sorted(cuts), 6], strict=True)]
        )
    ),
    token_budget=st.integers(1, 70),
    logits_rows=st.integers(0, 40),
)
def test_any_split_gives_the_same_gradient_and_logprobs(  # R4.4, R0.4
    tiny64: CausalLM,
    make_adapter: Any,
    assert_same_gradient: Any,
    calls: list[list[int]],
    token_budget: int,
    logits_rows: int,
) -> None:
    data = make_data(tiny64.vocab_size)
    whole, split = make_adapter(tiny64), make_adapter(tiny64)
    expected = run_pass(tiny64, whole, data, "cross_entropy", {})
    split.token_budget = token_budget

    loss = 0.0
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(logprobs, "LOGITS_BYTES", logits_rows * tiny64.vocab_size * 8)
        for call in calls:
            output = run_pass(tiny64, split, [data[i] for i in call], "cross_entropy", {})
            loss += output.metrics["loss:sum"]
            for i, outputs in zip(call, output.loss_fn_outputs, strict=True):
                got, wanted = outputs["logprobs"], expected.loss_fn_outputs[i]["logprobs"]
                assert got.shape == wanted.shape == data[i].loss_fn_inputs["target_tokens"].shape
                torch.testing.assert_close(got.to_torch(), wanted.to_torch(), rtol=2e-7, atol=0)

    assert loss == pytest.approx(expected.metrics["loss:sum"], rel=1e-9)
    assert_same_gradient(split.gradient, whole.gradient)


def test_an_output_matrix_alone_learns_chunk_by_chunk(
    tiny64: CausalLM, make_adapter: Any, assert_same_gradient: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Its input needs no gradient, which recomputing functions like to trip over.
    only_head = {"train_attn": False, "train_mlp": False}
    whole, chunked = make_adapter(tiny64, **only_head), make_adapter(tiny64, **only_head)
    data = make_data(tiny64.vocab_size)
    run_pass(tiny64, whole, data, "cross_entropy", {})
    monkeypatch.setattr(logprobs, "LOGITS_BYTES", 5 * tiny64.vocab_size * 8)
    run_pass(tiny64, chunked, data, "cross_entropy", {})
    assert_same_gradient(chunked.gradient, whole.gradient)


@pytest.mark.parametrize("chunked", first_only([True, False]))
def test_the_same_requests_give_the_same_bits(tiny: CausalLM, monkeypatch: pytest.MonkeyPatch, chunked: bool) -> None:
    if chunked:
        monkeypatch.setattr(logprobs, "LOGITS_BYTES", 5 * tiny.vocab_size * 4)

    def train() -> tuple[list[Any], dict[str, torch.Tensor]]:
        adapter = LoraAdapter(tiny.lora.new_weights(LoraConfig(rank=8, seed=4)), token_budget=20)
        answers: list[Any] = []
        for _ in range(4):
            answers.append(run_pass(tiny, adapter, make_data(tiny.vocab_size), "cross_entropy", {}))
            answers.append(adapter.step(AdamParams(learning_rate=1e-2, grad_clip_norm=1.0)))
        return answers, adapter.weights.tensors

    (answers, weights), (answers_again, weights_again) = train(), train()
    assert answers == answers_again
    assert all(torch.equal(weights[name], weights_again[name]) for name in weights)
