"""Reads a local PEFT folder, and uploads it as a checkpoint from which a model can be created."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tinker_lightning.client.files.export import CONFIG, WEIGHTS
from tinker_lightning.client.transport.operations import encode, perform
from tinker_lightning.errors import InvalidInput, Unsupported
from tinker_lightning.types import SaveWeightsResponse
from tinker_lightning.types.requests import ImportAdapterRequest

if TYPE_CHECKING:
    import os

    from tinker_lightning.client.transport.channel import Channel

# Settings of peft that change what an adapter computes, with the values that a plain LoRA adapter has.
_PLAIN: dict[str, tuple[Any, ...]] = {
    "peft_type": ("LORA",),
    "bias": ("none", None),
    "use_dora": (False, None),
    "modules_to_save": (None, []),
    "rank_pattern": ({}, None),
    "alpha_pattern": ({}, None),
}


def upload(channel: Channel, folder: str | os.PathLike[str], base_model: str | None) -> str:
    """Uploads a PEFT folder and returns the `tinker://` path of its copy on the server.

    Raises:
        InvalidInput: If the folder is not a plain LoRA adapter.
        Unsupported: If the server takes no adapters.
    """
    path = Path(folder).expanduser()
    config = _config(path)
    base_model = base_model or config.get("base_model_name_or_path")
    if not base_model:
        raise InvalidInput(f"{path / CONFIG} names no base model; pass base_model=")
    session = channel.session
    if not session.extensions.import_adapter:
        raise Unsupported(f"the server at {channel.url} takes no adapters; load a checkpoint that was saved there")
    rank, alpha = config["r"], config["lora_alpha"]
    scaling = alpha / (math.sqrt(rank) if config.get("use_rslora") else rank)
    request = ImportAdapterRequest(session.session_id, base_model, scaling, (path / WEIGHTS[0]).read_bytes())
    operation = encode(session.dialect, "import_adapter", "import_adapter", request, SaveWeightsResponse)
    return channel.wait(perform(session, operation)).path


def _config(path: Path) -> dict[str, Any]:
    for name in (CONFIG, WEIGHTS[0]):
        if not (path / name).is_file():
            raise InvalidInput(f"{path} is not a PEFT adapter: it has no {name}")
    try:
        config: dict[str, Any] = json.loads((path / CONFIG).read_text())
        r, alpha = config["r"], config["lora_alpha"]
    except (ValueError, KeyError, TypeError) as error:
        raise InvalidInput(f"{path / CONFIG} is not the configuration of a LoRA adapter: {error!r}") from error
    if not (isinstance(r, int) and r > 0 and isinstance(alpha, int | float)):
        raise InvalidInput(f"{path / CONFIG}: r={r!r} and lora_alpha={alpha!r} must be positive numbers")
    for name, plain in _PLAIN.items():
        if config.get(name, plain[0]) not in plain:
            raise InvalidInput(f"{path / CONFIG}: {name}={config[name]!r} is not supported; only plain LoRA is")
    return config
