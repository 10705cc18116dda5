"""Chats become the tokens that the model sees when it generates, with weights on what it has to write."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.helpers.chat_templates import PLAIN, TEMPLATE, tokenizer, trained
from tinker_lightning import Datum
from tinker_lightning.errors import InvalidDatum, InvalidInput, TooLong
from tinker_lightning.types import chat

REWRITES = PLAIN.replace("m.content", "(m.content if loop.last else 'short')")
CHAT = [
    {"role": "user", "content": "How are you?"},
    {"role": "assistant", "content": "\nVery well."},
    {"role": "user", "content": "Good.\n"},
    {"role": "assistant", "content": "Bye."},
]


@pytest.mark.parametrize("template", [PLAIN, TEMPLATE], ids=["by prefixes", "by marks"])
def test_the_assistants_messages_and_their_ends_are_trained(template: str) -> None:  # R4.1
    by = tokenizer(template)
    messages = [{**message, "content": message["content"].strip()} for message in CHAT]
    ids, weights = chat.render(messages, by)
    assert trained(ids, weights, by) == "Very well.<|e|>Bye.<|e|>"
    assert by.decode(ids) == by.apply_chat_template(messages, tokenize=False)
    ids, weights = chat.render(messages, by, first=2)
    assert trained(ids, weights, by) == "Bye.<|e|>"


def test_the_trained_prefix_is_the_prompt_even_if_a_token_crosses_the_boundary() -> None:
    by = tokenizer()
    ids, weights = chat.render(CHAT, by)
    whole = by(by.apply_chat_template(CHAT, tokenize=False), add_special_tokens=False)["input_ids"]
    assert ids != whole  # which has one token for the header's line break and that of the answer
    assert trained(ids, weights, by) == "\nVery well.<|e|>Bye.<|e|>"
    first, second = np.flatnonzero(np.diff(weights, prepend=0) > 0)
    assert ids[:first] == chat.generation_prompt(CHAT[:1], by)
    assert by.decode(ids[:second]) == by.decode(chat.generation_prompt(CHAT[:3], by))


def test_marks_raise_if_the_trained_prefix_is_not_the_prompt() -> None:
    with pytest.raises(InvalidDatum, match=r"message 1: .* renders earlier messages differently"):
        chat.render(CHAT, tokenizer(TEMPLATE))  # its mask is that of the whole text, with the crossing token


def test_the_end_of_a_turn_may_be_another_special_token_than_the_end_of_text() -> None:
    by = tokenizer(end=None)
    by.add_special_tokens({"pad_token": "<|e|>"})
    ids, weights = chat.render(CHAT[:2], by)
    assert trained(ids, weights, by) == "\nVery well.<|e|>"


def test_the_last_message_can_be_trained_on_if_the_template_rewrites_earlier_ones() -> None:
    by = tokenizer(REWRITES)
    with pytest.raises(InvalidDatum, match=r"message 1: .* Train on the last message only \(train_on='last'"):
        chat.render(CHAT, by)
    by = tokenizer(PLAIN.replace("m.content", "(m.content if m.role != 'assistant' or loop.last else 'short')"))
    ids, weights = chat.render(CHAT, by, only_last=True)
    assert trained(ids, weights, by) == "Bye.<|e|>"


@pytest.mark.parametrize(
    ("message", "text"),
    [
        ({"role": "asistant", "content": "x"}, "message 1 has the unknown role 'asistant'; did you mean 'assistant'?"),
        ({"role": "poet", "content": "x"}, "message 1 has the unknown role 'poet'; known roles are system, "),
        ({"content": "x"}, "message 1 has no role"),
        ({"role": "user"}, r"message 1 \(user\) has no content"),
        ({"role": "user", "content": 3}, r"message 1 \(user\) has content of type int"),
        ("hello", "message 1 must be a dict with role and content, got str"),
    ],
)
def test_a_message_that_is_not_one_is_named(message: Any, text: str) -> None:
    with pytest.raises(InvalidDatum, match=text.rstrip("?")):
        chat.render([CHAT[0], message], tokenizer())


def test_a_tokenizer_without_a_template_raises() -> None:
    with pytest.raises(InvalidInput, match=r"has no chat template\. Pass chat_template="):
        chat.render(CHAT, tokenizer(None))


def test_from_chat_takes_a_row_and_cuts_it() -> None:
    row, by = {"messages": CHAT[:2], "source": "a book"}, tokenizer()
    whole = Datum.from_chat(row, by)
    assert whole == Datum.from_chat(CHAT[:2], by)
    length = whole.model_input.length + 1
    assert Datum.from_chat(row, by, max_length=length) == whole
    with pytest.raises(TooLong, match=rf"it has {length} tokens, but max_length is {length - 1}\. Pass truncate="):
        Datum.from_chat(row, by, max_length=length - 1)
    left = Datum.from_chat(row, by, max_length=5, truncate="left")
    assert left.model_input.to_ints() == whole.model_input.to_ints()[-4:]
    right = Datum.from_chat(row, by, max_length=length - 2, truncate="right")
    assert right.model_input.to_ints() == whole.model_input.to_ints()[:-2]
    with pytest.raises(InvalidDatum, match="no token of the assistant is left within max_length=5"):
        Datum.from_chat(row, by, max_length=5, truncate="right")
    with pytest.raises(InvalidDatum, match="the row has no 'messages'; it has text"):
        Datum.from_chat({"text": "x"}, by)


def test_a_prompt_leaves_out_the_answer() -> None:
    by = tokenizer()
    assert chat.generation_prompt(CHAT, by) == chat.generation_prompt(CHAT[:3], by)
    assert by.decode(chat.generation_prompt(CHAT[:1], by)) == "<|s|>user\nHow are you?<|e|>\n<|s|>assistant\n"
    with pytest.raises(InvalidDatum, match="has no message to answer"):
        chat.generation_prompt(CHAT[1:2], by)
