"""What a chat template leaves out is refused, or named once; nothing is lost in silence. R5.13"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

import pytest

from tests.helpers.chat_templates import HERMES, PLAIN, TEMPLATE, tokenizer, trained
from tinker_lightning.errors import InvalidDatum, InvalidInput
from tinker_lightning.types import chat, template

if TYPE_CHECKING:
    from pathlib import Path

USER, ANSWER = {"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello."}
CALL = {"function": {"name": "weather", "arguments": '{"days": 3, "city": "Bonn"}'}}
CALLING = {"role": "assistant", "content": "I look.", "tool_calls": [CALL]}
TOOL = {"name": "weather", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}}
NO_SYSTEM = PLAIN.replace("messages %}", "messages if m.role != 'system' %}")
# As the templates of DeepSeek and Qwen do with the thinking of earlier answers.
NO_THINKING = PLAIN.replace(
    "m.content + '<|e|>'", "(m.content if loop.last else m.content.split('</think>')[-1]) + '<|e|>'"
)
THOUGHT = {"role": "assistant", "content": "<think>Hm.</think>Hello."}


@pytest.fixture(autouse=True)
def _named_again() -> None:
    template._warn_once.cache_clear()


@pytest.mark.parametrize(
    ("source", "messages", "lost"),
    [
        (PLAIN, [USER, CALLING], r"does not render tool_calls of message 1 \(assistant\)"),
        (
            PLAIN,
            [USER, CALLING, {"role": "tool", "content": "Rain."}, ANSWER],
            "does not render tool_calls of message 1",
        ),
        (
            HERMES.replace("in message.tool_calls", "in message.tool_calls[:1]"),
            [USER, {**CALLING, "tool_calls": [CALL] * 2}],
            "does not render tool_calls of message 1",
        ),
        (
            HERMES.replace("| tojson) + '}", "| list | tojson) + '}"),
            [USER, CALLING],
            "does not render tool_calls of message 1",
        ),
        (HERMES.replace("{{- '\n' + message.content }}", ""), [USER, CALLING], "does not render content of message 1"),
        (
            NO_SYSTEM,
            [{"role": "system", "content": "Hi"}, USER, ANSWER],
            r"does not render content of message 0 \(system\)",
        ),
        (
            PLAIN.replace("m.content + '<|e|>'", "m.content[:3] + '<|e|>'"),
            [USER, ANSWER],
            "does not render content of message 1",
        ),
        (
            PLAIN.replace("m.content + '<|e|>'", "m.content | upper + '<|e|>'"),
            [USER, ANSWER],
            "changes the content of message 1",
        ),
        (NO_THINKING.replace("loop.last", "false"), [USER, THOUGHT], "changes the content of message 1"),
        (PLAIN, [USER, {**ANSWER, "reasoning_content": "Hm."}], "does not render reasoning_content of message 1"),
        (
            HERMES.replace("{{- '\n<tool_call>", "{% generation %}{{- '\n<tool_call>").replace(
                "</tool_call>' }}", "' }}{% endgeneration %}"
            ),
            [USER, CALLING],
            "marks only a part of message 1",
        ),
        (
            PLAIN.replace("m.content", "m.content.missing.name"),
            [USER, ANSWER],
            "cannot render the chat: UndefinedError",
        ),
    ],
)
def test_a_part_that_is_not_rendered_is_refused(source: str, messages: list[Any], lost: str) -> None:
    with pytest.raises(InvalidDatum, match=rf"the chat template of .* {lost}"):
        chat.render(messages, tokenizer(source))


def test_tools_that_are_not_rendered_are_refused_also_in_prompts() -> None:
    for render in (chat.render, chat.generation_prompt):
        assert render([USER, ANSWER], tokenizer(HERMES), tools=[TOOL])
        with pytest.raises(InvalidDatum, match="does not render tools, which would be lost"):
            render([USER, ANSWER], tokenizer(), tools=[TOOL])
    with pytest.raises(InvalidDatum, match="does not render content of message 0"):
        chat.generation_prompt([{"role": "system", "content": "Be kind."}, USER], tokenizer(NO_SYSTEM))


@pytest.mark.parametrize("arguments", ['{"days": 3, "city": "Bonn"}', {"days": 3, "city": "Bonn"}])
def test_calls_are_trained_with_their_arguments_as_an_object(arguments: Any) -> None:
    by = tokenizer(HERMES.replace("<|im_start|>", "<|s|>").replace("<|im_end|>", "<|e|>"))
    call = {"function": {"name": "weather", "arguments": arguments}}
    ids, weights = chat.render([USER, {**CALLING, "tool_calls": [call]}], by, tools=[TOOL])
    expected = 'I look.\n<tool_call>\n{"name": "weather", "arguments": {"days": 3, "city": "Bonn"}}\n</tool_call><|e|>'
    assert trained(ids, weights, by) == expected


def test_what_a_template_leaves_out_on_purpose_is_named_once(caplog: pytest.LogCaptureFixture) -> None:
    chats = [[USER, THOUGHT, {**USER, "name": "Ada", "mood": 3}, THOUGHT]] * 2
    with caplog.at_level(logging.WARNING, "tinker_lightning"):
        for messages in chats:
            ids, weights = chat.render(messages, tokenizer(NO_THINKING), only_last=True)
            assert trained(ids, weights, tokenizer()) == "<think>Hm.</think>Hello.<|e|>"
    named = [record.getMessage().partition("does not render ")[2] or record.getMessage() for record in caplog.records]
    assert [each.partition(" of ")[0] for each in named[:2]] == ["name", "mood"]
    assert len(named) == 3
    assert named[2].endswith("changes the content of assistant messages")


def test_a_key_that_the_template_renders_is_not_named(caplog: pytest.LogCaptureFixture) -> None:
    by = tokenizer(PLAIN.replace("m.role + ", "(m.name or m.role) + "))
    chat.render([{**USER, "name": "Ada"}, ANSWER], by)
    assert not caplog.records


@pytest.mark.parametrize("source", [PLAIN, TEMPLATE], ids=["by prefixes", "by marks"])
def test_weights_choose_among_the_answers(source: str) -> None:
    by = tokenizer(source)
    first, second, third = ({**ANSWER, "content": each} for each in ("One.", "Two.", "Three."))
    for messages, expected in (
        ([USER, first, USER, {**second, "weight": 0}, USER, third], "One.<|e|>Three.<|e|>"),
        ([USER, {**first, "train": False}, USER, second, USER, {**third, "weight": 0}], "Two.<|e|>"),
        ([{**first, "weight": 0}, USER, second], "Two.<|e|>"),
    ):
        ids, weights = chat.render(messages, by)
        assert trained(ids, weights, by) == expected
        assert by.decode(ids) == by.apply_chat_template(messages, tokenize=False)


def test_a_template_is_read_from_a_file_or_given(tmp_path: Path) -> None:
    file = tmp_path / "own.jinja"
    file.write_text(PLAIN)
    assert template.read_template(file) == template.read_template(str(file)) == (str(file), PLAIN)
    assert template.read_template(PLAIN)[1] == PLAIN
    with pytest.raises(InvalidInput, match=r"cannot read the file .*nowhere\.jinja"):
        template.read_template(tmp_path / "nowhere.jinja")


@pytest.mark.parametrize(
    ("tools", "text"),
    [
        ("[{]", "tools: not JSON"),
        ({"name": "weather"}, "tools must be a list of dicts, got dict"),
        ([{"type": "function"}], "tool 0 has no function with a name"),
        (["weather"], "tool 0 has no function with a name"),
    ],
)
def test_tools_that_are_none_are_named(tools: Any, text: str) -> None:
    with pytest.raises(InvalidDatum, match=text):
        chat.check_tools(tools)
