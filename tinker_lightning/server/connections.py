"""Bounds on the connections of a server: how many there are, and how long they may do nothing.

Without them, connections that send nothing, or half of a request, use up the descriptors of the process. Then no client
can connect, and asyncio retries and logs each refused connection without a pause.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from typing import TYPE_CHECKING, Any

from uvicorn.protocols.http.auto import AutoHTTPProtocol

if TYPE_CHECKING:
    from collections.abc import Callable

logger = logging.getLogger("tinker_lightning.server")

# Seconds for a request to arrive up to the end of its headers.
HEADER_SECONDS = 15.0
# Seconds after which a response that nobody reads is aborted.
RESPONSE_SECONDS = 60.0
# asyncio accepts this many connections at a time, before any of them is known here, and tries as often if it has no
# descriptors left. More may wait in the queue of the operating system.
BACKLOG = 32
QUEUE = 512
MAX_CONNECTIONS = 4096
# Descriptors for everything else: models, checkpoints, the event loop, the log, and connections that are accepted but
# not yet counted, or closed but not yet gone.
_OTHER_DESCRIPTORS = 64 + 3 * BACKLOG
_SWEEP_SECONDS = 1.0
_LOG_SECONDS = 60.0


def most_connections() -> int:
    """Returns how many connections the descriptor limit of this process allows."""
    try:
        import resource
    except ImportError:  # not a POSIX system
        return MAX_CONNECTIONS
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return MAX_CONNECTIONS
    return max(8, min(MAX_CONNECTIONS, soft - _OTHER_DESCRIPTORS))


class Connections:
    """The open connections of a server. Used by one event loop.

    If there are too many, the oldest one that never sent a request makes room, or else the oldest one that is idle, or
    the oldest one whose request is not complete. So they cannot lock others out.
    """

    def __init__(self, most: int, header_seconds: float = HEADER_SECONDS) -> None:
        self._most = most
        self._header_seconds = header_seconds
        self._open: dict[Any, _State] = {}  # by protocol, oldest first
        self._timer: asyncio.TimerHandle | None = None
        self._closed = 0
        self._logged = -_LOG_SECONDS

    def protocol(self) -> type[asyncio.Protocol]:
        """Returns the protocol of connections that are counted here, for `uvicorn.Config(http=)`."""
        return type("BoundedProtocol", (_Protocol,), {"bounds": self})

    def opened(self, protocol: Any) -> None:
        """Adds a connection, and closes another one if there are too many."""
        self._open[protocol] = _State(time.monotonic())
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(_SWEEP_SECONDS, self._sweep)
        if len(self._open) > self._most:
            idle = [each for each in self._open if each is not protocol and not _is_busy(each)]
            silent = (each for each in idle if each.cycle is None)
            unfinished = (each for each in self._open if _is_busy(each) and each.cycle.more_body)
            oldest = next(itertools.chain(silent, idle, unfinished), protocol)
            self._close(oldest, f"there are more than {self._most}")

    def closed(self, protocol: Any) -> None:
        """Removes a connection."""
        self._open.pop(protocol, None)

    def _sweep(self) -> None:
        """Closes connections that have been idle, or whose response nobody reads."""
        now = time.monotonic()
        for protocol, state in list(self._open.items()):
            unsent = protocol.transport.get_write_buffer_size()
            if _is_busy(protocol):
                state.since = now
            if not unsent or unsent != state.unsent:
                state.unsent, state.unsent_since = unsent, now
            if now - state.since > self._header_seconds:
                self._close(protocol, f"no request arrived for {self._header_seconds:g} s")
            elif now - state.unsent_since > RESPONSE_SECONDS:
                self._close(protocol, f"the response was not read for {RESPONSE_SECONDS:g} s")
        loop = asyncio.get_running_loop()
        self._timer = loop.call_later(_SWEEP_SECONDS, self._sweep) if self._open else None

    def _close(self, protocol: Any, reason: str) -> None:
        self._open.pop(protocol, None)
        self._closed += 1
        protocol.transport.abort()
        now = time.monotonic()
        if now - self._logged >= _LOG_SECONDS:  # one line, however many connections there are
            self._logged = now
            logger.warning("closed %d connections; the last one because %s", self._closed, reason)


class _State:
    __slots__ = ("since", "unsent", "unsent_since")

    def __init__(self, now: float) -> None:
        self.since = now  # when it was last seen with a request
        self.unsent = 0
        self.unsent_since = now


class _Protocol(AutoHTTPProtocol):  # type: ignore[misc, valid-type]
    """uvicorn's protocol, which reports when a connection is opened and closed."""

    bounds: Connections

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self.bounds.opened(self)

    def connection_lost(self, exc: Exception | None) -> None:
        self.bounds.closed(self)
        super().connection_lost(exc)


def _is_busy(protocol: Any) -> bool:
    """Returns whether a request is being answered."""
    cycle = protocol.cycle
    return cycle is not None and not cycle.response_complete


class OncePerMinute(logging.Filter):
    """Passes each message once per minute: a client can cause as many warnings as it likes."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self._clock = clock
        self._logged: dict[str, float] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        """Returns whether to log a record."""
        if record.levelno < logging.WARNING:
            return True
        now = self._clock()
        fresh = now - self._logged.get(str(record.msg), -_LOG_SECONDS) >= _LOG_SECONDS
        if fresh:
            self._logged[str(record.msg)] = now
        return fresh
