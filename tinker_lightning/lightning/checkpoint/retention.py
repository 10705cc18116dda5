"""Keeps remote states as long as the checkpoint files that name them, and deletes them together.

A kill may come between any two of these steps of a save, and the next run that uses the folder repairs what it left:

    the server saves the state      it expires, because no file names it
    the file is written             it expires although the file names it: kept by `StateRetention.adopt`
    the expiry is lifted
    the file is overwritten later   nothing names it, and it never expires: `adopt` lets it expire
    the state is deleted
"""

from __future__ import annotations

import logging
import posixpath
import time
import uuid
import zipfile
from functools import partial
from itertools import accumulate
from typing import TYPE_CHECKING, Any, Self, TypeVar

from fsspec.core import url_to_fs  # type: ignore[import-untyped]

from tinker_lightning.client.files import checkpoints
from tinker_lightning.errors import ServerUnreachable, Unsupported
from tinker_lightning.lightning.checkpoint.files import address, folder_id, folder_of, is_of_others, listed
from tinker_lightning.remote import lm
from tinker_lightning.remote.saved_state import RECORD_PREFIX, SavedState

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Iterable

    import lightning.pytorch as pl
    from fsspec import AbstractFileSystem  # type: ignore[import-untyped]
    from torch import nn

    from tinker_lightning.types.responses import Checkpoint

logger = logging.getLogger("tinker_lightning")

T = TypeVar("T")

_NONE: frozenset[str] = frozenset()
# For how long no request is sent after one that did not reach the server, so that a fit can end.
_REST_SECONDS = 10.0
UNREADABLE = "?"
"""Stands for the states of a file that cannot be read, which may be any."""
_UNKNOWN = frozenset({UNREADABLE})

TTL_DAYS = 7
"""The days after which a state expires, where the server supports it, if no file names it."""


