"""Every checkpoint file has remote states of its own, which are deleted with it: after a run exactly those exist."""

from __future__ import annotations

import argparse
import contextlib
import logging
import os
import time
from collections import defaultdict
from typing import TYPE_CHECKING, Any

import httpx
import numpy as np
import pytest
import torch
from fsspec.implementations.local import LocalFileSystem  # type: ignore[import-untyped]
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from lightning.pytorch.plugins.io import AsyncCheckpointIO, TorchCheckpointIO

from tests.helpers.checkpoints import state_in
from tests.helpers.imitations.load_first import LOADINGS, LOADINGS_IN_SOAK, loading
from tests.helpers.soaking import first_only, mostly_soak
from tests.helpers.trainers import SMALL, loader, new, quiet
from tinker_lightning import RemoteModule
from tinker_lightning.client import ServiceClient
from tinker_lightning.client.dialects.servers import EMBEDDED
from tinker_lightning.client.files import checkpoints
from tinker_lightning.errors import NotFound, TinkerLightningError
from tinker_lightning.lightning.checkpoint.retention import StateRetention
from tinker_lightning.lightning.strategy import TinkerStrategy
from tinker_lightning.server import EmbeddedTrainer, create_app
from tinker_lightning.server.trainer.checkpoint_summary import TinkerPath

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    import lightning.pytorch as pl

    from tests.helpers.imitations.load_first import Loading

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

    def expiring(self) -> list[bool]:
        """Whether each state has an expiry."""
        return [each.expires_at is not None for each in self.trainer.store.listing() if each.path.kind == "weights"]

    def named(self) -> list[str]:
        """What the files name, each once."""
        files = [file for file in self.folder.rglob("*.ckpt") if file.exists()]
        return sorted({state_in(file) for file in files})

    def fit(self, *callbacks: pl.Callback, resume: str | None = None, **options: Any) -> pl.Trainer:
        """Two epochs of four steps each, validated behind each; in a module of their own."""
        options = {"max_epochs": 2, "callbacks": list(callbacks), "enable_checkpointing": bool(callbacks), **options}
        trainer, module = quiet(**options), new(self.service, RemoteModule)
        if resume and self.service.session.dialect.loads_first:
            trainer.validate(module, loader(count=2), verbose=False)  # after which a state takes a new model
        trainer.fit(module, loader(), loader(count=2), ckpt_path=resume)
        return trainer


@contextlib.contextmanager
def reached(how: Loading, tmp_path: Path) -> Iterator[Server]:
    trainer = EmbeddedTrainer(["tiny"], data_dir=tmp_path / "data")
    folder = tmp_path / "files"
    folder.mkdir()
    with loading(how, trainer) as service:
        yield Server(trainer, service, folder)
    trainer.close()


@pytest.fixture(params=LOADINGS_IN_SOAK)
def server(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Server]:
    with reached(request.param, tmp_path) as server:
        yield server


@pytest.fixture(params=LOADINGS)
def resumed(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Server]:
    """For what loads states: also on a server where that takes a new model, after which other states are named."""
    with reached(request.param, tmp_path) as server:
        yield server


