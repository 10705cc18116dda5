"""Keeps remote states as long as the checkpoint files that name them, and deletes them together."""

from __future__ import annotations

import logging
import posixpath
import zipfile
from typing import TYPE_CHECKING

from fsspec.core import url_to_fs  # type: ignore[import-untyped]

from tinker_lightning.errors import Unsupported
from tinker_lightning.remote.saved_state import RECORD_PREFIX, SavedState

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Iterable

    from fsspec import AbstractFileSystem  # type: ignore[import-untyped]

logger = logging.getLogger("tinker_lightning")

_NONE: frozenset[str] = frozenset()
_UNREADABLE = "?"

TTL_DAYS = 7
"""The days after which a state expires, where the server supports it, if its file is never written."""


class StateRetention:
    """Keeps a remote state when its checkpoint file has been written, and deletes it when no file names it anymore.

    Each file is written with its own states, but files may be copied or linked. So the states are read from the files,
    also from those in `folders()`, the folders of the trainer's checkpoint callbacks.
    """

    def __init__(
        self,
        delete: Callable[[str], object],
        folders: Callable[[], Iterable[str]],
        keep: Callable[[str], object] = lambda _: None,
    ) -> None:
        self._delete = delete
        self._keep = keep
        self._expiring: set[str] = set()  # the states of files that the server may still delete
        self._folders = folders
        self._read: dict[str, tuple[str, frozenset[str]]] = {}
        self._unwritten: dict[str, frozenset[str]] = {}  # the states of files that are still being written
        self._replaced: dict[str, str] = {}  # states to delete, and the files that named them
        self._warned = False  # whether the log mentions that the server deletes nothing

    def states_of(self, file: str | os.PathLike[str]) -> frozenset[str]:
        """Returns the states that a file names, or will name when it has been written."""
        return self._states_in_file(str(file)) | self._unwritten.get(str(file), _NONE)

    def keep(self, states: frozenset[str] = _NONE) -> None:
        """Keeps the states of a file that was written, which would expire otherwise, and those that failed before."""
        self._expiring |= states - {_UNREADABLE}
        for state in sorted(self._expiring):
            try:
                self._keep(state)
            except Exception as error:
                logger.warning(
                    "%s is named by a checkpoint file, but expires %d days after it was saved, because the request "
                    "to keep it failed. This is tried again at the next checkpoint and at the end of the "
                    "fit. %s",
                    state,
                    TTL_DAYS,
                    error,
                )
            else:
                self._expiring.discard(state)

    def replaced(self, file: str | os.PathLike[str], old: frozenset[str], new: frozenset[str] = _NONE) -> None:
        """Deletes the `old` states of a file that was overwritten with `new` ones or removed, if no file names them."""
        self._unwritten[str(file)] = new
        self._replaced |= dict.fromkeys(old - new - {_UNREADABLE}, str(file))
        self.release()

    def release(self, *, all_written: bool = False) -> None:
        """Deletes replaced states, unless files are still being written; `all_written` overrides the check."""
        written = [
            file for file, states in self._unwritten.items() if not states or states <= self._states_in_file(file)
        ]
        for file in written:
            del self._unwritten[file]
        if self._unwritten and not all_written:
            return
        replaced, self._replaced = self._replaced, {}
        for state, file in replaced.items():
            try:
                if not self._states_near(file) & {state, _UNREADABLE}:
                    self._expiring.discard(state)
                    self._delete(state)
            except Unsupported as error:
                if not self._warned:
                    logger.warning("states of removed checkpoint files stay, also those that follow: %s", error)
                self._warned = True
            except Exception as error:  # costs space on the server and nothing else
                logger.warning("%s is not named by any checkpoint file, but could not be deleted: %s", state, error)

    def _states_near(self, file: str) -> frozenset[str]:
        """Returns the states named by possible copies of a file, in its folder and folders of checkpoint callbacks."""
        fs, path = url_to_fs(file)
        states = self._states_in_folder(fs, posixpath.dirname(path), 1, posixpath.splitext(path)[1])
        for folder in self._folders():
            fs, path = url_to_fs(folder)
            states |= self._states_in_folder(fs, path, None, ".ckpt")
        return states

    def _states_in_file(self, file: str) -> frozenset[str]:
        fs, path = url_to_fs(file)
        return self._states_in_folder(fs, posixpath.dirname(path), 1, f"/{posixpath.basename(path)}")

    def _states_in_folder(self, fs: AbstractFileSystem, folder: str, depth: int | None, ending: str) -> frozenset[str]:
        """Returns the states named by the files of a folder. Only new and changed files are read."""
        fs.invalidate_cache(folder)  # another process may have written a file
        states: set[str] = set()
        for path, info in fs.find(folder, depth, detail=True).items():
            if path.endswith(ending):
                file, version = fs.unstrip_protocol(path), str(info)
                if self._read.get(file, ("",))[0] != version:
                    self._read[file] = version, _read_states(fs, file)
                states |= self._read[file][1]
        return frozenset(states)


def _read_states(fs: AbstractFileSystem, file: str) -> frozenset[str]:
    """Returns the states named by a file of `torch.save`, where each record is an entry of the archive."""
    states = set()
    try:
        with fs.open(file, "rb") as opened, zipfile.ZipFile(opened) as archive:
            for entry in archive.infolist():
                with archive.open(entry) as content:
                    if (start := content.read(len(RECORD_PREFIX))) == RECORD_PREFIX:
                        states.add(SavedState.from_bytes(start + content.read()).path)
    except FileNotFoundError:  # removed since it was listed, or a link to a removed file
        return _NONE
    except Exception as error:
        reason = str(error).partition("\n")[0]
        logger.warning("%s could not be read; remote states are kept while it may name one: %s", file, reason)
        return frozenset({_UNREADABLE})
    return frozenset(states)
