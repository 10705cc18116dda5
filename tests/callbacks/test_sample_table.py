"""`SampleTable` writes completions to the console and to every logger, once per step, after a resume too."""

from __future__ import annotations

import csv
import itertools
from typing import TYPE_CHECKING, Any

import pytest
import wandb
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.demos.boring_classes import BoringModel
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger, WandbLogger
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from tests.helpers.soaking import first_only
from tests.helpers.trainers import SMALL, OnServer, loader, new, quiet
from tests.helpers.wandb_log import history
from tinker_lightning import RemoteModule, SamplingParams
from tinker_lightning.callbacks import SampleTable
from tinker_lightning.data import RolloutData
from tinker_lightning.errors import InvalidInput
from tinker_lightning.recipes import GRPO

if TYPE_CHECKING:
    from pathlib import Path

    from tinker_lightning.client import ServiceClient

pytestmark = SMALL

SHORT = SamplingParams(max_tokens=3, temperature=0)
PROMPTS: list[Any] = ["text 1:", [{"role": "user", "content": "2 + 2?"}], {"prompt": "3 + 3?", "answer": "6"}]


def rows_of(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def test_every_logger_gets_the_table(  # R0.3
    service: ServiceClient, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    board = TensorBoardLogger(tmp_path / "board")
    loggers: list[Any] = [CSVLogger(tmp_path), board, WandbLogger(save_dir=tmp_path, offline=True)]
    table = SampleTable(PROMPTS, every_n_steps=2, sampling_params=SHORT)
    quiet(max_steps=3, accumulate_grad_batches=2, logger=loggers, callbacks=[table]).fit(
        new(service, OnServer), loader()
    )
    wandb.finish()
    board.experiment.close()
    rows = rows_of(tmp_path / "lightning_logs" / "version_0" / "samples.csv")
    assert [(row["step"], row["prompt"]) for row in rows] == [("2", "text 1:"), ("2", "2 + 2?"), ("2", "3 + 3?")]
    assert "samples after step 2:" in capsys.readouterr().out
    assert rows[0]["stop_reason"] == "length"
    events = EventAccumulator(str(tmp_path / "board" / "lightning_logs" / "version_0")).Reload()
    assert [event.step for event in events.Tensors("samples/text_summary")] == [1]  # as the metrics of the second step
    (file,) = tmp_path.glob("wandb/offline-run-*/*.wandb")
    tables = [row for row in history(file) if any(name.startswith("samples") for name in row)]
    assert [row["trainer/global_step"] for row in tables] == [1]


def test_a_resumed_run_continues_the_file(service: ServiceClient, tmp_path: Path) -> None:  # R4.3
    def fit(steps: int, **kwargs: Any) -> None:
        table = SampleTable(
            "text 1:", every_n_steps=1, sampling_params=SHORT, path=tmp_path / "table.csv", console=False
        )
        files = ModelCheckpoint(tmp_path, "{step}", every_n_train_steps=2, save_top_k=-1)
        trainer = quiet(max_steps=steps, callbacks=[table, files], enable_checkpointing=True)
        trainer.fit(new(service, RemoteModule), loader(), **kwargs)

    fit(3)
    whole = rows_of(tmp_path / "table.csv")
    fit(3, ckpt_path=tmp_path / "step=2.ckpt")
    resumed = rows_of(tmp_path / "table.csv")
    assert [row["step"] for row in resumed] == ["1", "2", "3"]
    assert resumed == whole


@pytest.mark.parametrize("strategy", first_only(["tinker", "auto"]))
def test_without_an_interval_it_follows_validations_or_epochs(
    service: ServiceClient, tmp_path: Path, strategy: str
) -> None:
    steps = []
    for validation in (loader(2, 2), None):
        table = SampleTable(
            PROMPTS[:1], sampling_params=SHORT, path=tmp_path / "table.csv", console=False, num_samples=2
        )
        trainer = quiet(strategy=strategy, accelerator="cpu", devices=1, max_steps=3, callbacks=[table])
        trainer.fit(new(service, RemoteModule), loader(4), validation)
        steps.append([row["step"] for row in rows_of(tmp_path / "table.csv")])
    assert steps == [["2", "2"], ["2", "2", "3", "3"]]


def test_mistakes_have_clear_errors() -> None:
    with pytest.raises(InvalidInput, match="SampleTable: prompts is empty"):
        SampleTable([])
    with pytest.raises(InvalidInput, match="every_n_steps must be at least 1, or None, got 0"):
        SampleTable("Hello", every_n_steps=0)
    with pytest.raises(InvalidInput, match="num_samples must be at least 1"):
        SampleTable("Hello", num_samples=0)
    with pytest.raises(InvalidInput, match="SampleTable needs a RemoteModule, but the trainer runs a BoringModel"):
        quiet(strategy="auto", accelerator="cpu", callbacks=[SampleTable("Hello")]).fit(BoringModel())


def test_rows_of_rollouts_show_the_question_without_system_message_and_template(
    service: ServiceClient, capsys: pytest.CaptureFixture[str]
) -> None:
    answers = itertools.count()
    data = RolloutData(
        ["2 + 2?"], rewards=lambda *_, **__: next(answers), system="Be brief.", group_size=2, batch_size=1, max_tokens=2
    )
    table = SampleTable(every_n_steps=1)
    quiet(max_steps=1, callbacks=[table]).fit(new(service, GRPO, reference=None), data)
    shown = capsys.readouterr().out
    assert shown.count("'2 + 2?' →") == 2
    assert "Be brief" not in shown
