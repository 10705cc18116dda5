"""Finds the line of the user's code that is being traced."""

from __future__ import annotations

import contextlib
import copy
import functools
import linecache
import os
import re
import sys
import traceback
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import torch

if TYPE_CHECKING:
    from collections.abc import Iterable


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
_OWN = {contextlib.__file__, copy.__file__, *map(str, _HERE.parent.rglob("*.py"))}
_PACKAGE = f"{_HERE.parents[1]}{os.sep}"
_PYTHON = f"{Path(os.__file__).parent}{os.sep}"
_INSTALLED = re.compile(r".*[/\\](?:site|dist)-packages[/\\]")
_FROZEN = re.compile(r"<frozen ([\w.]+)>")
