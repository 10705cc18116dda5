"""How fast a request body arrives: one that is slow must not keep memory from others."""

from __future__ import annotations

import asyncio
from collections import deque
from typing import TYPE_CHECKING, Self

from starlette.exceptions import HTTPException

from tinker_lightning.errors import MemoryLimitExceeded, TrainerClosed
from tinker_lightning.server.trainer.memory import format_size
from tinker_lightning.threads.callbacks import call_soon

if TYPE_CHECKING:
    from types import TracebackType

    from tinker_lightning.server.trainer.memory import Charge

# A body is rejected if fewer than this many bytes of it arrive in this many seconds: 16 KiB per second.
BODY_SECONDS = 30.0
_LEAST_BYTES = 480 << 10
# Its rate is measured every few seconds. Below 1 MiB per second, its memory can be evicted.
_LOOK_SECONDS = 5.0
_FAST_BYTES = 5 << 20


class Arrival:
    """Charges a body while it is received in an `async with` block, and ends the block if the body is rejected.

    Args:
        charge: The memory of the body, if it is counted.
    """

    def __init__(self, charge: Charge | None = None) -> None:
        self._charge = charge
        self._size = 0
        self._is_slow = False
        self._sizes: deque[int] = deque([0], maxlen=1 + round(BODY_SECONDS / _LOOK_SECONDS))  # at each look
        self._loop = asyncio.get_running_loop()
        self._timer = asyncio.timeout(None)
        self._next_look: asyncio.TimerHandle | None = None
        self._error: Exception | None = None

    async def __aenter__(self) -> Self:
        await self._timer.__aenter__()
        self._next_look = self._loop.call_later(_LOOK_SECONDS, self._look)
        if self._error is not None:  # the server is closing already
            self._timer.reschedule(self._loop.time())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._next_look is not None:
            self._next_look.cancel()
            self._next_look = None
        self._is_slow = False
        if self._charge is not None:
            self._charge.set_evict(None)  # what was received is needed now
        try:
            await self._timer.__aexit__(kind, error, trace)
        except TimeoutError:
            if self._error is None:
                raise
            raise self._error from None

    def grow(self, size: int) -> None:
        """Charges what has arrived; raises `MemoryLimitExceeded` if there is no memory for it."""
        self._size = size
        self.charge(2 * size)  # in parts and joined

    def charge(self, size: int) -> None:
        """Charges what the body takes. A slow one evicts no other body: two of them would evict each other forever."""
        if self._charge is not None:
            self._charge.resize(size, spares_bodies=self._is_slow)

    def close(self) -> None:
        """Ends the block because the server stops; may be called from any thread, also before the block."""
        self._end(TrainerClosed("the server is shutting down; send the request again when it runs"))

    def _look(self) -> None:
        """Measures how much has arrived since the last look."""
        arrived = self._size - self._sizes[-1]
        self._sizes.append(self._size)
        if len(self._sizes) == self._sizes.maxlen and self._size - self._sizes[0] < _LEAST_BYTES:
            detail = (
                f"only {format_size(self._size - self._sizes[0])} of the body arrived in {BODY_SECONDS:g} s; at least "
                f"{format_size(_LEAST_BYTES)} are required. Check the network, or send smaller batches."
            )
            self._end(HTTPException(408, detail, {"Connection": "close"}))
            return
        self._is_slow = arrived < _FAST_BYTES
        if self._charge is not None:
            self._charge.set_evict(self._evict if self._is_slow else None, expendable=True)
        self._next_look = self._loop.call_later(_LOOK_SECONDS, self._look)

    def _evict(self) -> None:
        assert self._charge is not None  # noqa: S101  # which was evicted
        rate = format_size(int(_FAST_BYTES / _LOOK_SECONDS))
        error = MemoryLimitExceeded(
            f"the body of this request arrived at less than {rate} per second, "
            f"and other requests needed the {format_size(2 * self._size)} that it took within the memory limit of "
            f"{format_size(self._charge.limit)}. Send it again later, or send smaller batches."
        )
        error.is_temporary = True
        self._end(error)

    def _end(self, error: Exception) -> None:
        def stop() -> None:
            if self._error is None:
                self._error = error
                if self._next_look is not None:  # within the block
                    self._timer.reschedule(self._loop.time())

        call_soon(self._loop, stop)
