"""Datums: the builders shift the targets, and entries of different lengths raise."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from lightning.fabric.utilities.apply_func import move_data_to_device
from tokenizers import Tokenizer, models, pre_tokenizers
from torch.utils.data import default_collate
from transformers import PreTrainedTokenizerFast

import tinker_lightning.rows.batches  # noqa: F401 which teaches torch's default to leave datums alone
from tinker_lightning.errors import InvalidDatum, InvalidInput
from tinker_lightning.types import Datum, ImageChunk, ModelInput, ProvenanceSpan, TensorData


@pytest.mark.parametrize(
    "make_tokens", [list, np.array, lambda ids: np.array(ids, np.int32), torch.tensor, torch.IntTensor]
)
@pytest.mark.parametrize(
    "weights", [[0, 0, 1, 1], [False, False, True, True], np.array([0.0, 0, 1, 1]), torch.tensor([0, 0, 1, 1]).bool()]
)
def test_from_tokens_shifts_targets_and_weights(make_tokens: Any, weights: Any) -> None:  # R4.1
    datum = Datum.from_tokens(make_tokens([5, 6, 7, 8]), weights)
    assert datum.model_input.to_ints() == [5, 6, 7]
    assert datum.loss_fn_inputs["target_tokens"] == TensorData([6, 7, 8])
    assert datum.loss_fn_inputs["weights"] == TensorData([0.0, 1.0, 1.0])


def test_from_tokens_trains_on_all_tokens_by_default() -> None:  # R4.1
    assert Datum.from_tokens([5, 6, 7]).loss_fn_inputs["weights"].tolist() == [1.0, 1.0]


@given(st.lists(st.integers(0, 2**31 - 1), min_size=2), st.data())
def test_position_i_predicts_token_i_plus_1(tokens: list[int], data: st.DataObject) -> None:  # R4.1
    weights = data.draw(st.lists(st.floats(-1, 1, width=32), min_size=len(tokens), max_size=len(tokens)))
    datum = Datum.from_tokens(tokens, weights)
    assert [*datum.model_input.to_ints(), tokens[-1]] == tokens
    assert [tokens[0], *datum.loss_fn_inputs["target_tokens"].tolist()] == tokens
    assert [weights[0], *datum.loss_fn_inputs["weights"].tolist()] == weights


def test_misaligned_weights_raise_unless_truncation_is_asked_for() -> None:  # R4.5
    with pytest.raises(
        InvalidDatum,
        match=r"weights has 2 entries but there are 4 tokens\. Give one weight per token, or pass truncate=True",
    ):
        Datum.from_tokens([5, 6, 7, 8], [0, 1])
    assert Datum.from_tokens([5, 6, 7, 8], [0, 1], truncate=True) == Datum.from_tokens([5, 6], [0, 1])
    assert Datum.from_tokens([5, 6], [0, 1, 1], truncate=True) == Datum.from_tokens([5, 6], [0, 1])


@pytest.mark.parametrize(
    ("tokens", "weights", "message"),
    [
        ([5], None, "got 1 tokens; a datum needs at least 2"),
        ([], None, "got 0 tokens; a datum needs at least 2"),
        ([5, 6], [[0], [1]], r"weights has the shape \[2, 1\]; give one number per token"),
        ([5, 6], 1.0, r"weights has the shape \[\]"),
        ([5, 6], ["a", "b"], "weights: not an array of numbers"),
        ([5, 6], [1e300, 0], "weights: a value does not fit into float32"),
        ([5.0, 6.0], None, "token ids must be integers"),
        ("hello", None, r"token ids: not an array of numbers: got str .* that a tokenizer returns"),
        ([[5, 6], [7]], None, "token ids: not a rectangular array"),
    ],
)
def test_from_tokens_says_what_is_wrong(tokens: Any, weights: Any, message: str) -> None:  # R4.5
    with pytest.raises(InvalidInput, match=message):
        Datum.from_tokens(tokens, weights)


def test_from_targets_takes_any_named_tensors() -> None:  # R4.2
    datum = Datum.from_targets(
        [1, 2, 3],
        [2, 3, 4],
        advantages=[1, 0, 1],
        routing=[[0, 1], [1, 0]],
        beta=0.1,
        group=torch.tensor(7),
        reference_logprobs=torch.tensor([-1.0, -2.0, -3.0], requires_grad=True),
    )
    inputs = datum.loss_fn_inputs
    assert inputs["advantages"] == TensorData([1.0, 0.0, 1.0])
    assert inputs["routing"] == TensorData([[0, 1], [1, 0]])
    assert inputs["beta"] == TensorData(0.1)
    assert inputs["beta"].shape == []
    assert inputs["group"] == TensorData(7)
    assert inputs["reference_logprobs"].tolist() == [-1.0, -2.0, -3.0]


def test_targets_may_be_several_per_position() -> None:  # R4.2
    datum = Datum.from_targets([1, 2], [[2, 9], [3, 9]], weights=[[0.5, 0.5], [1, 0]])
    assert datum.loss_fn_inputs["target_tokens"].shape == [2, 2]


def test_from_targets_truncates_per_token_entries_only_when_asked() -> None:  # R4.5
    given_tensors: dict[str, Any] = {"weights": [1, 1], "mine": [1, 2, 3, 4]}
    with pytest.raises(
        InvalidDatum,
        match=r"weights has 2 entries but the input has 3 tokens\. .*Datum\.from_tokens.*, or pass truncate=True",
    ):
        Datum.from_targets([1, 2, 3], [2, 3, 4], **given_tensors)
    datum = Datum.from_targets([1, 2, 3], [2, 3, 4], truncate=True, **given_tensors)
    assert datum == Datum.from_targets([1, 2], [2, 3], **given_tensors)


def test_datums_own_their_values() -> None:
    tokens, targets, values = np.arange(4, dtype=np.int32), np.arange(4), np.ones(4, np.float32)

    def made() -> list[Datum]:
        chunked = Datum(ModelInput.from_ints(tokens), {"target_tokens": torch.from_numpy(targets), "weights": values})
        return [Datum.from_targets(tokens, targets, logprobs=values), Datum.from_tokens(tokens, values), chunked]

    kept, expected = made(), copy.deepcopy(made())
    for buffer in (tokens, targets, values):
        buffer[:] = 3
    assert kept == expected
    assert made() != expected


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        ({"target_tokens": [1.5, 2.5]}, "target_tokens: must be integers, got floats"),
        ({"target_tokens": 3}, r"target_tokens has the shape \[\], but it must have one row per token"),
        ({"target_tokens": [1, 2, 3]}, "target_tokens has 3 entries but the input has 2 tokens"),
        ({"logprobs": [[[1.0]], [[1.0]]]}, r"logprobs has the shape \[2, 1, 1\]"),
        (
            {"target_tokens": [[1, 2], [3, 4]], "weights": [1, 1]},
            r"weights has the shape \[2\] but target_tokens has \[2, 2\]",
        ),
        ({"mine": object()}, "mine: not an array of numbers"),
    ],
)
def test_entries_of_different_lengths_raise(inputs: dict[str, Any], message: str) -> None:  # R4.5
    with pytest.raises(InvalidDatum, match=message):
        Datum(ModelInput.from_ints([1, 2]), inputs)


def test_tokens_are_not_yet_an_input() -> None:
    with pytest.raises(InvalidDatum, match=r"must be a ModelInput, got list\. Create one with ModelInput\.from_ints"):
        Datum([1, 2], {"target_tokens": [2, 3]})  # type: ignore[arg-type]


def test_empty_lists_take_the_dtype_of_their_name() -> None:
    inputs = Datum(ModelInput.from_ints([]), {"target_tokens": [], "weights": []}).loss_fn_inputs
    assert (inputs["target_tokens"].dtype, inputs["weights"].dtype) == ("int64", "float32")


def test_lengths_are_left_to_the_server_where_only_it_knows_them() -> None:
    assert Datum(ModelInput([ImageChunk(b"", "png")]), {"target_tokens": [1, 2, 3]}).loss_fn_inputs


def test_provenance_comes_as_a_pair() -> None:
    span = ProvenanceSpan("sampled", "s", 0, 2)
    model_input = ModelInput.from_ints([1, 2])
    with pytest.raises(InvalidDatum, match="set both model_input_spans and loss_fn_input_spans, or neither"):
        Datum(model_input, {}, [span])
    assert Datum(model_input, {}, [span], [span]) != Datum(model_input)
    assert Datum(model_input, {}, [], []) == Datum(model_input)
    with pytest.raises(InvalidDatum, match="must be at least 0, got -1 and 2"):
        ProvenanceSpan("prompt", "s", -1, 2)


def test_compares_by_value() -> None:
    assert Datum.from_tokens([1, 2, 3]) == Datum.from_tokens(np.array([1, 2, 3]))
    assert Datum.from_tokens([1, 2, 3]) != Datum.from_tokens([1, 2, 3], [0, 1, 0])
    assert Datum.from_tokens([1, 2]) != 1
    assert repr(Datum.from_tokens([1, 2])).startswith("Datum(ModelInput(EncodedTextChunk(1 tokens)), target_tokens=")
    with pytest.raises(TypeError, match="unhashable"):
        hash(Datum.from_tokens([1, 2]))


def test_data_loaders_and_devices_leave_datums_alone() -> None:
    """A datum is none of the types that Lightning rebuilds: dataclasses, mappings, sequences."""
    batch = [Datum.from_tokens([1, 2, 3]), Datum.from_tokens([1, 2])]
    parts = [batch[0], batch[0].model_input, batch[0].loss_fn_inputs["weights"]]
    for part in parts:
        assert not dataclasses.is_dataclass(part)
        assert not isinstance(part, Mapping | Sequence)
        assert move_data_to_device(part, "cpu") is part
    moved = move_data_to_device(batch, "cpu")
    assert all(after is before for after, before in zip(moved, batch, strict=True))
    assert all(after is before for after, before in zip(default_collate(batch), batch, strict=True))


# Chat

CHATML = (
    "{% for m in messages %}{{ '<|start|>' ~ m.role ~ ' : ' ~ m.content ~ ' <|end|> newline ' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start|>assistant : ' }}{% endif %}"
)
LAST_TURN_THINKS = CHATML.replace("m.content", "(m.content if loop.last else 'short')")
WORDS = [
    "<|start|>",
    "<|end|>",
    "newline",
    ":",
    "system",
    "user",
    "assistant",
    "be",
    "kind",
    "hello",
    "hi",
    "bye",
    "short",
]
CHAT = [
    {"role": "system", "content": "be kind"},
    {"role": "user", "content": "hello"},
    {"role": "assistant", "content": "hi"},
    {"role": "user", "content": "bye bye"},
    {"role": "assistant", "content": "bye hello bye"},
]


def make_tokenizer(template: str = CHATML, end_of_turn: str | None = "<|end|>") -> Any:
    words = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    words.add_special_tokens(["<|start|>", "<|end|>"])
    return PreTrainedTokenizerFast(tokenizer_object=words, eos_token=end_of_turn, chat_template=template)


def weighted_words(datum: Datum) -> list[str]:
    targets, weights = (datum.loss_fn_inputs[name].tolist() for name in ("target_tokens", "weights"))
    return [WORDS[target] for target, weight in zip(targets, weights, strict=True) if weight == 1.0]


def test_from_chat_trains_on_what_the_assistant_says() -> None:  # R4.1
    datum = Datum.from_chat(CHAT, make_tokenizer())
    assert weighted_words(datum) == ["hi", "<|end|>", "bye", "hello", "bye", "<|end|>"]
    assert set(datum.loss_fn_inputs["weights"].tolist()) == {0.0, 1.0}
    whole = make_tokenizer().apply_chat_template(CHAT, tokenize=False)
    assert [WORDS[i] for i in datum.model_input.to_ints()] == whole.replace("<|start|>", "<|start|> ").split()[:-1]


def test_from_chat_may_end_with_the_user() -> None:
    assert weighted_words(Datum.from_chat(CHAT[:4], make_tokenizer())) == ["hi", "<|end|>"]


def test_from_chat_without_an_end_token_takes_the_whole_turn() -> None:
    assert weighted_words(Datum.from_chat(CHAT[:3], make_tokenizer(end_of_turn=None))) == ["hi", "<|end|>", "newline"]


def test_from_chat_raises_for_a_template_that_rewrites_earlier_turns() -> None:  # R4.5
    tokenizer = make_tokenizer(LAST_TURN_THINKS)
    with pytest.raises(InvalidDatum, match=r"message 2: .* renders earlier messages differently .* Datum\.from_tokens"):
        Datum.from_chat(CHAT, tokenizer)


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        (CHAT[:2], "no assistant message, so there is nothing to train on"),
        ([], "no assistant message"),
        ([{"content": "hello"}], "message 0 has no role"),
        (CHAT[2:], "message 0 is an assistant message; put a system or user message before it"),
    ],
)
def test_from_chat_says_what_is_missing(messages: list[dict[str, str]], message: str) -> None:
    with pytest.raises(InvalidDatum, match=message):
        Datum.from_chat(messages, make_tokenizer())


def test_with_inputs_extends_and_replaces() -> None:
    spans = [ProvenanceSpan("prompt", "a", 0, 2)]
    datum = Datum(ModelInput.from_ints([1, 2]), {"target_tokens": [2, 3], "weights": [1, 1]}, spans, spans)
    changed = datum.with_inputs({"my.name": [[5.0]]}, weights=[0.5, 0.0])
    assert changed.loss_fn_inputs["weights"] == TensorData([0.5, 0.0])
    assert set(changed.loss_fn_inputs) == {"target_tokens", "weights", "my.name"}
    assert changed.model_input is datum.model_input
    assert (changed.model_input_spans, changed.loss_fn_input_spans) == (tuple(spans), tuple(spans))
    assert datum.loss_fn_inputs["weights"] == TensorData([1.0, 1.0])
    assert set(datum.with_only_inputs({"target_tokens": [2, 3]}).loss_fn_inputs) == {"target_tokens"}
    with pytest.raises(InvalidDatum, match="advantages has 3 entries but the input has 2 tokens"):
        datum.with_inputs(advantages=[1, 2, 3])