CALLBACKS: dict[str, tuple[list[dict[str, Any]], int]] = {
    "the best": ([{"monitor": "val_loss", "save_top_k": 1}], 1),
    "the best three of steps": ([{"monitor": "train_loss", "save_top_k": 3, "every_n_train_steps": 1}], 3),
    "the last": ([{"save_last": True, "save_top_k": 0}], 1),
    "the best, and the last of those that were": (
        [{"save_last": True, "monitor": "train_loss", "mode": "max", "save_top_k": 1}],
        2,
    ),
    "the best, and the last": (
        [{"monitor": "train_loss", "mode": "max", "save_top_k": 1}, {"save_last": True, "save_top_k": 0}],
        2,
    ),
    "a link to the last": ([{"save_last": "link", "every_n_train_steps": 3}], 1),
    "every second step": ([{"every_n_train_steps": 2, "save_top_k": -1}], 4),
    "each epoch's end": ([{"every_n_epochs": 1, "save_top_k": -1, "save_on_train_epoch_end": True}], 2),
    "two that save at the same steps": (
        [{"every_n_train_steps": 2, "save_top_k": -1}, {"every_n_train_steps": 4, "save_last": True}],
        6,
    ),
    "two that save at the same steps, of which one removes": (
        [{"every_n_train_steps": 2, "save_top_k": 1}, {"every_n_train_steps": 4, "save_top_k": -1}],
        3,
    ),
    "two folders": (
        [
            {"every_n_train_steps": 2, "save_top_k": -1},
            {"every_n_train_steps": 4, "save_last": True, "dirpath": "more"},
        ],
        6,
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


@pytest.mark.parametrize(
    "name",
    mostly_soak(
        CALLBACKS,
        but=[
            "the best, and the last of those that were",
            "a link to the last",
            "two that save at the same steps, of which one removes",
            "a folder in another",
        ],
    ),
)
def test_after_a_run_exactly_the_states_that_files_name_exist(server: Server, name: str) -> None:
    options, count = CALLBACKS[name]
    server.fit(
        *(ModelCheckpoint(server.folder / one.pop("dirpath", "files"), "{step}", **one) for one in map(dict, options))
    )
    assert server.states() == server.named()
    assert len(server.named()) == count
    files = {file.resolve() for file in server.folder.rglob("*.ckpt")}
    assert len(files) == count


def best(server: Server, **options: Any) -> ModelCheckpoint:
    """The best two by a score that is always better: files come and go."""
    return ModelCheckpoint(server.folder, "{step}", monitor="step", mode="max", save_top_k=2, **options)


def test_a_later_process_removes_what_an_earlier_one_wrote(resumed: Server) -> None:
    resumed.fit(best(resumed, save_last=True), max_epochs=3)
    assert len(resumed.named()) == 3
    first = set(resumed.named())
    resumed.fit(best(resumed, save_last=True), max_epochs=6, resume=str(resumed.folder / "last.ckpt"))
    assert resumed.states() == resumed.named()
    assert len(resumed.named()) == 3
    assert not first & set(resumed.named())


def test_files_saved_by_hand_are_overwritten_and_removed(server: Server) -> None:
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


def test_files_that_are_saved_without_training_in_between_share_no_state(server: Server) -> None:
    """One can be moved away, and is whole while the others are overwritten."""
    server.fit(ModelCheckpoint(server.folder / "a", "{step}", every_n_train_steps=8, save_last=True))
    assert len(server.named()) == 2
    kept = server.folder / "kept.ckpt"
    (server.folder / "a" / "step=8.ckpt").rename(kept)
    again = ModelCheckpoint(server.folder / "a", save_last=True, save_top_k=0)
    server.fit(again, max_epochs=3, resume=str(server.folder / "a" / "last.ckpt"))
    assert server.states() == server.named()
    assert state_in(kept) in server.states()
    server.fit(max_epochs=3, resume=str(kept))


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


def test_a_file_that_a_run_has_resumed_from_keeps_its_state(resumed: Server) -> None:
    resumed.fit(ModelCheckpoint(resumed.folder / "a", save_last=True, save_top_k=0))
    last = resumed.folder / "a" / "last.ckpt"
    resumed.fit(
        ModelCheckpoint(resumed.folder / "b", "{step}", every_n_train_steps=1, save_top_k=1),
        max_epochs=4,
        resume=str(last),
    )
    assert resumed.states() == resumed.named()
    assert len(resumed.named()) == 2


def test_a_copy_keeps_the_state_of_a_file_that_is_removed(server: Server) -> None:
    trainer = server.fit()
    file = server.folder / "a.ckpt"
    trainer.save_checkpoint(file)
    (server.folder / "b.ckpt").write_bytes(file.read_bytes())
    trainer.strategy.remove_checkpoint(file)
    assert server.states() == server.named() != []
    trainer.strategy.remove_checkpoint(server.folder / "b.ckpt")
    assert server.states() == []


def test_release_states_false_keeps_all_states(server: Server) -> None:
    saves = ModelCheckpoint(server.folder, "{step}", every_n_train_steps=1, save_top_k=1)
    server.fit(saves, strategy=TinkerStrategy(release_states=False))
    assert len(server.named()) == 1
    assert len(server.states()) == 8


class Slow(TorchCheckpointIO):
    """Writes files with a delay, and notes which states exist when one has been written."""

    def __init__(self, server: Server) -> None:
        super().__init__()
        self.server = server
        self.missing: list[str] = []

    def save_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        time.sleep(0.3)
        self.missing += set(self.server.named()) - set(self.server.states())  # what a kill would leave behind
        super().save_checkpoint(*args, **kwargs)


@pytest.mark.parametrize("name", first_only(["always-the-same", "{step}"]))
def test_states_outlive_the_files_that_a_plugin_is_still_to_overwrite(server: Server, name: str) -> None:
    saves = ModelCheckpoint(server.folder, name, every_n_train_steps=1, save_top_k=1, enable_version_counter=False)
    slow = Slow(server)
    server.fit(saves, strategy=TinkerStrategy(checkpoint_io=AsyncCheckpointIO(slow)), max_epochs=1)
    assert slow.missing == []
    assert server.states() == server.named()
    # Lightning leaves files behind that it removes before they are written.
    assert len(server.named()) == len(list(server.folder.glob("*.ckpt")))


def test_files_on_another_file_system_release_their_states(server: Server) -> None:
    """Those of an earlier process, too."""
    folder = f"memory://{server.folder.parent.name}"
    options: dict[str, Any] = {"every_n_train_steps": 1, "save_top_k": 1, "save_last": True}
    server.fit(ModelCheckpoint(folder, "{step}", **options))
    first = server.states()
    assert len(first) == 2
    again = ModelCheckpoint(folder, "{step}", **options)
    server.fit(again, max_epochs=3, resume=f"{folder}/last.ckpt")
    assert len(server.states()) == 2
    assert not set(first) & set(server.states())


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


def test_objects_of_unknown_classes_do_not_hide_what_a_file_names(
    server: Server, caplog: pytest.LogCaptureFixture
) -> None:
    server.fit(best(server, save_last=True), Remembers(), max_epochs=3)
    assert len(server.states()) == 3
    server.fit(ModelCheckpoint(server.folder, "{step}", every_n_train_steps=1, save_top_k=1), Remembers())
    assert len(server.states()) == 4
    assert "could not be read" not in caplog.text


def test_a_state_that_cannot_be_deleted_is_a_warning(
    server: Server, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server.trainer.store, "delete", failing)
    monkeypatch.setattr(checkpoints, "SHORT_SECONDS", 0.2)
    trainer = server.fit(ModelCheckpoint(server.folder, "{step}", every_n_train_steps=4, save_top_k=1))
    assert trainer.global_step == 8
    (warning,) = [record for record in caplog.records if "could not be deleted" in record.message]
    assert warning.levelno == logging.WARNING
    assert "is not named by any checkpoint file" in warning.message
    assert len(server.states()) == 2


class Expiries(TorchCheckpointIO):
    """Notes whether the states of a server expire while a file is written."""

    def __init__(self, server: Server) -> None:
        super().__init__()
        self.server = server
        self.seen: list[bool] = []

    def save_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        self.seen.append(any(self.server.expiring()))
        super().save_checkpoint(*args, **kwargs)


def test_a_state_expires_until_its_file_is_written(
    server: Server, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run that is killed in between leaves nothing behind for ever."""
    trainer = server.fit(strategy=TinkerStrategy(checkpoint_io=(files := Expiries(server))))
    trainer.save_checkpoint(server.folder / "a.ckpt")
    assert (files.seen, server.expiring()) == ([True], [False])
    with monkeypatch.context() as patch:
        patch.setattr(server.trainer.store, "set_ttl", failing)
        trainer.save_checkpoint(server.folder / "b.ckpt")
    assert sorted(server.expiring()) == [False, True]
    assert "expires 7 days after it was saved" in caplog.text
    trainer.strategy.teardown()  # tried again
    assert server.expiring() == [False, False]


def expire(server: Server, *files: Path) -> None:
    """Lets the states of files expire, as if their run had been killed before it could keep them."""
    for file in files:
        server.trainer.store.set_ttl(TinkerPath.parse(state_in(file)), 3600)


def test_states_of_files_that_a_resumed_run_finds_are_kept(resumed: Server) -> None:
    folders = [resumed.folder / "a", resumed.folder / "b"]
    callbacks: list[Any] = [{"save_last": True, "every_n_train_steps": 4, "save_top_k": -1}, {"monitor": "val_loss"}]

    def saves() -> list[ModelCheckpoint]:
        return [ModelCheckpoint(each, "{step}", **given) for each, given in zip(folders, callbacks, strict=True)]

    resumed.fit(*saves())
    last = folders[0] / "last.ckpt"
    expire(resumed, *resumed.folder.rglob("*.ckpt"))
    assert resumed.expiring() == [True] * 4
    resumed.fit(*saves(), resume=str(last))  # there is nothing left to train
    assert resumed.expiring() == [False] * 4
    expire(resumed, last, *folders[1].iterdir())
    resumed.fit(*saves(), resume=str(last), max_steps=9, max_epochs=3)
    assert not any(resumed.expiring())


def test_states_of_files_are_kept_by_another_run_that_loads_them_or_saves_next_to_them(server: Server) -> None:
    trainer = server.fit()
    for name in ("a.ckpt", "b.ckpt", "c.pt"):
        trainer.save_checkpoint(server.folder / name)
    expire(server, *server.folder.iterdir())
    server.fit().save_checkpoint(server.folder / "d.ckpt")
    assert server.expiring() == [False] * 4
    kept = server.folder / "kept"
    kept.mkdir()
    (server.folder / "a.ckpt").rename(kept / "a.ckpt")
    expire(server, kept / "a.ckpt")
    quiet().validate(new(server.service, RemoteModule), loader(count=2), ckpt_path=str(kept / "a.ckpt"), verbose=False)
    assert server.expiring() == [False] * 4


def test_what_a_killed_run_has_left_expires_when_it_is_resumed(
    resumed: Server, caplog: pytest.LogCaptureFixture
) -> None:
    """States whose files are gone, as after a kill between the removal of a file and that of its state."""
    module: Any = resumed.fit().lightning_module
    strangers = {module.lm.save()}  # which belongs to no file
    for folder in (resumed.folder / "a", resumed.folder / "b"):  # the first is of another run
        trainer = resumed.fit()
        for name in ("gone.ckpt", "gone.pt", "moved.ckpt", "last.ckpt"):
            trainer.save_checkpoint(folder / name)
    trainer.save_checkpoint(resumed.folder / "c" / "gone.ckpt")  # another folder
    left = {state_in(folder / name) for name in ("gone.ckpt", "gone.pt", "moved.ckpt")}
    strangers |= set(resumed.states()) - left
    for file in resumed.folder.rglob("gone*"):
        file.unlink()
    (folder / "moved.ckpt").rename(resumed.folder / "moved.ckpt")
    (folder / "broken.ckpt").write_bytes(b"half a fi")
    resumed.fit(resume=str(folder / "last.ckpt"), max_steps=9, max_epochs=3)
    assert not any(resumed.expiring())  # because broken.ckpt may name any of them
    (folder / "broken.ckpt").unlink()
    resumed.fit(resume=str(folder / "last.ckpt"), max_steps=9, max_epochs=3)
    listed = resumed.trainer.store.listing()
    assert {each.tinker_path for each in listed if each.expires_at is not None} == left
    assert strangers <= {each.tinker_path for each in listed}
    logged = [record.getMessage() for record in caplog.records if "is not named by any" in record.getMessage()]
    assert len(logged) == len(left)
    assert all(f"in file://{folder} and expires in 7 days" in each for each in logged)
    resumed.fit(resume=str(resumed.folder / "moved.ckpt"), max_steps=9, max_epochs=3)
    left.discard(state_in(resumed.folder / "moved.ckpt"))
    assert {each.tinker_path for each in resumed.trainer.store.listing() if each.expires_at is not None} == left


def test_a_file_in_a_sub_folder_keeps_its_state(server: Server, tmp_path: Path) -> None:
    """Also one behind a link to a folder, and one of another format, which is found by its name."""
    trainer = server.fit()
    for name in ("best.ckpt", "linked.ckpt", "other.pt", "gone.ckpt", "last.ckpt"):
        trainer.save_checkpoint(server.folder / name)
    left = {state_in(server.folder / "gone.ckpt")}
    (server.folder / "gone.ckpt").unlink()
    for folder, name in ((server.folder / "archive", "best.ckpt"), (tmp_path / "elsewhere", "linked.ckpt")):
        folder.mkdir()
        (server.folder / name).rename(folder / name)
    (server.folder / "link").symlink_to(tmp_path / "elsewhere")
    (server.folder / "archive" / "again").symlink_to(server.folder)  # without end
    (server.folder / "other.pt").unlink()
    (server.folder / "archive" / "other.pt.gz").write_bytes(b"compressed")
    elsewhere = ModelCheckpoint(tmp_path / "more", save_last=True)
    server.fit(elsewhere, resume=str(server.folder / "last.ckpt"), max_epochs=3)
    assert {each.tinker_path for each in server.trainer.store.listing() if each.expires_at is not None} == left


def test_a_file_in_another_format_keeps_a_state_that_would_expire(server: Server) -> None:
    trainer = server.fit()
    for name in ("a.ckpt", "b.ckpt", "gone.ckpt", "last.pt"):
        trainer.save_checkpoint(server.folder / name)
    states = {file.stem: state_in(file) for file in server.folder.iterdir()}
    expire(server, *server.folder.iterdir())
    (server.folder / "a.ckpt").rename(server.folder / "a.gz")  # whose content is not read below
    (server.folder / "a.gz").write_bytes(b"compressed")
    (server.folder / "archive").mkdir()
    (server.folder / "b.ckpt").rename(server.folder / "archive" / "b.ckpt")
    (server.folder / "gone.ckpt").unlink()
    server.fit(resume=str(server.folder / "last.pt"), max_epochs=3)
    expiring = {each.tinker_path for each in server.trainer.store.listing() if each.expires_at is not None}
    assert expiring == {states["gone"]}


def test_only_files_are_opened(server: Server, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    trainer = server.fit()
    os.mkfifo(server.folder / "pipe")  # opening it would wait for ever
    os.mkfifo(server.folder / "pipe.ckpt")
    (server.folder / "link").symlink_to(tmp_path)
    (server.folder / "nowhere").symlink_to(tmp_path / "none")
    for name in ("gone.ckpt", "last.ckpt"):
        trainer.save_checkpoint(server.folder / name)
    (server.folder / "gone.ckpt").unlink()
    expire(server, server.folder / "last.ckpt")
    server.fit(resume=str(server.folder / "last.ckpt"), max_epochs=3)
    assert sorted(server.expiring()) == [False, True]
    assert "could not be" not in caplog.text


def test_a_file_of_another_user_keeps_the_states_that_would_expire(
    server: Server, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = server.fit()
    for name in ("gone.ckpt", "last.ckpt"):
        trainer.save_checkpoint(server.folder / name)
    (server.folder / "gone.ckpt").unlink()
    (server.folder / "locked").write_bytes(b"x")
    opened = LocalFileSystem._open

    def locked(self: LocalFileSystem, path: str, *args: Any, **kwargs: Any) -> Any:  # as for a user who is not root
        if path.endswith("locked"):
            raise PermissionError(13, "Permission denied", path)
        return opened(self, path, *args, **kwargs)

    monkeypatch.setattr(LocalFileSystem, "_open", locked)
    expire(server, server.folder / "last.ckpt")
    server.fit(resume=str(server.folder / "last.ckpt"), max_epochs=3)
    assert server.expiring() == [False, False]
    assert f"{server.folder}/locked could not be read; remote states are kept" in caplog.text


def test_a_listing_that_fails_is_a_warning(
    server: Server, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And is tried again at the next checkpoint, after which states whose files are gone still expire."""
    trainer = server.fit()
    for name in ("gone.ckpt", "lost.ckpt", "a.ckpt"):
        trainer.save_checkpoint(server.folder / name)
    left = {state_in(server.folder / name) for name in ("gone.ckpt", "lost.ckpt")}
    for name in ("gone.ckpt", "lost.ckpt"):
        (server.folder / name).unlink()
    expire(server, server.folder / "a.ckpt")
    with monkeypatch.context() as patch:
        patch.setattr(checkpoints, "listing", failing)
        trainer = server.fit(resume=str(server.folder / "a.ckpt"), max_epochs=3)
    assert trainer.global_step == 12
    assert f"whether states of checkpoint files in ['file://{server.folder}'] expire. Those that an" in caplog.text
    assert "and at the end of the fit. the disk is read-only" in caplog.text
    set_ttl, failed = server.trainer.store.set_ttl, list[Any]()

    def first_fails(path: TinkerPath, seconds: int | None) -> Any:
        if not failed and seconds is not None:
            failed.append(path)
            raise NotFound("deleted in the meantime")
        return set_ttl(path, seconds)

    monkeypatch.setattr(server.trainer.store, "set_ttl", first_fails)
    trainer.save_checkpoint(server.folder / "b.ckpt")
    listed = server.trainer.store.listing()
    expiring = {each.tinker_path for each in listed if each.expires_at is not None}
    assert expiring < left
    assert len(expiring) == 1
    assert f"{failed[0]} is not named by any checkpoint file, but stays" in caplog.text


def test_states_never_expire_where_the_server_or_the_user_does_not_want_it(server: Server) -> None:
    without = EMBEDDED.but(newer_fields=EMBEDDED.newer_fields - {"ttl.ttl_seconds"})
    transport = httpx.ASGITransport(create_app(server.trainer))
    with ServiceClient(base_url="http://embedded", transport=transport, dialect=without) as service:
        for own, keeps in ((service, True), (server.service, False)):
            server.service = own
            strategy = TinkerStrategy(release_states=keeps, checkpoint_io=(files := Expiries(server)))
            server.fit(strategy=strategy).save_checkpoint(server.folder / "a.ckpt")
            server.fit(resume=str(server.folder / "a.ckpt"), max_epochs=3)
            assert files.seen == [False]


def failing(*_: Any) -> None:
    raise TinkerLightningError("the disk is read-only")


def test_a_save_that_fails_releases_its_own_state_only(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = server.fit()
    file = server.folder / "a.ckpt"
    trainer.save_checkpoint(file)
    before = server.named()
    io: Any = trainer.strategy.checkpoint_io

    def full(*_: Any, **__: Any) -> None:
        raise OSError("no space left on device")

    monkeypatch.setattr(io, "save_checkpoint", full)
    for path in (file, server.folder / "new.ckpt"):
        with pytest.raises(OSError, match="no space left"):
            trainer.save_checkpoint(path)
        assert server.states() == server.named() == before


def test_a_save_that_fails_raises_its_own_error_if_the_state_cannot_be_released(
    server: Server, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = server.fit()

    def fail(*_: Any, **__: Any) -> None:
        raise OSError("no space left on device")

    monkeypatch.setattr(trainer.strategy.checkpoint_io, "save_checkpoint", fail)
    monkeypatch.setattr(StateRetention, "_states_near", fail)
    with pytest.raises(OSError, match="no space left"):
        trainer.save_checkpoint(server.folder / "a.ckpt")
    assert "could not be deleted: no space left" in caplog.text
