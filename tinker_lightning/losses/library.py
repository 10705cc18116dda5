"""Checks of the library's losses before a server runs them.

A server sees tensors: it can only report that shapes do not match, or that a loss is NaN. So the loss is called here
first, on the datums and without log-probabilities. This checks all inputs as a local run would, with the same messages,
and computes next to nothing.
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
from tinker_lightning.losses.batch import EmptyBatch, Rehearsal
from tinker_lightning.losses.builtin import LOSSES
from tinker_lightning.losses.reduction import TokenCount, total_weight, weighted_positions
from tinker_lightning.losses.surrogate import forward_datums
from tinker_lightning.types import Datum, TensorData

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

# The losses that are sums over tokens, by name. All others are means already.
TOKEN_COUNTS: dict[str, TokenCount] = {
    **{name: loss.token_count for name, loss in LOSSES.items()},
    "kl_regularized": total_weight,
    "topk_distillation": weighted_positions,
}


def unwrapped(loss: Any) -> tuple[Any, dict[str, Any]]:
    """Returns a function without the keywords that `functools.partial` binds, and these keywords."""
    settings: dict[str, Any] = {}
    while isinstance(loss, functools.partial) and not loss.args:
        settings = {**loss.keywords, **settings}
        loss = loss.func
    return loss, settings


def is_of_library(loss: Any) -> bool:
    """Returns whether a loss is a function of `tinker_lightning.losses`, with or without settings."""
    function, _ = unwrapped(loss)
    name = getattr(function, "__name__", "")
    return name in losses.__all__ and function is getattr(losses, name)


def check_settings(loss: Any, given: Mapping[str, Any], *, may_have_others: bool = False) -> None:
    """Checks the settings of a library loss, also those that are bound to it, before there is a batch.

    With `may_have_others`, unknown names are left to the server, which may know them.

    Raises:
        InvalidInput: If the loss does not have a setting, or the setting cannot have this value.
    """
    function, bound = unwrapped(loss)
    _, _, *parameters = inspect.signature(function).parameters.values()
    defaults = {parameter.name: parameter.default for parameter in parameters}
    settings = {**bound, **given}
    if may_have_others:
        settings = known_settings(function, settings)
    for name, value in settings.items():
        if name not in defaults:
            known = ", ".join(defaults) or "no settings at all"
            raise InvalidInput(f"loss_fn_config: {function.__name__} does not know {name!r}; it takes {known}")
        if wanted := _wanted(defaults[name], value):
            raise InvalidInput(f"loss_fn_config: {name} of {function.__name__} must be {wanted}, got {value!r}")
    try:
        with contextlib.suppress(EmptyBatch):  # a loss checks its settings first
            function([], [], **settings)
    except InvalidInput as error:
        raise InvalidInput(f"loss_fn_config: {function.__name__}: {error}") from None


def known_settings(function: Any, given: Mapping[str, Any]) -> dict[str, Any]:
    """Returns those of the settings that a loss of the library has; a server may know others."""
    return {name: value for name, value in given.items() if name in inspect.signature(function).parameters}


def _wanted(default: Any, value: Any) -> str | None:
    """Returns what a setting must be, if its type is wrong; the loss itself checks strings and None."""
    if isinstance(default, bool):
        return None if isinstance(value, bool) else "True or False"
    if isinstance(default, int):
        return None if isinstance(value, Integral) else "a whole number"
    if isinstance(default, float):
        return None if isinstance(value, Real) and math.isfinite(value) else "a finite number"
    return None


def checked(loss: Any, data: Sequence[Datum], settings: Mapping[str, Any]) -> list[Datum]:
    """Checks datums and returns them as a server needs them to compute the same loss as a local run.

    An input that only some datums have is filled in for the others, with the default of the loss.

    Raises:
        InvalidInput: If a local run would raise it.
    """
    forward_datums(data)  # raises for a datum without targets
    shapes = [datum.loss_fn_inputs["target_tokens"].shape for datum in data]
    rehearsal, nothing = Rehearsal(data), torch.zeros(())
    with torch.no_grad():
        loss(rehearsal, [nothing.expand(shape) for shape in shapes], **settings)
    if not rehearsal.defaults:
        return list(data)
    return [_filled(datum, shape, rehearsal.defaults) for datum, shape in zip(data, shapes, strict=True)]


def _filled(datum: Datum, shape: Sequence[int], defaults: Mapping[str, float]) -> Datum:
    missing = {
        name: TensorData(np.full(shape, value, np.float32))
        for name, value in defaults.items()
        if name not in datum.loss_fn_inputs
    }
    return datum.with_inputs(missing)
