"""W&B runs of a fit: settings, metrics at their steps, tables and files; a resumed fit continues it."""

from __future__ import annotations

import json
import logging
from typing import TYPE_CHECKING, Any

import pytest
import wandb
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import WandbLogger

from tests.helpers.soaking import mostly_soak
from tests.helpers.trainers import SMALL, quiet
from tests.helpers.wandb_log import finished_records, history
from tinker_lightning import SamplingParams
from tinker_lightning.callbacks import RemoteMonitor, SampleTable
from tinker_lightning.data import ChatData, PreferenceData
from tinker_lightning.recipes import DPO, SFT

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tinker_lightning.client import ServiceClient

pytestmark = SMALL

PAIRS = [{"prompt": f"{i}?", "chosen": f"{i}.", "rejected": "No."} for i in range(8)]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    monkeypatch.chdir(tmp_path)
    wandb.finish()  # that of another test
    yield tmp_path
    wandb.finish()


def fit(service: ServiceClient, folder: Path, steps: int, *, strategy: str = "tinker", **settings: Any) -> None:
    """Trains up to a step, from the last checkpoint if there is one, as a process of its own would."""
    client = service.create_lora_training_client("tiny", rank=4, seed=1)
    last = folder / "files" / "last.ckpt"
    table = SampleTable(["1?"], every_n_steps=2, sampling_params=SamplingParams(max_tokens=2), console=False)
    trainer = quiet(
        strategy=strategy,
        max_steps=steps,
        enable_checkpointing=True,
        logger=WandbLogger(save_dir=folder, offline=True, **settings),
        callbacks=[table, RemoteMonitor(), ModelCheckpoint(folder / "files", every_n_train_steps=2, save_last=True)],
        accelerator="cpu",
        devices=1,
    )
    data = PreferenceData(PAIRS, PAIRS[:2], batch_size=2)
    trainer.fit(DPO(client, beta=0.25, learning_rate=1e-3), data, ckpt_path=last if last.exists() else None)
    wandb.finish()


def files_of(folder: Path) -> list[Path]:
    """The files of all runs, by when each was started; W&B may still write to the first when the second begins."""
    return sorted(folder.glob("wandb/offline-run-*/*.wandb"), key=started_at)


def started_at(file: Path) -> int:
    (run, *_) = (record.run for record in finished_records(file) if record.HasField("run"))
    return int(run.start_time.ToNanoseconds())


def steps_of(file: Path, name: str) -> list[int]:
    rows = history(file)  # a table has several keys with its name in front
    return [row["trainer/global_step"] for row in rows if name in row or f"{name}._type" in row]


def settings_of(file: Path) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for record in finished_records(file):
        updates = [*record.config.update, *record.run.config.update]
        found |= {each.key: json.loads(each.value_json) for each in updates}
    return found


@pytest.mark.parametrize("strategy", mostly_soak(["tinker", "auto"], but=["tinker"]))
def test_a_resumed_fit_continues_its_run(service: ServiceClient, folder: Path, strategy: str) -> None:  # R0.3
    fit(service, folder, 4, strategy=strategy)
    fit(service, folder, 8, strategy=strategy)
    first, second = files_of(folder)
    assert first.name == second.name  # the run's id
    for name in ("train_loss", "rewards/margins", "grad_norm", "learning_rate"):  # no gaps, and nothing twice
        assert [*steps_of(first, name), *steps_of(second, name)] == list(range(8)), name
    assert [*steps_of(first, "val_loss"), *steps_of(second, "val_loss")] == [3, 7]
    timed = [*steps_of(first, "remote/step_s"), *steps_of(second, "remote/step_s")]
    assert [step for step in timed if step != 3] == [0, 1, 2, 4, 5, 6, 7]  # that of step 3 came after the checkpoint
    for file, steps in ((first, [0, 1, 2, 3]), (second, [4, 5, 6, 7])):
        assert steps_of(file, "samples") == steps[1::2]
        tables = list(file.parent.glob("files/media/table/samples_*.table.json"))
        assert [len(json.loads(table.read_text())["data"]) for table in tables] == [1, 1]
        found = settings_of(file)
        expected = {"base_model": "tiny", "lora_rank": 4, "server": "the embedded trainer", "dialect": "embedded"}
        expected |= {"beta": 0.25, "loss_type": "dpo", "learning_rate": 1e-3}
        assert {name: found[name] for name in expected} == expected
        assert found["route"] in ("retained", "two-pass", "server")
        assert found["lora_parameters"] > 0
    if strategy == "auto":
        return
    summaries = [each for record in finished_records(second) for each in record.summary.update]
    states = [json.loads(each.value_json) for each in summaries if each.key == "checkpoints"][-1]
    kept = {str(path) for path in (folder / "files").iterdir()}
    assert set(states) & kept == kept
    assert all(state.startswith("tinker://") for state in states.values())


def test_another_run_is_named_in_a_warning(
    service: ServiceClient, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    fit(service, folder, 2)
    run = files_of(folder)[0].name.removeprefix("run-").removesuffix(".wandb")
    with caplog.at_level(logging.WARNING, "tinker_lightning"):
        fit(service, folder, 4, id="other")
    assert f"pass WandbLogger(id={run!r}, project='lightning_logs')" in caplog.text
    assert files_of(folder)[1].name == "run-other.wandb"


def test_settings_of_modules_that_are_given_names(folder: Path) -> None:
    logger = WandbLogger(save_dir=folder, offline=True)
    with SFT("tiny", rank=4, base_url="embedded", api_key="secret") as module:
        quiet(max_steps=1, logger=logger).fit(module, ChatData([{"prompt": "1?", "completion": "1."}]))
    wandb.finish()
    found = settings_of(files_of(folder)[0])
    assert {"model": "tiny", "rank": 4, "reduction": "mean", "route": "builtin"}.items() <= found.items()
    assert "secret" not in str(found)
