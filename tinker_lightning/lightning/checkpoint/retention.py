"""Deletes remote states together with the checkpoint files that name them."""

from __future__ import annotations

import logging
import os
import zipfile
from typing import TYPE_CHECKING

from lightning.fabric.utilities.cloud_io import get_filesystem

from tinker_lightning.remote.saved_state import RECORD_PREFIX, SavedState

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from fsspec import AbstractFileSystem  # type: ignore[import-untyped]

logger = logging.getLogger("tinker_lightning")

_NONE: frozenset[str] = frozenset()
_UNREADABLE = "?"


class StateRetention:
    """Deletes a remote state when no checkpoint file names it any more.

    Every file names states of its own, but may be copied or linked. What a file names is read from the file, because
    the process that wrote it may be gone.

    Args:
        delete: Deletes a state on the server.
        folders: Returns the folders of the trainer's checkpoint callbacks, where copies are looked for.
    """

    def __init__(self, delete: Callable[[str], object], folders: Callable[[], Iterable[str]]) -> None:
        self._delete = delete
        self._folders = folders
        self._read: dict[str, tuple[str, frozenset[str]]] = {}
        self._unwritten: dict[str, frozenset[str]] = {}  # what files will name that a plugin writes in the background
        self._replaced: dict[str, str] = {}  # states to delete, and the files that named them

    def states_of(self, file: str | os.PathLike[str]) -> frozenset[str]:
        """Returns the states that a file names, or will name when it has been written."""
        return self._named_by(str(file)) | self._unwritten.get(str(file), _NONE)

    def replaced(self, file: str | os.PathLike[str], old: frozenset[str], new: frozenset[str] = _NONE) -> None:
        """Deletes the states of a file that was overwritten or removed, as soon as nothing names them.

        Args:
            file: The file.
            old: What it named before.
            new: What it names now, or will when it has been written.
        """
        self._unwritten[str(file)] = new
        self._replaced |= dict.fromkeys(old - new - {_UNREADABLE}, str(file))
        self.release()

    def release(self, *, all_written: bool = False) -> None:
        """Deletes replaced states; none while a file that replaces one is still being written.

        Args:
            all_written: Whether nothing is being written any more, wherever a plugin may have put its files.
        """
        unwritten = {file: states for file, states in self._unwritten.items() if not states <= self._named_by(file)}
        self._unwritten = unwritten
        if unwritten and not all_written:
            return
        replaced, self._replaced = self._replaced, {}
        for state, file in replaced.items():
            if any(self._named_by(other) & {state, _UNREADABLE} for other in self._files(file)):
                continue
            try:
                self._delete(state)
            except Exception as error:  # costs space on the server and nothing else
                logger.warning("%s is named by no checkpoint file any more, but could not be deleted: %s", state, error)

    def _files(self, file: str) -> Iterator[str]:
        """Yields the files that may be copies of a file: in its folder, and in those of checkpoint callbacks."""
        siblings = (os.path.dirname(file) or ".", 1, os.path.splitext(file)[1])
        for folder, depth, suffix in (siblings, *((each, None, ".ckpt") for each in self._folders())):
            fs = get_filesystem(folder)
            yield from (fs.unstrip_protocol(found) for found in fs.find(folder, depth) if found.endswith(suffix))

    def _named_by(self, file: str) -> frozenset[str]:
        fs = get_filesystem(file)
        try:
            fs.invalidate_cache(file)  # another process may have written it
            version = fs.ukey(file)
        except FileNotFoundError:
            return _NONE
        if self._read.get(file, ("",))[0] != version:
            self._read[file] = version, _read_states(fs, file)
        return self._read[file][1]


def _read_states(fs: AbstractFileSystem, file: str) -> frozenset[str]:
    """Reads the records of remote models in a file of `torch.save`, where each is an entry of the archive."""
    states = set()
    try:
        with fs.open(file, "rb") as opened, zipfile.ZipFile(opened) as archive:
            for entry in archive.infolist():
                with archive.open(entry) as content:
                    if (start := content.read(len(RECORD_PREFIX))) == RECORD_PREFIX:
                        states.add(SavedState.from_bytes(start + content.read()).path)
    except Exception as error:
        reason = str(error).partition("\n")[0]
        logger.warning("%s could not be read; remote states are kept while it may name one: %s", file, reason)
        return frozenset({_UNREADABLE})
    return frozenset(states)
