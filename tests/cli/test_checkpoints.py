"""`tinker-lightning export` and `checkpoints`, on what a run in the user's data folder has left."""

from __future__ import annotations

import gzip
import json
import re
import zipfile
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from fsspec.implementations.local import LocalFileSystem  # type: ignore[import-untyped]
from lightning.pytorch.plugins import TorchCheckpointIO

from tests.helpers.checkpoints import state_in
from tests.helpers.trainers import quiet
from tinker_lightning import cli
from tinker_lightning.client import RestClient, ServiceClient
from tinker_lightning.data import ChatData
from tinker_lightning.errors import TinkerLightningError
from tinker_lightning.lightning.strategy import TinkerStrategy
from tinker_lightning.recipes import SFT
from tinker_lightning.server.trainer.checkpoint_store import CheckpointStore

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*does not have many workers"),
    pytest.mark.filterwarnings("ignore:.*LeafSpec.* is deprecated"),
    pytest.mark.filterwarnings("ignore:.*but have no `val_dataloader`"),
    pytest.mark.filterwarnings("ignore:The number of training batches"),
]


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint file whose state is in the user's data folder."""
    folder = tmp_path_factory.mktemp("run")
    with pytest.MonkeyPatch.context() as patch, SFT("tiny", rank=4, base_url="embedded") as module:
        patch.setenv("XDG_DATA_HOME", str(folder))
        trainer = pl.Trainer(
            strategy="tinker",
            max_steps=1,
            logger=False,
            enable_progress_bar=False,
            enable_checkpointing=False,
            enable_model_summary=False,
            default_root_dir=folder,
        )
        trainer.fit(module, ChatData([{"prompt": "1?", "completion": "1."}]))
        trainer.save_checkpoint(folder / "run.ckpt")
    return folder / "run.ckpt"


