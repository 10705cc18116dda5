"""Loading a model with transformers, which takes seconds and needs no bar of its own beside a trainer's."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pathlib import Path

    import torch


def load_model(path: Path | str, dtype: torch.dtype, **options: Any) -> Any:
    """A causal language model from a folder or a hub id."""
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    shows_bars = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        return AutoModelForCausalLM.from_pretrained(path, dtype=dtype, **options)
    finally:
        if shows_bars:
            logging.enable_progress_bar()
