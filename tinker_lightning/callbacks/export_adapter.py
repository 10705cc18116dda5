"""Exports the adapter at the end of a fit, ready for transformers, peft and vLLM."""

from __future__ import annotations

import importlib.util
import json
import logging
import math
import os
import warnings
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from typing_extensions import override

from tinker_lightning.callbacks.generation import require_remote
from tinker_lightning.client.files.peft_folder import CONFIG, check_target, export_adapter, vllm_problems
from tinker_lightning.errors import InvalidInput, OperationFailed, TinkerLightningError
from tinker_lightning.lightning.checkpoint import contents
from tinker_lightning.lightning.hyperparameters import is_secret
from tinker_lightning.lightning.reports import ReportingCallback
from tinker_lightning.remote.lm import delete_state
from tinker_lightning.wire import folders

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from os import PathLike

    import lightning.pytorch as pl

    from tinker_lightning.lightning.module import RemoteModule
    from tinker_lightning.remote.saved_state import SavedState

logger = logging.getLogger("tinker_lightning")

# Hub ids of models that the embedded trainer builds itself.
_HUB_IDS = {"smollm2-135m": "HuggingFaceTB/SmolLM2-135M-Instruct"}


class ExportAdapter(ReportingCallback):
    """Saves the adapter with tokenizer and model card as a PEFT folder when a fit ends; `folder` is its path then.

    Args:
        path: A new or empty folder.
        which: `"last"`, or `"best"`: the best checkpoint of the first `ModelCheckpoint` that monitors a metric. The
            module keeps its last weights.
        base_model: What `base_model_name_or_path` names, so that others can load the adapter; by default the hub id of
            the model, if the server names one.
        merged: A new or empty folder for a model with the adapter merged into its weights; loads the base model.
        check: Whether to check that transformers and peft load the adapter; loads no weights of the base model.
        overwrite: Whether to replace earlier exports.
    """

    def __init__(
        self,
        path: str | PathLike[str],
        which: Literal["last", "best"] = "last",
        *,
        base_model: str | None = None,
        merged: str | PathLike[str] | None = None,
        check: bool = True,
        overwrite: bool = False,
    ) -> None:
        if which not in ("last", "best"):
            raise InvalidInput(f"ExportAdapter: which must be 'last' or 'best', got {which!r}")
        missing = [name for name in ("transformers", "peft") if importlib.util.find_spec(name) is None]
        if missing and (check or merged is not None):
            raise InvalidInput(
                f"ExportAdapter needs {' and '.join(missing)} to check and merge adapters. Install them with: python "
                "-m pip install 'tinker-lightning[embedded]', or set check=False and merged=None."
            )
        self.path = path
        self.which = which
        self.base_model = base_model
        self.merged = merged
        self.check = check
        self.overwrite = overwrite
        self.folder: Path | None = None

    @override
    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Raises `InvalidInput` before anything is trained if the export would fail."""
        require_remote(self, pl_module)
        self._check_folders()
        if self.which == "best" and not _monitoring(trainer):
            raise InvalidInput(
                "ExportAdapter(which='best') needs a ModelCheckpoint that monitors a metric, for example "
                "ModelCheckpoint(monitor='val_loss')"
            )

    @override
    def on_fit_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Exports the adapter."""
        module = require_remote(self, pl_module)
        data = {"Data": data_rows(trainer)}
        if self.which == "last":
            metrics = {name: float(value) for name, value in trainer.callback_metrics.items() if "/" not in name}
            steps = {"epochs": trainer.current_epoch, "optimizer steps": trainer.global_step}
            self.export(module, data | training_sections(module.hparams, steps, metrics))
            return
        file = _monitoring(trainer)[0].best_model_path
        if not file:
            raise InvalidInput("there is no best checkpoint to export, because no checkpoint was saved in this fit")
        saved = trainer.strategy.checkpoint_io.load_checkpoint(file)
        with _temporarily_loaded(module, contents.state_in(saved, file)):
            self.export(module, data | file_sections(saved, file, module.hparams))

    @override
    def end_lines(self) -> dict[str, str]:
        """Returns the folder of the export."""
        merged = "" if self.merged is None else f", merged in {self.merged}"
        return {} if self.folder is None else {"Exported": f"{self.path}{merged}"}

    @property
    def _overwrites(self) -> bool:
        return self.overwrite or self.folder is not None  # a second fit replaces the export of the first

    def export(self, module: RemoteModule, about: Mapping[str, Mapping[str, Any]] | None = None) -> Path:
        """Exports the current adapter of a module, and returns its folder; `about` has sections of its model card."""
        self._check_folders()
        module.drain()
        base = ""

        def finish(part: Path) -> list[str]:
            nonlocal base
            base = self._name_base(module, part)
            _save_tokenizer(module, part)
            architectures = _check_loads(part, base) if self.check else []
            if problems := vllm_problems(part, architectures):
                warnings.warn(f"peft loads the adapter, but vLLM would not: {'; '.join(problems)}", stacklevel=2)
            return architectures

        folder = export_adapter(module.lm.backend, self.path, overwrite=self._overwrites, finish=finish, about=about)
        if self.merged is not None:
            with folders.new_folder(Path(self.merged).expanduser().resolve(), overwrite=self._overwrites) as part:
                _merge(folder, base, part)
                _save_tokenizer(module, part)
        self.folder = folder
        return folder

    def _check_folders(self) -> None:
        check_target(self.path, self._overwrites)
        if self.merged is not None:
            check_target(self.merged, self._overwrites, "model", "config.json")

    def _name_base(self, module: RemoteModule, folder: Path) -> str:
        """Writes a portable name of the base model; returns what it is loaded from on this machine."""
        file = folder / CONFIG
        config = json.loads(file.read_text(encoding="utf-8"))
        source = str(config.get("base_model_name_or_path") or "")
        name = module.lm.backend.get_info().model_data.model_name or ""
        hub_id = _HUB_IDS.get(name, name if name.count("/") == 1 and not Path(name).exists() else "")
        config["base_model_name_or_path"] = self.base_model or hub_id or source
        if not self.base_model and not hub_id:
            warnings.warn(
                f"{CONFIG} names the base model {source!r}, which other machines may not have. Pass its hub id: "
                "ExportAdapter(base_model='organization/model').",
                stacklevel=2,
            )
        file.write_text(json.dumps(config, indent=2), encoding="utf-8")
        return source if Path(source).is_dir() else config["base_model_name_or_path"]


