"""Lines of the user's code, for error messages: the one that is being traced, or the start of a function."""

from __future__ import annotations

import contextlib
import copy
import functools
import inspect
import linecache
import os
import re
import sys
import traceback
import types
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn

from tinker_lightning.errors import InvalidLoss, LossNotTraceable

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator


class SourceLine(NamedTuple):
    """A line of the user's code, and the library that it calls, if any; its string starts an error message."""

    line: str
    library: str = ""

    def __str__(self) -> str:
        if not self.line:
            return ""
        through = f"it passes a tensor to {self.library}, and there " if self.library else ""
        return f"{self.line}{through}"


def current_line() -> SourceLine:
    """Returns the line of the user's code that is running."""
    frames = []
    for frame, line in traceback.walk_stack(sys._getframe(1)):
        if frame.f_code.co_name == "record" and frame.f_code.co_filename in _OWN:
            break  # the remaining frames belong to its callers
        frames.append((frame.f_code.co_filename, line))
    return _innermost_line(frames)


def is_running(filename: str, function: str) -> bool:
    """Returns whether this function, defined in this file, is running."""
    codes = (frame.f_code for frame, _ in traceback.walk_stack(sys._getframe(1)))
    return any(code.co_name == function and code.co_filename == filename for code in codes)


def error_line(error: BaseException) -> SourceLine:
    """Returns the innermost line of the user's code that an exception passed through."""
    frames = reversed(traceback.extract_tb(error.__traceback__))
    return _innermost_line([(frame.filename, frame.lineno or 0) for frame in frames])


def _innermost_line(frames: Iterable[tuple[str, int]]) -> SourceLine:
    """Returns the innermost line of the user's code, given frames from the inside out."""
    outside = [(filename, line) for filename, line in frames if is_outside(filename)]
    library = ""
    for filename, line in outside:
        # The traced function may itself belong to a library.
        if not library_name(filename) or filename == outside[-1][0]:
            source = linecache.getline(filename, line).strip()
            return SourceLine(f"{filename}:{line}: {source}\n    " if source else f"{filename}:{line}: ", library)
        library = library_name(filename)
    return SourceLine("")


def is_outside(filename: str) -> bool:
    """Returns whether a file belongs neither to torch nor to the tracer."""
    return not (filename.startswith(_TORCH) or filename in _OWN)


@functools.lru_cache(maxsize=1024)
def library_name(filename: str) -> str:
    """Returns the import name of the library that a file belongs to; empty for the user's own files."""
    if frozen := _FROZEN.match(filename):
        return frozen[1]
    if filename.startswith(_PACKAGE):
        return "tinker_lightning"
    installed = _INSTALLED.match(filename)
    if installed is None and not filename.startswith(_PYTHON):
        return ""
    rest = filename[installed.end() :] if installed else filename.removeprefix(_PYTHON)
    return rest.partition(os.sep)[0].removesuffix(".py")


_TORCH = f"{torch.__path__[0]}{os.sep}"
_HERE = Path(__file__).parent
_OWN = {contextlib.__file__, copy.__file__, *map(str, _HERE.glob("*.py"))}
_PACKAGE = f"{_HERE.parent}{os.sep}"
_PYTHON = f"{Path(os.__file__).parent}{os.sep}"
_INSTALLED = re.compile(r".*[/\\](?:site|dist)-packages[/\\]")
_FROZEN = re.compile(r"<frozen ([\w.]+)>")


def loss_signature(fn: Callable[..., Any]) -> inspect.Signature:
    """Returns the signature of a function, or of the `forward` of a module, whose `__call__` takes anything."""
    return inspect.signature(_with_forward(fn))


def function_globals(fn: Callable[..., Any]) -> dict[str, Any]:
    """Returns the globals of a function, or of the one inside a partial, a method, a module or a callable object."""
    function = _function(fn)
    return function.__globals__ if function else {}


def function_line(fn: Callable[..., Any]) -> SourceLine:
    """Returns the line where a function starts, if it is known."""
    function = _function(fn)
    if function is None:
        return SourceLine("")
    filename, line = function.__code__.co_filename, function.__code__.co_firstlineno
    lines = linecache.getlines(filename)
    start = next((i for i in range(line - 1, len(lines)) if "def " in lines[i] or "lambda" in lines[i]), line - 1)
    source = lines[start].strip() if start < len(lines) else ""
    return SourceLine(f"{filename}:{start + 1}: {source}\n    " if source else f"{filename}:{line}: ")


@contextmanager
def error_at_function(fn: Callable[..., Any]) -> Iterator[None]:
    """Adds the line of a function to an error about it."""
    try:
        yield
    except InvalidLoss as error:
        raise LossNotTraceable(f"{function_line(fn)}{error}") from None


def _with_forward(fn: Callable[..., Any]) -> Callable[..., Any]:
    if isinstance(fn, functools.partial):
        return functools.partial(_with_forward(fn.func), *fn.args, **fn.keywords)
    return fn.forward if isinstance(fn, nn.Module) else fn


def _function(fn: Any) -> types.FunctionType | None:
    fn = _with_forward(fn)
    for _ in range(8):
        if isinstance(fn, types.FunctionType):
            return fn
        fn = getattr(fn, "func", None) or getattr(fn, "__func__", None) or type(fn).__call__
    return None
