"""The content of checkpoint files that concerns remote models: saved states, the window and metrics of the epoch.

Only the record in the `_extra_state` of a model, an entry of the file's state dict, names its state on the server.
Everything else is in one section of the file. `checkpoint.format` declares its keys.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self

import torch
from torch import Tensor, nn
from torchmetrics import Metric

from tinker_lightning.client.server_losses import LossHandle
from tinker_lightning.errors import InvalidInput
from tinker_lightning.lightning import _compat, loggers
from tinker_lightning.lightning.checkpoint.format import RECORD, SECTION, new_section
from tinker_lightning.lightning.checkpoint.loaders import capture_rng
from tinker_lightning.remote.calls import Call, ServerCall
from tinker_lightning.remote.lm import RemoteHandle, RemoteLM
from tinker_lightning.remote.saved_state import SavedState, is_record
from tinker_lightning.types import Datum, TensorData
from tinker_lightning.wire import json as wire_json

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import lightning.pytorch as pl

    from tinker_lightning.lightning.module import RemoteModule


def add_section(checkpoint: dict[str, Any], module: RemoteModule) -> None:
    """Adds the accumulation window of a module to a checkpoint, and how far it has logged to W&B and CSV files.

    Arguments that a subclass hard-codes are left out of the hyperparameters, because a load must not pass them again.
    """
    if SECTION in checkpoint:
        return  # already added by the hooks
    hparams = checkpoint.get(module.CHECKPOINT_HYPER_PARAMS_KEY)
    if isinstance(hparams, dict) and "_instantiator" not in hparams:  # which `LightningCLI` adds
        plain = {name: value for name, value in hparams.items() if name not in module._fixed_arguments}
        checkpoint[module.CHECKPOINT_HYPER_PARAMS_KEY] = plain
    module.drain()
    section = new_section(checkpoint)
    section.update(Window.capture(module).state())
    section["strategy"] = None  # which `TinkerStrategy` fills in
    if module.has_trainer:
        section["wandb"] = loggers.describe_runs(module.trainer)
        section["rows"] = loggers.describe_rows(module.trainer)


def load_states(checkpoint: dict[str, Any], module: nn.Module) -> None:
    """Loads the remote states that a checkpoint names, before anything local changes.

    The records are removed, so that `load_state_dict` does not load the states again.
    """
    entries = checkpoint.get("state_dict", {})
    for key, model in _keys(module).items():
        if key not in entries:
            raise InvalidInput(
                f"the checkpoint lacks {key!r} in its state_dict: it was not written by a RemoteModule, or by one "
                "without that remote model, or was changed since. Load it into a module of the class that wrote it."
            )
        model.set_extra_state(entries[key])
        entries[key] = None


def _keys(module: nn.Module) -> dict[str, RemoteLM]:
    """Returns the remote models of a module by the keys of their records in its state dict."""
    models = module.named_modules(remove_duplicate=False)
    return {f"{name}.{RECORD}": model for name, model in models if isinstance(model, RemoteLM)}


def states_in(checkpoint: Any, file: object) -> dict[str, SavedState]:
    """Returns the remote states that a checkpoint names, by the names of their models in the module."""
    entries = checkpoint.get("state_dict") if isinstance(checkpoint, dict) else None
    if not isinstance(entries, dict):
        raise InvalidInput(f"{file} is not a checkpoint file of Lightning: it has no state_dict")
    return {
        key.removesuffix(RECORD).removesuffix("."): SavedState.from_tensor(record)
        for key, record in entries.items()
        if key.endswith(RECORD) and is_record(record)
    }


def state_in(checkpoint: Any, file: object) -> SavedState:
    """Returns the state of the model `lm`, or of the first one if a module calls its models differently."""
    states = states_in(checkpoint, file)
    if not states:
        raise InvalidInput(f"{file} names no remote model: it was not written by a RemoteModule")
    return states.get("lm", next(iter(states.values())))


@dataclass(frozen=True, slots=True)
class Window:
    """The accumulation window of a module.

    Args:
        calls: The calls of each remote model, by the name of its parameter.
        local_gradients: The gradients of local parameters that wait for an optimizer step, by name.
        metrics: The metrics of the micro-batches, each with its number of datums.
    """

    calls: dict[str, list[Call | ServerCall]]
    local_gradients: dict[str, Tensor]
    metrics: list[tuple[dict[str, float], int]]

    @classmethod
    def capture(cls, module: RemoteModule) -> Self:
        """Copies the window of a module, because a loss that is rejected drops it."""
        calls, gradients = {}, {}
        for name, parameter in module.named_parameters():
            if isinstance(parameter, RemoteHandle):
                calls[name] = list(map(copy.copy, parameter.remote.window))
            elif parameter.grad is not None:
                gradients[name] = parameter.grad
        # With an empty window, only gradients of the last step are left.
        is_open = any(calls.values()) or not module.lm.handle.requires_grad or not module.automatic_optimization
        gradients = {name: gradient.clone() for name, gradient in gradients.items()} if is_open else {}
        return cls(calls, gradients, list(module._window_metrics))

    def state(self) -> dict[str, Any]:
        """Returns the window as tensors and plain data."""
        return {
            "windows": {name: window_state(calls) for name, calls in self.calls.items()},
            "local_gradients": self.local_gradients,
            "window_metrics": self.metrics,
        }


def restore_window(state: dict[str, Any], module: RemoteModule) -> None:
    """Restores the windows of remote models, the gradients of local parameters and the metrics."""
    for name, parameter in module.named_parameters():
        if name in state["windows"] and isinstance(parameter, RemoteHandle):
            parameter.remote.window = window_from(state["windows"][name])
        elif name in state["local_gradients"]:
            parameter.grad = state["local_gradients"][name].clone()
    module._window_metrics = list(state["window_metrics"])


def window_state(window: Sequence[Call | ServerCall]) -> list[dict[str, Any]]:
    """Returns a window as tensors and plain data, which load with `weights_only=True`."""
    states: list[dict[str, Any]] = []
    for call in window:
        datums = [_datum_state(datum) for datum in call.datums]
        states.append({"loss": None, "datums": datums, "gradients": call.gradients})
        if isinstance(call, ServerCall):
            own = {"config": dict(call.config), "added": call.added, "inputs": _tensors(call.inputs)}
            states[-1].update(own, loss=_loss_name(call))
    return states


def window_from(states: Sequence[dict[str, Any]]) -> list[Call | ServerCall]:
    """Converts the result of `window_state`, which `read_window` has checked, back to a window."""
    window: list[Call | ServerCall] = []
    for state in states:
        datums = [_datum_from(datum) for datum in state["datums"]]
        if state["loss"] is None:
            window.append(Call(datums, state["gradients"]))
        else:
            inputs = {name: TensorData.from_torch(tensor) for name, tensor in state["inputs"].items()}
            call = ServerCall(datums, state["loss"], state["config"], state["gradients"], state["added"], inputs)
            window.append(call)
    return window


def _loss_name(call: ServerCall) -> str:
    if isinstance(call.loss, LossHandle):  # the server forgets it with its session
        raise InvalidInput(
            f"a checkpoint in the middle of an accumulation window cannot keep the loss {call.name!r}, which exists "
            "only as long as its session. Save after an optimizer step, or register the loss by name with custom_loss."
        )
    return call.name


def _tensors(inputs: Mapping[str, TensorData]) -> dict[str, Tensor]:
    return {name: tensor.to_torch().clone() for name, tensor in inputs.items()}


def _datum_state(datum: Datum) -> dict[str, Any]:
    inputs = _tensors(datum.loss_fn_inputs)
    rest = wire_json.dumps(datum.with_only_inputs({}))
    return {"rest": torch.frombuffer(bytearray(rest), dtype=torch.uint8), "inputs": inputs}


def _datum_from(state: dict[str, Any]) -> Datum:
    inputs = {name: TensorData.from_torch(tensor) for name, tensor in state["inputs"].items()}
    rest = wire_json.parse(Datum, bytes(state["rest"].numpy()))
    return rest.with_inputs(inputs)


@dataclass(frozen=True, slots=True)
class BatchSnapshot:
    """The state at the start of a batch, in case a file is written before the batch ends.

    Args:
        number: The number of the batch in the fit.
        epoch_metrics: The logged values and metrics of the epoch.
        window: The accumulation window.
        rng: The random number generators.
    """

    number: int
    epoch_metrics: dict[str, Any]
    window: Window
    rng: dict[str, Any]

    @classmethod
    def capture(cls, trainer: pl.Trainer, module: RemoteModule) -> Self:
        """Captures the state of a fit before a batch is trained."""
        number = trainer.fit_loop.epoch_loop.total_batch_idx
        return cls(number, capture_epoch(trainer), Window.capture(module), capture_rng())

    def is_under_way(self, trainer: pl.Trainer) -> bool:
        """Returns whether the batch is still being trained; after a resume it starts again."""
        loop = trainer.fit_loop.epoch_loop
        batches: Any = loop.batch_progress.current
        return bool(batches.ready > batches.processed and loop.total_batch_idx == self.number)


def capture_epoch(trainer: pl.Trainer) -> dict[str, Any]:
    """Returns the logged values and the states of the module's metrics, as tensors and plain data."""
    logged, validated = _compat.logged_values(trainer)
    metrics = {
        name: _metric_state(metric)
        for name, metric in _metrics(trainer).items()
        if metric.update_called and name not in validated
    }
    return {"logged": logged, "metrics": metrics}


def restore_epoch(trainer: pl.Trainer, state: dict[str, Any]) -> None:
    """Restores the result of `capture_epoch`, before anything is logged."""
    metrics = _metrics(trainer)
    for name, saved in state["metrics"].items():
        if name in metrics:
            for key, part in saved["states"].items():
                setattr(metrics[name], key, part)
            _compat.UPDATE_COUNT.set(metrics[name], saved["count"])
    for entry in state["logged"]:
        value: Any = metrics.get(str(entry["metric_attribute"])) if entry["value"] is None else entry["value"]
        if value is not None:
            _compat.log_again(trainer, entry, value)


def _metrics(trainer: pl.Trainer) -> dict[str, Metric]:
    modules = trainer.lightning_module.named_modules()
    return {name: module for name, module in modules if isinstance(module, Metric)}


def _metric_state(metric: Metric) -> dict[str, Any]:
    # A metric changes its tensors in place, but only appends to its lists.
    states = {
        name: state.clone() if isinstance(state, Tensor) else list(state) for name, state in metric.metric_state.items()
    }
    return {"count": metric.update_count, "states": states}
