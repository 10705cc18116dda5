"""A resumed run logs no step twice: rows after its checkpoint are dropped, and a copy is kept."""  # R0.3, R5.3

from __future__ import annotations

import csv
import logging
from typing import TYPE_CHECKING, Any

import pytest
import wandb
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger, WandbLogger
from packaging.version import Version

from tests.helpers.soaking import diagonal
from tests.helpers.trainers import SMALL, OnServer, loader, new, quiet
from tests.helpers.wandb_log import finished_records, history
from tinker_lightning import RemoteModule

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    import lightning.pytorch as pl

    from tinker_lightning.client import ServiceClient

pytestmark = SMALL
RESUMED = 4  # the step of the checkpoint that is resumed


class Dies(ModelCheckpoint):
    """Saves every two steps, and ends the run by an error after some."""

    def __init__(self, folder: Path, step: int) -> None:
        super().__init__(folder, "{step}", every_n_train_steps=2, save_top_k=-1)
        self.last = step

    def on_train_batch_start(self, trainer: pl.Trainer, *_: Any) -> None:
        if trainer.global_step == self.last:
            raise RuntimeError("the power fails")


def fit(service: ServiceClient, folder: Path, logger: Any, dies_at: int = -1, **settings: Any) -> None:
    """Trains eight steps of two epochs, with a validation in each; from the checkpoint if there is one."""
    file, kind = folder / "files" / f"step={RESUMED}.ckpt", settings.pop("kind", OnServer)
    trainer = quiet(
        max_epochs=2,
        logger=logger,
        enable_checkpointing=True,
        callbacks=[Dies(folder / "files", dies_at)],
        accelerator="cpu",
        devices=1,
        **settings,
    )
    trainer.fit(new(service, kind), loader(), loader(2, 2), ckpt_path=file if file.exists() else None)


def die(*args: Any, **kwargs: Any) -> None:
    with pytest.raises(RuntimeError, match="the power fails"):
        fit(*args, **kwargs)


def rows_in(file: Path) -> list[dict[str, str]]:
    with file.open(newline="") as stream:
        return list(csv.DictReader(stream))


def steps_of(rows: list[dict[str, Any]], name: str, step: str = "step") -> list[int]:
    return [int(row[step]) for row in rows if row.get(name)]


@pytest.mark.parametrize(("strategy", "kind"), diagonal(["tinker", "auto"], [OnServer, RemoteModule]))
def test_a_csv_file_has_each_row_once(
    service: ServiceClient, tmp_path: Path, strategy: str, kind: type[RemoteModule], caplog: pytest.LogCaptureFixture
) -> None:
    """Without the strategy, which logs the row of the checkpoint's own step again, that row stays."""
    file, copy = tmp_path / "run/a/metrics.csv", tmp_path / f"run/a/metrics.csv.before-resume-at-{RESUMED}"
    fit(service, tmp_path / "whole", CSVLogger(tmp_path, "whole", "a"), strategy=strategy, kind=kind)
    die(service, tmp_path, CSVLogger(tmp_path, "run", "a"), 7, strategy=strategy, kind=kind)
    before = file.read_bytes()
    assert steps_of(rows_in(file), "train_loss")[-1] > RESUMED
    fit(service, tmp_path, CSVLogger(tmp_path, "run", "a"), strategy=strategy, kind=kind)
    assert copy.read_bytes() == before
    assert f"Rows after step {RESUMED} are dropped from {file}, because they are logged again; {copy}" in caplog.text
    whole, resumed = rows_in(tmp_path / "whole/a/metrics.csv"), rows_in(file)
    assert steps_of(resumed, "val_loss") == [3, 7]
    for name in whole[0].keys() - {"step"}:
        assert [(row["step"], row[name]) for row in resumed if row[name]] == [
            (row["step"], row[name]) for row in whole if row[name]
        ]
    again = CSVLogger(tmp_path, "run", "a")
    fit(service, tmp_path, again)
    fit(service, tmp_path, again)  # whose file is in use
    assert len(rows_in(file)) == len(resumed)
    assert len(list(file.parent.glob("*.before-resume-at-*"))) == 3


def test_a_csv_file_of_another_run_is_set_aside(service: ServiceClient, tmp_path: Path) -> None:
    fit(service, tmp_path, CSVLogger(tmp_path, "run", 0))
    other = CSVLogger(tmp_path, "run", 1)
    other.log_metrics({"accuracy": 0.5}, step=0)
    other.save()
    fit(service, tmp_path, CSVLogger(tmp_path, "run", 1))
    (copy,) = (tmp_path / "run/version_1").glob("*.before-resume-at-*")
    assert rows_in(copy) == [{"accuracy": "0.5", "step": "0"}]
    rows = rows_in(tmp_path / "run/version_1/metrics.csv")
    assert steps_of(rows, "train_loss") == [4, 5, 6, 7]
    assert not any(row.get("accuracy") for row in rows)


def test_a_csv_file_of_a_run_that_was_killed_before_its_first_row_is_continued(
    service: ServiceClient, tmp_path: Path
) -> None:
    fit(service, tmp_path, CSVLogger(tmp_path, "run", 0))
    file = tmp_path / "run/version_0/metrics.csv"
    file.write_bytes(b"")
    fit(service, tmp_path, CSVLogger(tmp_path, "run", 0))
    assert steps_of(rows_in(file), "train_loss") == [4, 5, 6, 7]


@pytest.fixture
def offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    monkeypatch.chdir(tmp_path)
    wandb.finish()
    yield
    wandb.finish()


# With 0.19.10 it passes by itself, but writes no file after another run of the same process. Why is not known.
@pytest.mark.skipif(Version(wandb.__version__) < Version("0.20"), reason="fails after other W&B runs of the process")
@pytest.mark.usefixtures("offline")
def test_the_files_of_an_offline_run_have_each_row_once(service: ServiceClient, tmp_path: Path) -> None:
    """Also if it is resumed twice from the same checkpoint, so that all rows of a process are dropped."""
    files: list[Path] = []
    whole: dict[Path, list[dict[str, Any]]] = {}
    for dies_at in (7, 6, -1):
        run = WandbLogger(save_dir=tmp_path, offline=True)
        (die if dies_at > 0 else fit)(service, tmp_path, run, dies_at)
        wandb.finish()
        (file,) = set(tmp_path.glob("wandb/offline-run-*/*.wandb")) - set(files)
        files.append(file)
        whole[file] = history(file)
    assert len({file.name for file in files}) == 1
    rows = [history(file) for file in files]
    assert rows[1] == []
    assert finished_records(files[1])[1].HasField("run")  # it can still be synchronized
    for name, steps in (("train_loss", list(range(8))), ("val_loss", [3, 7]), ("grad_norm", list(range(8)))):
        assert steps_of([*rows[0], *rows[2]], name, "trainer/global_step") == steps
    for file in files[:2]:
        (copy,) = file.parent.glob(f"*.wandb.before-resume-at-{RESUMED}")
        assert history(copy) == whole[file]


@pytest.mark.usefixtures("offline")
def test_rows_that_cannot_be_dropped_are_counted_in_a_warning(
    service: ServiceClient, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run = WandbLogger(save_dir=tmp_path, offline=True)
    fit(service, tmp_path, run)
    with caplog.at_level(logging.WARNING, "tinker_lightning"):
        fit(service, tmp_path, run)  # in the same process, which is still writing the file
    assert f"the W&B run {run.version} has " in caplog.text
    assert f"WandbLogger(resume=None, resume_from='{run.version}?_step=" in caplog.text
