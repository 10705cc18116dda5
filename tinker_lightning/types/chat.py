"""Chats as tokens: weights on the tokens that the assistant has to write, and prompts for its next message."""

from __future__ import annotations

import difflib
import itertools
import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import numpy as np

from tinker_lightning.errors import InvalidDatum, InvalidInput, TooLong

if TYPE_CHECKING:
    from numpy.typing import NDArray

Message: TypeAlias = Mapping[str, Any]
Truncate: TypeAlias = Literal["error", "left", "right"]
TokensAndWeights: TypeAlias = "tuple[list[int], NDArray[np.float32]]"

ROLES = ("system", "developer", "user", "assistant", "tool", "function", "ipython", "environment")
# Stands for an answer in a rendered template. Private characters, so that no message contains it.
_ANSWER = "\ue000answer\ue001"
_GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")


def check_messages(messages: Any) -> list[Message]:
    """Returns messages as a list; raises `InvalidDatum` if one lacks a role or content or has an unknown role."""
    if not isinstance(messages, Sequence) or isinstance(messages, str):
        raise InvalidDatum(f"messages must be a list of dicts with role and content, got {type(messages).__name__}")
    for i, message in enumerate(messages):
        if not isinstance(message, Mapping):
            raise InvalidDatum(f"message {i} must be a dict with role and content, got {type(message).__name__}")
        role, content = message.get("role"), message.get("content")
        if role is None:
            raise InvalidDatum(f"message {i} has no role. Write {{'role': 'user', 'content': ...}}.")
        if role not in ROLES:
            close = difflib.get_close_matches(str(role), ROLES, 1)
            hint = f"did you mean {close[0]!r}?" if close else f"known roles are {', '.join(ROLES)}."
            raise InvalidDatum(f"message {i} has the unknown role {role!r}; {hint}")
        if not isinstance(content, str | list) and not message.get("tool_calls"):
            got = "no content" if content is None else f"content of type {type(content).__name__}"
            raise InvalidDatum(f"message {i} ({role}) has {got}; it must be a string or a list of parts")
    return list(messages)


def render(
    messages: Any, tokenizer: Any, *, first: int = 0, only_last: bool = False, tools: Sequence[Any] | None = None
) -> TokensAndWeights:
    """Returns the tokens of a chat, and weights that are 1 on assistant messages, including end-of-turn tokens.

    The tokens before a trained message are exactly the prompt that the template renders to generate it.

    Args:
        messages: The messages; there must be one before the first assistant message.
        tokenizer: A Hugging Face tokenizer with a chat template. Marks (`{% generation %}`) are used if it has them.
        first: The first message to train on; earlier ones are part of the prompt.
        only_last: Whether to train on the last assistant message only.
        tools: Tools to pass to the template.
    """
    messages = check_messages(messages)
    turns = [i for i, message in enumerate(messages) if i >= first and message["role"] == "assistant"]
    if not turns:
        raise InvalidDatum("the conversation has no assistant message, so there is nothing to train on")
    if turns[0] == 0:
        # The assistant's header is taken from the prompt that the template renders for the messages before it.
        raise InvalidDatum("message 0 is an assistant message; put a system or user message before it")
    if only_last:
        turns = turns[-1:]
    text = _template(tokenizer, messages, tools)
    marked = bool(_GENERATION.search(tokenizer.get_chat_template(tools=tools)))
    spans: list[tuple[int, int]] = []
    for turn in turns:
        prompt = _template(tokenizer, messages[:turn], tools, add_generation_prompt=True)
        through = prompt if marked else _template(tokenizer, messages[: turn + 1], tools)
        if not text.startswith(prompt) or not text.startswith(through):
            raise _rewritten_error(turn)
        spans.append((len(prompt), len(through)))
    if marked:
        return _render_by_marks(
            messages, tokenizer, tools, [_tokens(tokenizer, text[:start]) for start, _ in spans], turns
        )
    return _render_by_prefixes(text, tokenizer, spans)


def messages_to_answer(messages: Any) -> list[Message]:
    """Returns the messages that a model has to answer; a last assistant message is left out."""
    prompt = check_messages(messages)
    if prompt and prompt[-1]["role"] == "assistant":
        prompt = prompt[:-1]
    if not prompt:
        raise InvalidDatum("the conversation has no message to answer")
    return prompt


def generation_prompt(messages: Any, tokenizer: Any, *, tools: Sequence[Any] | None = None) -> list[int]:
    """Returns the tokens that precede the assistant's next message; a last assistant message is left out."""
    return _tokens(tokenizer, _template(tokenizer, messages_to_answer(messages), tools, add_generation_prompt=True))


def following_prompt(
    answered: Sequence[Message], new: Sequence[Message], tokenizer: Any, *, tools: Sequence[Any] | None = None
) -> list[int]:
    """Returns the tokens between the last answer of a chat and the answer to new messages, end of turn included.

    The last answer may have been sampled with other tokens than its text is encoded to.
    """
    messages = [*answered[:-1], {"role": "assistant", "content": _ANSWER}, *new]
    text = _template(tokenizer, messages, tools, add_generation_prompt=True)
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


def _render_by_prefixes(text: str, tokenizer: Any, spans: list[tuple[int, int]]) -> TokensAndWeights:
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
    messages: list[Message], tokenizer: Any, tools: Any, prompts: list[list[int]], turns: list[int]
) -> TokensAndWeights:
    """Weights what the template marks, from the first trained message on."""
    encoded = tokenizer.apply_chat_template(
        messages, tools=tools, tokenize=True, return_dict=True, return_assistant_tokens_mask=True
    )
    ids, mask = list(encoded["input_ids"]), np.asarray(encoded["assistant_masks"], np.float32)
    for prompt, turn in zip(prompts, turns, strict=True):
        if ids[: len(prompt)] != prompt:
            raise _rewritten_error(turn)
    mask[: len(prompts[0])] = 0
    return ids, mask


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


def _template(tokenizer: Any, messages: list[Message], tools: Any, **options: Any) -> str:
    if not tokenizer.chat_template:
        raise InvalidInput(
            f"the tokenizer {tokenizer.name_or_path!r} has no chat template. Pass chat_template=..., or train on texts "
            "(as_text=True in ChatData)."
        )
    text: str = tokenizer.apply_chat_template(messages, tools=tools, tokenize=False, **options)
    return text


def _tokens(tokenizer: Any, text: str) -> list[int]:
    ids: list[int] = tokenizer(text, add_special_tokens=False)["input_ids"]
    return ids
