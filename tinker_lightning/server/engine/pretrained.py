"""Loads models with transformers."""

from __future__ import annotations

import functools
import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    import torch

# Held while a library temporarily changes process-wide state: transformers patches torch and its own classes while it
# builds a model, and `warnings.catch_warnings` replaces the filters. If two threads did this at once, one of them could
# permanently restore the temporary state of the other.
PATCH_LOCK = threading.RLock()


def load_model(path: Path | str, dtype: torch.dtype, **options: Any) -> Any:
    """Loads a causal language model from a folder or the hub, without a progress bar."""
    from transformers import AutoModelForCausalLM, modeling_gguf_pytorch_utils

    with without_bars():
        gguf_bar = getattr(modeling_gguf_pytorch_utils, "tqdm", None)  # which is shown even if bars are disabled
        if gguf_bar is not None:
            modeling_gguf_pytorch_utils.tqdm = functools.partial(gguf_bar, disable=True)
        try:
            return AutoModelForCausalLM.from_pretrained(path, dtype=dtype, **options)
        finally:
            if gguf_bar is not None:
                modeling_gguf_pytorch_utils.tqdm = gguf_bar


@contextmanager
def without_bars() -> Iterator[None]:
    """Hides the progress bars of transformers in a `with` block."""
    from transformers.utils import logging

    with PATCH_LOCK:
        shown = logging.is_progress_bar_enabled()
        logging.disable_progress_bar()
        try:
            yield
        finally:
            if shown:
                logging.enable_progress_bar()
