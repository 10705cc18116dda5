"""Chats as tokens: weights on the tokens that the assistant has to write, and prompts for its next message."""

from __future__ import annotations

import difflib
import itertools
import json
import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import numpy as np

from tinker_lightning.errors import InvalidDatum, InvalidInput, TooLong
from tinker_lightning.types.template import check_rendered, holds, lost_error, render_template

if TYPE_CHECKING:
    from numpy.typing import NDArray

Message: TypeAlias = Mapping[str, Any]
Truncate: TypeAlias = Literal["error", "left", "right"]
TokensAndWeights: TypeAlias = "tuple[list[int], NDArray[np.float32]]"

ROLES = ("system", "developer", "user", "assistant", "tool", "function", "ipython", "environment")
# Stands for an answer in a rendered template. Private characters, so that no message contains it.
_ANSWER = "\ue000answer\ue001"
_GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")
_UNSUPPORTED = {
    "function_call": "OpenAI's former tool_calls. Write tool_calls in place of it",
    "train_detail": "which trains parts of a message. Only whole messages can be trained: write train",
}


def check_messages(messages: Any) -> list[Message]:
    """Returns messages with strings as contents; raises `InvalidDatum` for anything that is not a message.

    The text parts of a content are joined, the arguments of tool calls are parsed, and None stands for a missing key.
    """
    if not isinstance(messages, Sequence) or isinstance(messages, str):
        raise InvalidDatum(f"messages must be a list of dicts with role and content, got {type(messages).__name__}")
    return [_check_message(i, message) for i, message in enumerate(messages)]


def is_trained(message: Message) -> bool:
    """Returns whether a message is trained: an assistant message, unless its `weight` or `train` forbids it."""
    return bool(message["role"] == "assistant" and message.get("weight", 1) and message.get("train", True))


def check_tools(tools: Any) -> list[Any] | None:
    """Returns tools in OpenAI's form, which may be given as JSON; None if there are none."""
    tools = parse_json(tools, "tools: ") if isinstance(tools, str) else tools
    if not tools:
        return None
    if not isinstance(tools, Sequence):
        raise InvalidDatum(f"tools must be a list of dicts, got {type(tools).__name__}")
    checked = [
        {"type": "function", "function": tool} if isinstance(tool, Mapping) and "name" in tool else tool
        for tool in tools
    ]
    for i, tool in enumerate(checked):
        function = tool.get("function") if isinstance(tool, Mapping) else None
        if not callable(tool) and not (isinstance(function, Mapping) and isinstance(function.get("name"), str)):
            raise InvalidDatum(f"tool {i} has no function with a name; write {{'type': 'function', 'function': ...}}")
    return checked


def parse_json(text: str | bytes, what: str = "", fix: str = "") -> Any:
    """Returns the value of a JSON text; raises `InvalidDatum` if it is damaged, too deep or has a huge number.

    Args:
        text: The text.
        what: The name of the text, which starts the message of an error.
        fix: How to fix damaged JSON, which ends the message of an error.
    """
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        line = f"line {error.lineno}, " if error.lineno > 1 else ""
        raise InvalidDatum(f"{what}not JSON: {error.msg} at {line}column {error.colno}{fix}") from error
    except UnicodeDecodeError as error:
        raise InvalidDatum(f"{what}not text: {error}. Save the file as UTF-8.") from error
    except ValueError as error:
        raise InvalidDatum(f"{what}not readable: {error}") from error
    except RecursionError as error:
        raise InvalidDatum(f"{what}nested too deeply") from error