class StateRetention:
    """Keeps a remote state when its checkpoint file has been written, and deletes it when no file names it anymore.

    Each file is written with its own states, but files may be copied or linked. So the states are read from the files,
    also from those in `folders()`, the folders of the trainer's checkpoint callbacks.

    Args:
        delete: Deletes a state.
        folders: Returns the folders of the trainer's checkpoint callbacks.
        set_expiry: Sets after how many seconds a state expires; None means never.
        listing: Returns everything that is saved on the server.
        is_silent: Returns whether the server is known not to answer.
    """

    def __init__(
        self,
        delete: Callable[[str], object],
        folders: Callable[[], Iterable[str]],
        set_expiry: Callable[[str, int | None], object] = lambda *_: None,
        listing: Callable[[], Iterable[Checkpoint]] = list,
        is_silent: Callable[[], bool] = lambda: False,
    ) -> None:
        self._delete = delete
        self._set_expiry = set_expiry
        self._listing = listing
        self._is_silent = is_silent
        self._unreached: tuple[float, ServerUnreachable] | None = None  # when and why no request reached the server
        self._expiring: set[str] = set()  # the states of files that the server may still delete
        self._own: set[str] = set()  # the states of all files that this process has written
        self._folders = folders
        self._saving: str | os.PathLike[str] | None = None  # the file that the trainer saves
        # A file whose folder `adopt_loaded` will adopt, and whether a fit resumes from it.
        self.loaded: tuple[str | os.PathLike[str], bool] | None = None
        self._adopted: set[str] = set()
        # What `adopt` is still to do: folders, and states that were loaded from a file.
        self._to_adopt: set[str] = set()
        self._resumed = _NONE
        self._run = uuid.uuid4().hex[:16]
        self._is_resumed = False
        self._files = NamedStates()
        self._unwritten: dict[str, frozenset[str]] = {}  # the states of files that are still being written
        self._replaced: dict[str, str] = {}  # states to delete, and the files that named them
        self._warned = False  # whether the log mentions that the server deletes nothing

    @classmethod
    def of_module(cls, module: Callable[[], nn.Module], folders: Callable[[], Iterable[str]]) -> Self:
        """Returns one for the states of a module, which need not exist yet."""
        return cls(
            lambda state: lm.delete_state(module(), state),
            folders,
            lambda state, ttl_seconds: lm.set_expiry(module(), state, ttl_seconds),
            lambda: lm.list_states(module()),
            lambda: lm.is_silent(module()),
        )

    def watch(self, trainer: pl.Trainer) -> None:
        """Notes the file of each save of a trainer, which Lightning does not name before the states are saved."""
        if "save_checkpoint" not in vars(trainer):
            trainer.save_checkpoint = partial(self._save, trainer.save_checkpoint)  # type: ignore[method-assign]

    def _save(self, save: Callable[..., None], filepath: str | os.PathLike[str], *args: Any, **kwargs: Any) -> None:
        self._saving = filepath
        try:
            save(filepath, *args, **kwargs)
        finally:
            self._saving = None

    def save_options(self) -> dict[str, Any]:
        """Returns the options with which states are saved: that they expire, and for which run and folder they are."""
        self.adopt_loaded()
        options: dict[str, Any] = {"ttl_seconds": TTL_DAYS * 24 * 3600}
        if self._saving is not None:
            options["user_metadata"] = {
                checkpoints.RUN: self._run,
                checkpoints.FOLDER: folder_id(folder_of(self._saving)),
                checkpoints.FILE: posixpath.basename(url_to_fs(str(self._saving))[1]),
            }
        return options

    def before_save(self, file: str | os.PathLike[str], new: frozenset[str] = _NONE) -> frozenset[str]:
        """Returns the states that a file names before its `new` ones, and adopts the others in its folder."""
        self._own |= new
        self.adopt([folder_of(file)])
        return self.states_of(file)

    def states_of(self, file: str | os.PathLike[str]) -> frozenset[str]:
        """Returns the states that a file names, or will name when it has been written."""
        return self._files.in_file(str(file)) | self._unwritten.get(str(file), _NONE)

    def keep(self, states: frozenset[str] = _NONE) -> None:
        """Keeps the states of a file that was written, which would expire otherwise, and those that failed before."""
        self._own |= states
        self._expiring |= states - {UNREADABLE}
        for state in sorted(self._expiring):
            try:
                self._ask(self._set_expiry, state, None)
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

    def adopt_loaded(self) -> None:
        """Adopts the folders of the `loaded` file and of checkpoint callbacks; a fit continues the run of the file."""
        if self.loaded is not None:
            (file, self._is_resumed), self.loaded = self.loaded, None
            fs, path = url_to_fs(str(file))  # also of a web server, whose folders cannot be listed
            self.adopt([folder_of(file), *self._folders()], _read_states(fs, path))

    def adopt(self, folders: Iterable[str], resumed: frozenset[str] = _NONE) -> None:
        """Keeps the states of all files in folders that are used for the first time; others of the run expire.

        No training is stopped by what fails here.

        Args:
            folders: The folders.
            resumed: The states that were loaded. They tell which run a fit continues.
        """
        listable = {address(folder) for folder in folders if not folder.startswith(("http://", "https://"))}
        self._to_adopt |= listable - self._adopted
        self._resumed |= resumed
        if not self._to_adopt and not self._resumed:
            return
        try:
            self._adopt(sorted(self._to_adopt), self._resumed)
        except Exception as error:
            logger.warning(
                "it could not be checked whether states of checkpoint files in %s expire. Those that an earlier run "
                "could not keep are deleted %d days after they were saved. This is tried again at the next checkpoint "
                "and at the end of the fit. %s",
                sorted(self._to_adopt),
                TTL_DAYS,
                error,
            )
        else:
            self._adopted |= self._to_adopt
            self._to_adopt, self._resumed = set(), _NONE
        self.keep()

    def finish(self) -> None:
        """Keeps and releases the states that are left at the end of a run, when all files have been written."""
        if self._is_silent():
            self._unreached = time.monotonic(), ServerUnreachable("the server did not answer at the end of the run")
        self.adopt_loaded()  # if nothing was trained
        self.adopt([])  # if it failed before
        self.keep()
        self.release(all_written=True)

    def _ask(self, request: Callable[..., T], *arguments: object) -> T:
        """Sends a request; if one has just not reached the server, those that follow fail without being sent."""
        if self._unreached is not None and time.monotonic() - self._unreached[0] < _REST_SECONDS:
            raise self._unreached[1]
        try:
            return request(*arguments)
        except ServerUnreachable as error:
            self._unreached = time.monotonic(), error
            raise

    def _adopt(self, folders: list[str], resumed: frozenset[str]) -> None:
        if not resumed and not self._is_resumed and not self._named(folders) - self._own:
            return
        # Listed before the files are read: a state that does not expire has its file by then, also one of another
        # process.
        saved = {each.tinker_path: each for each in self._ask(self._listing)}
        for state in resumed & saved.keys():
            self._run = checkpoints.saved_by(saved[state]) or self._run
        named = self._named(folders) | resumed
        self._expiring |= {state for state in named & saved.keys() if saved[state].expires_at is not None}
        ids = {folder_id(folder) for folder in folders}
        unnamed = [
            each
            for state, each in sorted(saved.items())
            if state not in named | self._own and checkpoints.written_into(each) in ids
            if each.expires_at is not None or checkpoints.saved_by(each) == self._run
        ]
        if not unnamed or not (resumed or self._is_resumed):
            return
        needed = self._files.needed(unnamed, [*folders, *self._folders()])
        self._expiring |= {each.tinker_path for each in unnamed if each.expires_at is not None} & needed
        if not self._is_resumed or UNREADABLE in named | needed:
            return
        for each in unnamed:
            if each.expires_at is not None or each.tinker_path in needed:
                continue
            try:
                self._ask(self._set_expiry, each.tinker_path, TTL_DAYS * 24 * 3600)
            except Exception as error:
                logger.warning("%s is not named by any checkpoint file, but stays: %s", each.tinker_path, error)
                continue
            logger.warning(
                "%s of this run is not named by any checkpoint file in %s and expires in %d days. To keep it, "
                "move its file back to that folder and resume, or resume from it where it is.",
                each.tinker_path,
                ", ".join(folders),
                TTL_DAYS,
            )

    def _named(self, folders: Iterable[str]) -> frozenset[str]:
        """Returns the states named by any file of these folders and of the folders of checkpoint callbacks."""
        return _NONE.union(
            *(self._files.in_folder(folder, 1) for folder in folders),
            *(self._files.in_folder(folder, None, ".ckpt") for folder in self._folders()),
        )

    def replaced(self, file: str | os.PathLike[str], old: frozenset[str], new: frozenset[str] = _NONE) -> None:
        """Deletes the `old` states of a file that was overwritten with `new` ones or removed, if no file names them."""
        self._unwritten[str(file)] = new
        self._replaced |= dict.fromkeys(old - new - {UNREADABLE}, str(file))
        self.release()

    def release(self, *, all_written: bool = False) -> None:
        """Deletes replaced states, unless files are still being written; `all_written` overrides the check."""
        written = [
            file for file, states in self._unwritten.items() if not states or states <= self._files.in_file(file)
        ]
        for file in written:
            del self._unwritten[file]
        if self._unwritten and not all_written:
            return
        replaced, self._replaced = self._replaced, {}
        for state, file in replaced.items():
            try:
                if not self._states_near(file) & {state, UNREADABLE}:
                    self._expiring.discard(state)
                    self._ask(self._delete, state)
            except ServerUnreachable as error:
                self._replaced[state] = file
                logger.warning(
                    "%s is not named by any checkpoint file, but the server could not be reached to delete it. This is "
                    "tried again at the next checkpoint and at the end of the fit; later, `tinker-lightning "
                    "checkpoints prune` deletes it: %s",
                    state,
                    error,
                )
            except Unsupported as error:
                if not self._warned:
                    logger.warning("states of removed checkpoint files stay, also those that follow: %s", error)
                self._warned = True
            except Exception as error:  # costs space on the server and nothing else
                logger.warning("%s is not named by any checkpoint file, but could not be deleted: %s", state, error)

    def _states_near(self, file: str) -> frozenset[str]:
        """Returns the states named by possible copies of a file, in its folder and folders of checkpoint callbacks."""
        near = self._files.in_folder(folder_of(file), 1, posixpath.splitext(file)[1])
        return near.union(*(self._files.in_folder(folder, None, ".ckpt") for folder in self._folders()))


