"""Finds the line of the user's code that is being traced."""

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
from collections.abc import Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

import torch
from torch import fx, nn

from tinker_lightning.errors import InvalidLoss, LossNotTraceable

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator


class Place(NamedTuple):
    """A line of the user's code, and the library that it calls, if any. Its string is the start of a message."""

    line: str
    library: str = ""

    def __str__(self) -> str:
        if not self.line:
            return ""
        through = f"it passes a tensor to {self.library}, and there " if self.library else ""
        return f"{self.line}{through}"


def here() -> Place:
    """Returns the user's line that is running."""
    frames = []
    for frame, line in traceback.walk_stack(sys._getframe(1)):
        if frame.f_code.co_name == "record" and frame.f_code.co_filename in _OWN:
            break  # the remaining frames are those of its callers
        frames.append((frame.f_code.co_filename, line))
    return _place(frames)


def within(filename: str, function: str) -> bool:
    """Returns whether a function of this file is running."""
    codes = (frame.f_code for frame, _ in traceback.walk_stack(sys._getframe(1)))
    return any(code.co_name == function and code.co_filename == filename for code in codes)


def place_of(error: BaseException) -> Place:
    """Returns the user's innermost line that an exception passed through."""
    return _place([(each.filename, each.lineno or 0) for each in reversed(traceback.extract_tb(error.__traceback__))])


def _place(frames: Iterable[tuple[str, int]]) -> Place:
    """Returns the user's innermost line, given frames from the inside out."""
    outside = [(filename, line) for filename, line in frames if is_outside(filename)]
    library = ""
    for filename, line in outside:
        # The traced function may itself belong to a library.
        if not library_of(filename) or filename == outside[-1][0]:
            source = linecache.getline(filename, line).strip()
            return Place(f"{filename}:{line}: {source}\n    " if source else f"{filename}:{line}: ", library)
        library = library_of(filename)
    return Place("")


def is_outside(filename: str) -> bool:
    """Returns whether a file belongs neither to torch nor to the tracer."""
    return not (filename.startswith(_TORCH) or filename in _OWN)


@functools.lru_cache(maxsize=1024)
def library_of(filename: str) -> str:
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


def loss_and_metrics(fn: Callable[..., Any], returned: Any) -> tuple[fx.Proxy, dict[Any, Any]]:
    """Converts the result of a traced function to `(loss, metrics)`; raises `LossNotTraceable` if it is neither."""
    if isinstance(returned, fx.Proxy):
        returned = returned, {}
    if not (isinstance(returned, tuple) and len(returned) == 2):
        wrong_output(fn, "(loss, metrics)", returned)
    loss, metrics = returned
    if not isinstance(loss, fx.Proxy):
        wrong_output(fn, "its loss as a tensor computed from what it is given", loss)
    if not isinstance(metrics, Mapping):
        wrong_output(fn, "its metrics as a dict", metrics)
    if unnamed := [name for name in metrics if not isinstance(name, str)]:
        with error_at_function(fn):
            raise InvalidLoss(f"invalid metric name {unnamed[0]!r:.100}; use a string")
    return loss, dict(metrics)


@contextmanager
def error_at_function(fn: Callable[..., Any]) -> Iterator[None]:
    """Adds the line of a function to an error about it."""
    try:
        yield
    except InvalidLoss as error:
        raise LossNotTraceable(f"{place_of_function(fn)}{error}") from None


def wrong_output(fn: Callable[..., Any], wanted: str, got: Any) -> NoReturn:
    """Raises `LossNotTraceable` with what a function must return."""
    name = getattr(fn, "__name__", type(fn).__name__)
    with error_at_function(fn):
        raise InvalidLoss(f"{name} must return {wanted}, but returned {type(got).__name__}")


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
