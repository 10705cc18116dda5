"""Checkpoint files run no code, are verified when they are read, and are written whole or not at all."""

from __future__ import annotations

import contextlib
import functools
import http.server
import io
import os
import random
import sys
import threading
import zipfile
from typing import TYPE_CHECKING, Any

import pytest
import torch
from lightning.pytorch.plugins import AsyncCheckpointIO, TorchCheckpointIO

from tests.helpers.soaking import first_only
from tests.helpers.trainers import SMALL, loader, quiet
from tinker_lightning import RemoteModule
from tinker_lightning.errors import InvalidInput
from tinker_lightning.lightning.checkpoint import files
from tinker_lightning.lightning.checkpoint.files import CheckpointFiles
from tinker_lightning.lightning.strategy import TinkerStrategy

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

pytestmark = SMALL


class Runs:
    """Creates a folder when it is unpickled."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __reduce__(self) -> Any:
        return os.makedirs, (str(self.folder),)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder with `good.ckpt` of a short fit; the server's data is in it, too."""
    folder = tmp_path_factory.mktemp("files")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_DATA_HOME", str(folder))
        with small() as module:
            trainer = quiet(max_steps=1)
            trainer.fit(module, loader())
            trainer.save_checkpoint(folder / "good.ckpt")
        yield folder


@pytest.fixture(scope="module")
def content(folder: Path) -> dict[str, Any]:
    checkpoint: dict[str, Any] = torch.load(folder / "good.ckpt", weights_only=True)
    return checkpoint


@pytest.fixture
def ran(folder: Path, content: dict[str, Any], tmp_path: Path) -> Path:
    """The folder that `bad.ckpt` would create."""
    torch.save({**content, "bad": Runs(tmp_path / "ran")}, folder / "bad.ckpt")
    return tmp_path / "ran"


@pytest.fixture(scope="module")
def url(folder: Path) -> Iterator[str]:
    """The address of the folder on a web server."""

    class Quiet(http.server.SimpleHTTPRequestHandler):
        def log_message(self, *_: Any) -> None:
            """Writes nothing."""

        def list_directory(self, _: Any) -> None:
            """Does not list folders, as most web servers."""
            self.send_error(404)

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Quiet, directory=str(folder))) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def small() -> RemoteModule:
    return RemoteModule("tiny", rank=2, base_url="embedded")


def fit(file: Any, **options: Any) -> None:
    with small() as module:
        quiet(accelerator="cpu", **options).fit(module, loader(), ckpt_path=file)


def validate(file: Any, **options: Any) -> None:
    with small() as module:
        quiet(accelerator="cpu", **options).validate(module, loader(count=2), ckpt_path=file, verbose=False)


def load(file: Any) -> None:
    RemoteModule.load_from_checkpoint(file).close()


WAYS: dict[str, Callable[[Any], None]] = {
    "fit": fit,
    "validate": functools.partial(validate, strategy="auto"),
    "validate with a plugin": functools.partial(validate, strategy="auto", plugins=[AsyncCheckpointIO()]),
    "fit with a plugin": lambda file: fit(file, plugins=[AsyncCheckpointIO()]),
    "load": load,
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", ["path", "URL"])
def test_a_file_runs_no_code(way: str, kind: str, folder: Path, url: str, ran: Path) -> None:  # R5.18
    file = f"{url}/bad.ckpt" if kind == "URL" else str(folder / "bad.ckpt")
    with pytest.raises(InvalidInput, match=f"^{file} contains objects that cannot be loaded safely: os.makedirs. Save"):
        WAYS[way](file)
    assert not ran.exists()


def test_a_file_that_is_open_runs_no_code(folder: Path, ran: Path) -> None:
    with (folder / "bad.ckpt").open("rb") as opened, pytest.raises(InvalidInput, match=r"safely: os\.makedirs"):
        RemoteModule.load_from_checkpoint(opened)
    with pytest.raises(InvalidInput, match=r"^the checkpoint contains objects that cannot"):
        RemoteModule.load_from_checkpoint(io.BytesIO((folder / "bad.ckpt").read_bytes()))
    assert not ran.exists()
    with (folder / "good.ckpt").open("rb") as opened:
        load(opened)


def test_a_good_file_is_read_from_a_path_and_a_web_server(folder: Path, url: str) -> None:
    for file in (folder / "good.ckpt", f"{url}/good.ckpt"):
        load(file)
        for strategy in ("tinker", "auto"):
            validate(str(file), strategy=strategy)
    with pytest.raises(FileNotFoundError, match=r"none\.ckpt"):
        load(f"{url}/none.ckpt")


def test_only_the_user_lets_a_file_rebuild_objects(folder: Path, ran: Path) -> None:
    RemoteModule.load_from_checkpoint(folder / "bad.ckpt", weights_only=False).close()
    assert ran.exists()


class Reads(TorchCheckpointIO):
    """A user's plugin with its own way of reading, as for Lightning 2.5."""

    def load_checkpoint(self, path: Any, map_location: Any = None) -> Any:  # type: ignore[override]
        return {**torch.load(path, map_location, weights_only=True), "read": True}


class Writes(TorchCheckpointIO):
    """A user's plugin that reads as Lightning does."""

    def save_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        super().save_checkpoint(*args, **kwargs)


@pytest.mark.parametrize("strategy", ["tinker", "auto"])
def test_a_plugin_that_reads_as_lightning_runs_no_code(strategy: str, folder: Path, ran: Path) -> None:
    with pytest.raises(InvalidInput, match=r"cannot be loaded safely: os\.makedirs"):
        validate(str(folder / "bad.ckpt"), strategy=strategy, plugins=[Writes()])
    assert not ran.exists()
    validate(str(folder / "good.ckpt"), strategy=strategy, plugins=[Writes()])


def test_plugins_of_the_user_stay(folder: Path) -> None:
    for plugin in (Reads(), AsyncCheckpointIO(Reads())):
        strategy = TinkerStrategy(checkpoint_io=plugin)
        with small() as module:
            strategy.connect(module)
            assert strategy.load_checkpoint(folder / "good.ckpt")["read"]
    files.secure(TinkerStrategy(checkpoint_io=(wrapping := AsyncCheckpointIO())))
    assert type(wrapping.checkpoint_io) is CheckpointFiles


@pytest.mark.parametrize(
    ("hparams", "message"),
    [
        ({"model": {"class_path": "os.makedirs", "init_args": {}}}, "model of the checkpoint name classes"),
        (
            {"_class_path": "somewhere.Else"},
            r"is one of somewhere\.Else, not of .*RemoteModule: call load_from",
        ),
        ({}, None),
    ],
)
def test_no_name_in_a_file_is_imported(
    hparams: dict[str, Any], message: str | None, folder: Path, content: dict[str, Any]
) -> None:
    """As in files of `LightningCLI`, which name a function that creates the module."""
    hparams = {**content["hyper_parameters"], "_instantiator": "antigravity.open", **hparams}
    torch.save({**content, "hyper_parameters": hparams}, folder / "names.ckpt")
    with contextlib.nullcontext() if message is None else pytest.raises(InvalidInput, match=message):
        load(folder / "names.ckpt")
    assert "antigravity" not in sys.modules
    if "_class_path" not in hparams:
        RemoteModule.load_from_checkpoint(folder / "names.ckpt", model="tiny").close()


def same(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor):
        return torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(value, b[key]) for key, value in a.items())
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(same, a, b))
    return bool(a == b)


