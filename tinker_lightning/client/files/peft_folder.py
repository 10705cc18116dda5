"""Local PEFT folders: exports of a trained adapter, and uploads of one from which a model can be created."""

from __future__ import annotations

import json
import logging
import math
import platform
import uuid
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tinker_lightning.client.transport.operations import operate
from tinker_lightning.errors import InvalidInput, OperationFailed, TinkerLightningError, Unsupported
from tinker_lightning.types import SaveWeightsResponse
from tinker_lightning.types.requests import ImportAdapterRequest
from tinker_lightning.wire import folders

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Mapping, Sequence

    from tinker_lightning.client.backend import TrainingBackend
    from tinker_lightning.client.transport.channel import Channel

logger = logging.getLogger("tinker_lightning.client")

CONFIG = "adapter_config.json"
WEIGHTS = ("adapter_model.safetensors", "adapter_model.bin")
CARD = "README.md"
# How long the server keeps the weights if this process dies before deleting them.
_KEPT_SECONDS = 86400
# Settings of peft that change what an adapter computes, with the values that a plain LoRA adapter has.
_PLAIN: dict[str, tuple[Any, ...]] = {
    "peft_type": ("LORA",),
    "bias": ("none", None),
    "use_dora": (False, None),
    "modules_to_save": (None, []),
    "rank_pattern": ({}, None),
    "alpha_pattern": ({}, None),
    "lora_bias": (False, None),
    "use_qalora": (False, None),
    "alora_invocation_tokens": (None, []),
    "trainable_token_indices": (None, [], {}),
    "target_parameters": (None, []),
    "layer_replication": (None, []),
    # Other initializations change the weights of the base model, too.
    "init_lora_weights": (True, False, None, "gaussian", "orthogonal", "eva"),
}
# The most bytes of a configuration, and the largest rank and alpha.
_MAX_CONFIG, _MAX_RANK = 1 << 20, 1 << 16
_PACKAGES = ("tinker-lightning", "lightning", "torch", "transformers", "peft")
_CARD = """\
---
{head}library_name: peft
tags: [lora, tinker-lightning]
---

# LoRA adapter of {base}

Trained with [tinker_lightning](https://pypi.org/project/tinker-lightning/){server}.
{sections}
## Use

With peft: `AutoPeftModelForCausalLM.from_pretrained(FOLDER)`. {vllm}

## Versions

{versions}
"""
# The ranks that `vllm serve --max-lora-rank` takes (vLLM 0.28, vllm/config/lora.py).
_VLLM_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
# The architectures of which vLLM adapts the output matrix and the embedding: `embedding_modules` names them (0.28).
_VLLM_UNEMBEDS = """
ApertusForCausalLM Ernie4_5ForCausalLM Exaone4ForCausalLM ExaoneForCausalLM ExaoneMoeForCausalLM FalconH1ForCausalLM
GlmForCausalLM GraniteForCausalLM GraniteMoeForCausalLM GraniteMoeHybridForCausalLM GraniteMoeSharedForCausalLM
JambaForCausalLM Lfm2ForCausalLM Lfm2MoeForCausalLM LlamaForCausalLM MiniCPMForCausalLM MixtralForCausalLM
NemotronForCausalLM NemotronHForCausalLM Phi3ForCausalLM PhiMoEForCausalLM Qwen3ForCausalLM Qwen3MoeForCausalLM
SolarForCausalLM
"""


