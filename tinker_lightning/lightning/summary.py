"""What a fit shows once about the model that it trains: server, dialect, adapter and route."""

from __future__ import annotations

import contextlib
import logging
from typing import TYPE_CHECKING, Any

from lightning.pytorch.callbacks import ModelSummary
from lightning.pytorch.utilities import rank_zero_info

from tinker_lightning.errors import TinkerLightningError, Unsupported
from tinker_lightning.lightning import _compat
from tinker_lightning.remote.handle import RemoteHandle

if TYPE_CHECKING:
    import lightning.pytorch as pl

    from tinker_lightning.lightning.base import RemoteBase

logger = logging.getLogger("tinker_lightning")

_ROUTES = {
    "builtin": "computed on the server in one pass",
    "server": "computed on the server in one pass",
    "retained": "computed here, from a forward pass that the server keeps for the gradient",
    "two-pass": "computed here, in one pass for the log-probabilities and one for the gradient",
}


def settings_of(module: RemoteBase) -> dict[str, Any]:
    """Returns what the server knows about a module's model, and where its loss runs."""
    backend = module.lm.backend
    found: dict[str, Any] = {"server": backend.server, "dialect": backend.dialect.name}
    with contextlib.suppress(Unsupported):  # by clients of some vendors
        info = backend.get_info()
        found["base_model"] = info.model_data.model_name
        found["lora_rank"] = info.lora_rank
        found["lora_parameters"] = info.lora_parameters
    with contextlib.suppress(TinkerLightningError):  # raised by the step, if it uses the loss
        found["route"] = module.chosen_route().route
    return {name: value for name, value in found.items() if value is not None}


def show(trainer: pl.Trainer, module: RemoteBase, settings: dict[str, Any]) -> None:
    """Shows the settings of a model in one line; in the log only if the trainer shows no model summary."""
    parameters = settings.get("lora_parameters")
    adapter = f"LoRA of rank {settings.get('lora_rank', 'unknown')}"
    adapter += f" ({parameters:,} parameters, on the server)" if parameters else " (on the server)"
    line = (
        f"Training {settings.get('base_model', 'a model')} on {settings['server']} (dialect {settings['dialect']}): "
        f"{adapter}, loss {module.lm.handle.remote.loss_name}"
    )
    if (route := settings.get("route")) is not None:
        line += f", {_ROUTES[route]} (route {route!r})"
    if _summaries(trainer):
        rank_zero_info(line)
    else:
        logger.info("%s", line)


def show_tokens(trainer: pl.Trainer, module: RemoteBase) -> None:
    """Shows how many tokens the first step has trained."""
    tokens = module.lm.handle.remote.tokens.trained
    if _summaries(trainer):
        module.print(f"The first step trained {tokens:,} tokens.")
    else:
        logger.info("the first step trained %d tokens", tokens)


def hide_handle(trainer: pl.Trainer, module: pl.LightningModule) -> None:
    """Drops Lightning's summary of a module without local parameters: it would list one parameter, the handle."""
    if all(isinstance(each, RemoteHandle) for each in module.parameters()):
        for each in _summaries(trainer):
            if _compat.SUMMARY_DEPTH.get(each) == 1:  # the trainer's own, not one that the user wants
                _compat.SUMMARY_DEPTH.set(each, 0)


def _summaries(trainer: pl.Trainer) -> list[ModelSummary]:
    return [each for each in _compat.CALLBACKS.get(trainer) if isinstance(each, ModelSummary)]
