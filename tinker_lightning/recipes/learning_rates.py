"""Recommended learning rates for LoRA."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from tinker_lightning.errors import InvalidInput

# Published with tinker-cookbook (hyperparam_utils.py); fitted to sweeps of fine-tuning with LoRA.
_BASE = 5e-5
_LORA_FACTOR = 10
_HIDDEN_SIZE = 2000
_EXPONENTS = {"llama": 0.781, "qwen": 0.0775}
_BATCH_SIZE = 128

# Models whose configuration cannot be read without an account or a network, by family and hidden size.
_MODELS = {
    "tiny": ("llama", 64),
    "smollm2-135m": ("llama", 576),
    "meta-llama/Llama-3.2-1B": ("llama", 2048),
    "meta-llama/Llama-3.2-3B": ("llama", 3072),
    "meta-llama/Llama-3.1-8B": ("llama", 4096),
    "meta-llama/Llama-3.1-8B-Instruct": ("llama", 4096),
    "meta-llama/Llama-3.1-70B": ("llama", 8192),
    "meta-llama/Llama-3.3-70B-Instruct": ("llama", 8192),
    "Qwen/Qwen3-4B-Instruct-2507": ("qwen", 2560),
    "Qwen/Qwen3-8B": ("qwen", 4096),
    "Qwen/Qwen3-8B-Base": ("qwen", 4096),
    "Qwen/Qwen3-30B-A3B": ("qwen", 2048),
    "Qwen/Qwen3-32B": ("qwen", 5120),
}


def recommended_lr(model: str, *, batch_size: int = _BATCH_SIZE) -> float:
    """Returns a learning rate for LoRA: `5e-5 · 10 · (2000 / hidden size)^p · sqrt(batch size / 128)`.

    The exponent `p` was fitted for Llama (0.781) and Qwen (0.0775); it does not depend on the rank. Losses are means
    over tokens, as in `RemoteModule`.

    Args:
        model: A model of the embedded trainer, a hub id or a folder.
        batch_size: The number of rows of an optimizer step, including accumulation.

    Raises:
        InvalidInput: If the model is of another family, or its configuration cannot be read.

    >>> f"{recommended_lr('meta-llama/Llama-3.1-8B'):.2e}"
    '2.86e-04'
    """
    if batch_size < 1:
        raise InvalidInput(f"batch_size must be at least 1, got {batch_size}")
    family, size = _MODELS.get(model) or _read(model)
    exponent = next((value for name, value in _EXPONENTS.items() if name in family), None)
    if exponent is None:
        raise InvalidInput(
            f"there is no published learning rate for {model}, a model of the family {family!r}; the formula was "
            f"fitted for {' and '.join(_EXPONENTS)}. Choose a learning_rate, for example 1e-4."
        )
    scaled: float = _BASE * _LORA_FACTOR * (_HIDDEN_SIZE / size) ** exponent * math.sqrt(batch_size / _BATCH_SIZE)
    return scaled


def _read(model: str) -> tuple[str, int]:
    """Returns the family and the hidden size from a model's configuration."""
    try:
        from transformers import AutoConfig

        from tinker_lightning.wire import hub

        path = model if Path(model).is_dir() else hub.reachable_or_cached(model)
        config: Any = AutoConfig.from_pretrained(path, trust_remote_code=False).get_text_config()
    except (ImportError, OSError, ValueError) as error:
        reason = str(error).partition("\n")[0].rstrip(".")
        raise InvalidInput(
            f"the configuration of {model} cannot be read: {reason}. Choose a learning_rate, for example 1e-4."
        ) from error
    return config.model_type, config.hidden_size
