"""The record of a model that was saved on the server, as state dicts and checkpoint files keep it."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self

import orjson
import torch
from torch import Tensor

from tinker_lightning.errors import InvalidInput

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

FORMAT_VERSION = 1
"""The format of records; a record of any other version is rejected."""

_VERSION_KEY = "tinker_lightning"
RECORD_PREFIX = f'{{"{_VERSION_KEY}":'.encode()
"""The first bytes of every record."""


@dataclass(frozen=True, slots=True)
class SavedState:
    """A model that was saved on the server, with its optimizer.

    The record is JSON in a tensor of bytes: safetensors files only contain tensors, and `torch.save` writes each tensor
    as a separate entry, so a record can be read without unpickling.
    """

    path: str
    base_model: str | None
    rank: int | None
    steps: int
    storage: str | None = None  # where it was saved, for errors; not in files of earlier versions

    def to_tensor(self) -> Tensor:
        """Returns the record as a state dict keeps it."""
        record = orjson.dumps({_VERSION_KEY: FORMAT_VERSION, **dataclasses.asdict(self)})
        return torch.frombuffer(bytearray(record), dtype=torch.uint8)

    @classmethod
    def from_tensor(cls, tensor: Tensor) -> Self:
        """Reads the result of `to_tensor`; raises like `from_bytes`."""
        return cls.from_bytes(tensor.numpy(force=True).tobytes())

    @classmethod
    def from_bytes(cls, record: bytes) -> Self:
        """Reads a record from its bytes; raises `InvalidInput` if it is damaged or has another format version."""
        try:
            content = orjson.loads(record)
        except orjson.JSONDecodeError as error:
            raise InvalidInput(
                f"the record of a remote model is not JSON: {error}. Save the model again with this version of "
                "tinker_lightning."
            ) from error
        what = "the record of a remote model"
        keys = [field.name for field in dataclasses.fields(cls) if field.default is dataclasses.MISSING]
        content = check_format(content, what, _VERSION_KEY, FORMAT_VERSION, keys)
        return cls(**{name: value for name, value in content.items() if name != _VERSION_KEY})


def is_record(value: object) -> bool:
    """Whether an entry of a state dict is the record of a saved state, of any format version."""
    if not isinstance(value, Tensor) or value.dtype != torch.uint8:
        return False
    return value[: len(RECORD_PREFIX)].numpy(force=True).tobytes() == RECORD_PREFIX


def check_format(part: Any, what: str, version_key: str, version: int, keys: Iterable[str]) -> dict[str, Any]:
    """Returns a part of a file, called `what` in errors; raises if it lacks a key or has another format version."""
    saved = part.get(version_key) if isinstance(part, dict) else None
    if saved is None:
        raise InvalidInput(
            f"{what} has no format version ({version_key!r}): it was not written by tinker_lightning, or was changed "
            "since. Save the model again with this version of tinker_lightning."
        )
    if saved != version:
        raise InvalidInput(
            f"{what} has format version {saved}, but this version of tinker_lightning reads version "
            f"{version}. Load it with the version of tinker_lightning that wrote it, or save the model again."
        )
    check_keys(part, what, keys)
    return dict(part)


def check_keys(part: Mapping[str, Any], what: str, keys: Iterable[str]) -> None:
    """Raises `InvalidInput` if a part of a file lacks one of the keys."""
    if missing := [key for key in keys if key not in part]:
        raise InvalidInput(
            f"{what} lacks {', '.join(map(repr, missing))}: the file is damaged or was changed since it was written. "
            "Load another checkpoint."
        )
