"""The tokenizer of a model: from the server, a folder, or the hub."""

from __future__ import annotations

import functools
import hashlib
import os
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tinker_lightning.errors import InvalidInput, ModelNotFound

if TYPE_CHECKING:
    from collections.abc import Mapping


@functools.cache
def load(tokenizer_id: str) -> Any:
    """The tokenizer of a folder or hub id.

    Raises:
        ModelNotFound: If it cannot be had; says what to install or where to get it.
    """
    try:
        from transformers import AutoTokenizer
    except ImportError as error:
        raise ModelNotFound(
            "tokenizers need the package transformers. Install it with: python -m pip install transformers"
        ) from error
    try:
        return AutoTokenizer.from_pretrained(tokenizer_id)
    except (OSError, ValueError) as error:
        raise ModelNotFound(
            f"the tokenizer {tokenizer_id!r} is neither a folder here nor to be had from the hub: {error}"
        ) from error


def load_files(files: Mapping[str, bytes]) -> Any:
    """The tokenizer that a server's files make; kept by their content."""
    digest = hashlib.sha256(b"".join(name.encode() + b"\0" + body for name, body in sorted(files.items()))).hexdigest()
    folder = Path(tempfile.gettempdir()) / f"tinker-lightning-tokenizers-{os.getuid()}" / digest
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    for name, body in files.items():
        if Path(name).name != name:
            raise InvalidInput(f"the server sent a tokenizer file with a path for a name: {name!r}")
        part = folder / f".{name}.{os.getpid()}"
        part.write_bytes(body)
        part.replace(folder / name)
    return load(str(folder))