def test_a_flipped_bit_is_found(folder: Path, content: dict[str, Any]) -> None:
    """Padding and time stamps may change; whatever loads has the same content."""
    whole, draw = (folder / "good.ckpt").read_bytes(), random.Random(0)  # noqa: S311
    rejected = 0
    for _ in range(150):
        changed = bytearray(whole)
        changed[draw.randrange(len(whole))] ^= 1 << draw.randrange(8)
        try:
            assert same(files.read(io.BytesIO(changed)), content)
        except InvalidInput:
            rejected += 1
    assert rejected > 20
    flipped = bytearray(whole)
    flipped[whole.index(b"tinker://") + 10] ^= 1  # in the path of the state
    assert zipfile.ZipFile(io.BytesIO(flipped)).testzip() is not None
    (folder / "flipped.ckpt").write_bytes(flipped)
    for way in (fit, load, functools.partial(validate, strategy="auto")):
        with pytest.raises(InvalidInput, match=r"its record .*/data/\d+ does not match its checksum.* load another"):
            way(str(folder / "flipped.ckpt"))


def test_an_archive_does_not_unpack_to_more_than_its_size(folder: Path) -> None:
    bomb = io.BytesIO()
    with zipfile.ZipFile(bomb, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("archive/data.pkl", bytes(10_000_000))
    (folder / "zipped.ckpt").write_bytes(bomb.getvalue())
    with pytest.raises(InvalidInput, match=r"its 9,\d\d\d bytes would unpack to 10,000,000"):
        load(folder / "zipped.ckpt")
    twice = io.BytesIO((folder / "good.ckpt").read_bytes())
    with zipfile.ZipFile(twice, "a") as archive, pytest.warns(UserWarning, match="Duplicate name"):
        archive.writestr(archive.namelist()[0], b"other")
    twice.seek(0)
    with pytest.raises(InvalidInput, match="it contains a record twice"):
        files.read(twice)


@pytest.mark.parametrize("part", first_only([0.5, 0.0, 0.99]))
def test_a_truncated_file_is_named(part: float, folder: Path) -> None:
    whole, file = (folder / "good.ckpt").read_bytes(), folder / "half.ckpt"
    for content in (whole[: int(part * len(whole))], b"garbage"):
        file.write_bytes(content)
        for way in (load, functools.partial(validate, strategy="auto"), fit):
            with pytest.raises(
                InvalidInput, match=f"^{file} cannot be read as a checkpoint: .*load another checkpoint"
            ):
                way(str(file))


def test_a_file_has_checksums_even_if_others_have_none(tmp_path: Path) -> None:
    torch.serialization.set_crc32_options(False)
    try:
        CheckpointFiles().save_checkpoint({"a": torch.ones(3)}, tmp_path / "a.ckpt")
        torch.save({"a": torch.ones(3)}, tmp_path / "b.ckpt")
    finally:
        torch.serialization.set_crc32_options(True)
    with zipfile.ZipFile(tmp_path / "a.ckpt") as archive:
        assert archive.testzip() is None
    assert torch.equal(files.read(tmp_path / "b.ckpt")["a"], torch.ones(3))


@pytest.mark.parametrize("use", ["fit", "save"])
def test_a_start_removes_what_a_killed_process_has_left(use: str, folder: Path, tmp_path: Path) -> None:
    good, file = (folder / "good.ckpt").read_bytes(), tmp_path / "a.ckpt"
    file.write_bytes(good)
    (tmp_path / ".writing-0123456789ab").write_bytes(good[:100])
    if use == "fit":
        fit(str(file), max_steps=1)
    else:
        CheckpointFiles().save_checkpoint({}, file)
    assert os.listdir(tmp_path) == ["a.ckpt"]
