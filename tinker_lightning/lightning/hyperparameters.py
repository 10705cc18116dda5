"""Which constructor arguments of a module are written to files: plain data without API keys."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator

API_KEY = "api_key"


def not_plain(module: Any) -> list[str]:
    """Returns the names of the constructor arguments of a module that are not plain data."""
    return [name for named, _ in _calls(module) for name, value in named.items() if not _is_plain(value)]


def fixed(module: Any) -> frozenset[str]:
    """Returns the arguments that a subclass hard-codes for `super().__init__`, which a file must not pass again."""
    *inner, (outermost, rest) = _calls(module)
    left = list(rest)
    given = set(outermost)
    for name, value in (pair for named, _ in reversed(inner) for pair in named.items()):
        if left and value is left[0]:  # one of the outermost call's `*args`, which are passed on in order
            left.pop(0)
            given.add(name)
    return frozenset(name for named, _ in inner for name in named) - given


def for_files(value: Any, key: str | None) -> Any:
    """Returns plain data with API keys emptied, and with lists in place of tuples, which `yaml.safe_load` rejects.

    Every string that equals `key` and every value named `api_key` is an API key.
    """
    if isinstance(value, Mapping):
        return {name: "" if name == API_KEY and item else for_files(item, key) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [for_files(item, key) for item in value]
    return "" if key and value == key else value


def _calls(module: Any) -> Iterator[tuple[dict[str, Any], tuple[Any, ...]]]:
    """Yields the named arguments and the `*args` of the running `__init__` calls of a module, the innermost first."""
    frame = inspect.currentframe()
    while (frame := frame and frame.f_back) is not None:
        names, rest, keywords, values = inspect.getargvalues(frame)
        if frame.f_code.co_name == "__init__" and names and values.get(names[0]) is module:
            named = {name: values[name] for name in names[1:] if name in values}
            yield {**named, **values.get(keywords or "", {})}, values.get(rest or "", ())


def _is_plain(value: Any) -> bool:
    if isinstance(value, Mapping):
        return all(isinstance(key, str) and _is_plain(item) for key, item in value.items())
    if isinstance(value, list | tuple):
        return all(_is_plain(item) for item in value)
    return value is None or isinstance(value, str | int | float | bool)
