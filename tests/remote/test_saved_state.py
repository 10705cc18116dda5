"""The record of a saved model: read as it was written, and rejected by name if it is of another format."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tinker_lightning import RemoteLM
from tinker_lightning.errors import InvalidInput
from tinker_lightning.remote.saved_state import FORMAT_VERSION, SavedState

if TYPE_CHECKING:
    from pathlib import Path

STATE = SavedState("tinker://model/weights/step-000003", "tiny", 4, 3)


def changed(**changes: Any) -> torch.Tensor:
    record = json.loads(bytes(STATE.to_tensor().tolist())) | changes
    content = json.dumps({key: value for key, value in record.items() if value is not None}, separators=(",", ":"))
    return torch.tensor(list(content.encode()), dtype=torch.uint8)


def test_a_record_is_read_as_it_was_written(tmp_path: Path) -> None:
    save_file({"lm._extra_state": STATE.to_tensor()}, tmp_path / "file.safetensors")
    assert SavedState.from_tensor(load_file(tmp_path / "file.safetensors")["lm._extra_state"]) == STATE


def test_a_record_is_readable_json() -> None:
    expected = {"path": "tinker://model/weights/step-000003", "base_model": "tiny", "rank": 4, "steps": 3}
    record = json.loads(bytes(STATE.to_tensor().tolist()))
    assert record == {"tinker_lightning": FORMAT_VERSION, **expected, "storage": None}
    del record["storage"]  # as an earlier version has written it
    assert SavedState.from_bytes(json.dumps(record).encode()) == STATE


BROKEN = {
    "another version": (changed(tinker_lightning=2), "has format version 2, but .* reads version 1. Load it with"),
    "no version": (changed(tinker_lightning=None), "has no format version .* Save the model again"),
    "a missing path": (changed(path=None), "lacks 'path': the file is damaged"),
    "missing steps": (changed(steps=None), "lacks 'steps': the file is damaged"),
    "a plain path": (torch.tensor(list(b"tinker://a"), dtype=torch.uint8), "is not JSON: .* Save the model again"),
    "a list": (torch.tensor(list(b"[1]"), dtype=torch.uint8), "has no format version"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_record_of_another_format_is_rejected(name: str) -> None:
    record, message = BROKEN[name]
    with pytest.raises(InvalidInput, match=message):
        SavedState.from_tensor(record)

    def never() -> None:
        raise AssertionError("it must be rejected before a model is created")

    with pytest.raises(InvalidInput, match=message):
        RemoteLM(never).load_state_dict({"handle": torch.zeros(()), "_extra_state": record})
