"""Which arguments of a module can stand in a checkpoint file: plain data that is to be given when it is loaded."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import FrameType


def not_plain(module: Any) -> list[str]:
    """What the constructors of a module, subclasses' included, were given that is no plain data."""
    arguments = (pair for frame in _constructors(module) for pair in _arguments(frame))
    return [name for name, value in arguments if value is not module and not _is_plain(value)]


def fixed(module: Any) -> frozenset[str]:
    """The arguments that a module's constructors pass to each other, and that nobody gave to the outermost of them.

    It passes them again when a file is loaded, and would be given them twice if they stood there.
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
    """The calls of `__init__` that are under way for a module, the innermost first."""
    frame = inspect.currentframe()
    while (frame := frame and frame.f_back) is not None:
        code = frame.f_code
        if code.co_name == "__init__" and code.co_argcount and frame.f_locals.get(code.co_varnames[0]) is module:
            yield frame


def _names_of(values: tuple[Any, ...], inner: list[FrameType]) -> set[str]:
    """The names that constructors further in have for what is passed on to them as `*args`."""
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
    """What a call has got as `*args`."""
    _, rest, _, values = inspect.getargvalues(frame)
    return tuple(values.get(rest, ())) if rest is not None else ()


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
