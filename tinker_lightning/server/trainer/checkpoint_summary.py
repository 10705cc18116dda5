"""The summary of a checkpoint, `checkpoint.json`, and the paths of checkpoints."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import re
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, Literal, get_args

from tinker_lightning.errors import InvalidInput, NotFound
from tinker_lightning.types import LoraConfig
from tinker_lightning.wire import folders
from tinker_lightning.wire import json as wire_json

if TYPE_CHECKING:
    from collections.abc import Mapping
Kind = Literal["weights", "sampler_weights", "external_weights"]

WEIGHTS, OPTIMIZER, SUMMARY = "adapter_model.safetensors", "optimizer.safetensors", "checkpoint.json"
# The files of a checkpoint that other programs need.
_ADAPTER_FILES = ("adapter_config.json", WEIGHTS)
ENCRYPTED = ".age"
# The version of `checkpoint.json`. Checkpoints of version 1 have no checksums, and no release has written them.
FORMAT = 2
# The number of times that a read is repeated while the checkpoint is being overwritten.
ATTEMPTS = 100
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,127}")
_RUN = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._:-]{0,127}")
_PATH = re.compile(r"tinker://([^/]+)/([^/]+)/([^/]+)")


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
    format: int = 0
    token_budget: int | None = None
    encrypted: bool = False
    owner: str | None = None  # the name of the key that saved it
    sha256: dict[str, str] = dataclasses.field(default_factory=dict)  # by file
    checksum: str = ""  # of all other fields

    def __post_init__(self) -> None:
        if self.format != FORMAT:
            raise InvalidInput(
                f"its format is {self.format}, and this version of tinker-lightning reads {FORMAT}; load it with the "
                "version that has written it"
            )
        for name, least in (("steps", 0), ("size_bytes", 0), ("token_budget", 1)):
            value = getattr(self, name)
            if value is not None and value < least:
                raise InvalidInput(f"{name} must be at least {least}, got {value}")
        for name in ("created_at", "expires_at"):
            try:
                moment = None if getattr(self, name) is None else datetime.fromisoformat(getattr(self, name))
            except ValueError as error:
                raise InvalidInput(f"{name}: {error}") from error
            if moment is not None and moment.tzinfo is None:
                raise InvalidInput(f"{name}: has no time zone")
        if self.checksum and self.checksum != _checksum(self):
            raise InvalidInput("its contents differ from its checksum, so it was changed after it was written")

    @classmethod
    def parse(cls, content: bytes) -> CheckpointSummary:
        """Parses the file; raises `InvalidInput` if it is not what was written."""
        summary = wire_json.parse(cls, content)
        if not summary.checksum:
            raise InvalidInput("checksum: missing")
        return summary

    @property
    def path(self) -> TinkerPath:
        """Path of the checkpoint."""
        return TinkerPath.parse(self.tinker_path)

    @property
    def adapter_files(self) -> list[str]:
        """Names of the files that other programs need."""
        return [name + ENCRYPTED * self.encrypted for name in _ADAPTER_FILES]

    def changed_file(self, files: Mapping[str, Path | BinaryIO]) -> str | None:
        """Returns the first of these files whose SHA-256 is not the one that was saved."""
        return next((name for name, file in files.items() if sha256(file) != self.sha256.get(name)), None)

    @property
    def is_expired(self) -> bool:
        """True after the expiry."""
        return self.expires_at is not None and datetime.fromisoformat(self.expires_at) <= datetime.now(UTC)


def read_summary(path: TinkerPath, folder: Path) -> CheckpointSummary:
    """Reads the file of a checkpoint; raises `NotFound` if there is none, and `InvalidInput` if it is damaged."""
    for _ in range(ATTEMPTS):
        if not folders.find_folder(folder):
            break
        try:
            summary = CheckpointSummary.parse((folder / SUMMARY).read_bytes())
            if summary.tinker_path != str(path):
                raise InvalidInput(f"it belongs to {summary.tinker_path}, from where it was moved or copied")
            return summary
        except FileNotFoundError:
            continue  # being overwritten
        except (InvalidInput, OSError) as error:
            raise InvalidInput(f"{path}: {folder / SUMMARY} is damaged: {error}") from error
    raise not_found(path)


def not_found(path: TinkerPath) -> NotFound:
    """Returns the error for a checkpoint that does not exist, or that belongs to another owner."""
    return NotFound(f"{path}: there is no such checkpoint")


def damaged(path: TinkerPath, file: Path) -> InvalidInput:
    """Returns the error for a file whose SHA-256 is not the one that was saved."""
    return InvalidInput(
        f"path: {path}: {file} is damaged: its SHA-256 is not the one in {SUMMARY}. Restore the file from a backup, "
        "or use another checkpoint."
    )


def write_summary(folder: Path, summary: CheckpointSummary) -> None:
    """Writes the file, with its checksum, into a folder that nobody reads yet."""
    content = dataclasses.asdict(summary) | {"checksum": _checksum(summary)}
    (folder / SUMMARY).write_text(json.dumps(content, indent=2) + "\n")
    folders.sync(folder / SUMMARY)


def _checksum(summary: CheckpointSummary) -> str:
    fields = dataclasses.asdict(summary) | {"checksum": ""}
    return hashlib.sha256(json.dumps(fields, sort_keys=True).encode()).hexdigest()


def sha256(source: Path | BinaryIO) -> str:
    """Returns the hash of a file. An open one is at its beginning afterwards."""
    with contextlib.ExitStack() as stack:
        file = stack.enter_context(source.open("rb")) if isinstance(source, Path) else source
        digest = hashlib.file_digest(file, "sha256").hexdigest()  # type: ignore[arg-type]
        file.seek(0)
    return digest
