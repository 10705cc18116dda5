"""The KTO example runs from end to end: on `tiny` in seconds, and as a soak test on a model that can read."""

from __future__ import annotations

import json
from functools import partial
from typing import TYPE_CHECKING

import lightning.pytorch as pl
import pytest

from examples import kto

if TYPE_CHECKING:
    from pathlib import Path

# Lightning's advice for loaders as small as these, and its use of a name that torch calls deprecated.
pytestmark = [
    pytest.mark.filterwarnings("ignore:.*does not have many workers"),
    pytest.mark.filterwarnings("ignore:.*LeafSpec.* is deprecated"),
]


def test_held_out_answers_are_scored_before_and_after(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pl, "Trainer", partial(pl.Trainer, limit_train_batches=3, limit_val_batches=1))
    before, after = kto.main(tmp_path, "tiny", learning_rate=2e-3)
    assert before["val_rewards/margins"] == pytest.approx(0, abs=1e-4)  # the reference against itself
    assert before["val_loss"] == pytest.approx(0.5, abs=1e-4)
    assert after["val_rewards/margins"] > 0.1
    assert after["val_loss"] < before["val_loss"]


def test_the_answers_are_those_of_the_pairs_one_to_a_prompt() -> None:
    answers, pairs = (
        [json.loads(line) for line in (kto.DATA / f"{name}_train.jsonl").read_text(encoding="utf-8").splitlines()]
        for name in ("answers", "preferences")
    )
    assert [(row["prompt"], row["completion"]) for row in answers] == [
        (pair["prompt"], pair["chosen" if row["label"] else "rejected"])
        for row, pair in zip(answers, pairs, strict=True)
    ]
    assert sum(row["label"] for row in answers) == len(answers) / 2


@pytest.mark.soak
def test_a_real_model_learns_from_labels_to_prefer_measures(tmp_path: Path) -> None:  # R3.5, R5.5
    before, after = kto.main(tmp_path)
    assert after["val_rewards/accuracies"] > max(0.8, before["val_rewards/accuracies"])
    assert after["val_rewards/margins"] > 1 > abs(before["val_rewards/margins"])
