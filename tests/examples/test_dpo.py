"""The DPO example runs from end to end: on `tiny` in seconds, and as a soak test on a model that can read."""

from __future__ import annotations

import ast
import csv
import json
import math
import re
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import lightning.pytorch as pl
import pytest

from examples import dpo
from tinker_lightning.data import PreferenceData
from tinker_lightning.server.engine.catalog import Catalog

if TYPE_CHECKING:
    from pathlib import Path

STEPS = 12
# A number with its unit: what all chosen answers have, and no rejected one.
UNIT = r"°C|mm|cm|m|km|ml|l|litres?|g|kg|bar|rpm|Nm|degrees|seconds|minutes?|hours?|days|weeks|months"
MEASURE = re.compile(rf"\d[ -]?(?:{UNIT})\b")

# Lightning's advice for loaders as small as these, and its use of a name that torch calls deprecated.
pytestmark = [
    pytest.mark.filterwarnings("ignore:.*does not have many workers"),
    pytest.mark.filterwarnings("ignore:.*LeafSpec.* is deprecated"),
]


class Run(NamedTuple):
    """The results of the example, and the files that it has written."""

    before: dict[str, float]
    after: dict[str, float]
    folder: Path

    def column(self, name: str) -> list[float]:
        with (self.folder / "version_0" / "metrics.csv").open() as file:
            return [float(row[name]) for row in csv.DictReader(file) if row[name]]


@pytest.fixture(scope="module")
def tiny_run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Few batches, and those of the lessons in two epochs."""
    folder = tmp_path_factory.mktemp("dpo")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pl, "Trainer", partial(pl.Trainer, limit_train_batches=STEPS // 2, limit_val_batches=1))
        before, after = dpo.main(folder, "tiny", learning_rate=1e-2)
    return Run(before, after, folder)


def read(part: str) -> list[dict[str, str]]:
    lines = (dpo.DATA / f"preferences_{part}.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines]


def test_the_chosen_answers_of_the_lessons_win(tiny_run: Run) -> None:  # R3.5, R4.3
    margins, losses = tiny_run.column("rewards/margins"), tiny_run.column("train_loss")
    assert len(margins) == len(losses) == STEPS
    assert margins[0] == pytest.approx(0, abs=1e-4)  # the reference against itself
    assert losses[0] == pytest.approx(math.log(2), abs=1e-4)
    assert sum(margins[-4:]) / 4 > 1
    assert sum(losses[-4:]) / 4 < 0.7 * losses[0]


def test_the_pairs_that_are_held_out_are_scored_before_and_after(tiny_run: Run) -> None:  # R5.3
    assert tiny_run.before["val_rewards/margins"] == pytest.approx(0, abs=1e-4)
    assert tiny_run.after["val_rewards/margins"] > 0.5
    assert len(tiny_run.column("val_rewards/accuracies")) == 4  # before, after each of two epochs, and after


def test_a_pair_is_one_prompt_with_two_answers_that_alone_count() -> None:  # R4.1
    tokenizer = Catalog(["tiny"]).get("tiny").tokenizer
    data = PreferenceData(validation=dpo.DATA / "preferences_validation.jsonl", tokenizer=tokenizer, batch_size=16)
    data.setup("validate")
    (pairs,) = data.val_dataloader()
    for pair, row in zip(pairs, read("validation"), strict=True):
        prompts = []
        for datum, answer in zip(pair, (row["chosen"], row["rejected"]), strict=True):
            weights, targets = (datum.loss_fn_inputs[name].to_torch() for name in ("weights", "target_tokens"))
            assert tokenizer.decode(targets[weights > 0]) == answer + tokenizer.eos_token
            prompts.append(targets[: int(weights.argmax())].tolist())
        assert prompts[0] == prompts[1]


@pytest.mark.parametrize("example", ["sft", "dpo"])
def test_the_scripts_are_short(example: str) -> None:
    tree = ast.parse((dpo.DATA.parent / f"{example}.py").read_text())
    main = next(node for node in tree.body if isinstance(node, ast.FunctionDef))
    lines = {line for node in main.body[1:] for line in range(node.lineno, (node.end_lineno or 0) + 1)}
    assert len(lines) <= 12


@pytest.mark.parametrize(("part", "size"), [("train", 48), ("validation", 16)])
def test_the_chosen_answer_has_a_measure_and_the_rejected_one_has_none(part: str, size: int) -> None:
    rows = read(part)
    assert len(rows) == size
    for row in rows:
        assert MEASURE.search(row["chosen"]), row["chosen"]
        assert not MEASURE.search(row["rejected"]), row["rejected"]
    # So it is not enough to look for a digit.
    assert sum(bool(re.search(r"\d", row["rejected"])) for row in rows) >= size / 8


def test_the_pairs_are_different_and_none_that_is_held_out_is_in_the_lessons() -> None:
    rows = read("train") + read("validation")
    for field in ("prompt", "chosen", "rejected"):
        assert len({row[field] for row in rows}) == len(rows), field
    for row in rows:  # not one answer with a word changed
        chosen, rejected = (set(re.findall(r"\w+", row[field].lower())) for field in ("chosen", "rejected"))
        assert len(chosen & rejected) < len(chosen | rejected) / 2, row


@pytest.mark.soak
def test_a_real_model_learns_to_prefer_measures_in_pairs_it_has_not_seen(tmp_path: Path) -> None:  # R3.5, R5.5
    before, after = dpo.main(tmp_path)
    assert after["val_rewards/accuracies"] > 0.8
    assert after["val_rewards/margins"] > 1 > abs(before["val_rewards/margins"])
    assert after["val_chosen_nll"] < before["val_chosen_nll"]  # it does not win by making both unlikely


@pytest.mark.soak
def test_to_a_real_model_the_answers_are_of_one_length() -> None:
    tokenizer = Catalog(["smollm2-135m"]).get("smollm2-135m").tokenizer
    for part in ("train", "validation"):
        lengths = [sum(len(tokenizer.encode(row[field])) for row in read(part)) for field in ("chosen", "rejected")]
        assert lengths[0] == pytest.approx(lengths[1], rel=0.05)
