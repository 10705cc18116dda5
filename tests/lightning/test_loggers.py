"""Metrics stand under their own steps in every logger, also those that come back from the server after their step."""

from __future__ import annotations

import asyncio
import csv
import functools
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import wandb
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger, WandbLogger
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from tests.helpers.soaking import diagonal, first_only
from tests.helpers.trainers import SMALL, OnServer, loader, new, quiet
from tests.helpers.wandb_log import history
from tinker_lightning import Regularizer, RemoteModule
from tinker_lightning.errors import InvalidInput
from tinker_lightning.losses import regularizers

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tinker_lightning.client import ServiceClient

pytestmark = SMALL

Table = dict[str, list[tuple[int, float]]]
"""Of each metric the steps and values, in the order in which they were written."""

STEPS, VALIDATED = [0, 1, 2, 3, 4, 5], [3]  # four batches an epoch


@pytest.fixture
def offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    monkeypatch.chdir(tmp_path)
    yield
    wandb.finish()


def from_csv(logger: CSVLogger) -> Table:
    with open(f"{logger.log_dir}/metrics.csv") as file:
        rows = list(csv.DictReader(file))
    return {
        name: [(int(row["step"]), float(row[name])) for row in rows if row[name]] for name in rows[0] if name != "step"
    }


def from_tensorboard(folder: Path) -> Table:
    events = EventAccumulator(str(folder)).Reload()
    return {name: [(event.step, event.value) for event in events.Scalars(name)] for name in events.Tags()["scalars"]}


def from_wandb(file: Path) -> Table:
    """What W&B has kept; its own count of rows must never go back, or it would drop them."""
    table: Table = {}
    count = -1
    for row in history(file):
        assert row["_step"] > count
        count = row["_step"]
        for name in row.keys() - {"trainer/global_step"}:
            table.setdefault(name, []).append((row["trainer/global_step"], row[name]))
    return table


