"""The content of checkpoint files that concerns remote models.

Only the record in the `_extra_state` of a model, an entry of the file's state dict, names its state on the server.
Everything else is in one section of the file.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from tinker_lightning.client.server_losses import LossHandle
from tinker_lightning.errors import InvalidInput
from tinker_lightning.remote.calls import Call, ServerCall
from tinker_lightning.remote.group import handles_of
from tinker_lightning.remote.handle import RemoteHandle
from tinker_lightning.remote.lm import RemoteLM
from tinker_lightning.remote.saved_state import FORMAT_VERSION, SavedState, check_format, check_keys, is_record
from tinker_lightning.types import Datum, TensorData
from tinker_lightning.wire import json as wire_json

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

SECTION = "tinker"
"""The key of the section in a checkpoint."""

OPTIMIZERS = "optimizer_states"
"""A key that files saved with `save_weights_only=True` lack."""

_RECORD = "_extra_state"  # the end of the keys of records in a state dict
_WINDOW_KEYS = ("windows", "local_gradients", "window_metrics")
_CALL_KEYS = ("loss", "datums", "gradients")
_SERVER_CALL_KEYS = ("config", "added", "inputs")
_DATUM_KEYS = ("rest", "inputs")


def section_of(checkpoint: dict[str, Any]) -> dict[str, Any]:
    """Returns the section of a checkpoint that is about to be written."""
    section: dict[str, Any] = checkpoint.setdefault(SECTION, {"version": FORMAT_VERSION})
    return section


def read_section(checkpoint: Mapping[str, Any], file: object, *keys: str) -> dict[str, Any]:
    """Returns the section of a checkpoint; raises `InvalidInput` if it lacks a key or has another format version."""
    if SECTION not in checkpoint:
        raise InvalidInput(
            f"{file} lacks {SECTION!r}: it was not written by a RemoteModule, or was changed since. Load a checkpoint "
            "of the module's class."
        )
    return check_format(checkpoint[SECTION], f"the {SECTION!r} section of {file}", "version", keys)


def read_window(checkpoint: Mapping[str, Any], file: object) -> dict[str, Any] | None:
    """Returns the accumulation window of a checkpoint; None for a file of weights that has none."""
    if SECTION not in checkpoint and OPTIMIZERS not in checkpoint:
        return None
    section = read_section(checkpoint, file, *_WINDOW_KEYS)
    for name, window in section["windows"].items():
        for call in window:
            what = f"the accumulation window of {name!r} in {file}"
            check_keys(call, what, _CALL_KEYS)
            check_keys(call, what, () if call["loss"] is None else _SERVER_CALL_KEYS)
            for datum in call["datums"]:
                check_keys(datum, f"a datum in {what}", _DATUM_KEYS)
    return section


def check_entry(checkpoint: Mapping[str, Any], file: object, path: str) -> None:
    """Raises `InvalidInput` if a checkpoint lacks an entry of its nested dicts, for example `loops.fit_loop`."""
    found: Any = checkpoint
    for key in path.split("."):
        check_keys(found, f"{path!r} of {file}", (key,))
        found = found[key]


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
        key.removesuffix(_RECORD).removesuffix("."): SavedState.from_tensor(record)
        for key, record in entries.items()
        if key.endswith(_RECORD) and is_record(record)
    }


def state_in(checkpoint: Any, file: object) -> SavedState:
    """Returns the state of the model `lm`, or of the first one if a module calls its models differently."""
    states = states_in(checkpoint, file)
    if not states:
        raise InvalidInput(f"{file} names no remote model: it was not written by a RemoteModule")
    return states.get("lm", next(iter(states.values())))


def windows(module: nn.Module) -> dict[str, list[dict[str, Any]]]:
    """Returns the accumulation window of each remote model, by the name of its parameter."""
    return {name: window_state(handle.remote.window) for name, handle in handles_of(module).items()}


def local_gradients(module: nn.Module) -> dict[str, Tensor]:
    """Returns copies of the gradients of local parameters, by name."""
    local = [(name, one) for name, one in module.named_parameters() if not isinstance(one, RemoteHandle)]
    return {name: one.grad.clone() for name, one in local if one.grad is not None}


def restore_gradients(section: Mapping[str, Any], module: nn.Module) -> None:
    """Restores the windows of remote models, and the gradients of local parameters."""
    for name, parameter in module.named_parameters():
        if name in section["windows"] and isinstance(parameter, RemoteHandle):
            parameter.remote.window = window_from(section["windows"][name])
        elif name in section["local_gradients"]:
            parameter.grad = section["local_gradients"][name].clone()


def _keys(module: nn.Module) -> dict[str, RemoteLM]:
    """Returns the remote models of a module by the keys of their records in its state dict."""
    models = module.named_modules(remove_duplicate=False)
    return {f"{name}.{_RECORD}": model for name, model in models if isinstance(model, RemoteLM)}


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


def window_from(state: Sequence[dict[str, Any]]) -> list[Call | ServerCall]:
    """Converts the result of `window_state`, which `read_window` has checked, back to a window."""
    window: list[Call | ServerCall] = []
    for entry in state:
        datums = [_datum_from(datum) for datum in entry["datums"]]
        if entry["loss"] is None:
            window.append(Call(datums, entry["gradients"]))
        else:
            inputs = {name: TensorData.from_torch(tensor) for name, tensor in entry["inputs"].items()}
            call = ServerCall(datums, entry["loss"], entry["config"], entry["gradients"], entry["added"], inputs)
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
