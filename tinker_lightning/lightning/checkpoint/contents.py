"""What a checkpoint file keeps of remote models: the names of states on the server, and windows that wait."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from tinker_lightning.errors import InvalidInput
from tinker_lightning.remote.calls import Call, ServerCall
from tinker_lightning.remote.group import handles_of
from tinker_lightning.remote.handle import RemoteHandle
from tinker_lightning.remote.lm import name_in, named
from tinker_lightning.types import Datum, TensorData
from tinker_lightning.wire import json as wire_json

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from tinker_lightning.remote.window import Remote

# Where a checkpoint file names the state on the server.
STATE_KEY = "tinker"
# Where a state dict names one: that of the module's own model, and those of others.
_OWN = "lm._extra_state"
_EXTRA = "_extra_state"
_SCHEME = b"tinker://"


def saved(remote: Remote) -> dict[str, Any]:
    """Saves a model on the server; returns what a file keeps of it, as plain data and tensors."""
    path = remote.save()
    info = remote.backend.get_info()
    return {
        "path": path,
        "base_model": info.model_data.model_name,
        "rank": info.lora_rank,
        "steps": remote.steps,
    }


def windows(module: nn.Module) -> dict[str, list[dict[str, Any]]]:
    """The windows of a module's remote models by the names of their parameters, as a file keeps them."""
    return {name: window_state(handle.remote.window) for name, handle in handles_of(module).items()}


def local_gradients(module: nn.Module) -> dict[str, Tensor]:
    """The gradients of parameters on this machine by name, as they are now; those of remote ones are windows."""
    local = [(name, one) for name, one in module.named_parameters() if not isinstance(one, RemoteHandle)]
    return {name: one.grad.clone() for name, one in local if one.grad is not None}


def put_back(state: dict[str, Any], module: nn.Module) -> None:
    """Gives remote models the windows that a file has kept, and parameters on this machine their gradients."""
    for name, parameter in module.named_parameters():
        if name in state["windows"] and isinstance(parameter, RemoteHandle):
            parameter.remote.window = window_from(state["windows"][name])
        elif name in state["local_gradients"]:
            parameter.grad = state["local_gradients"][name].clone()


def read(checkpoint: dict[str, Any], base_model: str, rank: int | None) -> dict[str, Any]:
    """What `saved` has put into a file.

    Args:
        checkpoint: The content of the file.
        base_model: What the state must be of; empty if that is not known.
        rank: The same; None if that is not known.

    Raises:
        InvalidInput: If the file is of another base model or rank, or not of a remote model.
    """
    state: dict[str, Any] | None = checkpoint.get(STATE_KEY)
    if state is None:
        raise InvalidInput("this checkpoint names no remote state; it was not written by a RemoteModule")
    if base_model and state["base_model"] not in (None, base_model):
        raise InvalidInput(f"the checkpoint is of {state['base_model']}, but this module of {base_model}")
    if None not in (state["rank"], rank) and state["rank"] != rank:
        raise InvalidInput(f"the checkpoint has rank {state['rank']}, but this module {rank}")
    return state


def mark_loaded(checkpoint: dict[str, Any]) -> None:
    """What `STATE_KEY` names was loaded, so that the state dict has nothing to add."""
    if _OWN in checkpoint.get("state_dict", {}):
        checkpoint["state_dict"][_OWN] = None


def named_in(checkpoint: Mapping[str, Any]) -> frozenset[str]:
    """All the states that a file names: the module's own, and those of further remote models in its state dict."""
    own = checkpoint.get(STATE_KEY)
    others = {name_in(entry) for _, entry in _entries(checkpoint)}
    return frozenset(others | ({str(own["path"])} if own else set()))


def rename(checkpoint: dict[str, Any], path: str, new: str) -> None:
    """Names another state wherever a file names this one."""
    own = checkpoint.get(STATE_KEY)
    if own and own["path"] == path:
        own["path"] = new
    for key, entry in list(_entries(checkpoint)):
        if name_in(entry) == path:
            checkpoint["state_dict"][key] = named(new)


def _entries(checkpoint: Mapping[str, Any]) -> Iterator[tuple[str, Tensor]]:
    """Those that name states; other modules have bytes of their own under such keys."""
    for key, entry in (checkpoint.get("state_dict") or {}).items():
        is_bytes = key.endswith(_EXTRA) and isinstance(entry, Tensor) and entry.dtype == torch.uint8
        if is_bytes and bytes(entry.flatten()[: len(_SCHEME)].tolist()) == _SCHEME:
            yield key, entry


def window_state(window: Sequence[Call | ServerCall]) -> list[dict[str, Any]]:
    """A window as tensors and plain data, which a file gives back without running code."""
    return [
        {
            "loss": _loss_name(call) if isinstance(call, ServerCall) else None,
            "config": dict(call.config) if isinstance(call, ServerCall) else {},
            "datums": [_datum_state(datum) for datum in call.datums],
            "gradients": call.gradients,
            "added": call.added if isinstance(call, ServerCall) else None,
            "inputs": _tensors(call.inputs) if isinstance(call, ServerCall) else {},
        }
        for call in window
    ]


def window_from(state: Sequence[dict[str, Any]]) -> list[Call | ServerCall]:
    """The window that a file has kept."""
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
    if hasattr(call.loss, "loss_id"):  # the server forgets it with its session
        raise InvalidInput(
            f"a checkpoint in the midst of a window cannot keep the loss {call.name!r}, which lives as long as its "
            "session. Save at the end of a step, or give it a name with custom_loss."
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
