"""Chat templates, and the check that they render everything that a chat says."""

from __future__ import annotations

import functools
import logging
import os
import re
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from tinker_lightning.errors import InvalidDatum, InvalidInput

if TYPE_CHECKING:
    from tinker_lightning.types.chat import Message

# Private characters around the number of a mark, so that no message contains it.
_MARK = "\ue000{}\ue001"
_THINKING = ("reasoning_content", "reasoning", "thinking")
# Keys that a template need not render: what is trained, and how calls and answers of tools belong together.
_NOT_RENDERED = ("role", "weight", "train", "tool_call_id", "id", "type")

# Once for each text, in each process.
_warn_once = functools.lru_cache(maxsize=1024)(logging.getLogger("tinker_lightning").warning)


def read_template(template: str | os.PathLike[str]) -> tuple[str, str]:
    """Returns the name and the text of a chat template, which is given as a file or as text."""
    if isinstance(template, str) and ("{{" in template or "{%" in template):
        return "this data module", template
    try:
        with open(template, encoding="utf-8") as file:
            return os.fspath(template), file.read()
    except OSError as error:
        raise InvalidInput(f"chat_template: cannot read the file {os.fspath(template)}: {error.strerror}") from error


def render_template(tokenizer: Any, messages: Sequence[Message], tools: Any, **options: Any) -> str:
    """Returns a chat as text; raises `InvalidDatum` if the template cannot render it."""
    if not tokenizer.chat_template:
        raise InvalidInput(
            f"the tokenizer {tokenizer.name_or_path!r} has no chat template. Pass chat_template=..., or train on texts "
            "(as_text=True in ChatData)."
        )
    try:
        text: str = tokenizer.apply_chat_template(messages, tools=tools, tokenize=False, **options)
    except Exception as error:  # a template is a program
        raise InvalidDatum(
            f"the chat template of {_name(tokenizer)} cannot render the chat: {type(error).__name__}: {error}"
        ) from error
    return text


def check_rendered(
    text: str, messages: list[Message], tokenizer: Any, tools: Any, spans: Mapping[int, tuple[int, int]], **options: Any
) -> None:
    """Raises `InvalidDatum` if the template leaves out a part of a chat that is trained or that the answer depends on.

    The thinking and the text of earlier answers, which some templates leave out on purpose, and keys that are not part
    of a message's text, such as `name`, are logged, each once.
    """
    for index, key in _dropped(text, messages, tokenizer, tools, options):
        if index < 0:
            raise lost_error("does not render tools", tokenizer)
        role = messages[index]["role"]
        is_history = role == "assistant" and index not in spans
        if key == "tool_calls" or (key == "content" and not is_history) or (key in _THINKING and not is_history):
            raise lost_error(f"does not render {key} of message {index} ({role})", tokenizer)
        _warn_once("the chat template of %s does not render %s of %s messages", _name(tokenizer), key, role)
    whole, answered, trained_until = "".join(text.split()), 0, 0
    for index, message in enumerate(messages):
        content, is_answer = "".join(message["content"].split()), message["role"] == "assistant"
        if index in spans:
            start, trained_until = trained_until, spans[index][1]
            if not holds(text[start:trained_until], content):
                raise lost_error(f"changes the content of message {index} (assistant)", tokenizer)
        found = whole.find(content, answered if is_answer else 0)
        if found < 0:
            _warn_once("the chat template of %s changes the content of %s messages", _name(tokenizer), message["role"])
        elif is_answer:
            answered = found + len(content)


def _name(tokenizer: Any) -> str:
    """Returns the name of a tokenizer or of its template; for files of a server, a digest would say nothing."""
    name = str(tokenizer.name_or_path)
    return "this tokenizer" if not name or re.fullmatch("[0-9a-f]{64}", os.path.basename(name)) else name


def _dropped(
    text: str, messages: list[Message], tokenizer: Any, tools: Any, options: Mapping[str, Any]
) -> list[tuple[int, str]]:
    """Returns the index and key of each part of a chat on which the text does not depend; -1 stands for tools.

    All strings of the chat get a mark. A part whose mark is missing is marked alone, because templates compare and cut.
    """

    def marked(only: int | None) -> tuple[str, list[tuple[int, str]]]:
        parts: list[tuple[int, str]] = []

        def mark(value: Any, part: tuple[int, str]) -> Any:
            parts.append(part)
            number = len(parts) - 1
            if only is not None and only != number:
                return value
            return (value if isinstance(value, str) else "") + _MARK.format(number)

        changed = [
            {key: value if key in _NOT_RENDERED else _mark_leaves(value, mark, (i, key)) for key, value in each.items()}
            for i, each in enumerate(messages)
        ]
        named = [
            {**tool, "function": {**tool["function"], "name": mark(tool["function"]["name"], (-1, "tools"))}}
            if isinstance(tool, Mapping)
            else tool
            for tool in tools or ()
        ]
        try:
            return render_template(tokenizer, changed, named or None, **options), parts
        except InvalidDatum:  # so it depends on the parts
            return "", parts

    together, parts = marked(None)
    missing = [number for number in range(len(parts)) if _MARK.format(number) not in together]
    return [parts[number] for number in missing if marked(number)[0] == text]


def _mark_leaves(value: Any, mark: Callable[[Any, tuple[int, str]], Any], part: tuple[int, str]) -> Any:
    if isinstance(value, Mapping):
        return {key: each if key in _NOT_RENDERED else _mark_leaves(each, mark, part) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_mark_leaves(each, mark, part) for each in value]
    return value if value in ("", None) else mark(value, part)


def holds(text: str, part: str) -> bool:
    """Returns whether a text has a part, apart from white space."""
    return "".join(part.split()) in "".join(text.split())


def lost_error(fault: str, tokenizer: Any) -> InvalidDatum:
    """Returns the error for a part of a chat that a template would lose."""
    return InvalidDatum(
        f"the chat template of {_name(tokenizer)} {fault}, which would be lost. Pass a template that supports it "
        "(chat_template='template.jinja' in a data module), or leave it out of the row; bad_rows='skip' skips such rows"
    )
