"""The tokenizer of a model: from the server, a folder, or the hub."""

from __future__ import annotations

import atexit
import contextlib
import functools
import hashlib
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlencode

from tinker_lightning.errors import ModelNotFound, NotATinkerServer

if TYPE_CHECKING:
    from collections.abc import Mapping

    from tinker_lightning.client.transport.channel import Channel


@dataclass(frozen=True, slots=True)
class TokenizerFiles:
    """The files of a tokenizer, by name."""

    files: dict[str, bytes]


def fetch(channel: Channel, model_name: str, tokenizer_id: str | None) -> Any:
    """Returns the tokenizer of a model: from the server if it offers it, else from a folder or the hub."""
    if channel.session.extensions.tokenizer_files:
        found = channel.fetch(f"/ext/v1/tokenizer?{urlencode({'model': model_name})}", TokenizerFiles)
        return load_files(found.files)
    return load(tokenizer_id or model_name)


@functools.cache
def load(tokenizer_id: str) -> Any:
    """Loads the tokenizer of a folder or hub id."""
    try:
        from transformers import AutoTokenizer

        from tinker_lightning.wire import hub
    except ImportError as error:
        raise ModelNotFound(
            "tokenizers need the package transformers. Install it with: python -m pip install transformers"
        ) from error
    try:
        path = tokenizer_id if Path(tokenizer_id).is_dir() else hub.reachable_or_cached(tokenizer_id)
        return AutoTokenizer.from_pretrained(path, trust_remote_code=False)
    except (OSError, ValueError) as error:
        if "trust_remote_code" in str(error):
            raise ModelNotFound(
                f"the tokenizer {tokenizer_id!r} needs Python code of its author, which is not run. Read the code, and "
                "if you trust it, load the tokenizer with transformers and pass it on, for example as tokenizer= of a "
                "data module."
            ) from error
        reason = str(error).partition("\n")[0]
        raise ModelNotFound(
            f"the tokenizer {tokenizer_id!r} is neither a local folder nor available from the hub: {reason}"
        ) from error


def load_files(files: Mapping[str, bytes]) -> Any:
    """Loads a tokenizer from a server's files; returns the same object for the same files."""
    digest = hashlib.sha256()
    for name, body in sorted(files.items()):
        if Path(name).name != name or name in ("", ".."):
            raise NotATinkerServer(f"the server sent a tokenizer file whose name is a path: {name!r}")
        digest.update(f"{name}\0{len(body)}\0".encode() + body)
    folder = _folder() / digest.hexdigest()
    if not folder.exists():
        part = Path(tempfile.mkdtemp(dir=_folder()))
        for name, body in files.items():
            (part / name).write_bytes(body)
        with contextlib.suppress(OSError):  # another thread was faster
            part.rename(folder)
    return load(str(folder))


@functools.cache
def _folder() -> Path:
    """Returns a temporary folder that lasts as long as the process, because tokenizers may read files later."""
    folder = Path(tempfile.mkdtemp(prefix="tinker-lightning-tokenizers-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder
