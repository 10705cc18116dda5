"""Remote states are counted by the files that name them: after a run exactly those exist."""

from __future__ import annotations

import argparse
import logging
from collections import defaultdict
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from lightning.pytorch.plugins.io import AsyncCheckpointIO
from packaging.version import Version

from tests.helpers.trainers import LIGHTNING, SMALL, loader, new, quiet
from tinker_lightning import RemoteModule
from tinker_lightning.client import checkpoints
from tinker_lightning.errors import TinkerLightningError
from tinker_lightning.lightning.checkpoint.retention import StateRetention
from tinker_lightning.lightning.strategy import TinkerStrategy
from tinker_lightning.server import EmbeddedTrainer
from tinker_lightning.testing import embedded_service

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    import lightning.pytorch as pl

pytestmark = [
    *SMALL,
    pytest.mark.filterwarnings("ignore:Checkpoint directory .* exists and is not empty"),
    pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`, callbacks"),
]


class Server:
    """A trainer in this process, and a folder for files."""

    def __init__(self, trainer: EmbeddedTrainer, service: Any, folder: Path) -> None:
        self.trainer = trainer
        self.service = service
        self.folder = folder

    def states(self) -> list[str]:
        return sorted(summary.tinker_path for summary in self.trainer.store.listing() if summary.path.kind == "weights")

    def named(self) -> list[str]:
        """What the files name, each once."""
        files = [file for file in self.folder.rglob("*.ckpt") if file.exists()]
        return sorted({torch.load(file, weights_only=True)["tinker"]["path"] for file in files})

    def fit(self, *callbacks: pl.Callback, resume: str | None = None, **options: Any) -> pl.Trainer:
        """Two epochs of four steps each, validated behind each; in a module of their own."""
        options = {"max_epochs": 2, "callbacks": list(callbacks), "enable_checkpointing": bool(callbacks), **options}
        trainer = quiet(**options)
        trainer.fit(new(self.service, RemoteModule), loader(), loader(count=2), ckpt_path=resume)
        return trainer


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    trainer = EmbeddedTrainer(["tiny"], data_dir=tmp_path / "data")
    folder = tmp_path / "files"
    folder.mkdir()
    with embedded_service(trainer) as service:
        yield Server(trainer, service, folder)
    trainer.close()


CALLBACKS: dict[str, tuple[list[dict[str, Any]], int]] = {
    "the best": ([{"monitor": "val_loss", "save_top_k": 1}], 1),
    "the best three of steps": ([{"monitor": "train_loss", "save_top_k": 3, "every_n_train_steps": 1}], 3),
    "the last": ([{"save_last": True, "save_top_k": 0}], 1),
    "the best, and the last of those that were": (
        [{"save_last": True, "monitor": "train_loss", "mode": "max", "save_top_k": 1}],
        1 if Version("2.6") <= LIGHTNING else 2,  # before, the last was saved whether or not it was among the best
    ),
    "the best, and the last": (
        [{"monitor": "train_loss", "mode": "max", "save_top_k": 1}, {"save_last": True, "save_top_k": 0}],
        2,
    ),
    "a link to the last": ([{"save_last": "link", "every_n_train_steps": 3}], 1),
    "every second step": ([{"every_n_train_steps": 2, "save_top_k": -1}], 4),
    "each epoch's end": ([{"every_n_epochs": 1, "save_top_k": -1, "save_on_train_epoch_end": True}], 2),
    "two that share": (
        [{"every_n_train_steps": 2, "save_top_k": -1}, {"every_n_train_steps": 4, "save_last": True}],
        4,
    ),
    "two that share, of which one removes": (
        [{"every_n_train_steps": 2, "save_top_k": 1}, {"every_n_train_steps": 4, "save_top_k": -1}],
        2,
    ),
    "two folders": (
        [
            {"every_n_train_steps": 2, "save_top_k": -1},
            {"every_n_train_steps": 4, "save_last": True, "dirpath": "more"},
        ],
        5,
    ),
    "two folders, one of which is emptied": (
        [{"every_n_train_steps": 2, "save_top_k": 1}, {"every_n_train_steps": 4, "save_top_k": -1, "dirpath": "more"}],
        3,
    ),
    "a folder in another": (
        [{"every_n_train_steps": 2, "save_top_k": 1}, {"every_n_train_steps": 4, "dirpath": "files/more"}],
        2,
    ),
}


@pytest.mark.parametrize("callbacks", CALLBACKS.values(), ids=CALLBACKS)
def test_after_a_run_exactly_the_states_that_files_name_exist(
    server: Server, callbacks: tuple[list[dict[str, Any]], int]
) -> None:
    options, count = callbacks
    server.fit(
        *(ModelCheckpoint(server.folder / one.pop("dirpath", "files"), "{step}", **one) for one in map(dict, options))
    )
    assert server.states() == server.named()
    assert len(server.named()) == count


def best(server: Server, **options: Any) -> ModelCheckpoint:
    """The best two by a score that is always better: files come and go."""
    return ModelCheckpoint(server.folder, "{step}", monitor="val_loss", save_top_k=2, **options)


def test_a_later_process_removes_what_an_earlier_one_wrote(server: Server) -> None:
    server.fit(best(server, save_last=True), max_epochs=3)
    assert len(server.named()) == 2
    first = set(server.named())
    server.fit(best(server, save_last=True), max_epochs=6, resume=str(server.folder / "last.ckpt"))
    assert server.states() == server.named()
    assert len(server.named()) == 2
    assert not first & set(server.named())


def test_files_that_were_written_by_hand_are_overwritten_and_removed(server: Server) -> None:
    trainer = server.fit()
    file, other = server.folder / "a.ckpt", server.folder / "b.ckpt"
    for path in (file, file, other, file):
        trainer.save_checkpoint(path)
        assert server.states() == server.named()
    trainer.strategy.remove_checkpoint(file)
    assert server.states() == server.named()
    assert len(server.named()) == 1
    trainer.strategy.remove_checkpoint(other)
    assert server.states() == []


def test_files_that_are_saved_without_training_in_between_share_one_state(server: Server) -> None:
    server.fit(
        ModelCheckpoint(server.folder / "a", "{step}", every_n_train_steps=8),
        ModelCheckpoint(server.folder / "a", "{epoch}", every_n_epochs=2, save_last=True),
        ModelCheckpoint(server.folder / "b", monitor="val_loss", every_n_epochs=2, save_last=True),
    )
    assert len(list(server.folder.rglob("*.ckpt"))) == 5
    assert len(server.named()) == 2  # one for each folder
    assert server.states() == server.named()


def test_a_later_run_in_one_folder_leaves_the_states_of_another(server: Server) -> None:
    """It does not know of the other folder, whose files were written at the same steps."""
    folders = {name: server.folder / name for name in ("best", "last")}
    server.fit(
        ModelCheckpoint(folders["best"], "{step}", monitor="val_loss"), ModelCheckpoint(folders["last"], save_last=True)
    )
    server.fit(
        ModelCheckpoint(folders["last"], save_last=True), max_epochs=3, resume=str(folders["last"] / "last.ckpt")
    )
    assert server.states() == server.named()
    (best,) = folders["best"].iterdir()
    server.fit(resume=str(best), max_epochs=3)


def test_trainers_of_one_module_share_no_state(server: Server) -> None:
    """Neither knows of the other's files."""
    module = new(server.service, RemoteModule)
    first = quiet(max_epochs=1, callbacks=[ModelCheckpoint(server.folder / "a")], enable_checkpointing=True)
    first.fit(module, loader())
    second = quiet()
    second.validate(module, loader(count=2), verbose=False)
    second.save_checkpoint(server.folder / "b.ckpt")
    assert len(server.named()) == 2
    second.strategy.remove_checkpoint(server.folder / "b.ckpt")
    assert len(server.named()) == 1
    assert server.states() == server.named()


def test_a_file_of_another_folder_keeps_the_state_that_it_names(server: Server) -> None:
    """It was read, and not written, by the run that removes its own."""
    server.fit(ModelCheckpoint(server.folder / "a", save_last=True, save_top_k=0))
    last = server.folder / "a" / "last.ckpt"
    server.fit(
        ModelCheckpoint(server.folder / "b", "{step}", every_n_train_steps=1, save_top_k=1),
        max_epochs=4,
        resume=str(last),
    )
    assert server.states() == server.named()
    assert len(server.named()) == 2


def test_states_are_kept_if_that_is_asked_for(server: Server) -> None:
    saves = ModelCheckpoint(server.folder, "{step}", every_n_train_steps=1, save_top_k=1)
    server.fit(saves, strategy=TinkerStrategy(release_states=False))
    assert len(server.named()) == 1
    assert len(server.states()) == 8


def test_files_that_are_written_later_are_waited_for(server: Server) -> None:
    saves = ModelCheckpoint(server.folder, "{step}", every_n_train_steps=1, save_top_k=2, monitor="train_loss")
    server.fit(saves, strategy=TinkerStrategy(checkpoint_io=AsyncCheckpointIO()))
    assert server.states() == server.named()
    assert len(server.named()) == 2


def test_a_file_that_cannot_be_read_may_name_any_state(server: Server, caplog: pytest.LogCaptureFixture) -> None:
    (server.folder / "broken.ckpt").write_bytes(b"half a fi")
    server.fit(ModelCheckpoint(server.folder, "{step}", every_n_train_steps=1, save_top_k=1))
    assert len(server.states()) == 8
    (warning,) = {record.message for record in caplog.records if "could not be read" in record.message}
    assert "broken.ckpt could not be read; remote states are kept while it may name one" in warning
    (server.folder / "broken.ckpt").unlink()
    assert set(server.named()) < set(server.states())


def test_files_of_other_programs_name_no_state(server: Server, caplog: pytest.LogCaptureFixture) -> None:
    torch.save({"settings": argparse.Namespace(rate=1)}, server.folder / "other.ckpt")  # runs code when it is loaded
    server.fit(ModelCheckpoint(server.folder, "{step}", every_n_train_steps=1, save_top_k=1))
    assert len(server.states()) == 1
    assert "could not be read" not in caplog.text


class Remembers(Callback):
    """A callback whose state torch does not load with `weights_only=True`."""

    def state_dict(self) -> dict[str, Any]:
        return {"best": np.float64(1.5), "seen": defaultdict(list, {"a": [1]}), "options": argparse.Namespace(rate=1)}


def test_objects_of_any_class_in_a_file_do_not_hide_what_it_names(
    server: Server, caplog: pytest.LogCaptureFixture
) -> None:
    server.fit(best(server, save_last=True), Remembers(), max_epochs=3)
    assert len(server.states()) == 2
    server.fit(ModelCheckpoint(server.folder, "{step}", every_n_train_steps=1, save_top_k=1), Remembers())
    assert len(server.states()) == 3
    assert "could not be read" not in caplog.text


def test_a_state_that_cannot_be_deleted_is_a_warning(
    server: Server, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any) -> None:
        raise TinkerLightningError("the disk is read-only")

    monkeypatch.setattr(server.trainer.store, "delete", refuse)
    monkeypatch.setattr(checkpoints, "DELETE_SECONDS", 0.2)
    trainer = server.fit(ModelCheckpoint(server.folder, "{step}", every_n_train_steps=4, save_top_k=1))
    assert trainer.global_step == 8
    (warning,) = [record for record in caplog.records if "could not be deleted" in record.message]
    assert warning.levelno == logging.WARNING
    assert "is named by no checkpoint file any more" in warning.message
    assert len(server.states()) == 2


def test_a_save_that_fails_releases_nothing(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = server.fit()
    file = server.folder / "a.ckpt"
    trainer.save_checkpoint(file)
    before = server.named()
    io: Any = trainer.strategy.checkpoint_io

    def full(*_: Any, **__: Any) -> None:
        raise OSError("no space left on device")

    monkeypatch.setattr(io, "save_checkpoint", full)
    with pytest.raises(OSError, match="no space left"):
        trainer.save_checkpoint(file)
    assert server.named() == before
    assert set(before) <= set(server.states())


def test_only_folders_of_checkpoints_are_searched_through(tmp_path: Path) -> None:
    """A file by hand may lie beside a large tree, whose files are none of ours."""
    deleted: list[str] = []
    (tmp_path / "hand" / "deep").mkdir(parents=True)
    (tmp_path / "callback" / "deep").mkdir(parents=True)
    for place in ("hand", "callback"):
        torch.save({"tinker": {"path": f"tinker://{place}"}}, tmp_path / place / "deep" / "file.ckpt")
    references = StateRetention(deleted.append, lambda: [str(tmp_path / "callback")])
    references.wrote(tmp_path / "hand" / "other.ckpt", frozenset())
    references.release("tinker://hand")
    references.release("tinker://callback")
    assert deleted == ["tinker://hand"]
