"""The quickstart runs from end to end; here with a model that learns nothing, but in seconds."""

from __future__ import annotations

import csv
import json
import runpy
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import wandb

from tests.helpers.checkpoints import records_in
from tests.helpers.wandb_log import history

EXAMPLE = Path(__file__).parents[2] / "examples" / "quickstart.py"
BATCHES = 16  # of the 32 of an epoch
STEPS = 12  # 4 batches a step, 3 epochs

# Lightning's advice for loaders as small as these, and its use of a name that torch calls deprecated.
pytestmark = [
    pytest.mark.filterwarnings("ignore:.*does not have many workers"),
    pytest.mark.filterwarnings("ignore:.*LeafSpec.* is deprecated"),
    pytest.mark.filterwarnings("ignore:adapter_config.json names the base model"),  # tiny is on no hub
]


@pytest.fixture(scope="module")
def quickstart() -> dict[str, Any]:
    return runpy.run_path(str(EXAMPLE))


@pytest.fixture(scope="module")
def folder(quickstart: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("quickstart")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pl, "Trainer", partial(pl.Trainer, limit_train_batches=BATCHES, limit_val_batches=2))
        orders = quickstart["read_orders"]()[:2]
        patch.setitem(quickstart["main"].__globals__, "read_orders", lambda: orders)
        patch.setitem(quickstart["main"].__globals__, "GREEDY", replace(quickstart["GREEDY"], max_tokens=8))
        quickstart["main"](folder, model="tiny")
    wandb.finish()  # as the end of the process would
    return folder


def read_table(folder: Path, column: str) -> list[tuple[int, float]]:
    with (folder / "version_0" / "metrics.csv").open() as file:
        return [(int(row["step"]), float(row[column])) for row in csv.DictReader(file) if row[column]]


def test_every_step_and_validation_is_in_the_table(folder: Path) -> None:  # R0.2, R0.4, R5.3
    for column in ("train_loss", "ticket_nll", "doubt", "grad_norm", "learning_rate"):
        assert [step for step, _ in read_table(folder, column)] == list(range(STEPS)), column
    validations = read_table(folder, "val_loss")
    assert [step for step, _ in validations] == [0, 3, 7, 11]
    assert [step for step, _ in read_table(folder, "tickets_right")] == [0, 3, 7, 11]
    assert validations[-1][1] < validations[0][1]


def test_the_learning_rate_warms_up_and_falls(folder: Path) -> None:  # R5.3
    rates = [rate for _, rate in read_table(folder, "learning_rate")]
    assert rates.index(max(rates)) == STEPS // 8
    assert rates[0] == pytest.approx(0.25 * max(rates))
    assert sorted(rates[STEPS // 8 :], reverse=True) == rates[STEPS // 8 :]
    assert rates[-1] < 0.05 * max(rates)


def test_the_checkpoint_is_the_best_and_names_a_state(folder: Path) -> None:  # R5.3
    checkpoint = torch.load(folder / "version_0" / "checkpoints" / "best.ckpt", weights_only=True)
    scores = read_table(folder, "val_loss")
    (kept,) = (value for key, value in checkpoint["callbacks"].items() if key.startswith("ModelCheckpoint"))
    assert kept["best_model_score"] == pytest.approx(min(loss for _, loss in scores))
    assert records_in(checkpoint)["lm"]["path"].startswith("tinker://")


def test_the_picture_is_a_picture(folder: Path) -> None:
    picture = (folder / "version_0" / "loss.png").read_bytes()
    assert picture.startswith(b"\x89PNG\r\n")
    assert len(picture) > 10_000


def test_wandb_has_the_same_numbers(folder: Path) -> None:  # R0.3
    (file,) = folder.glob("wandb/offline-run-*/run-*.wandb")
    losses = [row["train_loss"] for row in history(file) if "train_loss" in row]
    assert losses == pytest.approx([loss for _, loss in read_table(folder, "train_loss")])


def test_the_best_adapter_is_exported(folder: Path) -> None:
    assert {"adapter_config.json", "adapter_model.safetensors", "tokenizer.json"} <= {
        file.name for file in (folder / "adapter").iterdir()
    }


def test_a_ticket_is_right_or_not_and_kept(quickstart: dict[str, Any]) -> None:
    score, row = quickstart["Tickets"](), quickstart["read_orders"]()[0]
    _, order, ticket = row["messages"]
    assert [score(text, row) for text in ("A\nlatte", ticket["content"])] == [False, True]
    assert score.written == {order["content"]: ["A latte", ticket["content"]]}


def test_each_lesson_is_a_ticket_and_none_is_an_order_to_come(quickstart: dict[str, Any]) -> None:
    files = [quickstart["DATA"] / f"orders_{part}.jsonl" for part in ("train", "validation")]
    lessons, orders = ([json.loads(line)["messages"] for line in file.read_text().splitlines()] for file in files)
    for chat in lessons + orders:
        assert [message["role"] for message in chat] == ["system", "user", "assistant"]
        ticket = json.loads(chat[-1]["content"])
        assert list(ticket) == ["count", "size", "drink", "extra"]
        said = chat[1]["content"].lower()
        assert ticket["drink"] in said
        assert ticket["extra"] is None or ticket["extra"] in said
        assert ticket["size"] == "regular" or ticket["size"] in said
    assert not {chat[1]["content"] for chat in lessons} & {chat[1]["content"] for chat in orders}


def test_the_loss_counts_a_ticket_s_weakest_token_until_it_is_sure(quickstart: dict[str, Any]) -> None:  # R1.2
    barista = quickstart["Barista"]("tiny", base_url="embedded")
    datum = quickstart["Datum"].from_tokens([1, 2, 3, 4], weights=[0, 0, 1, 1])
    unsure = torch.tensor([0.1, 0.9, 0.2]).log().requires_grad_()
    loss, metrics = barista.loss([datum], [unsure])
    expected = -(torch.tensor([0.9, 0.2]).log().mean()) + 0.1 * torch.tensor(0.5 / 0.2).log()
    assert loss.item() == pytest.approx(expected.item())
    assert barista.loss([datum], [torch.tensor([0.1, 0.9, 0.6]).log()])[1]["doubt"] == 0
    assert metrics["doubt"] > 0
