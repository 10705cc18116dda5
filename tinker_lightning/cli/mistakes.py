"""Rewrites the errors of jsonargparse, which are pages about type unions, as one message with the nearest name."""

from __future__ import annotations

import importlib
import re
import textwrap
from typing import TYPE_CHECKING, Any

import lightning.pytorch as pl
from jsonargparse import ArgumentParser
from lightning.pytorch.loggers import Logger

from tinker_lightning.errors import TinkerLightningError, did_you_mean

if TYPE_CHECKING:
    from collections.abc import Iterator

_KEY = re.compile(r'Parser key "([^"]+)"')
_HELP = re.compile(r"^--([\w.]+)\.help:")
_NO_CLASS = re.compile(r"Expected a dot import path string: (\S+)")
_NO_OPTION = re.compile(r"class_path '([\w.]+)':\s+(?:.*\n\s*)?(?:Option|Key|No action for key) '([\w.]+)' is not")
_NO_KEY = re.compile(r"(?:(?:option|key|nested key) '([\w.]+)'|unrecognized arguments: --([\w.]+))")
_REQUIRED = re.compile(r"the following arguments are required: \w+\.(\w+)")
# An option of a class that has a wrong value, with the lines that say so, which are indented.
_IN_CLASS = re.compile(r"class_path '[\w.]+':\n( +Parser key .*?)(?=\n {4}- |\Z)", re.DOTALL)
_FIRST_ERROR = re.compile(r"Errors:\n\s+- (.*?)(?=\n    - |\n  Given value|\Z)", re.DOTALL)
_NO_FILE = re.compile(r"File does not exist: '(.*)'")
_NOT_YAML = re.compile(r"Problems parsing config: (.*)\Z", re.DOTALL)
_GIVEN = re.compile(r"Given value: (.*)\Z", re.DOTALL)
_BASES = {"model": pl.LightningModule, "data": pl.LightningDataModule, "callbacks": pl.Callback, "logger": Logger}
_BASE_NAMES = {base.__name__ for base in _BASES.values()}
_SECTIONS = ("model", "data", "trainer", "ckpt_path", "seed_everything", "output")


def explain(text: str) -> str:
    """Returns what is wrong, where, and what it should be, as far as the error of jsonargparse says."""
    found = _KEY.search(text) or _HELP.search(text)
    key = found[1] if found else ""
    if match := _NO_CLASS.search(text):
        base = _BASES.get(key.rpartition(".")[2])
        names = sorted({cls.__name__ for cls in _subclasses(base)} if base else ())
        hint = did_you_mean(match[1], names) or "Give a name that --help lists, or the import path of a class."
        return f"{key}: there is no class {match[1]!r}. {hint}"
    if match := _NO_FILE.search(text):
        return f"--{key}: there is no file {match[1]}"
    if match := _NOT_YAML.search(text):
        reason = match[1].replace('in "<unicode string>",', "at")
        return f"--config is not valid YAML: {_plain(reason)}"
    if match := _IN_CLASS.search(text):
        return f"{key}.{explain(textwrap.dedent(match[1]))}"
    match = _NO_OPTION.search(text)
    # The parser takes a mapping with other keys than class_path and init_args for options of the base class.
    if match[1].rpartition(".")[2] in _BASE_NAMES if match else "Subclass types expect" in text:
        return f"{key}: expected class_path, a name, and init_args, the options of that class, and no other keys"
    if match:
        return f"{key}: {match[1].rpartition('.')[2]} has no option {match[2]!r}. " + (
            did_you_mean(match[2], _options(match[1])) or f"--{key}.help {match[1]} lists its options."
        )
    if match := _NO_KEY.search(text):
        name = match[1] or match[2]
        if name.startswith("trainer."):
            names = [f"trainer.{each}" for each in _options("lightning.pytorch.Trainer")]
        else:
            name, names = name.partition(".")[0], [*_SECTIONS]
        return f"there is no option {name!r}. {did_you_mean(name, names) or '--help lists the options.'}"
    if match := _REQUIRED.search(text):
        return f"{match[1]} is missing. Pass --{match[1]} NAME, or --config FILE with a section {match[1]!r}."
    if match := _FIRST_ERROR.search(text):
        reason = _plain(match[1])
        given = _GIVEN.search(text)
        has_value = given is None or "Got value" in reason or "class_path" in reason
        return f"{key}: {reason}" + ("" if has_value else f", got {given[1].strip()}")  # type: ignore[index]
    return f"{key}: {_plain(text.partition(':')[2])}" if text.startswith("Parser key") else _plain(text)


def of_library(error: BaseException | None) -> TinkerLightningError | None:
    """Returns the error of this library that another one was raised for, such as that of a class from a YAML file."""
    while error is not None and not isinstance(error, TinkerLightningError):
        error = error.__cause__ or error.__context__
    return error


def is_of_lightning(error: BaseException) -> bool:
    """Returns whether Lightning or the parser has raised an error, rather than the user's code or torch."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    name = "" if trace is None else str(trace.tb_frame.f_globals.get("__name__", ""))
    return name.partition(".")[0] in ("lightning", "jsonargparse")


def _options(class_path: str) -> list[str]:
    """Returns the names of the constructor arguments of a class, those of `**kwargs` included."""
    module, _, name = class_path.rpartition(".")
    added = ArgumentParser().add_class_arguments(getattr(importlib.import_module(module), name))
    return [str(option) for option in added]


def _subclasses(cls: type[Any]) -> Iterator[type[Any]]:
    for each in cls.__subclasses__():
        yield each
        yield from _subclasses(each)


def _plain(text: str) -> str:
    """Returns a message on one line, with types as they are written in code."""
    text = re.sub(r"<class '(?:\w+\.)*(\w+)'>", r"\1", text)
    text = re.sub(r"(?:typing\.)?Literal\[([^]]*)\]", r"one of \1", text).replace("Expected a ", "expected ")
    return re.sub(r"\s+", " ", text.replace("Parser key ", "")).strip()
