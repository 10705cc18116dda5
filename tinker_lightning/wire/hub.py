"""Guards around the Hugging Face libraries: an unreachable hub, progress bars, and their process-wide state."""

from __future__ import annotations

import functools
import socket
import threading
import urllib.request
from contextlib import contextmanager
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from huggingface_hub import constants, snapshot_download

if TYPE_CHECKING:
    from collections.abc import Iterator

# Held while a library temporarily changes process-wide state: transformers patches torch and its own classes while it
# builds a model, and `warnings.catch_warnings` replaces the filters. If two threads did this at once, one of them could
# permanently restore the temporary state of the other.
PATCH_LOCK = threading.RLock()
_SECONDS = 5.0


def reachable_or_cached(name: str) -> str:
    """Returns the source of a hub id for transformers: the id, or without a network the folder of the hub's cache.

    The hub's own library would try to reach it for a minute.

    Raises:
        OSError: If the hub cannot be reached and the model is not in its cache.
    """
    host = urlsplit(constants.ENDPOINT)
    if constants.HF_HUB_OFFLINE or urllib.request.getproxies():
        return name
    try:
        socket.create_connection((host.hostname or "", host.port or 443), _SECONDS).close()
    except OSError as error:
        try:
            return snapshot_download(name, local_files_only=True)
        except OSError:
            raise OSError(f"{constants.ENDPOINT} cannot be reached ({error}), and it is not in the cache") from error
    return name


@contextmanager
def without_progress_bars() -> Iterator[None]:
    """Hides the progress bars of transformers in a `with` block."""
    from transformers import modeling_gguf_pytorch_utils
    from transformers.utils import logging

    with PATCH_LOCK:
        shown = logging.is_progress_bar_enabled()
        logging.disable_progress_bar()
        gguf_bar = getattr(modeling_gguf_pytorch_utils, "tqdm", None)  # shown even if bars are disabled
        if gguf_bar is not None:
            modeling_gguf_pytorch_utils.tqdm = functools.partial(gguf_bar, disable=True)
        try:
            yield
        finally:
            if shown:
                logging.enable_progress_bar()
            if gguf_bar is not None:
                modeling_gguf_pytorch_utils.tqdm = gguf_bar
