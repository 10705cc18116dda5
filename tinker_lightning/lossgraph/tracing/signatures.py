"""Inspects a loss function without calling it: its parameters, its globals and its line."""

from __future__ import annotations

import functools
import inspect
import linecache
import types
from typing import TYPE_CHECKING, Any

from torch import nn

from tinker_lightning.lossgraph.tracing.lines import Place

if TYPE_CHECKING:
    from collections.abc import Callable


def signature_of(fn: Callable[..., Any]) -> inspect.Signature:
    """Returns the parameters of a function; for a module those of its `forward`, as its `__call__` takes anything."""
    return inspect.signature(_called(fn))


def globals_of(fn: Callable[..., Any]) -> dict[str, Any]:
    """Returns the globals of a function, or of the one inside a partial, a method, a module or a callable object."""
    function = _function(fn)
    return function.__globals__ if function else {}


def place_of_function(fn: Callable[..., Any]) -> Place:
    """Returns the line where a function starts, if it is known."""
    function = _function(fn)
    if function is None:
        return Place("")
    filename, line = function.__code__.co_filename, function.__code__.co_firstlineno
    lines = linecache.getlines(filename)
    start = next((i for i in range(line - 1, len(lines)) if "def " in lines[i] or "lambda" in lines[i]), line - 1)
    source = lines[start].strip() if start < len(lines) else ""
    return Place(f"{filename}:{start + 1}: {source}\n    " if source else f"{filename}:{line}: ")


def _called(fn: Callable[..., Any]) -> Callable[..., Any]:
    if isinstance(fn, functools.partial):
        return functools.partial(_called(fn.func), *fn.args, **fn.keywords)
    return fn.forward if isinstance(fn, nn.Module) else fn


def _function(fn: Any) -> types.FunctionType | None:
    fn = _called(fn)
    for _ in range(8):
        if isinstance(fn, types.FunctionType):
            return fn
        fn = getattr(fn, "func", None) or getattr(fn, "__func__", None) or type(fn).__call__
    return None
