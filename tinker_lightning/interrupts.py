"""Work that a Ctrl-C must not cut in two."""

from __future__ import annotations

import contextlib
import signal
import threading
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator


@contextlib.contextmanager
def held() -> Iterator[None]:
    """A Ctrl-C in the midst of the `with` block is acted on at its end.

    Only the main thread is ever interrupted, so for others nothing changes.
    """
    act = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(act):
        yield
        return
    came: list[tuple[int, Any]] = []
    signal.signal(signal.SIGINT, lambda number, frame: came.append((number, frame)))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, act)
        if came:
            act(*came[0])
