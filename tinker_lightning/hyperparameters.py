"""Which arguments of a module are plain data, so that they can stand in a checkpoint file."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import FrameType


def not_plain(module: Any) -> list[str]:
    """What the constructors of a module, subclasses' included, were given that is no plain data."""
    names: list[str] = []
    frame = inspect.currentframe()
    while (frame := frame and frame.f_back) is not None:
        code = frame.f_code
        if code.co_name == "__init__" and code.co_argcount and frame.f_locals.get(code.co_varnames[0]) is module:
            names += [name for name, value in _arguments(frame) if value is not module and not _is_plain(value)]
    return names


def _arguments(frame: FrameType) -> Iterator[tuple[str, Any]]:
    """The arguments of a call by name, those in `**kwargs` under their own."""
    names, _, keywords, values = inspect.getargvalues(frame)
    yield from ((name, values[name]) for name in names if name in values)
    if keywords is not None:
        yield from values.get(keywords, {}).items()


def _is_plain(value: Any) -> bool:
    if isinstance(value, Mapping):
        return all(isinstance(key, str) and _is_plain(item) for key, item in value.items())
    if isinstance(value, list | tuple):
        return all(_is_plain(item) for item in value)
    return value is None or isinstance(value, str | int | float | bool)