def encode(tokenizer: Any, text: str, **options: Any) -> list[int]:
    """Returns the tokens of a text; raises `InvalidDatum` if it has half of a surrogate pair."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InvalidDatum(
            f"{text[error.start]!a} is half of a surrogate pair, and not a character; fix the text around "
            f"{text[max(0, error.start - 20) : error.start]!a}"
        ) from error
    ids: list[int] = tokenizer(text, **options)["input_ids"]
    return ids


def render(
    messages: Any, tokenizer: Any, *, first: int = 0, only_last: bool = False, tools: Any = None
) -> TokensAndWeights:
    """Returns the tokens of a chat, and weights that are 1 on the messages to train, including end-of-turn tokens.

    These are the assistant messages, except for those with `weight` 0 or `train` False. The tokens before a trained
    message are exactly the prompt that the template renders to generate it.

    Args:
        messages: The messages; there must be one before the first trained message.
        tokenizer: A Hugging Face tokenizer with a chat template. Marks (`{% generation %}`) are used if it has them.
        first: The first message to train on; earlier ones are part of the prompt.
        only_last: Whether to train on the last of the messages only.
        tools: Tools to pass to the template, also as JSON.
    """
    messages, tools = check_messages(messages), check_tools(tools)
    answers = [i for i, message in enumerate(messages) if i >= first and message["role"] == "assistant"]
    turns = [i for i in answers if is_trained(messages[i])]
    if not turns:
        fault = (
            "every assistant message has weight 0 or train False"
            if answers
            else "the conversation has no assistant message"
        )
        raise InvalidDatum(f"{fault}, so there is nothing to train on")
    if turns[0] == 0:
        # The assistant's header is taken from the prompt that the template renders for the messages before it.
        raise InvalidDatum("message 0 is an assistant message; put a system or user message before it")
    if only_last:
        turns = turns[-1:]
    text = render_template(tokenizer, messages, tools)
    marked = bool(_GENERATION.search(tokenizer.get_chat_template(tools=tools)))
    spans: dict[int, tuple[int, int]] = {}
    for turn in turns:
        prompt = render_template(tokenizer, messages[:turn], tools, add_generation_prompt=True)
        following = next((i for i in answers if i > turn), None)
        if not marked:
            through = render_template(tokenizer, messages[: turn + 1], tools)
        elif following is None:
            through = text
        else:
            through = render_template(tokenizer, messages[:following], tools, add_generation_prompt=True)
        if not text.startswith(prompt) or not text.startswith(through):
            raise _rewritten_error(turn)
        spans[turn] = len(prompt), len(through)
    check_rendered(text, messages, tokenizer, tools, spans)
    if marked:
        return _render_by_marks(text, tokenizer, spans, messages, tools)
    return _render_by_prefixes(text, tokenizer, list(spans.values()))


def messages_to_answer(messages: Any) -> list[Message]:
    """Returns the messages that a model has to answer; a last assistant message is left out."""
    prompt = check_messages(messages)
    if prompt and prompt[-1]["role"] == "assistant":
        prompt = prompt[:-1]
    if not prompt:
        raise InvalidDatum("the conversation has no message to answer")
    return prompt


def generation_prompt(messages: Any, tokenizer: Any, *, tools: Any = None) -> list[int]:
    """Returns the tokens that precede the assistant's next message; a last assistant message is left out."""
    messages, tools = messages_to_answer(messages), check_tools(tools)
    text = render_template(tokenizer, messages, tools, add_generation_prompt=True)
    check_rendered(text, messages, tokenizer, tools, {}, add_generation_prompt=True)
    return _tokens(tokenizer, text)


def following_prompt(
    answered: Sequence[Message], new: Sequence[Message], tokenizer: Any, *, tools: Any = None
) -> list[int]:
    """Returns the tokens between the last answer of a chat and the answer to new messages, end of turn included.

    The last answer may have been sampled with other tokens than its text is encoded to.
    """
    messages = check_messages([*answered[:-1], {"role": "assistant", "content": _ANSWER}, *new])
    text = render_template(tokenizer, messages, check_tools(tools), add_generation_prompt=True)
    _, separator, rest = text.rpartition(_ANSWER)
    if not separator:
        raise InvalidInput(
            "the chat template of this tokenizer leaves out earlier answers, so what follows one is unknown. Build the "
            "prompts from tokens."
        )
    return _tokens(tokenizer, rest)


def shorten(
    ids: list[int], weights: NDArray[np.float32], max_length: int | None, truncate: Truncate
) -> TokensAndWeights:
    """Returns tokens and weights, cut on one side to `max_length` tokens; raises `TooLong` for `truncate="error"`."""
    if max_length is None or len(ids) <= max_length:
        return ids, weights
    if max_length < 2:
        raise InvalidInput(f"max_length must be at least 2, got {max_length}")
    if truncate not in ("left", "right"):
        raise TooLong(
            f"it has {len(ids)} tokens, but max_length is {max_length}. Pass truncate='left' or 'right' to cut it."
        )
    part = slice(-max_length, None) if truncate == "left" else slice(max_length)
    return ids[part], weights[part]


def _render_by_prefixes(text: str, tokenizer: Any, spans: Sequence[tuple[int, int]]) -> TokensAndWeights:
    """Weights what follows each prompt, which ends where the template without the message ends."""
    ids = _tokens(tokenizer, text)
    starts = [_tokens(tokenizer, text[:start]) for start, _ in spans]
    ends = [_tokens(tokenizer, text[:end]) for _, end in spans]
    if any(ids[: len(part)] != part for part in (*starts, *ends)):
        # A token crosses a boundary, such as two line breaks in one. A model never generates it, so each part is
        # tokenized alone, as in a chat whose earlier answers were generated.
        cuts = [0, *(cut for span in spans for cut in span), len(text)]
        parts = [_tokens(tokenizer, text[a:b]) for a, b in itertools.pairwise(cuts)]
        sums = np.cumsum([len(part) for part in parts])
        ids = [token for part in parts for token in part]
        starts = [ids[:length] for length in sums[0:-1:2]]
        ends = [ids[:length] for length in sums[1:-1:2]]
    weights = np.zeros(len(ids), np.float32)
    for start, through in zip(starts, ends, strict=True):
        weights[len(start) : len(start) + _generated_length(through[len(start) :], tokenizer)] = 1.0
    return ids, weights