def _monitoring(trainer: pl.Trainer) -> list[Any]:
    """Returns the checkpoint callbacks that monitor a metric."""
    return [one for one in trainer.checkpoint_callbacks if getattr(one, "monitor", None) is not None]


@contextmanager
def _temporarily_loaded(module: RemoteModule, state: SavedState) -> Iterator[None]:
    """Loads a state into the model for the length of a `with` block."""
    handle = module.lm.handle.remote
    saved = handle.saved
    current = handle.save()
    try:
        handle.load(state)
        yield
    finally:
        handle.load(current)
        handle.saved = saved
        if saved is None:
            try:
                delete_state(module, current.path)
            except TinkerLightningError as error:
                logger.warning("%s could not be deleted and stays on the server: %s", current.path, error)


def _save_tokenizer(module: RemoteModule, folder: Path) -> None:
    try:
        module.tokenizer.save_pretrained(folder)
    except TinkerLightningError as error:
        warnings.warn(f"the export has no tokenizer: {error}", stacklevel=2)


def data_rows(trainer: pl.Trainer) -> dict[str, str]:
    """Returns the parts of the data of a fit, described by the report of a data module of this library."""
    parts: Mapping[str, Mapping[str, Any]] = getattr(trainer.datamodule, "report", {})  # type: ignore[attr-defined]
    rows = {
        part: ", ".join(f"{str(name).replace('_', ' ')}: {value}" for name, value in counts.items() if value)
        for part, counts in parts.items()
    }
    return rows or {"train": f"{trainer.num_training_batches} batches of a loader"}


