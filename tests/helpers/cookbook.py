"""Data for `tinker-cookbook` that needs no network."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pathlib import Path

KEY = "tml-any"
QUESTIONS = ("What is the sky?", "Who are you?", "Count to three.", "Say it in French: yes.")
GOOD = ("Blue, on most days.", "A very small model.", "One, two, three.", "Oui.")
BAD = ("I will not say.", "Nobody knows, and nobody should care about it at all.", "One, three.", "No.")


def common(batch_size: int) -> Any:
    """The settings that all of its dataset builders share."""
    from tinker_cookbook.supervised.types import ChatDatasetBuilderCommonConfig

    return ChatDatasetBuilderCommonConfig(
        model_name_for_tokenizer="tiny", renderer_name="role_colon", max_length=256, batch_size=batch_size
    )


def conversations() -> list[dict[str, Any]]:
    """Questions with good answers."""
    return [
        {"messages": [message("user", ask), message("assistant", good)]}
        for ask, good in zip(QUESTIONS, GOOD, strict=True)
    ]


def comparisons() -> list[dict[str, Any]]:
    """Questions with a good and a bad answer."""
    return [
        {
            "comparison": {
                "prompt_conversation": [message("user", ask)],
                "completion_A": [message("assistant", good)],
                "completion_B": [message("assistant", bad)],
            },
            "label": "A",
        }
        for ask, good, bad in zip(QUESTIONS, GOOD, BAD, strict=True)
    ]


def write_rows(path: Path, rows: list[dict[str, Any]]) -> str:
    """Writes a JSONL file; returns its path."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def message(role: str, content: str) -> dict[str, str]:
    """A message of a conversation."""
    return {"role": role, "content": content}
