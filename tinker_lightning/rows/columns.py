"""The columns of rows in the formats of other libraries: ShareGPT, Alpaca, and the preferences of OpenAI."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from tinker_lightning.errors import InvalidDatum, did_you_mean
from tinker_lightning.types import chat

_SENDERS = {
    "system": "system",
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "assistant": "assistant",
    "function_call": "assistant",
    "tool": "tool",
    "observation": "tool",
}


FORMATS = (
    *("messages", "prompt and completion", "texts", "datums", "preferences", "prompts"),
    *("ShareGPT", "Alpaca", "OpenAI preferences"),
)


def standard_columns(row: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """Returns the format of a row, and the row with columns of this library, without those that are None."""
    # A dataset of rows of several kinds has every column in each row, as None where it is missing.
    row = {name: value for name, value in row.items() if value is not None}
    if "preferred_output" in row and isinstance(row.get("input"), Mapping):
        answers = {"chosen": row["preferred_output"], "rejected": row.get("non_preferred_output")}
        asked = row["input"]
        return "OpenAI preferences", {"prompt": asked.get("messages"), "tools": asked.get("tools"), **answers}
    turns = row.get("messages", row.get("conversations"))
    if turns is not None and not ("prompt" in row and "chosen" in row):
        if not _is_sharegpt(turns):
            return "messages", {**row, "messages": turns}
        messages = _with_system(row.get("system"), [_from_sharegpt(i, turn) for i, turn in enumerate(turns)])
        answers = {
            name: [_from_sharegpt(0, row[name])]
            for name in ("chosen", "rejected")
            if isinstance(row.get(name), Mapping)
        }
        return "ShareGPT", {**row, "prompt" if answers else "messages": messages, **answers}
    if "instruction" in row and "prompt" not in row:
        return "Alpaca", {**row, "prompt" if "chosen" in row else "messages": _from_alpaca(row)}
    names = {"chosen": "preferences", "completion": "prompt and completion", "prompt": "prompts", "text": "texts"}
    return next((name for column, name in names.items() if column in row), "texts"), row


def _is_sharegpt(turns: Any) -> bool:
    return isinstance(turns, Sequence) and any(isinstance(turn, Mapping) and "from" in turn for turn in turns)


def _from_sharegpt(index: int, turn: Any) -> Mapping[str, Any]:
    if not isinstance(turn, Mapping) or not isinstance(turn.get("from"), str):
        raise InvalidDatum(f"message {index} must be a dict with from and value, as the other messages")
    sender, value = turn["from"], turn.get("value")
    if sender not in _SENDERS:
        raise InvalidDatum(f"message {index} is from the unknown {sender!r}. {did_you_mean(sender, _SENDERS)}".strip())
    message = {name: each for name, each in turn.items() if name not in ("from", "value")}
    if sender != "function_call":
        return {**message, "role": _SENDERS[sender], "content": value}
    calls = chat.parse_json(value, f"message {index}: the function call is ") if isinstance(value, str) else value
    return {**message, "role": "assistant", "tool_calls": calls if isinstance(calls, list) else [calls]}


def _from_alpaca(row: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Returns the messages of an instruction with its input, after those of `system` and `history`."""
    asked = [row["instruction"], row.get("input") or ""]
    history = row.get("history") or []
    texts = [each for pair in history for each in pair] if _are_lists(history) else [history]
    texts += ["\n\n".join(filter(None, asked)) if _are_strings(asked) else asked]
    texts += [row["output"]] if "output" in row else []
    if not _are_strings(texts):
        raise InvalidDatum("instruction, input and output must be strings, and history a list of pairs of strings")
    turns: list[Mapping[str, Any]] = [
        {"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(texts)
    ]
    return _with_system(row.get("system"), turns)


def _are_lists(values: Any) -> bool:
    return isinstance(values, list | tuple) and all(
        isinstance(each, list | tuple) and len(each) == 2 for each in values
    )


def _are_strings(values: Iterable[Any]) -> bool:
    return all(isinstance(each, str) for each in values)


def _with_system(system: Any, messages: list[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    if not system or (messages and messages[0]["role"] == "system"):
        return messages
    return [{"role": "system", "content": system}, *messages]
