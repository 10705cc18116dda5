"""Folders and files that are created, replaced and removed atomically, even if the process is killed.

A new folder is filled under a temporary name next to its destination and then renamed. A folder that is overwritten is
first renamed to a backup name; if the process dies before the new folder is in place, the next reader restores the
backup. Temporary folders that a killed process leaves behind are deleted by the next one that writes next to them: a
living process holds a lock on its own. Where there are no locks, they are deleted after a day.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import sys
import tempfile
import time
import uuid
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

if sys.platform != "win32":
    import fcntl

LEFTOVERS = (".part-", ".gone-")
_BACKUP_PREFIX = ".old-"
_FILE_PREFIX = ".writing-"
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
    with temporary_folder(folder.parent) as part:
        yield part
        part.chmod(0o755)
        for file in part.iterdir():
            sync(file)
        sync(part)
        _move(part, folder, overwrite=overwrite)
        sync(folder.parent)
    remove_leftovers(folder.parent)


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


def replace_file(file: Path, content: bytes | memoryview) -> None:
    """Writes a file atomically: under a temporary name next to it, then synced and renamed.

    The temporary file is locked, so that `clear_parts` knows when the process that writes it has ended.

    Raises:
        OSError: If the file cannot be written, of the kind that the system reports. A file that existed is unchanged.
    """
    part: Path | None = None
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        part, descriptor = _new_part(file.parent)
        with os.fdopen(descriptor, "wb") as opened:
            opened.write(content)
            opened.flush()
            os.fsync(descriptor)
            if sys.platform != "win32":
                part.replace(file)
        if sys.platform == "win32":  # Windows only renames closed files
            part.replace(file)
        sync(file.parent)
    except OSError as error:
        raise _not_written(file, len(content), error) from error
    finally:
        if part is not None:
            part.unlink(missing_ok=True)


def clear_parts(folder: Path) -> None:
    """Removes the temporary files of `replace_file` that killed processes have left in a folder."""
    for part in folder.glob(f"{_FILE_PREFIX}*"):
        with contextlib.suppress(OSError), part.open("rb") as opened:  # removed or locked by another process
            is_old = part.stat().st_mtime < time.time() - _LEFTOVER_SECONDS
            if _lock(opened.fileno(), wait=False) or is_old:
                part.unlink()


def _not_written(file: Path, size: int, error: OSError) -> OSError:
    """Returns an error of the same kind with the size of the file, and how much space is free."""
    free = ""
    with contextlib.suppress(OSError):
        free = f", and {shutil.disk_usage(file.parent).free:,} are free"
    return OSError(
        error.errno,
        f"{file} could not be written: {error.strerror}. It needs {size:,} bytes{free}. Make room, or choose another "
        "folder. What was written before is unchanged.",
    )


def _new_part(folder: Path) -> tuple[Path, int]:
    while True:
        part = folder / f"{_FILE_PREFIX}{uuid.uuid4().hex[:12]}"
        descriptor = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_BINARY", 0), 0o666)
        _lock(descriptor, wait=True)
        if part.exists():  # otherwise another process has removed it before it was locked
            return part, descriptor
        os.close(descriptor)


def _lock(descriptor: int, *, wait: bool) -> bool:
    """Locks a file or folder until it is closed or its process ends; returns False where that is not possible."""
    if sys.platform == "win32":
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except OSError:
        return False
    return True


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
    with (
        temporary_folder(folder.parent, LEFTOVERS[1]) as gone,
        contextlib.suppress(FileNotFoundError),  # another process has removed it
    ):
        folder.rename(gone / "folder")


def remove_leftovers(parent: Path) -> None:
    """Deletes the temporary folders in a folder that belong to no living process."""
    for folder in parent.iterdir():
        with contextlib.suppress(OSError):
            if folder.name.startswith(LEFTOVERS):
                with _locked(folder, wait=False) as is_locked:
                    if is_locked or folder.stat().st_mtime < time.time() - _LEFTOVER_SECONDS:
                        shutil.rmtree(folder, ignore_errors=True)


@contextlib.contextmanager
def temporary_folder(parent: Path, prefix: str = LEFTOVERS[0]) -> Iterator[Path]:
    """Yields a new folder that is deleted afterwards, and that no other process takes for a leftover until then."""
    for _ in range(_ATTEMPTS):
        folder = Path(tempfile.mkdtemp(prefix=prefix, dir=parent))
        with contextlib.ExitStack() as stack:
            with contextlib.suppress(FileNotFoundError):
                stack.enter_context(_locked(folder, wait=True))
            if not folder.exists():
                continue  # another process has deleted it before it was locked
            try:
                yield folder
            finally:
                shutil.rmtree(folder, ignore_errors=True)
            return
    raise FileExistsError(str(parent))


@contextlib.contextmanager
def _locked(folder: Path, *, wait: bool) -> Iterator[bool]:
    """Locks a folder in the `with` block; yields whether that succeeded."""
    if sys.platform == "win32":  # which cannot open folders
        yield False
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        yield _lock(descriptor, wait=wait)
    finally:
        os.close(descriptor)
