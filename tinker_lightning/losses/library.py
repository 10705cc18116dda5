"""Checks of library losses before a server runs them.

A server can only report mismatched shapes or NaN. So the loss is first called here, on the datums and without
log-probabilities, which checks all inputs with the messages of a local run and costs next to nothing.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import math
from numbers import Integral, Real
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from tinker_lightning import losses
from tinker_lightning.errors import InvalidInput
from tinker_lightning.losses.batch import EmptyBatch, Rehearsal, TokenCount, total_weight, weighted_positions
from tinker_lightning.losses.builtin import LOSSES
from tinker_lightning.losses.custom import forward_datums
from tinker_lightning.types import Datum, TensorData

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

# The losses that are sums over tokens, by name. All others are means already.
TOKEN_COUNTS: dict[str, TokenCount] = {
    **{name: loss.token_count for name, loss in LOSSES.items()},
    "kl_regularized": total_weight,
    "topk_distillation": weighted_positions,
}


def unwrap_partial(loss: Any) -> tuple[Any, dict[str, Any]]:
    """Returns a function without the keywords that `functools.partial` binds, and these keywords."""
    settings: dict[str, Any] = {}
    while isinstance(loss, functools.partial) and not loss.args:
        settings = {**loss.keywords, **settings}
        loss = loss.func
    return loss, settings


def is_of_library(loss: Any) -> bool:
    """Returns whether a loss is a function of `tinker_lightning.losses`, with or without settings."""
    function, _ = unwrap_partial(loss)
    name = getattr(function, "__name__", "")
    return name in losses.__all__ and function is getattr(losses, name)


def check_settings(loss: Any, config: Mapping[str, Any], *, allow_unknown: bool = False) -> None:
    """Raises `InvalidInput` for unknown or invalid settings of a library loss, including those bound to it.

    With `allow_unknown`, unknown names are left to the server.
    """
    function, bound = unwrap_partial(loss)
    _, _, *parameters = inspect.signature(function).parameters.values()
    defaults = {parameter.name: parameter.default for parameter in parameters}
    settings = {**bound, **config}
    if allow_unknown:
        settings = supported_settings(function, settings)
    for name, value in settings.items():
        if name not in defaults:
            valid = ", ".join(defaults) or "no settings at all"
            raise InvalidInput(f"loss_fn_config: {function.__name__} has no setting {name!r}; it takes {valid}")
        if expected := _expected_type(defaults[name], value):
            raise InvalidInput(f"loss_fn_config: {name} of {function.__name__} must be {expected}, got {value!r}")
    try:
        with contextlib.suppress(EmptyBatch):  # a loss checks its settings first
            function([], [], **settings)
    except InvalidInput as error:
        raise InvalidInput(f"loss_fn_config: {function.__name__}: {error}") from None


def supported_settings(function: Any, config: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the settings that a library loss has; a server may support others."""
    return {name: value for name, value in config.items() if name in inspect.signature(function).parameters}


def _expected_type(default: Any, value: Any) -> str | None:
    """Returns the expected type of a setting, if its value has another; the loss itself checks strings and None."""
    if isinstance(default, bool):
        return None if isinstance(value, bool) else "True or False"
    if isinstance(default, int):
        return None if isinstance(value, Integral) else "a whole number"
    if isinstance(default, float):
        return None if isinstance(value, Real) and math.isfinite(value) else "a finite number"
    return None


def check_datums(loss: Any, data: Sequence[Datum], settings: Mapping[str, Any]) -> list[Datum]:
    """Checks datums as a local run would; inputs that only some of them have are filled with the loss's default."""
    forward_datums(data)  # raises for a datum without targets
    shapes = [datum.loss_fn_inputs["target_tokens"].shape for datum in data]
    rehearsal, nothing = Rehearsal(data), torch.zeros(())
    with torch.no_grad():
        loss(rehearsal, [nothing.expand(shape) for shape in shapes], **settings)
    filled = list(data)
    for name, value in rehearsal.defaults.items():
        for i, shape in enumerate(shapes):
            if name not in filled[i].loss_fn_inputs:
                filled[i] = filled[i].with_inputs({name: TensorData(np.full(shape, value, np.float32))})
    return filled
