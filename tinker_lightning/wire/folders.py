"""Folders that are created, replaced and removed atomically, even if the process is killed.

A new folder is filled under a temporary name next to its destination and then renamed. A folder that is overwritten is
first renamed to a backup name; if the process dies before the new folder is in place, the next reader restores the
backup. Temporary folders that a killed process leaves behind are deleted later.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

LEFTOVERS = (".part-", ".gone-")
_BACKUP_PREFIX = ".old-"
_EXISTS = (errno.EEXIST, errno.ENOTEMPTY)
_LEFTOVER_SECONDS = 86400.0
# How often a write is retried if another process writes the same folder at the same time.
_ATTEMPTS = 100


@contextlib.contextmanager
def new_folder(folder: Path, *, overwrite: bool) -> Iterator[Path]:
    """Yields a temporary folder that is renamed to `folder` after the `with` block, or deleted on an exception.

    Raises `FileExistsError` if the folder exists and `overwrite` is not set.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    part = Path(tempfile.mkdtemp(prefix=LEFTOVERS[0], dir=folder.parent))
    try:
        yield part
        part.chmod(0o755)
        for file in part.iterdir():
            sync(file)
        sync(part)
        _move(part, folder, overwrite=overwrite)
        sync(folder.parent)
    finally:
        shutil.rmtree(part, ignore_errors=True)
    _clear_leftovers(folder.parent)


def find_folder(folder: Path) -> bool:
    """Returns whether a folder exists; restores it if an overwrite was interrupted between its two renames."""
    for _ in range(3):  # another process may be overwriting it at the same time
        if folder.exists():
            return True
        with contextlib.suppress(OSError):
            _backup(folder).rename(folder)
    return folder.exists()


def remove_folder(folder: Path) -> None:
    """Removes a folder if it exists."""
    _discard(_backup(folder))  # first, because the backup would be restored otherwise
    _discard(folder)


def original_path(folder: Path) -> Path:
    """Returns the original path of a folder, which may have been renamed to its backup name."""
    return folder.with_name(folder.name.removeprefix(_BACKUP_PREFIX))


def sync(path: Path) -> None:
    """Flushes a file or folder to disk."""
    is_folder = path.is_dir()
    if os.name == "nt" and is_folder:
        return  # Windows cannot open folders
    # Windows can only sync files that are open for writing.
    descriptor = os.open(path, os.O_RDONLY if is_folder else os.O_RDWR)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _backup(folder: Path) -> Path:
    return folder.with_name(f"{_BACKUP_PREFIX}{folder.name}")


def _move(part: Path, folder: Path, *, overwrite: bool) -> None:
    for _ in range(_ATTEMPTS):
        try:
            if find_folder(folder) and overwrite:
                _discard(_backup(folder))
                with contextlib.suppress(FileNotFoundError):
                    folder.rename(_backup(folder))
            part.rename(folder)
        except OSError as error:  # renaming onto an existing folder fails, so nothing is overwritten by accident
            if error.errno not in _EXISTS:
                raise
            if not overwrite:
                break
        else:
            _discard(_backup(folder))
            return
    raise FileExistsError(str(folder))


def _discard(folder: Path) -> None:
    """Removes a folder atomically by renaming it, then deletes its files."""
    if not folder.exists():
        return
    gone = Path(tempfile.mkdtemp(prefix=LEFTOVERS[1], dir=folder.parent))
    with contextlib.suppress(FileNotFoundError):  # another process has removed it
        folder.rename(gone / "folder")
    shutil.rmtree(gone, ignore_errors=True)


def _clear_leftovers(parent: Path) -> None:
    for folder in parent.iterdir():
        with contextlib.suppress(OSError):
            if folder.name.startswith(LEFTOVERS) and folder.stat().st_mtime < time.time() - _LEFTOVER_SECONDS:
                shutil.rmtree(folder, ignore_errors=True)
