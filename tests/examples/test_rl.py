"""The examples of reinforcement learning and distillation run from end to end, on `tiny` in seconds."""

from __future__ import annotations

import ast
import csv
import json
from functools import partial
from typing import TYPE_CHECKING, Any

import lightning.pytorch as pl
import pytest
import torch

from examples import distill, grpo, grpo_by_hand, judge, multi_turn
from tests.helpers.trainers import SMALL
from tinker_lightning import Datum, ModelInput, losses
from tinker_lightning.recipes import GRPO
from tinker_lightning.testing import embedded_service

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = SMALL


@pytest.fixture(autouse=True)
def _few_prompts(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.node.get_closest_marker("soak") is None:
        monkeypatch.setattr(pl, "Trainer", partial(pl.Trainer, limit_val_batches=1))


def column(folder: Path, name: str) -> list[float]:
    (file,) = folder.rglob("metrics.csv")
    with file.open() as opened:
        return [float(row[name]) for row in csv.DictReader(opened) if row.get(name)]


def test_grpo(tmp_path: Path) -> None:  # R5.9
    before, after = grpo.main(tmp_path, "tiny", rewards=[grpo.right, grpo.digits], steps=1)
    for scores in (before, after):
        assert 0 <= scores["val_reward"] <= 2
        assert 0 <= scores["val_reward/right"] <= 1
    rewards = column(tmp_path, "reward/digits")
    assert len(rewards) == 1
    assert column(tmp_path, "train_loss")


def test_the_right_answers_differ_and_none_that_is_held_out_is_in_the_lessons() -> None:
    parts = {}
    for part in ("train", "validation"):
        lines = (grpo.DATA / f"numbers_{part}.jsonl").read_text().splitlines()
        rows = parts[part] = [json.loads(line) for line in lines]
        answers = [row["answer"] for row in rows]
        assert max(answers.count(answer) for answer in answers) == len(answers) / 8
        asked = [(first, last) for _, _, _, first, *_, last in (row["prompt"].split() for row in rows)]
        assert sum(last == f"{first}:" for first, last in asked) == len(rows) / 2  # asked for the first thing
        for row in rows:
            assert grpo.right(row["prompt"], f" {row['answer']}.", row["answer"]) == 1
            assert grpo.right(row["prompt"], f" {row['answer']}1", row["answer"]) == 0
    names = [{row["prompt"].split()[0] for row in rows} for rows in parts.values()]
    assert not names[0] & names[1]


def test_grpo_by_hand() -> None:
    with embedded_service() as service:
        rewards = grpo_by_hand.train(service.create_lora_training_client("tiny", rank=8, seed=0))
    assert sum(rewards[-3:]) > 2 * sum(rewards[:3])


def test_the_loss_by_hand_is_the_librarys() -> None:
    logprobs, sampler = torch.tensor([-1.0, -2.0, -0.5]), torch.tensor([-1.5, -1.9, -0.5])
    for advantage in (torch.tensor(0.7), torch.tensor(-0.7)):
        inputs: Any = {"logprobs": sampler, "advantages": advantage.expand(3), "target_tokens": [1, 2, 3]}
        expected, _ = losses.ppo([Datum(ModelInput.from_ints([0, 1, 2]), inputs)], [logprobs])
        assert grpo_by_hand.clipped_loss(logprobs, sampler, advantage).sum() == pytest.approx(expected)


@pytest.mark.filterwarnings("ignore:the gradient of the loss")  # the model is still its reference
def test_multi_turn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:  # R5.9
    # Without training, all answers of a group may get the same reward, which only a penalty has a gradient for.
    monkeypatch.setattr(multi_turn, "GRPO", partial(GRPO, kl_coefficient=0.1))
    before, after = multi_turn.main(tmp_path, "tiny", steps=1, group_size=2, batch_size=2)
    for scores in (before, after):
        assert 0 <= scores["val_reward"] <= 1
    assert len(column(tmp_path, "reward")) == 1


def test_judge(tmp_path: Path) -> None:  # R5.9
    before, after = judge.main(tmp_path, "tiny", steps=1, batch_size=2, group_size=2, max_tokens=4)
    for scores in (before, after):
        assert 0 < scores["val_reward/polite"] < 1


def test_distill(tmp_path: Path) -> None:  # R5.9
    distill.main(tmp_path, "tiny", lessons=2, steps=1, rates=(4e-2, 4e-2), batch_size=2, max_tokens=6)
    (divergence,) = column(tmp_path, "policy/kl_teacher")
    assert divergence > 0.1  # the student starts as the base model, which the teacher is no longer


@pytest.mark.soak
def test_a_real_model_doubles_its_reward_on_prompts_it_has_not_seen(tmp_path: Path) -> None:  # R5.9
    before, after = grpo.main(tmp_path)
    assert 0.1 <= before["val_reward"] <= 0.4
    assert after["val_reward"] >= 2 * before["val_reward"]


def test_the_script_is_short() -> None:
    tree = ast.parse((grpo.DATA.parent / "grpo.py").read_text())
    lines: set[int] = set()
    for node in tree.body:
        if isinstance(node, ast.FunctionDef):
            for each in node.body[1:]:
                lines |= set(range(each.lineno, (each.end_lineno or 0) + 1))
    assert len(lines) <= 15


def test_the_loop_by_hand_is_on_one_page() -> None:
    assert len((grpo.DATA.parent / "grpo_by_hand.py").read_text().splitlines()) <= 80
