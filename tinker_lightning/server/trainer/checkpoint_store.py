"""Saved adapters on disk: PEFT folders with the optimizer state and a readable JSON summary.

    <root>/<run>/<kind>/<name>/
        adapter_config.json, adapter_model.safetensors    loads in peft, transformers and vLLM
        optimizer.safetensors                             AdamW state (kind `weights` only)
        checkpoint.json                                   base model, LoRA config, steps, token budget, expiry

The files of an encrypted adapter have the suffix `.age`.
A checkpoint is written to a temporary folder and renamed, so that readers never see a partial one. Several processes
may share a root.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import json
import logging
import re
import threading
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, BinaryIO, Literal, Self, get_args

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from tinker_lightning.errors import InvalidInput, NotFound
from tinker_lightning.server.engine.interface import AdapterWeights
from tinker_lightning.server.keys import Owner
from tinker_lightning.types import LoraConfig
from tinker_lightning.wire import folders
from tinker_lightning.wire import json as wire_json

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from tinker_lightning.server.engine.interface import PeftConfig

logger = logging.getLogger("tinker_lightning.server")

Kind = Literal["weights", "sampler_weights", "external_weights"]

_WEIGHTS, _OPTIMIZER, _SUMMARY = "adapter_model.safetensors", "optimizer.safetensors", "checkpoint.json"
# The files of a checkpoint that other programs need.
_ADAPTER_FILES = ("adapter_config.json", _WEIGHTS)
_ENCRYPTED = ".age"
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,127}")
_RUN = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._:-]{0,127}")
_PATH = re.compile(r"tinker://([^/]+)/([^/]+)/([^/]+)")
# The number of times that a read is repeated while the checkpoint is being overwritten.
_ATTEMPTS = 100


@dataclass(frozen=True, slots=True)
class TinkerPath:
    """A checkpoint path, `tinker://<run>/<kind>/<name>`."""

    run: str
    kind: Kind
    name: str

    def __post_init__(self) -> None:
        if not _NAME.fullmatch(self.name):
            raise InvalidInput(
                f"path: {self.name!r} is not a valid checkpoint name. Use up to 128 letters, digits, '.', '_' and '-'. "
                "It must not begin with '.' or '-'."
            )
        check_run(self.run)
        if self.kind not in get_args(Kind):
            raise NotFound(f"unknown checkpoint kind {self.kind!r}; use one of {', '.join(get_args(Kind))}")

    @classmethod
    def parse(cls, text: str) -> TinkerPath:
        """Parses a `tinker://` path."""
        match = _PATH.fullmatch(text)
        if match is None:
            raise InvalidInput(f"path: {text!r} is not of the form tinker://<run>/<kind>/<name>")
        run, kind, name = match.groups()
        return cls(run, kind, name)  # type: ignore[arg-type]  # checked in __post_init__

    def __str__(self) -> str:
        return f"tinker://{self.run}/{self.kind}/{self.name}"


def check_run(run: str) -> None:
    """Raises `NotFound` for an invalid run name, so that it never reaches the file system."""
    if not _RUN.fullmatch(run):
        raise NotFound(f"there is no training run {run!r}")


@dataclass(frozen=True, slots=True)
class CheckpointSummary:
    """The contents of `checkpoint.json`."""

    tinker_path: str
    base_model: str
    lora_config: LoraConfig
    steps: int
    created_at: str
    expires_at: str | None = None
    size_bytes: int = 0
    user_metadata: dict[str, str] | None = None
    format: int = 1
    token_budget: int | None = None
    encrypted: bool = False
    owner: str | None = None  # the name of the key that saved it

    @property
    def path(self) -> TinkerPath:
        """Path of the checkpoint."""
        return TinkerPath.parse(self.tinker_path)

    @property
    def adapter_files(self) -> list[str]:
        """Names of the files that other programs need."""
        return [name + _ENCRYPTED * self.encrypted for name in _ADAPTER_FILES]

    @property
    def is_expired(self) -> bool:
        """True after the expiry."""
        return self.expires_at is not None and datetime.fromisoformat(self.expires_at) <= datetime.now(UTC)


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
            self._encrypt_file(str(file), f"{file}{_ENCRYPTED}", self._recipients)
            file.unlink()


class CheckpointStore:
    """The checkpoints in a folder. All methods are thread-safe.

    The checkpoints of other owners are not found, with the error of a path that does not exist.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        self.owner = Owner()
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
        try:
            self.summary(path)  # removes an expired checkpoint
        except (NotFound, InvalidInput):
            pass
        else:
            if not overwrite:
                raise _name_conflict(path)
        try:
            with self._lock, folders.new_folder(folder, overwrite=overwrite) as part:
                tensors = {name: tensor.detach().contiguous() for name, tensor in weights.tensors.items()}
                save_file(tensors, part / _WEIGHTS, metadata={"format": "pt"})
                peft_config.save_pretrained(str(part))
                if training_state is not None:
                    save_file({name: tensor.contiguous() for name, tensor in training_state.items()}, part / _OPTIMIZER)
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
                    encrypted=encryption is not None,
                    owner=self.owner.name,
                )
                _write_summary(part, summary)
        except FileExistsError as error:
            raise _name_conflict(path) from error
        return summary

    def summary(self, path: TinkerPath) -> CheckpointSummary:
        """Returns the summary of a checkpoint. An expired checkpoint is removed and raises `NotFound`."""
        folder = self._folder(path)
        summary = _read_summary(path, folder)
        if not self.owner.owns(summary.owner):
            raise _not_found(path)
        if not summary.is_expired:
            return summary
        with self._lock:
            if _read_summary(path, folder) == summary:  # otherwise it has been overwritten in the meantime
                folders.remove_folder(folder)
        raise NotFound(f"{path} expired at {summary.expires_at}")

    def load(self, path: TinkerPath, *, training_state: bool = False) -> SavedAdapter:
        """Loads a checkpoint. All tensors come from the same save, even if it is overwritten meanwhile."""
        if training_state and path.kind != "weights":
            raise InvalidInput(
                f"path: {path} has no optimizer state. Load only its weights, or a checkpoint written by save_state."
            )
        folder = self._folder(path)
        for _ in range(_ATTEMPTS):
            summary = self.summary(path)
            if summary.encrypted:
                raise InvalidInput(
                    f"path: {path} is encrypted and cannot be loaded here; only its files can be downloaded"
                )
            try:
                weights = AdapterWeights(summary.lora_config, load_file(folder / _WEIGHTS))
                state = load_file(folder / _OPTIMIZER) if training_state else None
            except FileNotFoundError:
                continue  # being overwritten
            except RuntimeError as error:  # as above, between the opening by safetensors and the mapping by torch
                if "No such file" not in str(error):
                    raise
            except SafetensorError as error:
                raise InvalidInput(f"path: {path}: {folder} is damaged: {error}") from error
            else:
                if self.summary(path) == summary:
                    return SavedAdapter(summary.base_model, weights, state, summary.token_budget)
        raise InvalidInput(f"path: {path}: {folder} is damaged: a file is missing or keeps being overwritten")

    def open_adapter(self, path: TinkerPath, name: str | None = None) -> dict[str, BinaryIO]:
        """Opens the files of an adapter, all from the same save, or one of them.

        They stay readable if the checkpoint is removed.
        """
        folder = self._folder(path)
        for _ in range(_ATTEMPTS):
            summary = self.summary(path)
            names = summary.adapter_files if name is None else [name]
            if name not in (None, *summary.adapter_files):
                raise NotFound(f"{path} has no file {name!r}; it has {', '.join(summary.adapter_files)}")
            with contextlib.ExitStack() as stack, contextlib.suppress(FileNotFoundError):  # being overwritten
                files: dict[str, BinaryIO] = {each: stack.enter_context((folder / each).open("rb")) for each in names}
                if self.summary(path) == summary:
                    stack.pop_all()
                    return files
        raise InvalidInput(f"path: {path}: {folder} is damaged: a file is missing or keeps being overwritten")

    def listing(self, run: str | None = None) -> list[CheckpointSummary]:
        """Returns the checkpoints, oldest first. One that another process is overwriting may be missing."""
        if run is not None:
            check_run(run)
        summaries: dict[Path, CheckpointSummary] = {}
        with self._lock:
            for file in self.root.glob(f"{'*' if run is None else _folder_name(run)}/*/*/{_SUMMARY}"):
                folder = folders.original_path(file.parent)
                if folder in summaries or folder.name.startswith(folders.LEFTOVERS):
                    continue
                try:
                    path = wire_json.parse(CheckpointSummary, file.read_bytes()).path
                    if self._folder(path) == folder:
                        summaries[folder] = self.summary(path)
                except (NotFound, OSError):
                    continue  # expired, or deleted in the meantime
                except InvalidInput as error:
                    logger.warning("ignoring %s, which is not a valid checkpoint: %s", file, error)
        return sorted(summaries.values(), key=lambda summary: (summary.created_at, summary.tinker_path))

    def delete(self, path: TinkerPath) -> None:
        """Deletes a checkpoint."""
        self.summary(path)
        with self._lock:
            folders.remove_folder(self._folder(path))

    def set_ttl(self, path: TinkerPath, ttl_seconds: int | None) -> None:
        """Sets the time after which a checkpoint expires; None means never."""
        with self._lock:
            summary = dataclasses.replace(self.summary(path), expires_at=_expiry(ttl_seconds))
            _write_summary(self._folder(path), summary)

    def _folder(self, path: TinkerPath) -> Path:
        return self.root / _folder_name(path.run) / path.kind / path.name


