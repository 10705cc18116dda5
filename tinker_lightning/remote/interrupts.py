"""Work that a Ctrl-C must not cut in two."""

from __future__ import annotations

import contextlib
import signal
import threading
from typing import TYPE_CHECKING, Any, ClassVar

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


class SigintHold:
    """Puts off a Ctrl-C while it lasts; several may overlap, and the last one to end acts on it.

    Only the main thread is ever interrupted, so for others nothing changes.
    """

    _lasting: ClassVar[set[SigintHold]] = set()
    _came: ClassVar[list[tuple[int, Any]]] = []
    _act: ClassVar[Callable[[int, Any], Any]]

    def begin(self) -> None:
        """Begins it, unless it lasts already."""
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
        """Ends it, if it lasts.

        Args:
            act: Whether a Ctrl-C that has come is acted on; not if something else ends the work already.
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
    """A Ctrl-C in the midst of the `with` block is acted on at its end."""
    hold = SigintHold()
    hold.begin()
    try:
        yield
    finally:
        hold.end()
