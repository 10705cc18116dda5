"""Saved adapters on disk: PEFT folders with the optimizer state and a readable JSON summary.

    <root>/<run>/<kind>/<name>/
        adapter_config.json, adapter_model.safetensors    loads in peft, transformers and vLLM
        optimizer.safetensors                             AdamW state (kind `weights` only)
        checkpoint.json                                   base model, LoRA config, steps, token budget, expiry, SHA-256

The files of an encrypted adapter have the suffix `.age`. `checkpoint.json` has the SHA-256 of each other file and of
its own contents, and nothing is loaded that differs from it.
A checkpoint is written to a temporary folder and renamed, so that readers never see a partial one. Several processes
may share a root.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import logging
import shutil
import tempfile
import threading
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, BinaryIO, Self

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from tinker_lightning.errors import InvalidInput, NotFound, NotStored
from tinker_lightning.server.engine.interface import AdapterWeights
from tinker_lightning.server.keys import Owner
from tinker_lightning.server.trainer.checkpoint_summary import (
    ATTEMPTS,
    ENCRYPTED,
    FORMAT,
    OPTIMIZER,
    SUMMARY,
    WEIGHTS,
    CheckpointSummary,
    TinkerPath,
    check_run,
    damaged,
    not_found,
    read_summary,
    sha256,
    write_summary,
)
from tinker_lightning.server.trainer.memory import format_size
from tinker_lightning.wire import folders

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from pathlib import Path

    from tinker_lightning.server.engine.interface import PeftConfig

logger = logging.getLogger("tinker_lightning.server")

# The space that a checkpoint takes in addition to its tensors.
_OTHER_BYTES = 64 << 10


@dataclass(frozen=True, slots=True)
class SavedAdapter:
    """The contents of a checkpoint, with the training state only if it was requested."""

    base_model: str
    weights: AdapterWeights
    training_state: dict[str, Tensor] | None
    token_budget: int | None = None


class Encryption:
    """Encrypts files with age, so that only the given recipients can read them.

    Args:
        recipients: Public keys: native ones (`age1...`) or those of SSH.

    Raises:
        InvalidInput: If a key is invalid, there is none, or the extra `age` is not installed.
    """

    def __init__(self, recipients: Sequence[str]) -> None:
        try:
            import pyrage
        except ImportError as error:
            raise InvalidInput(
                "age_encryption_recipients: this trainer cannot encrypt, because pyrage is not installed. Install it "
                "where the trainer runs: python -m pip install 'tinker-lightning[age]'"
            ) from error
        if not recipients:
            raise InvalidInput(
                "age_encryption_recipients: give at least one public key, or omit it to save plain files"
            )
        self._recipients = []
        self._encrypt_file = pyrage.encrypt_file
        for i, key in enumerate(recipients):
            kind = pyrage.ssh if key.startswith("ssh-") else pyrage.x25519
            try:
                self._recipients.append(kind.Recipient.from_str(key))
            except pyrage.RecipientError as error:
                raise InvalidInput(
                    f"age_encryption_recipients: entry {i} is not a public key of age (age1...) or SSH: {error}"
                ) from error

    def encrypt(self, folder: Path) -> None:
        """Replaces each file of a folder by an encrypted one, whose name has the suffix `.age`."""
        for file in list(folder.iterdir()):
            self._encrypt_file(str(file), f"{file}{ENCRYPTED}", self._recipients)
            file.unlink()


class CheckpointStore:
    """The checkpoints in a folder. All methods are thread-safe.

    The checkpoints of other owners are not found, with the error of a path that does not exist.

    Args:
        root: The folder.
        disk_limit: The most bytes that all checkpoints take together.
    """

    def __init__(self, root: Path, disk_limit: int | None = None) -> None:
        if disk_limit is not None and disk_limit <= 0:
            raise InvalidInput(f"disk_limit must be a positive number of bytes, got {disk_limit}")
        self.root = root
        self.disk_limit = disk_limit
        self.owner = Owner()
        self._is_clean = threading.Event()  # once this process has removed what killed saves have left
        # By file, with the inode, time and size that it had: a listing parses each version once.
        self._parsed: dict[Path, tuple[tuple[int, int, int], CheckpointSummary | None]] = {}
        # Serializes operations that read a checkpoint and then change it. Other processes are isolated by renames only.
        self._lock = threading.RLock()

    def owned_by(self, owner: Owner) -> Self:
        """Returns a view that has the checkpoints of an owner only, and shares everything else."""
        view = copy.copy(self)
        view.owner = owner
        return view

    def save(
        self,
        path: TinkerPath,
        *,
        base_model: str,
        weights: AdapterWeights,
        peft_config: PeftConfig,
        steps: int,
        token_budget: int | None = None,
        training_state: Mapping[str, Tensor] | None = None,
        ttl_seconds: int | None = None,
        overwrite: bool = False,
        user_metadata: dict[str, str] | None = None,
        encryption: Encryption | None = None,
    ) -> CheckpointSummary:
        """Writes a checkpoint atomically; raises `InvalidInput` if it exists and `overwrite` is not set."""
        folder = self._folder(path)
        if not self._is_clean.is_set():
            self._remove_leftovers()
        try:
            self.summary(path)  # removes an expired checkpoint
        except (NotFound, InvalidInput):
            pass
        else:
            if not overwrite:
                raise _name_conflict(path)
        state = training_state or {}
        size = _OTHER_BYTES + weights.nbytes + sum(tensor.nbytes for tensor in state.values())
        try:
            with self._lock, self._storing(path, size), folders.new_folder(folder, overwrite=overwrite) as part:
                tensors = {name: tensor.detach().contiguous() for name, tensor in weights.tensors.items()}
                save_file(tensors, part / WEIGHTS, metadata={"format": "pt"})
                peft_config.save_pretrained(str(part))
                if training_state is not None:
                    save_file({name: tensor.contiguous() for name, tensor in training_state.items()}, part / OPTIMIZER)
                if encryption is not None:
                    encryption.encrypt(part)
                summary = CheckpointSummary(
                    tinker_path=str(path),
                    base_model=base_model,
                    lora_config=weights.config,
                    steps=steps,
                    created_at=datetime.now(UTC).isoformat(),
                    expires_at=_expiry(ttl_seconds),
                    size_bytes=sum(file.stat().st_size for file in part.iterdir()),
                    user_metadata=user_metadata,
                    token_budget=token_budget,
                    format=FORMAT,
                    encrypted=encryption is not None,
                    owner=self.owner.name,
                    sha256={file.name: sha256(file) for file in part.iterdir()},
                )
                write_summary(part, summary)
        except FileExistsError as error:
            raise _name_conflict(path) from error
        return summary

    def summary(self, path: TinkerPath) -> CheckpointSummary:
        """Returns the summary of a checkpoint. An expired checkpoint is removed and raises `NotFound`."""
        folder = self._folder(path)
        summary = read_summary(path, folder)
        if not self.owner.owns(summary.owner):
            raise not_found(path)
        if not summary.is_expired:
            return summary
        with self._lock:
            if read_summary(path, folder) == summary:  # otherwise it has been overwritten in the meantime
                folders.remove_folder(folder)
        raise NotFound(f"{path} expired at {summary.expires_at}")

    def load(self, path: TinkerPath, *, training_state: bool = False) -> SavedAdapter:
        """Loads a checkpoint. All tensors come from the same save, even if it is overwritten meanwhile."""
        if training_state and path.kind != "weights":
            raise InvalidInput(
                f"path: {path} has no optimizer state. Load only its weights, or a checkpoint written by save_state."
            )
        folder = self._folder(path)
        for _ in range(ATTEMPTS):
            summary = self.summary(path)
            if summary.encrypted:
                raise InvalidInput(
                    f"path: {path} is encrypted and cannot be loaded here; only its files can be downloaded"
                )
            names = [WEIGHTS, *([OPTIMIZER] if training_state else [])]
            try:
                changed = summary.changed_file({name: folder / name for name in names})
                if changed is None:
                    loaded = [load_file(folder / name) for name in names]
            except FileNotFoundError:
                continue  # being overwritten
            except RuntimeError as error:  # as above, between the opening by safetensors and the mapping by torch
                if "No such file" not in str(error):
                    raise
                continue
            except SafetensorError as error:
                raise InvalidInput(f"path: {path}: {folder} is damaged: {error}") from error
            if self.summary(path) != summary:
                continue
            if changed is not None:
                raise damaged(path, folder / changed)
            for name, tensors in zip(names, loaded, strict=True):
                wrong = next((each for each, tensor in tensors.items() if not torch.isfinite(tensor).all()), None)
                if wrong is not None:
                    raise InvalidInput(f"path: {path}: {folder / name} is damaged: {wrong} is not finite")
            weights = AdapterWeights(summary.lora_config, loaded[0])
            return SavedAdapter(
                summary.base_model, weights, loaded[1] if training_state else None, summary.token_budget
            )
        raise InvalidInput(f"path: {path}: {folder} is damaged: a file is missing or keeps being overwritten")

    def open_adapter(self, path: TinkerPath, name: str | None = None) -> dict[str, BinaryIO]:
        """Opens the files of an adapter, all from the same save, or one of them.

        They stay readable if the checkpoint is removed.
        """
        folder = self._folder(path)
        for _ in range(ATTEMPTS):
            summary = self.summary(path)
            names = summary.adapter_files if name is None else [name]
            if name not in (None, *summary.adapter_files):
                raise NotFound(f"{path} has no file {name!r}; it has {', '.join(summary.adapter_files)}")
            with contextlib.ExitStack() as stack, contextlib.suppress(FileNotFoundError):  # being overwritten
                files: dict[str, BinaryIO] = {each: stack.enter_context((folder / each).open("rb")) for each in names}
                changed = summary.changed_file(files)
                if self.summary(path) == summary:
                    if changed is not None:
                        raise damaged(path, folder / changed)
                    stack.pop_all()
                    return files
        raise InvalidInput(f"path: {path}: {folder} is damaged: a file is missing or keeps being overwritten")

    def listing(self, run: str | None = None) -> list[CheckpointSummary]:
        """Returns the checkpoints, oldest first. One that another process is overwriting may be missing."""
        if run is not None:
            check_run(run)
        files: dict[Path, Path] = {}
        for file in self.root.glob(f"{'*' if run is None else _folder_name(run)}/*/*/{SUMMARY}"):
            folder = folders.original_path(file.parent)
            if not folder.name.startswith(folders.LEFTOVERS):
                files.setdefault(folder, file)
        summaries = []
        for folder, file in files.items():
            summary = self._listed(folder, file)
            if summary is None or not self.owner.owns(summary.owner):
                continue
            with contextlib.suppress(NotFound, OSError):  # expired, or deleted in the meantime
                if summary.is_expired or file.parent != folder:
                    summary = self.summary(summary.path)  # removes it, or restores it from its backup
                summaries.append(summary)
        if run is None:
            for file in set(self._parsed.copy()) - set(files.values()):  # those that were deleted
                self._parsed.pop(file, None)
        return sorted(summaries, key=lambda summary: (summary.created_at, summary.tinker_path))

    def _listed(self, folder: Path, file: Path) -> CheckpointSummary | None:
        """Returns what a file contains, or None if it is not the valid summary of a checkpoint in this folder."""
        version = 0, 0, 0
        try:
            status = file.stat()
            version = status.st_ino, status.st_mtime_ns, status.st_size
            known = self._parsed.get(file)
            if known is not None and known[0] == version:
                return known[1]
            summary: CheckpointSummary | None = CheckpointSummary.parse(file.read_bytes())
            if summary is not None and self._folder(summary.path) != folder:
                raise InvalidInput(f"it belongs to {summary.tinker_path}")
        except FileNotFoundError:
            return None  # deleted in the meantime
        except (NotFound, InvalidInput, OSError) as error:
            logger.warning("ignoring %s, which is not a valid checkpoint: %s", file, error)
            summary = None
        self._parsed[file] = version, summary
        return summary

    def delete(self, path: TinkerPath) -> None:
        """Deletes a checkpoint, also a damaged one unless there are several owners."""
        try:
            self.summary(path)
        except InvalidInput:
            if self.owner.name is not None:
                raise
        with self._lock:
            folders.remove_folder(self._folder(path))

    def set_ttl(self, path: TinkerPath, ttl_seconds: int | None) -> None:
        """Sets the time after which a checkpoint expires; None means never."""
        with self._lock:
            summary = dataclasses.replace(self.summary(path), expires_at=_expiry(ttl_seconds), checksum="")
            with self._storing(path, _OTHER_BYTES, replaces=True):
                folder = self._folder(path)
                with folders.temporary_folder(folder.parent) as part:
                    write_summary(part, summary)
                    (part / SUMMARY).replace(folder / SUMMARY)

    def prepare(self) -> None:
        """Creates the folder, checks that it can be written, and removes what expired or was never finished.

        Raises:
            OSError: If the folder cannot be written.
        """
        self.root.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=self.root):
            pass
        self._remove_leftovers()
        self.listing()

    def _remove_leftovers(self) -> None:
        """Removes the folders of saves whose process was killed."""
        self._is_clean.set()
        for parent in self.root.glob("*/*"):
            with contextlib.suppress(OSError):  # not a folder, or one that cannot be read
                folders.remove_leftovers(parent)

    @contextlib.contextmanager
    def _storing(self, path: TinkerPath, size: int, *, replaces: bool = False) -> Iterator[None]:
        """Raises `NotStored` if a checkpoint exceeds the limit, or if it cannot be written in the `with` block."""
        if self.disk_limit is not None and not replaces:
            others = sum(each.size_bytes for each in self.owned_by(Owner()).listing() if each.path != path)
            if others + size > self.disk_limit:
                raise NotStored(
                    f"{path} takes {format_size(size)}, but the other checkpoints take {format_size(others)} of the "
                    f"{format_size(self.disk_limit)} that are allowed. Delete some, or let them expire (ttl_seconds); "
                    "the limit is set by serve --disk-limit, or EmbeddedTrainer(disk_limit=)."
                )
        try:
            yield
        except FileExistsError:
            raise
        except (OSError, SafetensorError) as error:
            reason = (error.strerror if isinstance(error, OSError) else None) or str(error)
            free = ""
            with contextlib.suppress(OSError):
                free = f", and {format_size(shutil.disk_usage(self.root).free)} are free there"
            raise NotStored(
                f"{path} cannot be written to {self._folder(path)} where the trainer runs: {reason}. It takes "
                f"{format_size(size)}{free}. Nothing was saved and the model is unchanged: delete checkpoints, free "
                "space, or let the trainer write there, and save again."
            ) from error

    def _folder(self, path: TinkerPath) -> Path:
        return self.root / _folder_name(path.run) / path.kind / path.name


def _folder_name(run: str) -> str:
    return run.replace(":", "+")  # some file systems do not allow colons


def _name_conflict(path: TinkerPath) -> InvalidInput:
    overwriting = ", or set overwrite=True" if path.kind == "weights" else ""
    return InvalidInput(f"path: {path} already exists. Choose another name{overwriting}.")


def _expiry(ttl_seconds: int | None) -> str | None:
    return None if ttl_seconds is None else (datetime.now(UTC) + timedelta(seconds=ttl_seconds)).isoformat()
