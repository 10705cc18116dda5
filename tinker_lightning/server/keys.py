"""API keys of a server, and what each of them may reach.

A key file has a line per key, its name and its SHA-256. A key is random and long, so that its hash needs no salt:

    alice 6dcd4ce23d88e2ee9568ba546c007c63d9131c1b4b6e0f2c1e3d0b2a8e5f7c90
    bob   0fb1bb4c2b1d9c0b8a4c8f0f6a2c0dc3a0e5d3b1b2c4f6a7988766554433aabb
"""

from __future__ import annotations

import hashlib
import logging
import os
import re
import secrets
import tempfile
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from tinker_lightning.errors import InvalidInput

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

logger = logging.getLogger("tinker_lightning.server")

# The prefix that the official SDK requires.
_PREFIX = "tml-"
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_LINE = re.compile(rf"({_NAME.pattern})\s+([0-9a-f]{{64}})")


@dataclass(frozen=True, slots=True)
class Owner:
    """The owner of sessions, checkpoints and what belongs to them.

    Args:
        name: The name of its key; None owns everything, as do clients of a server without a key or with a single one.
        is_first: Whether it also owns what was stored without an owner.
    """

    name: str | None = None
    is_first: bool = False

    def owns(self, owner: str | None) -> bool:
        """Returns whether an object that was stored with this owner is its own."""
        return self.name is None or owner == self.name or (owner is None and self.is_first)


class Keys:
    """The keys that a server accepts: a single one, or those of a file, which is read again when it changes."""

    def __init__(self, names: Mapping[str, str | None], file: Path | None = None) -> None:
        self._names = dict(names)  # by SHA-256; the first one first
        self._file = file
        self._version = None if file is None else _version(file)
        self._lock = threading.Lock()
        self._on_removal: list[Callable[[str], object]] = []

    @classmethod
    def single(cls, key: str, source: str = "api_key") -> Keys:
        """Returns a key without a name, which owns everything; raises `InvalidInput` if no header can have it."""
        if not key.strip() or key != key.strip() or not (key.isascii() and key.isprintable()):
            raise InvalidInput(
                f"{source}: a key must be printable ASCII characters without white space around them, because it is "
                "sent in a header. Make one with `tinker-lightning keys add NAME`, or choose another."
            )
        return cls({_digest(key.encode()): None})

    @classmethod
    def from_file(cls, file: Path) -> Keys:
        """Reads a key file; raises `InvalidInput` if it cannot be read or has no key."""
        version = _version(file)  # before the content, so that a change in between is noticed later
        names = {digest: name for name, digest in read_file(file).items()}
        if not names:
            raise InvalidInput(f"{file} has no key. Add one: tinker-lightning keys add NAME --file {file}")
        keys = cls(dict(names), file)
        keys._version = version
        return keys

    def on_removal(self, call: Callable[[str], object]) -> None:
        """Calls a function with the name of each key that is removed from the file."""
        self._on_removal.append(call)

    def find(self, key: bytes) -> Owner | None:
        """Returns the owner that a key belongs to, or None for an unknown key."""
        self.refresh()
        # Looking up a hash takes a time that says nothing about the key.
        digest = _digest(key)
        return self._owner(self._names[digest]) if digest in self._names else None

    def named(self, name: str | None) -> Owner | None:
        """Returns the owner with this name, or None if it has no key any more."""
        self.refresh()
        return self._owner(name) if name in self._names.values() else None

    def _owner(self, name: str | None) -> Owner:
        return Owner(name, is_first=name == next(iter(self._names.values())))

    def refresh(self) -> None:
        """Reads the file again if it has changed. One that cannot be read changes nothing, and is logged."""
        if self._file is None or _version(self._file) == self._version:
            return
        with self._lock:
            version = _version(self._file)
            if version == self._version:
                return
            self._version = version
            try:
                names = read_file(self._file)
            except InvalidInput as error:
                logger.error("keeping the keys that were read before: %s", error)
                return
            before = set(self._names.values())
            self._names = {digest: name for name, digest in names.items()}
            removed = sorted(name for name in before - set(names) if name is not None)
        logger.info("read %s again: %d keys, without %s", self._file, len(names), ", ".join(removed) or "changes")
        for name in removed:
            for call in self._on_removal:
                call(name)


def read_file(file: Path) -> dict[str, str]:
    """Returns the SHA-256 of each key in a file by name; raises `InvalidInput` if it is not a key file."""
    try:
        lines = file.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not a text"
        raise InvalidInput(
            f"cannot read the key file {file}: {reason}. Create it: tinker-lightning keys add NAME --file {file}"
        ) from error
    names: dict[str, str] = {}
    for number, line in enumerate(lines, 1):
        if not line.strip() or line.startswith("#"):
            continue
        match = _LINE.fullmatch(line.strip())
        if match is None or match[1] in names or match[2] in names.values():
            # Without the line itself, because it may be a key that was pasted as it is.
            raise InvalidInput(
                f"{file}, line {number}: is not the name of a key and its SHA-256, or repeats one. Keys are added by: "
                f"tinker-lightning keys add NAME --file {file}"
            )
        names[match[1]] = match[2]
    return names


def add_key(file: Path, name: str) -> str:
    """Adds a new key to a file, which is created if it does not exist; returns the key, which is stored nowhere."""
    if not _NAME.fullmatch(name):
        raise InvalidInput(
            f"{name!r:.80} is not a name for a key. Use up to 64 letters, digits, '.', '_' and '-', beginning with a "
            "letter or digit."
        )
    names = read_file(file) if file.exists() else {}
    if name in names:
        raise InvalidInput(
            f"{file} already has a key {name!r}. Choose another name, or remove it first; checkpoints belong to the "
            "name, so a new key of that name has them."
        )
    key = _PREFIX + secrets.token_urlsafe(32)
    _write_file(file, {**names, name: _digest(key.encode())})
    return key


def remove_key(file: Path, name: str) -> None:
    """Removes a key from a file; raises `InvalidInput` if there is none of this name."""
    names = read_file(file)
    if name not in names:
        raise InvalidInput(f"{file} has no key {name!r:.80}; it has {', '.join(names) or 'none'}")
    del names[name]
    _write_file(file, names)


def _write_file(file: Path, names: Mapping[str, str]) -> None:
    """Replaces the file, so that a server never reads a part of it. Only its owner can read it."""
    part: Path | None = None
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        descriptor, temporary = tempfile.mkstemp(prefix=f".{file.name}-", dir=file.parent)
        part = Path(temporary)
        with open(descriptor, "w", encoding="utf-8") as stream:
            stream.writelines(f"{name} {digest}\n" for name, digest in names.items())
            stream.flush()
            os.fsync(stream.fileno())
        part.replace(file)
    except OSError as error:
        if part is not None:
            part.unlink(missing_ok=True)
        raise InvalidInput(f"cannot write the key file {file}: {error.strerror}. Choose another --file.") from error


def _digest(key: bytes) -> str:
    return hashlib.sha256(key).hexdigest()


def _version(file: Path) -> tuple[int, int, int] | None:
    try:
        status = file.stat()
    except OSError:
        return None
    return status.st_mtime_ns, status.st_size, status.st_ino