@pytest.fixture(autouse=True)
def _data_folder(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_DATA_HOME", str(file.parent))
    monkeypatch.delenv("TINKER_BASE_URL", raising=False)
    monkeypatch.delenv("TINKER_API_KEY", raising=False)


def listed(capsys: pytest.CaptureFixture[str]) -> list[str]:
    capsys.readouterr()
    assert cli.main(["checkpoints", "list", "--json"]) == 0
    return [each["tinker_path"] for each in json.loads(capsys.readouterr().out)]


def test_a_checkpoint_file_and_its_path_are_exported(
    file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["export", str(file), str(tmp_path / "a")]) == 0
    printed = capsys.readouterr()
    assert printed.out == f"{tmp_path / 'a'}\n"
    assert "Pass its hub id: --base-model organization/model." in printed.err
    for folder, options, fix in [
        ("a", [], "or pass --overwrite to replace the adapter in it."),
        ("b", ["--merged", str(tmp_path / "a")], "or pass --overwrite to replace the model in it."),
        ("", ["--overwrite"], "and --overwrite would delete what it contains."),
    ]:
        assert cli.main(["export", str(file), str(tmp_path / folder), *options]) == 2
        assert fix in capsys.readouterr().err
    (path,) = listed(capsys)  # what the export saved on the way is deleted
    assert cli.main(["export", path, str(tmp_path / "b"), "--base-model", "me/tiny"]) == 0
    weights = [(tmp_path / each / "adapter_model.safetensors").read_bytes() for each in "ab"]
    assert weights[0] == weights[1]
    assert json.loads((tmp_path / "b" / "adapter_config.json").read_text())["base_model_name_or_path"] == "me/tiny"
    assert (tmp_path / "a" / "tokenizer_config.json").exists()


def test_checkpoints_are_listed_with_their_folder_and_deleted(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (path,) = listed(capsys)
    run = path.split("/")[2]
    for choice in (["--all"], ["--run", run]):
        assert cli.main(["checkpoints", "delete", *choice]) == 2
        assert "this would delete 1 checkpoint, " in capsys.readouterr().err
    assert cli.main(["checkpoints", "list", "--run", run]) == 0
    printed = capsys.readouterr().out
    assert path in printed
    assert str(file.parent / "tinker_lightning" / "checkpoints") in printed
    assert cli.main(["checkpoints", "delete", path]) == 0
    assert capsys.readouterr().out == f"deleted {path}\n"
    for command in (["checkpoints", "delete", path], ["chat", path]):
        assert cli.main(command) == 2
        assert capsys.readouterr().err == (
            f"tinker-lightning: {path}: there is no such checkpoint. `tinker-lightning checkpoints list` lists the "
            "paths.\n"
        )
    assert cli.main(["checkpoints", "delete", "--all", "--yes"]) == 0
    assert listed(capsys) == []


class Runs:
    """Files of two runs in two folders, and one that was moved away, with a state of each on a server of their own."""

    def __init__(self, folder: Path) -> None:
        self.folders = [folder / "a", folder / "b"]
        self.store = CheckpointStore(folder / "tinker_lightning" / "checkpoints")
        for each in self.folders:
            with SFT("tiny", rank=4, base_url="embedded") as module:
                trainer = quiet(max_steps=1)
                trainer.fit(module, ChatData([{"prompt": "1?", "completion": "1."}]))
                for name in ("kept.ckpt", "gone.ckpt"):
                    trainer.save_checkpoint(each / name)
                self.unnamed = module.lm.save()  # which no run saved for a file
        self.states = {file: state_in(file) for each in self.folders for file in each.iterdir()}
        self.gone = self.states[self.folders[0] / "gone.ckpt"]
        for each in self.folders:
            (each / "gone.ckpt").unlink()

    def left(self) -> set[str]:
        return {summary.tinker_path for summary in self.store.listing()}


@pytest.fixture
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Runs:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    return Runs(tmp_path)


def test_states_without_a_file_are_listed_and_pruned(runs: Runs, capsys: pytest.CaptureFixture[str]) -> None:
    before = runs.left()
    prune = ["checkpoints", "prune", "--files", str(runs.folders[0])]
    capsys.readouterr()
    assert cli.main(prune) == 0
    assert capsys.readouterr().out.startswith("deleted 0 states, 0.0 MB, in ")  # none is a day old
    prune += ["--older-than", "0s"]
    assert cli.main(prune) == 2
    printed = capsys.readouterr()
    header, row = printed.out.splitlines()
    assert header.split() == ["PATH", "KIND", "SIZE", "AGE", "EXPIRES", "BASE", "MODEL", "RUN"]
    assert re.fullmatch(rf"{runs.gone}  training  \d\.\d MB  \d+ s  never    tiny        [0-9a-f]{{16}}", row)
    assert "this would delete 1 state, " in printed.err
    assert runs.left() == before
    assert cli.main(["checkpoints", "list", "--files", str(runs.folders[0]), "--json"]) == 0
    files = {each["tinker_path"]: each["file"] for each in json.loads(capsys.readouterr().out)}
    kept = runs.folders[0] / "kept.ckpt"
    assert files == {runs.states[kept]: kept.as_uri(), runs.gone: None}
    assert cli.main([*prune, "--yes"]) == 0
    assert runs.left() == before - {runs.gone}
    assert "deleted 1 state, " in capsys.readouterr().out


def test_a_state_that_cannot_be_deleted_does_not_hide_what_was(
    runs: Runs, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that another process has deleted in the meantime is no failure."""
    for file in runs.folders[0].iterdir():
        file.unlink()
    before, delete, deleted = runs.left(), ServiceClient.delete_checkpoint, list[str]()

    def second_fails(self: ServiceClient, path: str, **options: Any) -> None:
        if deleted:
            raise TinkerLightningError("the disk is read-only")
        deleted.append(path)
        delete(self, path)
        delete(self, path, **options)

    runs_listed, list_runs = list[int](), RestClient.list_training_runs

    def counted(self: RestClient, limit: int, offset: int) -> Any:
        runs_listed.append(offset)
        return list_runs(self, limit, offset)

    monkeypatch.setattr(ServiceClient, "delete_checkpoint", second_fails)
    monkeypatch.setattr(RestClient, "list_training_runs", counted)
    assert cli.main(["checkpoints", "prune", "--older-than", "0s", "--yes", "--files", str(runs.folders[0])]) == 2
    printed = capsys.readouterr()
    assert "deleted 1 state, " in printed.out
    assert "the disk is read-only" in printed.err
    assert runs.left() == before - set(deleted)
    assert runs_listed == [0]  # once, not for each state


def test_nothing_is_pruned_if_anything_cannot_be_read(runs: Runs, capsys: pytest.CaptureFixture[str]) -> None:
    before = runs.left()
    folder = runs.folders[0]
    prune = ["checkpoints", "prune", "--older-than", "0s", "--yes", "--files", str(folder)]
    assert cli.main([*prune, str(folder / "none")]) == 2
    assert f"there is no folder {folder}/none" in capsys.readouterr().err
    whole = (folder / "kept.ckpt").read_bytes()
    (folder / "deep").mkdir()
    for name, content in (("half.ckpt", whole[:-99]), ("half.pt", whole[:-99]), ("deep/x.ckpt", b"")):
        (folder / name).write_bytes(content)
        assert cli.main(prune) == 2
        assert f"{folder / name} cannot be read, so it may name any state" in capsys.readouterr().err
        (folder / name).unlink()
    assert runs.left() == before
    (folder / "deep" / "kept.ckpt").write_bytes(whole)
    (folder / "kept.ckpt").unlink()
    (folder / "notes.txt").write_text("of another program")
    assert cli.main(prune) == 0
    assert runs.left() == before - {runs.gone}


class OtherFormats(TorchCheckpointIO):
    """Writes compressed files, and folders."""

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None) -> None:  # noqa: ARG002
        path = Path(path)
        if path.suffix != ".gz":
            path.mkdir(parents=True)
            path = path / "shard_0"
        with gzip.open(path, "wb") as opened:
            torch.save(checkpoint, opened)


def test_states_of_files_in_other_formats_are_not_pruned(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    folder, store = tmp_path / "a", CheckpointStore(tmp_path / "tinker_lightning" / "checkpoints")
    with SFT("tiny", rank=4, base_url="embedded") as module:
        trainer = quiet(max_steps=1, strategy=TinkerStrategy(checkpoint_io=OtherFormats()))
        trainer.fit(module, ChatData([{"prompt": "1?", "completion": "1."}]))
        for name in ("a.ckpt", "b", "c.pt.gz", "d.pt.gz"):
            trainer.save_checkpoint(folder / name)
    prune = ["checkpoints", "prune", "--older-than", "0s", "--yes", "--files", str(folder)]
    left = []
    for file in ("a.ckpt", "b", "c.pt.gz", "d.pt.gz"):
        exit_code = cli.main(prune)
        left.append((exit_code, len(store.listing())))
        (folder / file).rename(tmp_path / file)
    assert left[0] == (2, 4)
    assert f"{folder}/a.ckpt cannot be read, so it may name any state" in capsys.readouterr().err
    assert left[1:] == [(0, 3), (0, 2), (0, 2)]  # d.pt.gz may be the file that was c.pt.gz
    assert cli.main(prune) == 0
    assert store.listing() == []


def test_a_folder_that_cannot_be_listed_has_no_states_to_prune(
    runs: Runs, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    before = runs.left()
    (runs.folders[0] / "locked").mkdir()
    listed = LocalFileSystem.ls

    def locked(self: LocalFileSystem, path: str, *args: Any, **kwargs: Any) -> Any:  # as for a user who is not root
        if path.endswith("locked"):
            raise PermissionError(13, "Permission denied", path)
        return listed(self, path, *args, **kwargs)

    monkeypatch.setattr(LocalFileSystem, "ls", locked)
    assert cli.main(["checkpoints", "prune", "--older-than", "0s", "--yes", "--files", str(runs.folders[0])]) == 2
    assert "Permission denied" in capsys.readouterr().err
    assert runs.left() == before


def test_a_file_that_torch_takes_for_instructions_is_one_message(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "run.yaml").write_text("seed_everything: 0\nmodel:\n")
    for command in (["chat", f"{tmp_path}/run.yaml"], ["export", f"{tmp_path}/run.yaml", "x"]):
        assert cli.main(command) == 2
        assert capsys.readouterr().err == (
            f"tinker-lightning: {tmp_path}/run.yaml cannot be read as a checkpoint: it is not a file of torch.save. If "
            "it is damaged or incomplete, load another checkpoint.\n"
        )


def test_a_checkpoint_with_objects_names_their_classes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "a.ckpt"
    torch.save({"state_dict": {}, "hyper_parameters": {"folder": tmp_path}}, file)
    assert cli.main(["export", str(file), "x"]) == 2
    assert capsys.readouterr().err == (
        f"tinker-lightning: {file} contains objects that cannot be loaded safely: "
        f"{type(tmp_path).__module__}.{type(tmp_path).__name__}. Save hyperparameters as plain values, such as "
        "str(path).\n"
    )
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("notes.txt", "not of torch")
    assert cli.main(["export", str(file), "x"]) == 2
    assert capsys.readouterr().err.startswith(f"tinker-lightning: {file} cannot be read as a checkpoint: ")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["export", "none.ckpt", "x"], "there is no checkpoint file none.ckpt"),
        (["export", __file__, "x"], "cannot be read as a checkpoint: it is not a file of torch.save"),
        (["export", "tiny", "x"], "tiny is neither a checkpoint file nor a tinker:// path"),
        (["export", "tinker://nonsense", "x"], "tinker-lightning: 'tinker://nonsense' is not of the form tinker://"),
        (["checkpoints", "delete", "x"], "is not the path of a checkpoint. `tinker-lightning checkpoints list` lists"),
        (["checkpoints", "delete"], "pass the paths of checkpoints"),
        (["checkpoints", "list", "--files", "none"], "--files: there is no folder none"),
    ],
)
def test_mistakes(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(arguments) == 2
    assert message in capsys.readouterr().err
