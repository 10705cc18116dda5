"""The example that is evaluated by what the model writes runs from end to end, on `tiny` with few batches."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import torch

from examples import generation_eval
from tests.helpers.trainers import SMALL

if TYPE_CHECKING:
    from pathlib import Path

    import pytest

pytestmark = SMALL


def test_the_checkpoint_is_chosen_by_what_the_model_writes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:  # R5.3
    # Any answer has some letters, so that the score of a model that cannot write JSON is above 0.
    monkeypatch.setattr(generation_eval, "score", lambda text, _: {"is_json": 0.0, "fields": 0.5 + bool(text) / 4})
    metrics = generation_eval.main("tiny", tmp_path, limit_train_batches=1, enable_progress_bar=False)
    assert metrics["ticket/fields"] == 0.75
    assert metrics["ticket/is_json"] == 0
    states = torch.load(tmp_path / "best.ckpt", weights_only=True)["callbacks"]
    (kept,) = (state for name, state in states.items() if name.startswith("ModelCheckpoint"))
    assert (kept["monitor"], kept["best_model_score"]) == ("ticket/fields", 0.75)


def test_a_ticket_is_scored_by_its_fields() -> None:
    ticket = {"count": 2, "size": "large", "drink": "latte", "extra": None}
    row = {"messages": [{"role": "assistant", "content": json.dumps(ticket)}]}
    assert generation_eval.score(json.dumps(ticket), row) == {"is_json": 1, "fields": 1}
    assert generation_eval.score(json.dumps({**ticket, "size": "small"}), row) == {"is_json": 1, "fields": 0.75}
    for text in ("two lattes", "3", "[]"):
        assert generation_eval.score(text, row) == {"is_json": 0, "fields": 0}
