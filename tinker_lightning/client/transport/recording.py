"""Records when operations start and end, how many bytes they transfer, and when a thread waits for them.

Off by default: a client without a recording measures nothing.
"""

from __future__ import annotations

import re
import threading
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tinker_lightning.threads.background import observed_waits

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    import httpx

# A server's own measurements: `Server-Timing: queue;dur=1.5, run;dur=20.1`, in milliseconds.
TIMING_HEADER = "server-timing"
_TIMING = re.compile(r"\b(queue|run)\s*;\s*dur=([0-9.]+)")


@dataclass(eq=False, slots=True)
class OperationRecord:
    """An operation from its submission by the caller to its result. Times are values of `time.perf_counter`.

    Args:
        name: What was called: `forward`, `forward_backward`, `optim_step`, `sample`, `save_state` and others.
        subject: The id of the model or the sampler.
        begun: When the caller submitted it.
        posted: When its first request was sent.
        ended: When its result was decoded, or its failure was known.
        requests: The number of requests, including polls and retries.
        bytes_sent: The bodies of its requests, as they were sent.
        bytes_received: The bodies of its responses, as they arrived.
        queued: How long it waited on the server, including pauses, if the server reports it.
        ran: How long it ran on the server, if the server reports it.
    """

    name: str
    subject: str | None
    begun: float
    posted: float | None = None
    ended: float | None = None
    requests: int = 0
    bytes_sent: int = 0
    bytes_received: int = 0
    queued: float | None = None
    ran: float | None = None

    def add(self, body: bytes | None, response: httpx.Response | None, received: int = 0) -> None:
        """Adds a request and its response; None if none arrived."""
        self.requests += 1
        self.bytes_sent += len(body or b"")
        if response is None:
            return
        self.bytes_received += received
        reported = {name: float(ms) / 1000 for name, ms in _TIMING.findall(response.headers.get(TIMING_HEADER, ""))}
        self.queued, self.ran = reported.get("queue", self.queued), reported.get("run", self.ran)


class Recording:
    """The operations of clients that were given it, and the waits of one thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._operations: list[OperationRecord] = []
        self._waits: list[tuple[float, float]] = []

    def begin(self, name: str, subject: str | None) -> OperationRecord:
        """Starts the record of an operation that is submitted now."""
        record = OperationRecord(name, subject, time.perf_counter())
        with self._lock:
            self._operations.append(record)
        return record

    def take(self) -> tuple[list[OperationRecord], list[tuple[float, float]]]:
        """Returns the operations and waits since the last call; an operation in flight is completed later."""
        with self._lock:
            taken = self._operations, self._waits
            self._operations, self._waits = [], []
        return taken

    def record_waits(self) -> AbstractContextManager[None]:
        """Also records when the current thread waits for results inside the `with` block."""
        return observed_waits(self.waited)

    def waited(self, start: float, end: float) -> None:
        """Adds a wait; one that continues the last wait prolongs it."""
        with self._lock:
            if self._waits and start - self._waits[-1][1] < 1e-3:
                start = self._waits.pop()[0]
            self._waits.append((start, end))