def _render_by_marks(
    text: str, tokenizer: Any, spans: Mapping[int, tuple[int, int]], messages: list[Message], tools: Any
) -> TokensAndWeights:
    """Weights what the template marks between each prompt and the next one."""
    encoded = tokenizer.apply_chat_template(
        messages, tools=tools, tokenize=True, return_dict=True, return_assistant_tokens_mask=True
    )
    ids, mask = list(encoded["input_ids"]), np.asarray(encoded["assistant_masks"], np.float32)
    weights = np.zeros_like(mask)
    for turn, (start, end) in spans.items():
        before, through = _tokens(tokenizer, text[:start]), _tokens(tokenizer, text[:end])
        if ids[: len(before)] != before or ids[: len(through)] != through:
            raise _rewritten_error(turn)
        part = slice(len(before), len(through))
        weights[part] = mask[part]
        marked = tokenizer.decode(np.asarray(ids[part])[mask[part] > 0])
        names = [call["function"]["name"] for call in messages[turn].get("tool_calls", ())]
        if not all(holds(marked, each) for each in (messages[turn]["content"], *names)):
            raise lost_error(f"marks only a part of message {turn} (assistant) for training", tokenizer)
    return ids, weights


def _generated_length(reply: list[int], tokenizer: Any) -> int:
    """Returns how many tokens a model generates: templates add a line break after the end of a turn."""
    if tokenizer.eos_token_id in reply:
        return len(reply) - reply[::-1].index(tokenizer.eos_token_id)
    special = [i for i, token in enumerate(reply) if token in tokenizer.all_special_ids]
    is_end = special and not tokenizer.decode(reply[special[-1] + 1 :]).strip()
    return special[-1] + 1 if is_end else len(reply)


def _rewritten_error(turn: int) -> InvalidDatum:
    return InvalidDatum(
        f"message {turn}: this tokenizer's chat template renders earlier messages differently when later ones follow, "
        "so the assistant's tokens cannot be identified. Train on the last message only (train_on='last' in ChatData), "
        "or build the datum with Datum.from_tokens(tokens, weights)."
    )


def _check_message(index: int, given: Any) -> Message:
    where = f"message {index}"
    if not isinstance(given, Mapping):
        raise InvalidDatum(f"{where} must be a dict with role and content, got {type(given).__name__}")
    message = {key: value for key, value in given.items() if value is not None}
    role, weight, train = message.get("role"), message.get("weight", 1), message.get("train", True)
    if role is None:
        raise InvalidDatum(f"{where} has no role. Write {{'role': 'user', 'content': ...}}.")
    if role not in ROLES:
        close = difflib.get_close_matches(str(role), ROLES, 1)
        hint = f"did you mean {close[0]!r}?" if close else f"known roles are {', '.join(ROLES)}."
        raise InvalidDatum(f"{where} has the unknown role {role!r}; {hint}")
    where += f" ({role})"
    for key, hint in _UNSUPPORTED.items():
        if key in message:
            raise InvalidDatum(f"{where} has {key}, {hint}")
    if isinstance(weight, bool) or weight not in (0, 1):
        raise InvalidDatum(f"{where} has weight {weight!r}; it must be 0 or 1")
    if not isinstance(train, bool):
        raise InvalidDatum(f"{where} has train {train!r}; it must be true or false")
    if role != "assistant" and (message.get("weight") or message.get("train")):
        raise InvalidDatum(f"{where} is to be trained, but only messages of the assistant can be; leave the key out")
    calls = message.pop("tool_calls", None)
    if calls:
        if not isinstance(calls, Sequence) or isinstance(calls, str):
            raise InvalidDatum(f"{where} has tool_calls of type {type(calls).__name__}; they must be a list")
        message["tool_calls"] = [_check_call(where, call) for call in calls]
    message["content"] = _join(where, message.get("content", "" if calls else None))
    return message


def _check_call(where: str, call: Any) -> dict[str, Any]:
    function = call.get("function", call) if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise InvalidDatum(f"{where} has a tool call without the name of a function")
    arguments = function.get("arguments") or {}
    if isinstance(arguments, str):
        arguments = parse_json(arguments, f"{where}: the arguments of {function['name']} are ") or {}
    if not isinstance(arguments, Mapping):
        raise InvalidDatum(f"{where}: the arguments of {function['name']} must be a JSON object, got {arguments!r}")
    # Templates render the arguments as JSON, so as a string they would be encoded twice.
    own = {} if function is call else call
    return {**own, "type": "function", "function": {**function, "arguments": arguments}}


def _join(where: str, content: Any) -> str:
    """Returns a content, which may be a list of text parts, as a string."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list | tuple):
        got = "no content" if content is None else f"content of type {type(content).__name__}"
        raise InvalidDatum(f"{where} has {got}; it must be a string or a list of text parts")
    for part in content:
        kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
        if kind != "text" or not isinstance(part.get("text"), str):
            raise InvalidDatum(f"{where} has a part of type {kind!r}; only parts of text can be trained and answered")
    return "".join(part["text"] for part in content)


def _tokens(tokenizer: Any, text: str) -> list[int]:
    return encode(tokenizer, text, add_special_tokens=False)