class NamedStates:
    """Reads which states checkpoint files name, without running anything; only new and changed files are read."""

    def __init__(self) -> None:
        self._read: dict[str, tuple[str, frozenset[str]]] = {}

    def in_file(self, file: str) -> frozenset[str]:
        """Returns the states that a file names."""
        return self.in_folder(folder_of(file), 1, f"/{posixpath.basename(url_to_fs(file)[1])}")

    def in_folder(self, folder: str, depth: int | None, ending: str = "") -> frozenset[str]:
        """Returns the states that the files of a folder name; see `by_file`."""
        return _NONE.union(*self.by_file(folder, depth, ending).values())

    def below(self, folder: str) -> dict[str, frozenset[str]]:
        """Returns the states of each file in a folder, and of each `*.ckpt` in its sub-folders; see `by_file`."""
        return self.by_file(folder, 1) | self.by_file(folder, None, ".ckpt")

    def by_file(self, folder: str, depth: int | None, ending: str = "") -> dict[str, frozenset[str]]:
        """Returns the states of each file with an ending; without one, files that are no archives name none.

        A file that cannot be read names `UNREADABLE`, with a warning, as does a folder with the ending, by default
        .ckpt, which is a checkpoint of another format. A folder that cannot be listed raises `OSError`; one that does
        not exist has no files.
        """
        fs, root = url_to_fs(folder)
        found: dict[str, frozenset[str]] = {}
        for info in listed(fs, root, depth):
            path, is_folder = info["name"].rstrip("/"), info["type"] == "directory"
            if not path.endswith(ending) or (is_folder and not path.endswith(ending or ".ckpt")):
                continue
            # Whatever is neither, such as a pipe, is not opened: that might take forever.
            if not is_folder and (info["type"] != "file" or (not ending and is_of_others(fs, path))):
                continue
            file, version = fs.unstrip_protocol(path), "folder" if is_folder else str(info)
            if self._read.get(file, ("",))[0] != version:
                self._read[file] = version, _unreadable(file, "a folder") if is_folder else _read_states(fs, file)
            found[file] = self._read[file][1]
        return found

    def needed(self, states: Iterable[Checkpoint], folders: Iterable[str]) -> frozenset[str]:
        """Returns what folders and their sub-folders name, and those of the states that something there may need.

        What names no state may be a file in another format. So a state of a checkpoint file may be needed if something
        has the name of its file, whatever its ending, or if something that cannot be read has the same ending.
        """
        needed, names, endings = set[str](), set[str](), set[str]()
        for folder in folders:
            read = self.below(folder)
            needed |= _NONE.union(*read.values())
            fs, root = url_to_fs(folder)
            for info in listed(fs, root, None):
                path = info["name"].rstrip("/")
                found = read.get(fs.unstrip_protocol(path), _UNKNOWN)
                is_pipe = info["type"] == "other" and not info.get("islink")
                if not is_pipe and not found - _UNKNOWN:
                    names |= set(accumulate(posixpath.basename(path).split("."), "{}.{}".format))
                    endings |= {posixpath.splitext(path)[1]} if found else set()
        for each in states:
            stem, ending = posixpath.splitext(checkpoints.file_of(each) or "")
            if not stem or stem in names or ending in endings:
                needed.add(each.tinker_path)
        return frozenset(needed)


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
        return _unreadable(file, str(error).partition("\n")[0])
    return frozenset(states)


def _unreadable(file: str, reason: str) -> frozenset[str]:
    logger.warning("%s could not be read; remote states are kept while it may name one: %s", file, reason)
    return _UNKNOWN
