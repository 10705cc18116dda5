"""Checks the fields of dialects, which users write by hand or load from files."""

from __future__ import annotations

import functools
import types
import typing
from dataclasses import fields
from typing import TYPE_CHECKING, Any

from tinker_lightning.errors import InvalidInput

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable


def check_names(what: str, cls: type[Any], names: Iterable[str]) -> None:
    """Raises `InvalidInput` if a dataclass does not have one of these fields."""
    known = [field.name for field in fields(cls)]
    if unknown := sorted(set(names) - set(known)):
        raise InvalidInput(f"{what}: {', '.join(unknown)}: unknown; choose from {', '.join(known)}")


def checked_names(what: str, given: Any, known: Collection[str]) -> frozenset[str]:
    """Returns a set of names, which files have as a list; raises `InvalidInput` if it is none or a name is unknown."""
    if not isinstance(given, list | tuple | set | frozenset) or not all(isinstance(name, str) for name in given):
        raise InvalidInput(f"{what}: {given!r} is not a list of names; list some of {', '.join(sorted(known))}")
    if unknown := sorted(set(given) - set(known)):
        raise InvalidInput(f"{what}: {', '.join(unknown)}: unknown; choose from {', '.join(sorted(known))}")
    return frozenset(given)


def check_values(what: str, instance: Any) -> None:
    """Raises `InvalidInput` if a field whose type lists its values has another one."""
    cls: Any = type(instance)
    for name, allowed in _choices(cls).items():
        value = getattr(instance, name)
        if not any(value is each or (isinstance(each, str) and value == each) for each in allowed):
            raise InvalidInput(f"{what}: {name}: {value!r} is unknown; choose from {', '.join(map(repr, allowed))}")


@functools.cache
def _choices(cls: Any) -> dict[str, tuple[Any, ...]]:
    """Returns the values of each field whose type lists them: literals, booleans, or either or None."""
    listed = {name: _values(hint) for name, hint in typing.get_type_hints(cls).items()}
    return {name: values for name, values in listed.items() if values is not None}


def _values(hint: Any) -> tuple[Any, ...] | None:
    if hint is bool:
        return True, False
    if hint is types.NoneType:
        return (None,)
    origin, members = typing.get_origin(hint), typing.get_args(hint)
    if origin is typing.Literal:
        return members
    if origin in (typing.Union, types.UnionType):
        parts = [_values(member) for member in members]
        return None if None in parts else tuple(value for part in parts for value in part or ())
    return None
