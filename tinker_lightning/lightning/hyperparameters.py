"""Which constructor arguments of a module a checkpoint file stores: plain data that loading passes again."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import FrameType


def not_plain(module: Any) -> list[str]:
    """Returns the names of the arguments of a module's constructors that are not plain data."""
    arguments = (pair for frame in _constructors(module) for pair in _arguments(frame))
    return [name for name, value in arguments if value is not module and not _is_plain(value)]


def fixed(module: Any) -> frozenset[str]:
    """Returns the arguments that a subclass passes to `super().__init__` itself.

    It passes them again when a file is loaded, so they would be passed twice if the file had them.
    """
    *inner, outermost = _constructors(module)
    given = {name for name, _ in _arguments(outermost)} | _names_of(_rest(outermost), inner)
    return frozenset(name for frame in inner for name, _ in _arguments(frame)) - given


def without_tuples(value: Any) -> Any:
    """Returns plain data with lists in place of tuples."""
    if isinstance(value, Mapping):
        return {key: without_tuples(item) for key, item in value.items()}
    return [without_tuples(item) for item in value] if isinstance(value, list | tuple) else value


def _constructors(module: Any) -> Iterator[FrameType]:
    """Yields the frames of the running `__init__` calls of a module, the innermost first."""
    frame = inspect.currentframe()
    while (frame := frame and frame.f_back) is not None:
        code = frame.f_code
        if code.co_name == "__init__" and code.co_argcount and frame.f_locals.get(code.co_varnames[0]) is module:
            yield frame


def _names_of(values: tuple[Any, ...], inner: list[FrameType]) -> set[str]:
    """Returns the names that inner constructors have for values that are passed on as `*args`."""
    if not values or not inner:
        return set()
    *further, frame = inner
    names = frame.f_code.co_varnames[1 : frame.f_code.co_argcount]
    got = (*(frame.f_locals.get(name) for name in names), *_rest(frame))
    for start in range(len(got) - len(values) + 1):
        if all(value is other for value, other in zip(values, got[start:], strict=False)):
            here = names[start : start + len(values)]
            return {*here, *_names_of(values[len(here) :], further)}
    return set()


def _rest(frame: FrameType) -> tuple[Any, ...]:
    """Returns the `*args` of a call."""
    _, rest, _, values = inspect.getargvalues(frame)
    return tuple(values.get(rest, ())) if rest is not None else ()


def _arguments(frame: FrameType) -> Iterator[tuple[str, Any]]:
    """Yields the arguments of a call by name, including those in `**kwargs`."""
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
