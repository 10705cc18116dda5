"""Checkpoint files on disk: read without running anything that they contain, verified, and replaced atomically."""

from __future__ import annotations

import contextlib
import hashlib
import io
import os
import pickle
import posixpath
import socket
import zipfile
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import torch
from fsspec.core import url_to_fs  # type: ignore[import-untyped]
from fsspec.implementations.local import LocalFileSystem  # type: ignore[import-untyped]
from lightning.pytorch.plugins import TorchCheckpointIO
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature
from typing_extensions import override

from tinker_lightning.errors import InvalidInput, TinkerLightningError
from tinker_lightning.lightning import _compat
from tinker_lightning.wire import folders

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator

    from fsspec import AbstractFileSystem  # type: ignore[import-untyped]
    from lightning.fabric.plugins import CheckpointIO
    from lightning.pytorch.strategies import Strategy

# The first bytes of what torch.save writes.
ARCHIVE = b"PK\x03\x04"

# What `LightningCLI` adds to hyperparameters: an importable function that creates the module, and the module's class.
INSTANTIATOR = "_instantiator"
_CLASS_PATH = "_class_path"


class CheckpointFiles(TorchCheckpointIO):
    """Lightning's plugin for files, which also checks what it reads and never leaves half a file."""

    def __init__(self) -> None:
        super().__init__()
        self._cleared: set[Path] = set()

    @override
    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any | None = None) -> None:
        """Writes a file next to its final name, syncs it and renames it; a remote file system has its own way."""
        local = _local_path(path)
        if local is None or storage_options is not None:
            super().save_checkpoint(checkpoint, path, storage_options)
            return
        content = io.BytesIO()
        with _checksums():
            torch.save(checkpoint, content)
        self._clear(local.parent)
        folders.replace_file(local, content.getbuffer())

    @override
    def load_checkpoint(
        self, path: Any, map_location: Any = lambda storage, _: storage, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Reads a file as `read` does."""
        local = _local_path(path)
        if local is not None:
            self._clear(local.parent)
        checkpoint: dict[str, Any] = read(path, map_location, weights_only)
        return checkpoint

    def _clear(self, folder: Path) -> None:
        """Removes what killed processes have left in a folder, once."""
        if folder not in self._cleared:
            self._cleared.add(folder)
            folders.clear_parts(folder)


def secure(strategy: Strategy) -> None:
    """Replaces Lightning's plugin for files by our own, also inside of plugins that wrap it.

    A user's plugin that reads files with Lightning's `load_checkpoint` reads them as `read` does.
    """
    *outer, plugin = _compat.nested_plugins(strategy.checkpoint_io)
    if type(plugin) is TorchCheckpointIO:
        if outer:
            _compat.WRAPPED_PLUGIN.set(outer[-1], CheckpointFiles())
        else:
            strategy.checkpoint_io = CheckpointFiles()
    elif type(plugin).load_checkpoint is TorchCheckpointIO.load_checkpoint:
        plugin.load_checkpoint = CheckpointFiles().load_checkpoint  # type: ignore[method-assign]


def read(file: str | os.PathLike[str] | IO[bytes], map_location: Any = "cpu", weights_only: bool | None = None) -> Any:
    """Reads a file of `torch.save` after its checksums were verified; nothing in it can run code.

    Args:
        file: A path, the URL of a file on a remote file system or a web server, or a file that is open for reading.
        map_location: The device of its tensors, as for `torch.load`.
        weights_only: False also rebuilds objects, which can run any code. None means True for every kind of file.

    Raises:
        FileNotFoundError: If there is no such file.
        InvalidInput: If the file is damaged, or contains anything but tensors and plain data.
    """
    name = getattr(file, "name", "the checkpoint") if hasattr(file, "read") else file
    if isinstance(file, str | os.PathLike) and os.path.isdir(file):
        raise InvalidInput(f"{file} is a folder. Pass one of the checkpoint files in it, which end in .ckpt.")
    with _opened(file) as opened:
        try:
            _verify(opened)
            opened.seek(0)
            return torch.load(opened, map_location=map_location, weights_only=weights_only is not False)
        except Exception as error:  # of zipfile or of torch, whose type depends on the damage
            raise unreadable(name, error, opened) from error


def read_by(plugin: CheckpointIO, path: Any, weights_only: bool | None) -> dict[str, Any]:
    """Reads a file with a plugin, which may be the user's; its failure raises `InvalidInput` with the path."""
    # A user's plugin may not have the argument, because Lightning 2.5 does not pass it.
    *_, inner = _compat.nested_plugins(plugin)
    has_argument = is_param_in_hook_signature(inner.load_checkpoint, "weights_only")
    options = {"weights_only": weights_only is not False} if has_argument else {}
    try:
        return plugin.load_checkpoint(path, **options)
    except Exception as error:
        is_worded = isinstance(error, OSError) and str(path) in str(error)
        if is_worded or isinstance(error, TinkerLightningError):
            raise
        raise unreadable(path, error) from error


def unreadable(name: object, error: Exception, opened: IO[bytes] | None = None) -> InvalidInput:
    """Returns the error for a file that cannot be read, with the objects in it that are neither tensors nor data."""
    reason = str(error).partition("\n")[0] or type(error).__name__
    if isinstance(error, pickle.UnpicklingError):  # whose advice is to let the file run its code
        reason = "it contains objects that cannot be loaded safely"
        with contextlib.suppress(Exception):
            archive: Any = str(name) if opened is None else opened
            if opened is not None:
                opened.seek(0)
            if names := torch.serialization.get_unsafe_globals_in_checkpoint(archive):
                return InvalidInput(
                    f"{name} contains objects that cannot be loaded safely: {', '.join(names)}. Save hyperparameters "
                    "as plain values, such as str(path)."
                )
    return InvalidInput(
        f"{name} cannot be read as a checkpoint: {reason}. If it is damaged or incomplete, load another checkpoint."
    )


def with_plain_arguments(checkpoint: dict[str, Any], cls: type, given: Collection[str]) -> dict[str, Any]:
    """Returns a checkpoint without the functions and classes that its hyperparameters name, which `LightningCLI` adds.

    Args:
        checkpoint: The contents of a file.
        cls: The class of the module to load.
        given: The names of the hyperparameters that the caller passes.

    Raises:
        InvalidInput: If the file is one of another class, or classes are named by hyperparameters that are not given.
    """
    hparams = checkpoint.get("hyper_parameters")
    if not isinstance(hparams, dict) or INSTANTIATOR not in hparams:
        return checkpoint
    plain = {name: value for name, value in hparams.items() if name not in (INSTANTIATOR, _CLASS_PATH)}
    own = f"{cls.__module__}.{cls.__qualname__}"
    if (written_by := hparams.get(_CLASS_PATH, own)) != own:
        raise InvalidInput(
            f"the checkpoint is one of {written_by}, not of {own}: call load_from_checkpoint of its class"
        )
    if named := [name for name, value in plain.items() if name not in given and _names_class(value)]:
        arguments = ", ".join(f"{name}=..." for name in named)
        raise InvalidInput(
            f"the hyperparameters {', '.join(named)} of the checkpoint name classes, which are not imported because a "
            f"file says so. Pass the objects: load_from_checkpoint(file, {arguments})."
        )
    return {**checkpoint, "hyper_parameters": plain}


def _names_class(value: Any) -> bool:
    if isinstance(value, dict):
        return "class_path" in value or any(map(_names_class, value.values()))
    return isinstance(value, list | tuple) and any(map(_names_class, value))


@contextlib.contextmanager
def _opened(file: Any) -> Iterator[IO[bytes]]:
    """Opens a file that can be read twice: a local one as it is, any other one as a copy in memory."""
    if hasattr(file, "read"):
        yield io.BytesIO(file.read())
        return
    fs, path = url_to_fs(str(file))
    if not fs.exists(path):
        raise FileNotFoundError(f"Checkpoint file not found: {file}")
    if isinstance(fs, LocalFileSystem):
        with Path(path).open("rb") as opened:
            yield opened
        return
    yield io.BytesIO(fs.cat_file(path))


def _verify(file: IO[bytes]) -> None:
    """Raises if an archive has another checksum than when it was written; torch writes checksums but ignores them."""
    size = file.seek(0, io.SEEK_END)
    file.seek(0)
    if file.read(len(ARCHIVE)) != ARCHIVE:
        raise ValueError("it is not a file of torch.save")
    with zipfile.ZipFile(file) as archive:
        records = archive.infolist()
        # torch.save does not compress, so nothing unpacks to more than the file.
        if (unpacked := sum(record.file_size for record in records)) > size:
            raise ValueError(f"its {size:,} bytes would unpack to {unpacked:,}")
        if len({record.filename for record in records}) < len(records):
            raise ValueError("it contains a record twice")
        # Without checksums, which torch can be told to leave out, all of them are 0.
        if any(record.CRC for record in records) and (damaged := archive.testzip()) is not None:
            raise ValueError(f"its record {damaged} does not match its checksum")


@contextlib.contextmanager
def _checksums() -> Iterator[None]:
    """Makes torch write checksums, even if the user has switched them off for other files."""
    before = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(True)
    try:
        yield
    finally:
        torch.serialization.set_crc32_options(before)


def folder_of(file: str | os.PathLike[str]) -> str:
    """Returns the address of the folder that contains a file."""
    fs, path = url_to_fs(str(file))
    return str(fs.unstrip_protocol(posixpath.dirname(path)))


def address(folder: str) -> str:
    """Returns the address of a folder, however it is written."""
    fs, path = url_to_fs(folder)
    return str(fs.unstrip_protocol(path))


def folder_id(folder: str) -> str:
    """Returns a hash of a folder's address, which for a local folder includes the name of this machine."""
    fs, path = url_to_fs(folder)
    is_local = isinstance(fs, LocalFileSystem)
    address = f"file://{socket.gethostname()}{os.path.realpath(path)}" if is_local else fs.unstrip_protocol(path)
    return hashlib.sha256(address.encode()).hexdigest()[:32]


def listed(fs: AbstractFileSystem, folder: str, depth: int | None) -> list[dict[str, Any]]:
    """Returns what is in a folder, nothing if it does not exist; raises `OSError` if a folder cannot be listed."""
    fs.invalidate_cache(folder)  # another process may have written a file
    try:
        return list(_entries_below(fs, folder, depth, set()))
    except FileNotFoundError:
        if fs.exists(folder):
            raise  # a folder in it has been removed in the meantime
        return []


def _entries_below(
    fs: AbstractFileSystem, folder: str, depth: int | None, followed: set[str]
) -> Iterator[dict[str, Any]]:
    """Yields what is in a folder, and links as what they lead to; links to folders are `followed` once."""
    for info in fs.ls(folder, detail=True):
        if info["type"] == "directory" and info["name"].rstrip("/") == folder.rstrip("/"):
            continue
        target = None
        if info.get("islink"):
            with contextlib.suppress(OSError):  # it leads nowhere
                info, target = fs.info(info["name"]), os.path.realpath(info["name"])
        yield info
        if info["type"] == "directory" and depth != 1 and target not in followed:
            followed |= {target} if target is not None else set()
            yield from _entries_below(fs, info["name"], depth, followed)


def is_of_others(fs: AbstractFileSystem, file: str) -> bool:
    """Returns whether a file was not written by torch; those that a process still writes are hidden."""
    if file.endswith(".ckpt"):
        return False
    if posixpath.basename(file).startswith("."):
        return True
    try:
        with fs.open(file, "rb") as opened:
            return bool(opened.read(len(ARCHIVE)) != ARCHIVE)
    except FileNotFoundError:
        return True
    except OSError:  # such as another user's: whoever reads it is told
        return False


def _local_path(path: object) -> Path | None:
    fs, plain = url_to_fs(str(path))
    return Path(plain) if isinstance(fs, LocalFileSystem) else None