def assert_whole(table: Table, steps: list[int], validated: list[int]) -> None:
    """Each metric once for each of its steps, and the rates and norms where they belong."""
    for name in ("train_loss", "grad_norm", "learning_rate"):
        assert [step for step, _ in table[name]] == steps, name
    assert {(step, epoch) for step, epoch in table["epoch"]} == {(step, step // 4) for step in steps}
    assert [step for step, _ in table["val_loss"]] == validated
    assert all(norm > 0 for _, norm in table["grad_norm"])


def fit(service: ServiceClient, logger: Any, *, kind: type[RemoteModule] = RemoteModule, **settings: Any) -> None:
    quiet(**{"max_steps": 6, "logger": logger, **settings}).fit(new(service, kind), loader(), loader(2, 2))


@pytest.mark.parametrize(("strategy", "kind"), diagonal(["tinker", "auto"], [RemoteModule, OnServer]))
def test_csv_logger(service: ServiceClient, tmp_path: Path, kind: type[RemoteModule], strategy: str) -> None:
    logger = CSVLogger(tmp_path)
    fit(service, logger, kind=kind, strategy=strategy, accelerator="cpu", devices=1)
    assert_whole(from_csv(logger), STEPS, VALIDATED)


@pytest.mark.parametrize("kind", [RemoteModule, OnServer])
def test_tensorboard_logger(service: ServiceClient, tmp_path: Path, kind: type[RemoteModule]) -> None:
    logger, other = TensorBoardLogger(tmp_path / "board"), CSVLogger(tmp_path)
    fit(service, [logger, other], kind=kind)
    logger.experiment.close()
    table = from_tensorboard(tmp_path / "board" / "lightning_logs" / "version_0")
    assert_whole(table, STEPS, VALIDATED)
    for name, values in from_csv(other).items():
        assert [value for _, value in table[name]] == pytest.approx([value for _, value in values])


@pytest.mark.usefixtures("offline")
@pytest.mark.parametrize("kind", first_only([RemoteModule, OnServer]))
def test_wandb_logger(service: ServiceClient, tmp_path: Path, kind: type[RemoteModule]) -> None:  # R0.3
    other = CSVLogger(tmp_path)
    fit(service, [WandbLogger(save_dir=tmp_path, offline=True), other], kind=kind)
    wandb.finish()
    (file,) = tmp_path.glob("wandb/offline-run-*/*.wandb")
    table = from_wandb(file)
    assert_whole(table, STEPS, VALIDATED)
    for name, values in from_csv(other).items():
        assert table[name] == values


BASE = ("value", "nll", "perplexity", "tokens")


async def topology(data: list[Any], logprobs: list[Any]) -> Any:
    await asyncio.sleep(0)
    return regularizers.topology(data, logprobs)


class Regularized(RemoteModule):
    regularizers = (
        Regularizer(regularizers.entropy, lambda step: 0.1 * (step + 1), "entropy"),
        Regularizer(topology, 0.01, "topology"),
        Regularizer(functools.partial(regularizers.length, limit=3), 0.5, "length", run_in_executor=True),
    )


@pytest.mark.usefixtures("offline")
def test_regularizers_in_every_logger(service: ServiceClient, tmp_path: Path) -> None:  # R2.4
    rows, board = CSVLogger(tmp_path), TensorBoardLogger(tmp_path / "board")
    fit(service, [WandbLogger(save_dir=tmp_path, offline=True), rows, board], kind=Regularized, max_steps=3)
    wandb.finish()
    board.experiment.close()
    (file,) = tmp_path.glob("wandb/offline-run-*/*.wandb")
    own = {"entropy": "entropy", "topology": "peaks", "length": "length"}
    names = {f"regularizers/{name}/{what}" for name in own for what in ("value", "weight", "contribution", "grad_norm")}
    names |= {f"regularizers/{name}/custom/{metric}" for name, metric in own.items()}
    names |= {"loss_total", "regularizer_total", *(f"base_loss/{name}" for name in BASE)}
    for table in (from_wandb(file), from_csv(rows), from_tensorboard(Path(board.log_dir))):
        assert {name for name in table if "regularizer" in name or name.startswith("base_loss")} | {
            "loss_total"
        } == names
        assert all([step for step, _ in table[name]] == [0, 1, 2] for name in names)
        values = {name: dict(table[name]) for name in names}
        for step in range(3):
            contributions = [values[f"regularizers/{name}/contribution"][step] for name in own]
            assert values["regularizers/entropy/weight"][step] == pytest.approx(0.1 * (step + 1))
            assert values["regularizer_total"][step] == pytest.approx(sum(contributions))
            total = values["base_loss/value"][step] + values["regularizer_total"][step]
            assert values["loss_total"][step] == pytest.approx(total)


@pytest.mark.usefixtures("offline")
def test_loggers_after_a_resume(service: ServiceClient, tmp_path: Path) -> None:
    """The rows of a step that was taken again follow the first; the last row of each step counts."""
    whole = CSVLogger(tmp_path, name="whole")
    fit(service, whole)
    files = ModelCheckpoint(tmp_path, every_n_train_steps=3, save_top_k=-1)
    written: list[list[Table]] = []
    known: set[Path] = set()
    for steps in (4, 6):
        started = int(time.time())
        run = WandbLogger(save_dir=tmp_path, id="same", resume="allow", offline=True)
        lines, board = CSVLogger(tmp_path, version=steps), TensorBoardLogger(tmp_path / "board", version=steps)
        trainer = quiet(max_steps=steps, logger=[run, lines, board], enable_checkpointing=True, callbacks=[files])
        resumed = files.best_model_path or None
        trainer.fit(new(service, RemoteModule), loader(), loader(2, 2), ckpt_path=resumed)
        wandb.finish()
        board.experiment.close()
        (file,) = set(tmp_path.glob("wandb/offline-run-*/run-same.wandb")) - known
        known.add(file)
        while int(time.time()) == started:  # the name of a folder has the second
            time.sleep(0.05)
        written.append([from_wandb(file), from_csv(lines), from_tensorboard(Path(board.log_dir))])
    for before, after in zip(*written, strict=True):
        assert [step for step, _ in after["grad_norm"]] == [3, 4, 5]
        for name, values in from_csv(whole).items():
            assert {**dict(before[name]), **dict(after[name])} == pytest.approx(dict(values)), name


@pytest.mark.usefixtures("offline")
def test_what_an_exception_leaves_behind(service: ServiceClient, tmp_path: Path) -> None:
    class Fails(RemoteModule):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            if batch_idx == 2:
                raise RuntimeError("a fault in user code")
            return super().training_step(batch, batch_idx)

    logger, run = CSVLogger(tmp_path), WandbLogger(save_dir=tmp_path, offline=True)
    with pytest.raises(RuntimeError, match="a fault in user code"):
        fit(service, [logger, run], kind=Fails)
    wandb.finish()
    (file,) = tmp_path.glob("wandb/offline-run-*/*.wandb")
    for table in (from_csv(logger), from_wandb(file)):
        assert [step for step, _ in table["train_loss"]] == [step for step, _ in table["grad_norm"]] == [0, 1]


def test_metrics_are_logged_as_often_as_is_asked_for(service: ServiceClient, tmp_path: Path) -> None:
    logger = CSVLogger(tmp_path)
    fit(service, logger, log_every_n_steps=2, accumulate_grad_batches=2, max_steps=4)
    table = from_csv(logger)
    assert [step for step, _ in table["grad_norm"]] == [step for step, _ in table["train_loss"]] == [1, 3]


@pytest.mark.usefixtures("offline")
def test_watching_a_remote_gradient_raises(service: ServiceClient, tmp_path: Path) -> None:
    logger = WandbLogger(save_dir=tmp_path, offline=True)
    with pytest.raises(InvalidInput, match="grad_norm"):
        logger.watch(new(service, RemoteModule))
