"""Calls into an event loop from other threads."""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from asyncio import AbstractEventLoop
    from collections.abc import Callable


def call_soon(loop: AbstractEventLoop, callback: Callable[[], object]) -> None:
    """Runs a callback on a loop, from any thread; does nothing if the loop is closed and nobody waits."""
    with suppress(RuntimeError):
        loop.call_soon_threadsafe(callback)
