"""Folders that appear, are replaced and vanish as a whole, at whatever moment a process is killed.

A new folder is filled beside its place and renamed into it. One that is replaced first steps aside, under a name that
leads back to it: whoever finds the place empty puts it back. What a killed process left half done has a name of its
own, leads nowhere, and is cleared away later.
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
_ASIDE = ".old-"
_TAKEN = (errno.EEXIST, errno.ENOTEMPTY)
_LEFTOVERS_KEPT = 86400.0
# How often a writer starts over because another process writes the same folder at the same time.
_ATTEMPTS = 100


@contextlib.contextmanager
def new_folder(folder: Path, *, overwrite: bool) -> Iterator[Path]:
    """Yields a folder to fill; at the end of the `with` block it stands in its place, at an error it is gone.

    Raises:
        FileExistsError: If there is one already and `overwrite` is not set.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    part = Path(tempfile.mkdtemp(prefix=LEFTOVERS[0], dir=folder.parent))
    try:
        yield part
        part.chmod(0o755)
        for file in part.iterdir():
            sync(file)
        sync(part)
        _put(part, folder, overwrite=overwrite)
        sync(folder.parent)
    finally:
        shutil.rmtree(part, ignore_errors=True)
    _clear_leftovers(folder.parent)


def find_folder(folder: Path) -> bool:
    """Whether there is such a folder; mends an overwrite that was cut off between its two renames."""
    for _ in range(3):  # another process may just be overwriting it, so that both places change under our eyes
        if folder.exists():
            return True
        with contextlib.suppress(OSError):
            _aside(folder).rename(folder)
    return folder.exists()


def remove_folder(folder: Path) -> None:
    """Removes a folder if it is there."""
    _discard(_aside(folder))  # first, else it would come back in the removed one's place
    _discard(folder)


def place_of(folder: Path) -> Path:
    """The place that a folder belongs to, should it have stepped aside."""
    return folder.with_name(folder.name.removeprefix(_ASIDE))


def sync(path: Path) -> None:
    """Waits until a file or folder is on the disk."""
    is_folder = path.is_dir()
    if os.name == "nt" and is_folder:
        return  # a folder cannot be opened there
    # Windows syncs only what is open for writing.
    descriptor = os.open(path, os.O_RDONLY if is_folder else os.O_RDWR)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _aside(folder: Path) -> Path:
    return folder.with_name(f"{_ASIDE}{folder.name}")


def _put(part: Path, folder: Path, *, overwrite: bool) -> None:
    for _ in range(_ATTEMPTS):
        try:
            if find_folder(folder) and overwrite:
                _discard(_aside(folder))
                with contextlib.suppress(FileNotFoundError):
                    folder.rename(_aside(folder))
            part.rename(folder)
        except OSError as error:  # a rename fails where something is, so that nothing is ever overwritten unasked
            if error.errno not in _TAKEN:
                raise
            if not overwrite:
                break
        else:
            _discard(_aside(folder))
            return
    raise FileExistsError(str(folder))


def _discard(folder: Path) -> None:
    """Takes a folder away at once, and then its files."""
    if not folder.exists():
        return
    gone = Path(tempfile.mkdtemp(prefix=LEFTOVERS[1], dir=folder.parent))
    with contextlib.suppress(FileNotFoundError):  # someone else was faster
        folder.rename(gone / "folder")
    shutil.rmtree(gone, ignore_errors=True)


def _clear_leftovers(parent: Path) -> None:
    for folder in parent.iterdir():
        with contextlib.suppress(OSError):
            if folder.name.startswith(LEFTOVERS) and folder.stat().st_mtime < time.time() - _LEFTOVERS_KEPT:
                shutil.rmtree(folder, ignore_errors=True)
