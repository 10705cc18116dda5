"""Where in the user's code something happened while it was traced."""

from __future__ import annotations

import contextlib
import copy
import linecache
import sys
import traceback
from pathlib import Path
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from types import FrameType


def here() -> str:
    """The user's line that is being run, for the start of a message."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if is_users(frame.f_code.co_filename):
            return _place(frame.f_code.co_filename, frame.f_lineno)
        frame = frame.f_back
    return ""


def within(filename: str, function: str) -> bool:
    """Whether a function of this file is being run."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_name == function and frame.f_code.co_filename == filename:
            return True
        frame = frame.f_back
    return False


def place_of(error: BaseException) -> str:
    """The user's last line that an exception passed through."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if is_users(frame.filename)]
    return _place(frames[-1].filename, frames[-1].lineno or 0) if frames else ""


def _place(filename: str, line: int) -> str:
    source = linecache.getline(filename, line).strip()
    return f"{filename}:{line}: {source}\n    " if source else f"{filename}:{line}: "


def is_users(filename: str) -> bool:
    """Whether a file is neither torch's nor one that traces."""
    return not (filename.startswith(_TORCH) or filename in _OWN)


_TORCH = torch.__path__[0]
_OWN = {contextlib.__file__, copy.__file__, *(str(path) for path in Path(__file__).parent.glob("tracing*.py"))}
_OWN |= {str(Path(__file__).parent / name) for name in ("graph_lines.py", "graph_writer.py")}
