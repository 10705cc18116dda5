"""Constructor arguments of a module as they are written to files: plain data without API keys."""

from __future__ import annotations

import contextlib
import inspect
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator

    import lightning.pytorch as pl


class Secret(str):
    """A string with the repr `***` that command lines do not write to configuration files."""

    __slots__ = ()

    def __repr__(self) -> str:
        return "'***'"


with contextlib.suppress(ImportError):  # the extra "cli"
    from jsonargparse.typing import register_type

    # A configuration without the key can be reused: the key is then read from the environment.
    register_type(Secret, serializer=lambda _: None, deserializer=Secret)


def is_secret(name: object, value: object) -> bool:
    """Returns whether a value is an API key: a `Secret`, or named `api_key` or `…_api_key` (also `X-API-Key`)."""
    plain = str(name).lower().replace("-", "_")
    return isinstance(value, Secret) or plain == "api_key" or plain.endswith("_api_key")


def arguments_left_out(module: Any) -> list[str]:
    """Returns the names of the constructor arguments of a module that are API keys or not plain data."""
    arguments = _arguments(module)
    return [name for name, value in arguments if is_secret(name, value) or not _is_plain(value)]


def api_keys(module: Any) -> frozenset[str]:
    """Returns the API keys among the constructor arguments of a module."""
    return frozenset(Secret(value) for name, value in _arguments(module) if value and is_secret(name, value))


def fixed_arguments(module: Any) -> frozenset[str]:
    """Returns the arguments that a subclass hard-codes for `super().__init__`, which a file must not pass again."""
    *inner, (outermost, rest) = _calls(module)
    left = list(rest)
    free = set(outermost)
    for name, value in (pair for arguments, _ in reversed(inner) for pair in arguments.items()):
        if left and value is left[0]:  # one of the outermost call's `*args`, which are passed on in order
            left.pop(0)
            free.add(name)
    return frozenset(name for arguments, _ in inner for name in arguments) - free


def hide_keys(value: Any, keys: Collection[str]) -> Any:
    """Returns plain data for files: API keys are emptied, and tuples, which `yaml.safe_load` rejects, become lists.

    API keys are the strings in `keys`, and what `is_secret` names.
    """
    if isinstance(value, Mapping):
        return {name: "" if item and is_secret(name, item) else hide_keys(item, keys) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [hide_keys(item, keys) for item in value]
    return "" if isinstance(value, str) and (value in keys or is_secret("", value)) else value


def hide_in_configs(callbacks: Iterable[pl.Callback], keys: Collection[str]) -> None:
    """Removes API keys from the configurations that callbacks of `LightningCLI` are about to write.

    A module may declare `api_key: str` itself, or take a key under another name.
    """
    cli: Any = sys.modules.get("lightning.pytorch.cli")  # not imported here, because only command lines need it
    for callback in callbacks if cli is not None else ():
        if isinstance(callback, cli.SaveConfigCallback):
            callback.config = callback.config.clone()
            for name, value in list(callback.config.items()):
                leaf = name.rpartition(".")[2]
                callback.config[name] = hide_keys({leaf: value}, keys)[leaf]


def _arguments(module: Any) -> Iterator[tuple[str, Any]]:
    return (pair for arguments, _ in _calls(module) for pair in arguments.items())


def _calls(module: Any) -> Iterator[tuple[dict[str, Any], tuple[Any, ...]]]:
    """Yields the named arguments and the `*args` of the running `__init__` calls of a module, the innermost first."""
    frame = inspect.currentframe()
    while (frame := frame and frame.f_back) is not None:
        names, rest, keywords, values = inspect.getargvalues(frame)
        if frame.f_code.co_name == "__init__" and names and values.get(names[0]) is module:
            arguments = {name: values[name] for name in names[1:] if name in values}
            yield {**arguments, **values.get(keywords or "", {})}, values.get(rest or "", ())


def _is_plain(value: Any) -> bool:
    if isinstance(value, Mapping):
        return all(isinstance(key, str) and _is_plain(item) for key, item in value.items())
    if isinstance(value, list | tuple):
        return all(_is_plain(item) for item in value)
    return value is None or isinstance(value, str | int | float | bool)
