"""The content of checkpoint files that concerns remote models: saved states and the accumulation window.

Only the record in the `_extra_state` of a model, an entry of the file's state dict, names its state on the server.
Everything else is in one section of the file. `checkpoint.format` declares its keys.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self, cast

import torch
from torch import Tensor, nn

from tinker_lightning.client.server_losses import LossHandle
from tinker_lightning.errors import InvalidInput
from tinker_lightning.lightning import wandb_runs
from tinker_lightning.lightning.checkpoint.format import RECORD, SECTION, new_section
from tinker_lightning.remote.calls import Call, ServerCall
from tinker_lightning.remote.group import handles_of
from tinker_lightning.remote.handle import RemoteHandle
from tinker_lightning.remote.lm import RemoteLM
from tinker_lightning.remote.saved_state import SavedState, is_record
from tinker_lightning.types import Datum, TensorData
from tinker_lightning.wire import json as wire_json

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from tinker_lightning.lightning.checkpoint.format import CallState, DatumState, ServerCallState, WindowState
    from tinker_lightning.lightning.module import RemoteModule


def add_section(checkpoint: dict[str, Any], module: RemoteModule) -> None:
    """Adds the accumulation window of a module to a checkpoint, and the W&B runs that it logs to.

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
    section.update(Window.capture(module).state())  # type: ignore[typeddict-item]
    section["strategy"] = None  # which `TinkerStrategy` fills in
    if module.has_trainer:
        section["wandb"] = wandb_runs.describe(module.trainer)


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
        calls = {name: [copy.copy(one) for one in each.remote.window] for name, each in handles_of(module).items()}
        gradients = {}
        # With an empty window, only gradients of the last step are left.
        if any(calls.values()) or not module.lm.handle.requires_grad or not module.automatic_optimization:
            local = [(name, one) for name, one in module.named_parameters() if not isinstance(one, RemoteHandle)]
            gradients = {name: one.grad.clone() for name, one in local if one.grad is not None}
        return cls(calls, gradients, list(module._window_metrics))

    def state(self) -> WindowState:
        """Returns the window as tensors and plain data."""
        return {
            "windows": {name: window_state(calls) for name, calls in self.calls.items()},
            "local_gradients": self.local_gradients,
            "window_metrics": self.metrics,
        }


def restore_window(state: WindowState, module: RemoteModule) -> None:
    """Restores the windows of remote models, the gradients of local parameters and the metrics."""
    for name, parameter in module.named_parameters():
        if name in state["windows"] and isinstance(parameter, RemoteHandle):
            parameter.remote.window = window_from(state["windows"][name])
        elif name in state["local_gradients"]:
            parameter.grad = state["local_gradients"][name].clone()
    module._window_metrics = list(state["window_metrics"])


def _keys(module: nn.Module) -> dict[str, RemoteLM]:
    """Returns the remote models of a module by the keys of their records in its state dict."""
    models = module.named_modules(remove_duplicate=False)
    return {f"{name}.{RECORD}": model for name, model in models if isinstance(model, RemoteLM)}


def window_state(window: Sequence[Call | ServerCall]) -> list[CallState | ServerCallState]:
    """Returns a window as tensors and plain data, which load with `weights_only=True`."""
    states: list[CallState | ServerCallState] = []
    for call in window:
        state: CallState = {
            "loss": None,
            "datums": [_datum_state(datum) for datum in call.datums],
            "gradients": call.gradients,
        }
        if isinstance(call, ServerCall):
            inputs = _tensors(call.inputs)
            server: ServerCallState = {**state, "config": dict(call.config), "added": call.added, "inputs": inputs}
            server["loss"] = _loss_name(call)
            states.append(server)
        else:
            states.append(state)
    return states


def window_from(states: Sequence[CallState | ServerCallState]) -> list[Call | ServerCall]:
    """Converts the result of `window_state`, which `read_window` has checked, back to a window."""
    window: list[Call | ServerCall] = []
    for state in states:
        datums = [_datum_from(datum) for datum in state["datums"]]
        if state["loss"] is None:
            window.append(Call(datums, state["gradients"]))
        else:
            call = cast("ServerCallState", state)
            inputs = {name: TensorData.from_torch(tensor) for name, tensor in call["inputs"].items()}
            window.append(ServerCall(datums, call["loss"], call["config"], call["gradients"], call["added"], inputs))
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


def _datum_state(datum: Datum) -> DatumState:
    inputs = _tensors(datum.loss_fn_inputs)
    rest = wire_json.dumps(datum.with_only_inputs({}))
    return {"rest": torch.frombuffer(bytearray(rest), dtype=torch.uint8), "inputs": inputs}


def _datum_from(state: DatumState) -> Datum:
    inputs = {name: TensorData.from_torch(tensor) for name, tensor in state["inputs"].items()}
    rest = wire_json.parse(Datum, bytes(state["rest"].numpy()))
    return rest.with_inputs(inputs)