def _folder_name(run: str) -> str:
    return run.replace(":", "+")  # some file systems do not allow colons


def _name_conflict(path: TinkerPath) -> InvalidInput:
    overwriting = ", or set overwrite=True" if path.kind == "weights" else ""
    return InvalidInput(f"path: {path} already exists. Choose another name{overwriting}.")


def _expiry(ttl_seconds: int | None) -> str | None:
    return None if ttl_seconds is None else (datetime.now(UTC) + timedelta(seconds=ttl_seconds)).isoformat()


def _read_summary(path: TinkerPath, folder: Path) -> CheckpointSummary:
    for _ in range(_ATTEMPTS):
        if not folders.find_folder(folder):
            break
        try:
            return wire_json.parse(CheckpointSummary, (folder / _SUMMARY).read_bytes())
        except FileNotFoundError:
            continue  # being overwritten
        except InvalidInput as error:
            raise InvalidInput(f"{path}: {folder / _SUMMARY} is damaged: {error}") from error
    raise _not_found(path)


def _not_found(path: TinkerPath) -> NotFound:
    return NotFound(f"{path}: there is no such checkpoint")


def _write_summary(folder: Path, summary: CheckpointSummary) -> None:
    part = folder / f".{_SUMMARY}"
    part.write_text(json.dumps(dataclasses.asdict(summary), indent=2) + "\n")
    folders.sync(part)
    part.replace(folder / _SUMMARY)
