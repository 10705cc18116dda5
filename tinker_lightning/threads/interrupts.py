"""Delays Ctrl-C during work that must not be interrupted halfway."""

from __future__ import annotations

import contextlib
import signal
import threading
from typing import TYPE_CHECKING, Any, ClassVar

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


class SigintHold:
    """Delays SIGINT while it is active; several may overlap, and the last one to end delivers it.

    Has no effect outside of the main thread, the only one that receives signals.
    """

    _active: ClassVar[set[SigintHold]] = set()
    _received: ClassVar[list[tuple[int, Any]]] = []
    _handler: ClassVar[Callable[[int, Any], Any]]

    def begin(self) -> None:
        """Starts the hold."""
        handler = signal.getsignal(signal.SIGINT)
        if threading.current_thread() is not threading.main_thread() or not callable(handler):
            return
        if handler is not SigintHold._defer:  # also if another handler was installed in the meantime
            SigintHold._handler = handler
            SigintHold._active.clear()
            SigintHold._received.clear()
            signal.signal(signal.SIGINT, SigintHold._defer)
        SigintHold._active.add(self)

    @staticmethod
    def _defer(number: int, frame: Any) -> None:
        SigintHold._received.append((number, frame))

    def end(self, *, deliver: bool = True) -> None:
        """Ends the hold, and delivers a SIGINT that was received unless `deliver` is False."""
        if self not in SigintHold._active:
            return
        SigintHold._active.remove(self)
        if not SigintHold._active:
            signal.signal(signal.SIGINT, SigintHold._handler)
            if SigintHold._received and deliver:
                SigintHold._handler(*SigintHold._received[0])


@contextlib.contextmanager
def held() -> Iterator[None]:
    """Delays a SIGINT during the `with` block until its end."""
    hold = SigintHold()
    hold.begin()
    try:
        yield
    finally:
        hold.end()
