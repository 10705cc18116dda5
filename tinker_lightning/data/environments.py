"""Environments and rewards by import path, as a configuration file names them."""

from __future__ import annotations

import difflib
import importlib
import inspect
import os
import re
from collections.abc import Iterable, Mapping, Sequence, Sized
from typing import Any

from tinker_lightning.data.sources import check_source, read_rows
from tinker_lightning.errors import InvalidInput
from tinker_lightning.rl import Environment

_IMPORT_PATH = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)+")


def imported(path: str, option: str) -> Any:
    """Returns what an import path names; errors name the option that has it."""
    package, _, name = path.rpartition(".")
    try:
        module = importlib.import_module(package)
    except (ModuleNotFoundError, ValueError) as error:
        file = "" if os.path.exists(path) else f", and there is no file {path}"
        raise InvalidInput(
            f"{option}: {path!r} cannot be imported: {error}{file}. Write package.module.name, and start the command "
            "in the folder that has the package."
        ) from error
    except Exception as error:  # of the user's module
        raise InvalidInput(f"{option}: importing {package} failed with {type(error).__name__}: {error}") from error
    if not hasattr(module, name):
        near = _nearest(name, [each for each in vars(module) if not each.startswith("_")])
        raise InvalidInput(f"{option}: {path!r} cannot be imported: the module {package} has no {name!r}.{near}")
    return getattr(module, name)


def prompts_of(source: Any, part: str, environment: Any = None) -> Any:
    """Returns the prompts or environments that an option of a data module names.

    Args:
        source: A JSON Lines file; a collection of prompts or environments; the import path of one, or of a function
            that returns one; a dict with `class_path` and `init_args`, which is a class or function to call, alone or
            in a list.
        part: The name of the option.
        environment: A class or function that returns the environment of each row; the columns of a row are its
            arguments.
    """
    if isinstance(source, str) and _IMPORT_PATH.fullmatch(source) and not _is_file(source):
        found = imported(source, part)
        source = {"class_path": source} if callable(found) else found
    if _is_call(source):
        source = _result(source, part)
    elif isinstance(source, Sequence) and not isinstance(source, str):
        source = [each for item in source for each in (_result(item, part) if _is_call(item) else [item])]
    elif isinstance(source, Environment):
        source = [source]
    if isinstance(source, str | os.PathLike):
        source = read_rows(source, part)
    check_source(source, part)
    is_indexed = isinstance(source, Sized) and callable(getattr(type(source), "__getitem__", None))
    if not is_indexed and (isinstance(source, Sized) or part != "train"):
        source = list(source)  # only what is trained on may be a stream
    if environment is None:
        return source
    if not isinstance(source, Sized):
        raise InvalidInput(f"{part} has no length, so environment={environment!r} cannot be used. Pass environments.")
    rows: Any = source
    return [_environment(environment, row, f"{part}: row {i}") for i, row in enumerate(rows)]


def _is_file(source: str) -> bool:
    return source.endswith((".json", ".jsonl", ".txt")) or os.path.isfile(source)


def _is_call(item: Any) -> bool:
    return isinstance(item, Mapping) and isinstance(item.get("class_path"), str)


def _result(call: Mapping[str, Any], part: str) -> Any:
    """Returns what a class or function returns, an environment as a list of one."""
    if other := sorted(set(call) - {"class_path", "init_args"}):
        raise InvalidInput(f"{part}: expected class_path and init_args, and no other keys, got {other[0]!r}")
    path = call["class_path"]
    found = _called(imported(path, part), call.get("init_args") or {}, part)
    if isinstance(found, Environment):
        return [found]
    if isinstance(found, str | Mapping) or not isinstance(found, Iterable):
        raise InvalidInput(
            f"{part}: {path} returned {_a(found)}, not an Environment. Name a subclass of Environment, or a function "
            "that returns environments."
        )
    return found


def _environment(make: Any, row: Any, where: str) -> Environment:
    if not isinstance(row, Mapping):
        raise InvalidInput(f"{where} must be a dict with the arguments of an environment, got {_a(row)}")
    found = _called(make, row, where)
    if not isinstance(found, Environment):
        raise InvalidInput(
            f"environment must be a subclass of Environment, or a function that returns one; {_name(make)} returned "
            f"{_a(found)}"
        )
    return found


def _called(make: Any, arguments: Mapping[str, Any], where: str) -> Any:
    """Calls a class or function; raises `InvalidInput` for arguments that it does not take."""
    if not callable(make):
        raise InvalidInput(f"{where}: expected a class or a function, got {_a(make)}")
    if inspect.isabstract(make):
        raise InvalidInput(f"{where}: the class {_name(make)} has no method {', '.join(make.__abstractmethods__)}")
    try:
        signature = inspect.signature(make)
    except ValueError:  # a builtin without one
        return make(**arguments)
    try:
        signature.bind(**arguments)
    except TypeError as error:
        unknown = [name for name in arguments if name not in signature.parameters]
        near = _nearest(unknown[0], signature.parameters) if unknown else ""
        fault = f"has no argument {unknown[0]!r}.{near}" if unknown else f"is {error}"
        raise InvalidInput(f"{where}: {_name(make)} {fault}") from error
    return make(**arguments)


def _nearest(name: str, names: Iterable[str]) -> str:
    found = difflib.get_close_matches(name, list(names), 1)
    return f" Did you mean {found[0]!r}?" if found else ""


def _name(made: Any) -> str:
    return getattr(made, "__name__", type(made).__name__)


def _a(value: Any) -> str:
    return f"a {type(value).__name__}"
