"""Data and clients for both tested releases of `tinker-cookbook`; nothing of it needs a network."""

from __future__ import annotations

import json
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

from packaging.version import Version

from benchmarks import arithmetic

if TYPE_CHECKING:
    from pathlib import Path

# Release 0.5.8 is written for SDK 0.36, and 0.6.1 for 0.38.
IS_0_6 = Version(version("tinker-cookbook")) >= Version("0.6")
KEY = "tml-any"
QUESTIONS = ("What is the sky?", "Who are you?", "Count to three.", "Say it in French: yes.")
GOOD = ("Blue, on most days.", "A very small model.", "One, two, three.", "Oui.")
BAD = ("I will not say.", "Nobody knows, and nobody should care about it at all.", "One, three.", "No.")


def created(client: Any) -> Any:
    """The client itself, of which the SDK returns a future from 0.38 on."""
    return client.result() if hasattr(client, "result") else client


def seeded(kind: Any) -> Any:
    """A class of clients whose new models start from the same weights, and which counts its clients."""

    class Counted(arithmetic.seeded(kind)):  # type: ignore[misc]
        created = 0

        def __init__(self, *args: Any, **settings: Any) -> None:
            Counted.created += 1
            super().__init__(*args, **settings)

    return Counted


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


def is_result(name: str) -> bool:
    """Whether a metric follows from the training, unlike durations."""
    return "time" not in name