def export_adapter(
    backend: TrainingBackend,
    path: str | os.PathLike[str],
    *,
    overwrite: bool = False,
    finish: Callable[[Path], Sequence[str]] | None = None,
    about: Mapping[str, Mapping[str, Any]] | None = None,
) -> Path:
    """Saves the current adapter as a folder that peft, transformers and vLLM load; returns the folder.

    The folder is created atomically. What the server saved for the download is deleted there afterwards.

    Args:
        backend: A training client of this library, or the official SDK's behind `as_backend`.
        path: A new or empty folder.
        overwrite: Whether to replace a folder that contains an adapter, with everything in it.
        finish: Called with the downloaded files in a temporary folder, to add to them before they appear at `path`;
            returns the architectures of the base model, if they are known.
        about: Sections of the model card, each with its rows.

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
            architectures = () if finish is None else finish(part)
            (part / CARD).write_text(model_card(part, backend, about or {}, architectures), encoding="utf-8")
            check_target(path, overwrite)  # something may have been written to it in the meantime
    except OSError as error:
        if isinstance(error, TinkerLightningError):  # some of which are OSErrors
            raise
        if isinstance(error, FileExistsError) and target.is_dir():
            raise InvalidInput(_taken(target)) from error
        raise InvalidInput(f"{target} cannot be written: {error}. Choose another folder.") from error
    return target


def model_card(
    folder: Path, backend: TrainingBackend, about: Mapping[str, Mapping[str, Any]], architectures: Sequence[str] = ()
) -> str:
    """Returns the model card of an adapter: what it was trained on and how, its scores, and how it is used."""
    config = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
    source = str(config.get("base_model_name_or_path") or "")
    base = backend.get_info().model_data.model_name or source or "a model that its server does not name"
    is_hub_id = source.count("/") == 1 and not source.startswith((".", "/", "~"))
    problems = vllm_problems(folder, architectures)
    rank = next((each for each in _VLLM_RANKS if each >= (config.get("r") or 0)), None)
    serve = f"With vLLM: `vllm serve BASE --enable-lora --max-lora-rank {rank} --lora-modules NAME=FOLDER`."
    versions = {"Python": platform.python_version()}
    for package in _PACKAGES:
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            continue
    return _CARD.format(
        head=f"base_model: {source}\n" if is_hub_id else "",
        base=source if is_hub_id else base,
        server=f" on a server of the kind `{backend.dialect.name}`",
        sections="".join(f"\n## {title}\n\n{_table(rows)}\n" for title, rows in about.items() if rows),
        vllm=f"vLLM does not load it: {'; '.join(problems)}." if problems else serve,
        versions=_table(versions),
    )


def vllm_problems(folder: Path, architectures: Sequence[str]) -> list[str]:
    """Returns why vLLM would not load an adapter, by the rules of its loader; nothing is known of other model classes.

    vLLM takes plain LoRA whose tensors are called `base_model.model.MODULE.lora_A.weight` and `….lora_B.weight`, for
    linear layers, and for the output matrix in some architectures only (`vllm/lora/peft_helper.py`, `utils.py` and
    `lora_model.py`).
    """
    config = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
    problems = [
        f"{name} is {config[name]!r}"
        for name in ("bias", "use_dora", "modules_to_save")
        if config.get(name, _PLAIN[name][0]) not in _PLAIN[name]
    ]
    if not 0 < (config.get("r") or 0) <= _VLLM_RANKS[-1]:
        problems.append(f"its rank is {config.get('r')}, and vLLM takes 1 to {_VLLM_RANKS[-1]}")
    modules: dict[str, set[str]] = {}
    for name in _tensor_names(folder):
        module, _, matrix = name.removesuffix(".weight").rpartition(".")
        is_known = name.endswith(("lora_embedding_A", "lora_embedding_B", "lora_A.weight", "lora_B.weight"))
        if not (is_known and module.startswith("base_model.model.")):
            problems.append(f"it does not know the tensor {name}")
            break
        modules.setdefault(module, set()).add(matrix[-1])
    if half := [module for module, matrices in modules.items() if matrices != {"A", "B"}]:
        problems.append(f"{half[0]} has only one of its two matrices")
    embeds = sorted({module.rpartition(".")[2] for module in modules} & {"lm_head", "embed_tokens"})
    if embeds and architectures and not {*_VLLM_UNEMBEDS.split()} & {*architectures}:
        problems.append(
            f"for {architectures[0]} it takes no adapter of {embeds[0]}; train with train_unembed=False, or use the "
            "merged model"
        )
    return problems


def _tensor_names(folder: Path) -> list[str]:
    file = folder / WEIGHTS[0]
    if not file.exists():  # the names in a .bin are not read: that would unpickle it
        return []
    with file.open("rb") as opened:
        length = int.from_bytes(opened.read(8), "little")
        try:
            header = json.loads(opened.read(min(length, file.stat().st_size)))
        except ValueError:
            return [f"of a file {file.name} without a header"]
    return [name for name in header if name != "__metadata__"]


def _table(rows: Mapping[str, Any]) -> str:
    cells = [(str(name), str(value).replace("|", "\\|").replace("\n", " ")) for name, value in rows.items()]
    return "\n".join(["| | |", "|---|---|", *(f"| {name} | {value} |" for name, value in cells)])


def upload_adapter(channel: Channel, folder: str | os.PathLike[str], base_model: str | None) -> str:
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
    weights = path / WEIGHTS[0]
    if (size := weights.stat().st_size) > ImportAdapterRequest.MAX_BYTES:
        raise InvalidInput(
            f"{weights} has {size:,} bytes, but at most {ImportAdapterRequest.MAX_BYTES:,} can be uploaded. Use a "
            "smaller rank, or save it in bfloat16."
        )
    request = ImportAdapterRequest(session.session_id, base_model, scaling, weights.read_bytes(), rank)
    return channel.wait(operate(session, "import_adapter", request, SaveWeightsResponse)).path


def check_target(
    path: str | os.PathLike[str], overwrite: bool, contents: str = "adapter", config: str = CONFIG
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
                f"{target} contains no {contents} ({config} is missing), and overwrite=True would delete what it "
                "contains. Choose another folder."
            )
    return target


def _taken(target: Path, contents: str = "adapter") -> str:
    return f"{target} is not empty. Choose another folder, or set overwrite=True to replace the {contents} in it."


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


def _config(path: Path) -> dict[str, Any]:
    for name in (CONFIG, WEIGHTS[0]):
        if not (path / name).is_file():
            raise InvalidInput(f"{path} is not a PEFT adapter: it has no {name}")
    if (size := (path / CONFIG).stat().st_size) > _MAX_CONFIG:
        raise InvalidInput(f"{path / CONFIG} has {size:,} bytes, which no configuration of an adapter has")
    try:
        config: dict[str, Any] = json.loads((path / CONFIG).read_text())
        r, alpha = config["r"], config["lora_alpha"]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise InvalidInput(f"{path / CONFIG} is not the configuration of a LoRA adapter: {error!r}") from error
    if not (type(r) is int and 0 < r <= _MAX_RANK and type(alpha) in (int, float) and 0 < alpha <= _MAX_RANK):
        raise InvalidInput(
            f"{path / CONFIG}: r={r!r:.40} and lora_alpha={alpha!r:.40} must be positive numbers up to {_MAX_RANK}"
        )
    for name, plain in _PLAIN.items():
        if config.get(name, plain[0]) not in plain:
            raise InvalidInput(f"{path / CONFIG}: {name}={config[name]!r} is not supported; only plain LoRA is")
    return config
