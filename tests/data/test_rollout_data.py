"""Prompts and rewards of files and import paths, as loaders of rollouts."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from examples.grpo import digits, right
from tinker_lightning.data import RolloutData
from tinker_lightning.errors import InvalidDatum, InvalidInput

if TYPE_CHECKING:
    from pathlib import Path

ROWS = [{"prompt": f"{i} + {i} =", "answer": str(2 * i)} for i in range(6)]


def test_loaders_of_files_and_rewards_by_import_path(tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    data = RolloutData(
        file,
        ROWS[:2],
        rewards=["examples.grpo.right", digits],
        weights=[1, 0.5],
        batch_size=3,
        max_tokens=5,
        staleness=1,
    )
    train, validation = (getattr(data, f"{part}_dataloader")() for part in ("train", "val"))
    assert (train.batch_size, train.group_size, train.staleness, len(train)) == (3, 8, 1, 2)
    assert (validation.staleness, len(validation)) == (0, 1)
    assert train.sampling.params.max_tokens == 5
    assert train is data.train_dataloader()  # its position is part of the checkpoint
    rewards: Any = data._rewards
    assert rewards.functions == {"right": right, "digits": digits}
    assert rewards.weights == {"right": 1, "digits": 0.5}


def test_mistakes(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match="wrong' cannot be imported"):
        RolloutData(ROWS, rewards="examples.grpo.wrong")
    with pytest.raises(InvalidInput, match="rewards: 'right' cannot be imported"):
        RolloutData(ROWS, rewards="right")
    with pytest.raises(InvalidInput, match=r"train: there is no file no\.jsonl"):
        RolloutData("no.jsonl", rewards=right).train_dataloader()
    broken = tmp_path / "broken.jsonl"
    broken.write_text('{"prompt": "1 + 1 ="}\n{"prompt": \n')
    with pytest.raises(InvalidDatum, match=r"broken\.jsonl:2: not JSON"):
        RolloutData(broken, rewards=right).train_dataloader()
