"""Saved adapters on disk: PEFT folders, the optimizer's state beside the weights, and one readable JSON.

    <root>/<run>/<kind>/<name>/
        adapter_config.json, adapter_model.safetensors    loads in peft, transformers and vLLM
        optimizer.safetensors                             AdamW's moments (kind `weights` only)
        checkpoint.json                                   what it is, and of which model

A folder is written beside its place and renamed, so that a name never leads to half a checkpoint.
"""

from __future__ import annotations

import dataclasses
import json
import os
import re
import shutil
import tempfile
import threading
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from safetensors.torch import load_file, save_file

from tinker_lightning.errors import InvalidInput, NotFound
from tinker_lightning.server.engine.lora import LoraWeights
from tinker_lightning.types import LoraConfig
from tinker_lightning.wire import json as wire_json

if TYPE_CHECKING:
    import peft
    from torch import Tensor

Kind = Literal["weights", "sampler_weights"]

_WEIGHTS, _OPTIMIZER, _SUMMARY = "adapter_model.safetensors", "optimizer.safetensors", "checkpoint.json"
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,127}")
_RUN = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._:-]{0,127}")
_PATH = re.compile(r"tinker://([^/]+)/([^/]+)/([^/]+)")


@dataclass(frozen=True, slots=True)
class TinkerPath:
    """`tinker://<run>/<kind>/<name>`: the address of something saved."""

    run: str
    kind: Kind
    name: str

    def __post_init__(self) -> None:
        if not _NAME.fullmatch(self.name):
            raise InvalidInput(
                f"path: {self.name!r} is no checkpoint name. Use up to 128 letters, digits, '.', '_' and '-', not "
                "beginning with '.' or '-', and no folders."
            )
        if not _RUN.fullmatch(self.run):
            raise NotFound(f"there is no training run {self.run!r}")
        if self.kind not in ("weights", "sampler_weights"):
            raise NotFound(f"there is no kind of checkpoint {self.kind!r}; there are weights and sampler_weights")

    @classmethod
    def parse(cls, text: str) -> TinkerPath:
        """The address that a string spells."""
        match = _PATH.fullmatch(text)
        if match is None:
            raise InvalidInput(f"path: {text!r} is not of the form tinker://<run>/<kind>/<name>")
        run, kind, name = match.groups()
        return cls(run, kind, name)  # type: ignore[arg-type]  # checked at once

    def __str__(self) -> str:
        return f"tinker://{self.run}/{self.kind}/{self.name}"


@dataclass(frozen=True, slots=True)
class CheckpointSummary:
    """The readable JSON of a checkpoint."""

    tinker_path: str
    base_model: str
    lora_config: LoraConfig
    steps: int
    created_at: str
    expires_at: str | None = None
    size_bytes: int = 0
    user_metadata: dict[str, str] | None = None
    format: int = 1

    @property
    def path(self) -> TinkerPath:
        """Its address."""
        return TinkerPath.parse(self.tinker_path)

    @property
    def is_expired(self) -> bool:
        """Whether its time has come."""
        return self.expires_at is not None and datetime.fromisoformat(self.expires_at) <= datetime.now(UTC)


