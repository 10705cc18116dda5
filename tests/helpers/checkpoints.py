"""What checkpoint files name, read without the code that writes them."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path


def record_of(entry: torch.Tensor) -> dict[str, Any]:
    """The record of a remote model in a state dict."""
    record: dict[str, Any] = json.loads(bytes(entry.tolist()))
    return record


def records_in(content: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """The records in the state dict of a checkpoint, by the names of the models."""
    suffix = "._extra_state"
    entries = {key: entry for key, entry in content["state_dict"].items() if key.endswith(suffix)}
    return {key.removesuffix(suffix): record_of(entry) for key, entry in entries.items() if entry.numel()}


def state_in(file: Path | str) -> str:
    """The path of the state that a file of a `RemoteModule` names for its own model."""
    return str(records_in(torch.load(file, weights_only=True))["lm"]["path"])