def training_sections(
    settings: Mapping[str, Any], steps: Mapping[str, Any], scores: Mapping[str, float]
) -> dict[str, dict[str, Any]]:
    """Returns the sections of a model card on how an adapter was trained, without API keys and addresses."""
    shown = {
        name: value
        for name, value in settings.items()
        if value is not None and not name.startswith("_") and not name.endswith("_url") and not is_secret(name, value)
    }
    finite = {name: value for name, value in sorted(scores.items()) if name not in shown and math.isfinite(value)}
    return {"Settings": {**shown, **steps}, "Scores": {name: f"{value:.6g}" for name, value in finite.items()}}


def file_sections(
    checkpoint: Mapping[str, Any], file: str | PathLike[str], settings: Mapping[str, Any] | None = None
) -> dict[str, dict[str, Any]]:
    """Returns the sections of a model card that a checkpoint file has; without defaults if no settings are given."""
    steps = {"epochs": checkpoint.get("epoch", 0) + 1, "optimizer steps": checkpoint.get("global_step", 0)}
    name = os.path.basename(file)
    scores = {
        str(state["monitor"]): float(state["best_model_score"])
        for state in checkpoint.get("callbacks", {}).values()
        if isinstance(state, dict) and state.get("monitor") and os.path.basename(state["best_model_path"]) == name
    }
    return training_sections(settings or checkpoint.get("hyper_parameters", {}), steps, scores)


def _check_loads(folder: Path, base: str) -> list[str]:
    """Returns the architectures of the base model; none, with a warning, if it is not available.

    Raises:
        OperationFailed: If the adapter does not fit its base model.
    """
    import peft
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    if (folder / "tokenizer_config.json").exists():
        AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    try:
        config = AutoConfig.from_pretrained(base, trust_remote_code=False)
    except (OSError, ValueError) as error:
        warnings.warn(
            f"the adapter is exported, but not checked: its base model {base!r} is not available: {error}",
            stacklevel=2,
        )
        return []
    with torch.device("meta"), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # advice for those who will train the adapter
        model = peft.get_peft_model(
            AutoModelForCausalLM.from_config(config), peft.PeftConfig.from_pretrained(str(folder))
        )
        weights = peft.get_peft_model_state_dict(model, save_embedding_layers=False)
    exported = {name: list(tensor.shape) for name, tensor in peft.load_peft_weights(str(folder), device="cpu").items()}
    expected = {name: list(tensor.shape) for name, tensor in weights.items()}
    if wrong := sorted(name for name in exported.keys() | expected.keys() if exported.get(name) != expected.get(name)):
        raise OperationFailed(
            f"the adapter does not fit {base!r}: peft expects {wrong[0]} with shape {expected.get(wrong[0])}, the "
            f"server sent {exported.get(wrong[0])}. Pass the base model that was trained as base_model=, or "
            "check=False."
        )
    return list(config.architectures or ())


def _merge(adapter: Path, base: str, folder: Path) -> None:
    import peft
    import torch
    from transformers import AutoModelForCausalLM

    from tinker_lightning.wire.hub import without_progress_bars

    with without_progress_bars(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # advice on tied weights, which are untied here
        model: Any = AutoModelForCausalLM.from_pretrained(base, dtype="auto", trust_remote_code=False)
        head = model.get_output_embeddings()
        if head.weight is model.get_input_embeddings().weight:
            # An adapter of the output matrix must not change the embedding that shares its weights.
            head.weight = torch.nn.Parameter(head.weight.detach().clone())
            model.config.tie_word_embeddings = False
        peft.PeftModel.from_pretrained(model, str(adapter)).merge_and_unload().save_pretrained(folder)
