"""Work that a Ctrl-C must not cut in two."""

from __future__ import annotations

import contextlib
import signal
import threading
from typing import TYPE_CHECKING, Any, ClassVar

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


class Hold:
    """Puts off a Ctrl-C while it lasts; several may overlap, and the last one to end acts on it.

    Only the main thread is ever interrupted, so for others nothing changes.
    """

    _lasting: ClassVar[set[Hold]] = set()
    _came: ClassVar[list[tuple[int, Any]]] = []
    _act: ClassVar[Callable[[int, Any], Any]]

    def begin(self) -> None:
        """Begins it, unless it lasts already."""
        act = signal.getsignal(signal.SIGINT)
        if threading.current_thread() is not threading.main_thread() or not callable(act):
            return
        if not Hold._lasting:
            Hold._act = act
            Hold._came.clear()
            signal.signal(signal.SIGINT, lambda number, frame: Hold._came.append((number, frame)))
        Hold._lasting.add(self)

    def end(self, *, act: bool = True) -> None:
        """Ends it, if it lasts.

        Args:
            act: Whether a Ctrl-C that has come is acted on; not if something else ends the work already.
        """
        if self not in Hold._lasting:
            return
        Hold._lasting.remove(self)
        if not Hold._lasting:
            signal.signal(signal.SIGINT, Hold._act)
            if Hold._came and act:
                Hold._act(*Hold._came[0])


@contextlib.contextmanager
def held() -> Iterator[None]:
    """A Ctrl-C in the midst of the `with` block is acted on at its end."""
    hold = Hold()
    hold.begin()
    try:
        yield
    finally:
        hold.end()
