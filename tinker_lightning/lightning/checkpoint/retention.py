"""Which remote states checkpoint files name, so that one is deleted with the last file that names it."""

from __future__ import annotations

import logging
import zipfile
from pathlib import Path
from typing import TYPE_CHECKING

from tinker_lightning.lightning.checkpoint import safe_load
from tinker_lightning.lightning.checkpoint.contents import named_in

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

logger = logging.getLogger("tinker_lightning")

_NONE: frozenset[str] = frozenset()
_UNREADABLE = "?"
_MARK = b"tinker://"  # stands as it is in a file that names a state: torch does not compress


class StateRetention:
    """Which remote states each checkpoint file names, so that one goes when its last file has gone.

    The answer is read from the files: they outlive the process that wrote them.

    Args:
        delete: Removes a state on the server.
        folders: Where checkpoint files may lie.
    """

    def __init__(self, delete: Callable[[str], object], folders: Callable[[], Iterable[str]]) -> None:
        self._delete = delete
        self._folders = folders
        self._known: dict[str, frozenset[str]] = {}
        self._read: dict[Path, tuple[tuple[int, int], frozenset[str]]] = {}

    def named_by(self, file: str | Path) -> frozenset[str]:
        """The paths of the states that a file names; none if there is no such file."""
        path = Path(file)
        try:
            status = path.stat()
        except OSError:
            return self._known.get(str(file), _NONE) if "://" in str(file) else _NONE
        key = (status.st_mtime_ns, status.st_size)
        known = self._read.get(path)
        if known is None or known[0] != key:
            known = self._read[path] = (key, _read_names(path))
        return known[1]

    def wrote(self, file: str | Path, states: frozenset[str]) -> None:
        """A file was written, or read, that names states; it counts wherever it lies."""
        self._known[str(file)] = states

    def is_named(self, state: str) -> bool:
        """Whether some file names a state, as far as one can see."""
        return any(self.named_by(file) & {state, _UNREADABLE} for file in self._files())

    def release(self, state: str) -> None:
        """Deletes a state that no file names any more; a failure is logged, for nothing is lost by it."""
        if state == _UNREADABLE or self.is_named(state):
            return
        try:
            self._delete(state)
        except Exception as error:
            logger.warning("%s is named by no checkpoint file any more, but could not be deleted: %s", state, error)

    def gone(self, file: str | Path) -> None:
        """A file was removed; those that lay beside it still count."""
        self._known[str(file)] = _NONE

    def _files(self) -> set[str | Path]:
        """Those in the folders of checkpoints, those that are known, and those beside them."""
        beside = {Path(file).parent for file in self._known if "://" not in file}
        found = {file for folder in self._folders() for file in Path(folder).rglob("*.ckpt")}
        return found | {file for folder in beside for file in folder.glob("*.ckpt")} | set(self._known)


def _read_names(file: Path) -> frozenset[str]:
    try:
        return named_in(safe_load.load(file))
    except Exception as error:
        if _is_whole(file) and _MARK not in file.read_bytes():  # another program's, of which there may be many
            return _NONE
        reason = str(error).partition("\n")[0]
        logger.warning("%s could not be read; remote states are kept while it may name one: %s", file, reason)
        return frozenset({_UNREADABLE})


def _is_whole(file: Path) -> bool:
    """Whether a file has been written to its end, where torch's format has its table of contents."""
    return zipfile.is_zipfile(file)
