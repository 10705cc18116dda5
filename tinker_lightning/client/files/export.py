"""Exports a trained adapter as a local PEFT folder."""

from __future__ import annotations

import logging
import uuid
from pathlib import Path
from typing import TYPE_CHECKING

from tinker_lightning.errors import InvalidInput, OperationFailed, TinkerLightningError
from tinker_lightning.wire import folders

if TYPE_CHECKING:
    import os
    from collections.abc import Callable

    from tinker_lightning.client.backend import TrainingBackend

logger = logging.getLogger("tinker_lightning.client")

CONFIG = "adapter_config.json"
WEIGHTS = ("adapter_model.safetensors", "adapter_model.bin")
# How long the server keeps the weights if this process dies before deleting them.
_KEPT_SECONDS = 86400


def export_adapter(
    backend: TrainingBackend,
    path: str | os.PathLike[str],
    *,
    overwrite: bool = False,
    finish: Callable[[Path], None] | None = None,
) -> Path:
    """Saves the current adapter as a folder that peft, transformers and vLLM load; returns the folder.

    The folder is created atomically. What the server saved for the download is deleted there afterwards.

    Args:
        backend: A training client of this library, or the official SDK's behind `as_backend`.
        path: A new or empty folder.
        overwrite: Whether to replace a folder that contains an adapter, with everything in it.
        finish: Called with the downloaded files in a temporary folder, to add to them before they appear at `path`.

    Raises:
        InvalidInput: If the folder is not empty, or cannot be written.
        OperationFailed: If the server's files are not a PEFT adapter.
    """
    target = check_target(path, overwrite)
    try:
        with folders.new_folder(target, overwrite=overwrite) as part:
            saved = backend.save_weights_external(f"export-{uuid.uuid4().hex[:12]}", _KEPT_SECONDS).result().path
            try:
                backend.download_checkpoint(saved, part)
            finally:
                _delete(backend, saved)
            _check(part)
            if finish is not None:
                finish(part)
            check_target(path, overwrite)  # something may have been written to it in the meantime
    except OSError as error:
        if isinstance(error, TinkerLightningError):  # some of which are OSErrors
            raise
        if isinstance(error, FileExistsError) and target.is_dir():
            raise InvalidInput(_taken(target)) from error
        raise InvalidInput(f"{target} cannot be written: {error}. Choose another folder.") from error
    return target


def check_target(
    path: str | os.PathLike[str], overwrite: bool, contents: str = "an adapter", config: str = CONFIG
) -> Path:
    """Returns the folder to export to; raises `InvalidInput` if it is taken, by files without that config as well."""
    target = Path(path).expanduser().resolve()
    if target.exists() and not target.is_dir():
        raise InvalidInput(f"{target} is a file; pass a folder to export to")
    if target.is_dir() and any(target.iterdir()):
        if not overwrite:
            raise InvalidInput(_taken(target, contents))
        if not (target / config).exists():
            raise InvalidInput(
                f"{target} does not contain {contents} ({config} is missing), and overwrite=True would delete what it "
                "contains. Choose another folder."
            )
    return target


def _taken(target: Path, contents: str = "an adapter") -> str:
    return f"{target} is not empty. Choose another folder, or set overwrite=True to replace {contents} in it."


def _check(part: Path) -> None:
    found = sorted(each.name for each in part.iterdir())
    if CONFIG not in found or not any(name in found for name in WEIGHTS):
        raise OperationFailed(
            f"the server sent {', '.join(found) or 'no files'}, which is not a PEFT adapter: that has {CONFIG} and "
            f"{WEIGHTS[0]}"
        )


def _delete(backend: TrainingBackend, saved: str) -> None:
    try:
        backend.delete_checkpoint(saved, missing_ok=True)
    except TinkerLightningError as error:
        logger.warning("%s could not be deleted and stays on the server for a day: %s", saved, error)
