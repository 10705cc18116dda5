"""Settings of a loss: their defaults, their types, and whether a call may change them."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from tinker_lightning.errors import InvalidInput

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

Setting: TypeAlias = float | int | str | bool | None


@dataclass(frozen=True, slots=True)
class Hyperparameter:
    """A setting of a loss. A fixed one has shaped the graph, so a call cannot change it."""

    default: Setting
    fixed: bool = False


def check_settings(
    loss: str,
    hyperparameters: Mapping[str, Hyperparameter],
    config: Mapping[str, Any],
    *,
    accepts_any_setting: bool = False,
) -> dict[str, Setting]:
    """Returns all settings of a loss, the defaults overridden by `config`; raises `InvalidInput` if one is invalid."""
    values = {name: each.default for name, each in hyperparameters.items()}
    for name, value in cast_like_defaults(hyperparameters, config).items():
        if name not in hyperparameters:
            if accepts_any_setting:
                values[name] = value
                continue
            raise InvalidInput(unknown_setting_message(loss, name, hyperparameters))
        default = hyperparameters[name].default
        if hyperparameters[name].fixed and value != default:
            raise InvalidInput(
                f"loss_fn_config: {name} of {loss} is fixed to {default!r}, because the control flow of the function "
                f"depends on it. Register the loss under another name with {name}={value!r}."
            )
        is_number = isinstance(value, int | float)
        is_wrong = not math.isfinite(value) if is_number else isinstance(default, int | float)
        if is_wrong and not hyperparameters[name].fixed:
            raise InvalidInput(f"loss_fn_config: {name} must be a finite number, got {value!r}")
        values[name] = value
    return values


def unknown_setting_message(loss: str, name: str, valid: Iterable[str]) -> str:
    """Returns the message for a setting that a loss does not have."""
    return f"loss_fn_config: {loss} has no setting {name!r}; it takes {', '.join(valid) or 'no settings'}"


def cast_like_defaults(hyperparameters: Mapping[str, Hyperparameter], config: Mapping[str, Any]) -> dict[str, Any]:
    """Returns settings with the types of their defaults, because all numbers on the wire are floats."""
    values = {name: to_python(value) for name, value in config.items()}
    for name in hyperparameters.keys() & values.keys():
        value, default = values[name], hyperparameters[name].default
        if isinstance(value, float) and isinstance(default, int) and value.is_integer():
            values[name] = type(default)(value)
        elif isinstance(value, int) and isinstance(default, float):
            values[name] = float(value)  # the function may depend on the type
    return values


def to_python(value: Any) -> Any:
    """Converts a numpy scalar to a Python number; returns anything else unchanged."""
    return value.item() if isinstance(value, np.generic) else value
