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

    Only the main thread receives signals, so it has no effect on others.
    """

    _lasting: ClassVar[set[SigintHold]] = set()
    _came: ClassVar[list[tuple[int, Any]]] = []
    _act: ClassVar[Callable[[int, Any], Any]]

    def begin(self) -> None:
        """Starts the hold."""
        act = signal.getsignal(signal.SIGINT)
        if threading.current_thread() is not threading.main_thread() or not callable(act):
            return
        if act is not SigintHold._defer:  # also where someone else has replaced it since
            SigintHold._act = act
            SigintHold._lasting.clear()
            SigintHold._came.clear()
            signal.signal(signal.SIGINT, SigintHold._defer)
        SigintHold._lasting.add(self)

    @staticmethod
    def _defer(number: int, frame: Any) -> None:
        SigintHold._came.append((number, frame))

    def end(self, *, act: bool = True) -> None:
        """Ends the hold.

        Args:
            act: Whether to deliver a SIGINT that came in; False if something else ends the work already.
        """
        if self not in SigintHold._lasting:
            return
        SigintHold._lasting.remove(self)
        if not SigintHold._lasting:
            signal.signal(signal.SIGINT, SigintHold._act)
            if SigintHold._came and act:
                SigintHold._act(*SigintHold._came[0])


@contextlib.contextmanager
def held() -> Iterator[None]:
    """Delivers a SIGINT that comes in during the `with` block at its end."""
    hold = SigintHold()
    hold.begin()
    try:
        yield
    finally:
        hold.end()