class CheckpointStore:
    """The checkpoints under one folder; any thread may use it."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._lock = threading.Lock()

    def save(
        self,
        path: TinkerPath,
        *,
        base_model: str,
        weights: LoraWeights,
        peft_config: peft.LoraConfig,
        steps: int,
        training_state: dict[str, Tensor] | None = None,
        ttl_seconds: int | None = None,
        overwrite: bool = False,
        user_metadata: dict[str, str] | None = None,
    ) -> CheckpointSummary:
        """Writes a checkpoint, whole or not at all.

        Raises:
            InvalidInput: If the name is taken and `overwrite` is not set.
        """
        folder = self._folder(path)
        if folder.exists() and not overwrite:
            raise InvalidInput(f"path: {path} exists already. Choose another name, or set overwrite=True.")
        folder.parent.mkdir(parents=True, exist_ok=True)
        part = Path(tempfile.mkdtemp(prefix=".part-", dir=folder.parent))
        try:
            tensors = {name: tensor.detach().contiguous() for name, tensor in weights.tensors.items()}
            save_file(tensors, part / _WEIGHTS, metadata={"format": "pt"})
            peft_config.save_pretrained(str(part))
            if training_state is not None:
                save_file({name: tensor.contiguous() for name, tensor in training_state.items()}, part / _OPTIMIZER)
            summary = CheckpointSummary(
                tinker_path=str(path),
                base_model=base_model,
                lora_config=weights.config,
                steps=steps,
                created_at=datetime.now(UTC).isoformat(),
                expires_at=_expiry(ttl_seconds),
                size_bytes=sum(file.stat().st_size for file in part.iterdir()),
                user_metadata=user_metadata,
            )
            _write_summary(part, summary)
            part.chmod(0o755)
            for file in part.iterdir():
                _sync(file)
            with self._lock:
                _put(part, folder)
            _sync(folder.parent)
        finally:
            shutil.rmtree(part, ignore_errors=True)
        return summary

    def summary(self, path: TinkerPath) -> CheckpointSummary:
        """What a checkpoint is.

        Raises:
            NotFound: If there is none, or its time has come.
        """
        folder = self._folder(path)
        try:
            summary = wire_json.parse(CheckpointSummary, (folder / _SUMMARY).read_bytes())
        except OSError as error:
            raise NotFound(f"{path}: there is no such checkpoint") from error
        if summary.is_expired:
            self._remove(folder)
            raise NotFound(f"{path}: its time to live ended at {summary.expires_at}")
        return summary

    def weights(self, path: TinkerPath) -> LoraWeights:
        """The saved weights."""
        config = self.summary(path).lora_config
        return LoraWeights(config, load_file(self._folder(path) / _WEIGHTS))

    def training_state(self, path: TinkerPath) -> dict[str, Tensor]:
        """The saved optimizer state.

        Raises:
            InvalidInput: If it was saved for sampling only.
        """
        file = self._folder(path) / _OPTIMIZER
        if not file.exists():
            raise InvalidInput(f"{path} holds no optimizer state. Load it without, or load one made by save_state.")
        return load_file(file)

    def listing(self, run: str | None = None) -> list[CheckpointSummary]:
        """All checkpoints, or those of one run, oldest first."""
        pattern = f"{_folder_name(run)}/*/*/{_SUMMARY}" if run is not None else f"*/*/*/{_SUMMARY}"
        found: list[CheckpointSummary] = []
        for file in self.root.glob(pattern):
            if file.parent.name.startswith("."):
                continue
            try:
                found.append(self.summary(wire_json.parse(CheckpointSummary, file.read_bytes()).path))
            except (NotFound, OSError):
                continue  # expired, or deleted meanwhile
        return sorted(found, key=lambda summary: (summary.created_at, summary.tinker_path))

    def delete(self, path: TinkerPath) -> None:
        """Removes a checkpoint."""
        self.summary(path)
        self._remove(self._folder(path))

    def set_ttl(self, path: TinkerPath, ttl_seconds: int | None) -> None:
        """Sets when a checkpoint is removed; None keeps it."""
        summary = dataclasses.replace(self.summary(path), expires_at=_expiry(ttl_seconds))
        _write_summary(self._folder(path), summary)

    def _folder(self, path: TinkerPath) -> Path:
        folder = self.root / _folder_name(path.run) / path.kind / path.name
        old = _aside(folder)
        if not folder.exists() and old.exists():
            with self._lock:  # an overwrite was cut off between its two renames
                if not folder.exists() and old.exists():
                    old.rename(folder)
        return folder

    def _remove(self, folder: Path) -> None:
        gone = Path(tempfile.mkdtemp(prefix=".gone-", dir=folder.parent))
        with self._lock:
            if folder.exists():
                folder.rename(gone / folder.name)
        shutil.rmtree(_aside(folder), ignore_errors=True)  # else it would come back in the removed one's place
        shutil.rmtree(gone, ignore_errors=True)


def _folder_name(run: str) -> str:
    return run.replace(":", "+")  # a colon is not allowed in a file name everywhere


def _aside(folder: Path) -> Path:
    return folder.with_name(f".old-{folder.name}")


def _put(part: Path, folder: Path) -> None:
    old = _aside(folder)
    shutil.rmtree(old, ignore_errors=True)
    if folder.exists():
        folder.rename(old)
    part.rename(folder)
    shutil.rmtree(old, ignore_errors=True)


def _expiry(ttl_seconds: int | None) -> str | None:
    return None if ttl_seconds is None else (datetime.now(UTC) + timedelta(seconds=ttl_seconds)).isoformat()


def _write_summary(folder: Path, summary: CheckpointSummary) -> None:
    part = folder / f".{_SUMMARY}"
    part.write_text(json.dumps(dataclasses.asdict(summary), indent=2) + "\n")
    _sync(part)
    part.replace(folder / _SUMMARY)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
