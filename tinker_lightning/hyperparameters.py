"""Which arguments of a module are plain data, so that they can stand in a checkpoint file."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any


def not_plain(module: Any) -> list[str]:
    """What the constructors of a module, subclasses' included, were given that is no plain data."""
    names: list[str] = []
    frame = inspect.currentframe()
    while (frame := frame and frame.f_back) is not None:
        if frame.f_code.co_name == "__init__" and frame.f_locals.get("self") is module:
            for name, value in frame.f_locals.items():
                given = value.items() if isinstance(value, Mapping) else [(name, value)]
                names += [key for key, item in given if not _is_plain(item)]
    return names


def _is_plain(value: Any) -> bool:
    if isinstance(value, Mapping):
        return all(isinstance(key, str) and _is_plain(item) for key, item in value.items())
    if isinstance(value, list | tuple):
        return all(_is_plain(item) for item in value)
    return value is None or isinstance(value, str | int | float | bool)
