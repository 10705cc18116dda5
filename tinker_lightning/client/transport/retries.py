"""The retry policy of failing requests, and the waits of a client: what holds its requests up, and until when."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import random
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from tinker_lightning.errors import printable

if TYPE_CHECKING:
    from collections.abc import Iterator

    import httpx

logger = logging.getLogger("tinker_lightning.client")

# At the first contact the URL is probably wrong, so the error is raised soon.
FIRST_CONTACT_SECONDS = 3.0
SILENT = "the server is silent"
# When a wait is shown, and how often it is measured from then on.
_SHOWN_SECONDS = 2.0
_UPDATE_SECONDS = 0.5
# When a wait is logged; after that at doubling intervals.
_LOG_SECONDS = (10.0, 30.0)
# The longest time between two heartbeats while a client waits.
_PING_SECONDS = 10.0


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """The time for which a failing request is retried, and the pauses in between, in seconds."""

    seconds: float  # from the first attempt on; for an account without credit, the server sets another limit
    first_delay: float = 0.5  # doubles with each attempt, up to the longest
    longest_delay: float = 10.0
    billing_delay: float = 5.0  # while the account has no credit

    def delay(self, attempt: int, response: httpx.Response | None) -> float:
        """Returns the pause before the next attempt: the one that the server asks for, or an increasing one."""
        if response is not None:
            for header, unit in (("retry-after-ms", 0.001), ("retry-after", 1.0)):
                try:
                    asked = float(response.headers[header]) * unit
                except (KeyError, ValueError):
                    continue
                if 0 < asked <= 60:
                    return asked
            if response.status_code == 402:
                return self.billing_delay
        longest: float = min(self.first_delay * 2 ** min(attempt, 30), self.longest_delay)
        return longest * random.uniform(0.75, 1.0)  # noqa: S311  # spreads retries, hides nothing


@dataclass(frozen=True, slots=True)
class Pause:
    """What a client waits for, for users."""

    seconds: float  # since a request has last got a result, or since the server has been silent or refusing
    reason: str
    until: float | None = None  # the time at which the client gives up
    is_fault: bool = False  # the server is silent or refuses requests
    waited: float = 0.0  # since any request has last got a result, also across faults that have passed

    def __str__(self) -> str:
        clock = "" if self.until is None else f", gives up at {time.strftime('%H:%M:%S', time.localtime(self.until))}"
        return f"waiting for {self.seconds:.0f} s: {self.reason}{clock}"


@dataclass(eq=False, slots=True)
class Wait:
    """A request that has not ended, and what holds it up."""

    name: str
    is_quick: bool = False  # a server answers it at once
    waits: Waits | None = None  # where it counts
    since: float = field(default_factory=lambda: time.monotonic())
    reason: str = ""
    until: float | None = None
    is_fault: bool = False
    refused: float = 0.0  # the time from which on the server has answered, but not this request

    def hold(self, reason: str, until: float | None = None, *, is_fault: bool = False) -> None:
        """Notes what holds the request up, until when, and whether the server refuses it."""
        if is_fault and not self.is_fault and self.waits is not None:
            self.refused = max(self.since, self.waits.ended, self.waits.heard_at)
        self.reason, self.until, self.is_fault = printable(reason), until, is_fault

    def resume(self) -> None:
        """Notes that nothing holds the request up any more."""
        self.reason, self.until, self.is_fault = "", None, False


class Waits:
    """The requests of a connection that have not ended, and the pause if none of them gets anywhere.

    A pause is logged after 10 s, 30 s and then at doubling intervals, and once more when it is over. All methods run
    on the event loop of the client; `pause` can be read from any thread.

    Args:
        url: The server.
        seconds: How long the client waits for a silent server.
    """

    def __init__(self, url: str, seconds: float) -> None:
        self.pause: Pause | None = None
        # Asks for a heartbeat, whose answer tells a busy server from a silent one; None if nobody sends any.
        self.ping: asyncio.Event | None = None
        self._url = url
        self._seconds = seconds
        self._open: dict[Wait, None] = {}
        self.ended = time.monotonic()  # when a request that a server works on has last got a result
        self.heard_at = self.ended  # when the server has last answered
        self._pinged: float | None = None  # not answered since
        self._timer: asyncio.TimerHandle | None = None
        self._logged: Pause | None = None

    @contextlib.contextmanager
    def waiting(self, name: str, *, is_quick: bool = False) -> Iterator[Wait]:
        """Counts a request as waiting during the `with` block."""
        wait = Wait(name, is_quick, self)
        self._open[wait] = None
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(_SHOWN_SECONDS, self._update)
        has_result = False
        try:
            yield wait
            has_result = True
        finally:
            del self._open[wait]
            if has_result and not is_quick:
                self.ended = time.monotonic()
            if self.pause is not None:
                self._measure(is_over=has_result)  # otherwise the error is raised in place of the end of the pause

    def pinged(self) -> None:
        """Notes that a request was sent that a server answers at once."""
        if self._pinged is None:
            self._pinged = time.monotonic()

    def heard(self) -> None:
        """Notes that the server has answered a request, in whatever way."""
        self.heard_at, self._pinged = time.monotonic(), None

    def silent_seconds(self) -> float:
        """Returns for how long the server has not answered anything, 0 if it does not have to."""
        now = time.monotonic()
        is_silent = self._pinged is not None and now - self._pinged >= _SHOWN_SECONDS
        return now - self.heard_at if is_silent else 0.0

    @property
    def is_given_up(self) -> bool:
        """Whether the server has been silent for longer than the client waits."""
        return self.silent_seconds() > self._seconds

    def _update(self) -> None:
        self._timer = None
        self._measure()
        if not self._open:
            return
        self._timer = asyncio.get_running_loop().call_later(_UPDATE_SECONDS, self._update)
        if self.pause is not None and self.ping is not None:
            last = max(self.heard_at, self._pinged or 0.0)
            if time.monotonic() - last >= min(max(_SHOWN_SECONDS, self.pause.seconds / 2), _PING_SECONDS):
                self.ping.set()

    def _measure(self, *, is_over: bool = True) -> None:
        before, self.pause = self.pause, self._current()
        logged, self._logged = self._logged, None
        if logged is not None and self.pause is not None and self.pause.is_fault == logged.is_fault:
            self._logged = logged
        elif logged is not None and is_over and (self.pause is None or logged.is_fault):
            seconds = logged.seconds if before is None else before.seconds
            level = logging.WARNING if logged.is_fault else logging.INFO
            logger.log(level, "%s: continuing after %.0f s", self._url, seconds)
        if self.pause is not None and self.pause.seconds >= _next_log(self._logged):
            logger.log(logging.WARNING if self.pause.is_fault else logging.INFO, "%s: %s", self._url, self.pause)
            self._logged = self.pause

    def _current(self) -> Pause | None:
        now = time.monotonic()
        # What the server refuses waits by itself; of what it works on, the result of any request is progress.
        waited = {each: now - max(each.since, self.ended) for each in self._open}
        refused = {each: now - each.refused for each in self._open if each.is_fault}
        refused = {each: seconds for each, seconds in refused.items() if seconds >= _SHOWN_SECONDS}
        ages = refused or waited
        wait = max(ages, key=lambda each: ages[each], default=None)
        if wait is None or ages[wait] < _SHOWN_SECONDS:
            return None
        seconds, total, past = ages[wait], max(waited.values()), time.time() - now
        if refused:
            gives_up = None if wait.until is None else past + wait.until
            return Pause(seconds, wait.reason, gives_up, is_fault=True, waited=total)
        if not wait.is_fault and (self.silent_seconds() or (wait.is_quick and self.ping is None)):
            until = past + max(self.heard_at, wait.since) + self._seconds
            return Pause(min(seconds, self.silent_seconds() or seconds), SILENT, until, is_fault=True, waited=total)
        reason = "" if wait.is_fault else wait.reason  # perhaps the next attempt succeeds
        return Pause(seconds, reason or f"{wait.name} is queued or running", waited=total)


def _next_log(logged: Pause | None) -> float:
    """Returns the age at which a pause is logged next: after 10 s, 30 s, 60 s, 120 s, and so on."""
    if logged is None:
        return _LOG_SECONDS[0]
    if logged.seconds < _LOG_SECONDS[1]:
        return _LOG_SECONDS[1]
    return _LOG_SECONDS[1] * 2.0 ** (1 + math.floor(math.log2(logged.seconds / _LOG_SECONDS[1])))
