"""Runs jobs one at a time. The jobs of a model run in the order of their numbers, and each number runs exactly once.

A job may be submitted before one with a lower number (then it waits), or twice (the second submission returns the
first job). If a number is missing for `gap_timeout` seconds, the jobs after it run without it, and submitting it
later raises. A client that submits one request after the other has given up a number once it polls for a later one, so
`polled_gap_timeout` seconds of polling suffice.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import threading
import time
from collections import deque
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from tinker_lightning.errors import InvalidInput, NotFound, OperationFailed, TinkerLightningError, TrainerClosed

if TYPE_CHECKING:
    from collections.abc import Callable

logger = logging.getLogger("tinker_lightning.server")

# Longer than a client takes to notice a lost request (clients wait a minute for an answer) and to send it again.
# Otherwise one broken connection would cost a step.
GAP_TIMEOUT = 120.0
# A number that a client skipped: it drew the number and failed before it sent the request.
POLLED_GAP_TIMEOUT = 6.0
# An unfetched result is kept for a client that may be disconnected, a fetched one in case the response was lost.
RETENTION = 3600.0
FETCHED_RETENTION = 300.0


class Job:
    """A unit of work and its result, which can be fetched any number of times.

    Equal requests have the same `request_id`. The `labels` are fields for the log.
    """

    def __init__(self, request_id: str, kind: str, run: Callable[[], Any], **labels: object) -> None:
        self.request_id = request_id
        self.kind = kind
        self.labels = "".join(f"{name}={value} " for name, value in labels.items())
        self.future: Future[Any] = Future()
        self.future.set_running_or_notify_cancel()  # so that a waiter that times out cannot cancel it
        self.kept_since: float | None = None  # when it finished, or was last fetched
        self.fetched = False
        self.cancelled = False
        self.line: str | None = None  # where it is numbered
        self._run: Callable[[], Any] | None = run

    def execute(self) -> None:
        """Runs the job and stores its result or exception."""
        run, self._run = self._run, None  # frees the request
        assert run is not None  # noqa: S101  # a job is executed once
        started = time.perf_counter()
        outcome = "ok"
        defect: BaseException | None = None
        try:
            result = run()
        except BaseException as error:
            outcome = "failed: " + str(error).partition("\n")[0]
            defect = None if isinstance(error, TinkerLightningError) else error
            self.kept_since = time.monotonic()
            self.future.set_exception(error)
        else:
            self.kept_since = time.monotonic()
            self.future.set_result(result)
        elapsed = (time.perf_counter() - started) * 1000
        level = logging.INFO if defect is None else logging.ERROR
        logger.log(level, "op=%s %sms=%.1f %s", self.kind, self.labels, elapsed, outcome, exc_info=defect)

    def raise_if_cancelled(self) -> None:
        """Raises `OperationFailed` if the client has cancelled the job."""
        if self.cancelled:
            raise OperationFailed(f"{self.kind} was cancelled by the client")

    def mark_fetched(self) -> None:
        """Records that the result was fetched, and keeps it a little longer in case the response was lost."""
        self.fetched = True
        self.kept_since = time.monotonic()


@dataclass(slots=True)
class _Line:
    """The numbered jobs of a model."""

    last: int = 0  # the highest number that was released
    waiting: dict[int, Job] = field(default_factory=dict)
    freed: set[int] = field(default_factory=set)  # numbers of rejected submissions
    blocked_since: float | None = None
    polled_since: float | None = None  # when a client first asked for a result beyond the missing number

    @property
    def missing(self) -> int:
        """The lowest number that has neither arrived nor been rejected."""
        number = self.last + 1
        while number in self.freed:
            number += 1
        return number

    def release(self) -> list[Job]:
        """Returns the jobs whose turn has come."""
        ready = []
        while self.waiting:
            number = self.missing
            if number not in self.waiting:
                break
            ready.append(self.waiting.pop(number))
            self._pass(number)
        if not self.waiting:
            self.blocked_since = self.polled_since = None
        elif ready or self.blocked_since is None:
            self.blocked_since = time.monotonic()
            self.polled_since = None
        return ready

    def skip(self) -> list[Job]:
        """Stops waiting for missing numbers and returns the jobs after them."""
        self._pass(min(self.waiting) - 1)
        self.blocked_since = None
        return self.release()

    def _pass(self, number: int) -> None:
        self.last = number
        self.freed = {n for n in self.freed if n > number}


class Scheduler:
    """Executes jobs on a dedicated thread. All methods are thread-safe, and all timeouts are in seconds."""

    def __init__(
        self,
        gap_timeout: float = GAP_TIMEOUT,
        polled_gap_timeout: float = POLLED_GAP_TIMEOUT,
        retention: float = RETENTION,
        fetched_retention: float = FETCHED_RETENTION,
    ) -> None:
        self._gap_timeout = gap_timeout
        self._polled_gap_timeout = polled_gap_timeout
        self._retention = retention
        self._fetched_retention = fetched_retention
        self._next_cleaning = 0.0
        self._jobs: dict[str, Job] = {}
        self._lines: dict[str, _Line] = {}
        self._ready: deque[Job] = deque()
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._closed = False

    def submit(self, job: Job, line: str | None = None, number: int = 0) -> Job:
        """Queues a job, or returns the job that was submitted earlier with the same request id.

        The jobs of a line run in the order of their numbers, from 1. A job without a line may run at any time.
        """
        with self._changed:
            if self._closed:
                raise TrainerClosed("the trainer has been closed; connect to a running one")
            known = self._jobs.get(job.request_id)
            if known is not None:
                if known.kind != job.kind:
                    raise InvalidInput(f"number {number} of {line} was already used for {known.kind}")
                return known
            if job.kept_since is not None:
                job.mark_fetched()  # its result was dropped, but its owner still has the job
            elif line is None:
                self._ready.append(job)
            else:
                entry = self._lines.setdefault(line, _Line())
                if number <= entry.last:
                    raise InvalidInput(
                        f"number {number} of {line} arrived too late: {entry.last} has already run. Either its result "
                        "has expired, or it was missing for so long that later numbers ran without it."
                    )
                entry.freed.discard(number)
                entry.waiting[number] = job
                job.line = line
                self._ready.extend(entry.release())
            self._jobs[job.request_id] = job
            self._drop_old()
            if self._thread is None:
                self._thread = threading.Thread(target=self._work, name="tinker-lightning-trainer", daemon=True)
                self._thread.start()
            self._changed.notify_all()
        return job

    def known(self, request_id: str) -> Job | None:
        """Returns the job that was submitted with this id, if its result is still kept."""
        with self._changed:
            return self._jobs.get(request_id)

    def free(self, line: str, number: int) -> None:
        """Marks the number of a rejected submission, so that the jobs after it do not wait for it."""
        with self._changed:
            if self._closed:
                return
            entry = self._lines.setdefault(line, _Line())
            if number > entry.last and number not in entry.waiting:
                entry.freed.add(number)
                self._ready.extend(entry.release())
                self._changed.notify_all()

    def find(self, request_id: str) -> Job:
        """Returns the job with this id; raises `NotFound` if there is none, or its result has been dropped."""
        with self._changed:
            job = self._jobs.get(request_id)
        if job is None:
            raise NotFound(f"request_id {request_id!r} is unknown, or its result has expired")
        return job

    def missing_before(self, job: Job, *, submits_in_turn: bool) -> int | None:
        """Returns the number that a job waits for because it has not arrived, or None.

        Args:
            job: The job for whose result a client asks.
            submits_in_turn: Whether the client sends a request only after the one before was accepted or given up. The
                missing number will then never arrive. If the client keeps asking, it is skipped.
        """
        with self._changed:
            line = self._lines.get(job.line or "")
            if line is None or job not in line.waiting.values():
                return None
            if submits_in_turn:
                now = time.monotonic()
                line.polled_since = line.polled_since or now
                if now - line.polled_since >= self._polled_gap_timeout:
                    logger.warning("%s: continuing without number %d, which was never sent", job.line, line.missing)
                    self._ready.extend(line.skip())
                    self._changed.notify_all()
                    return None
            return line.missing

    def close(self, timeout: float = 30.0) -> None:
        """Fails waiting jobs and stops the thread; a job that still runs after `timeout` seconds is interrupted."""
        with self._changed:
            self._closed = True
            waiting = [*self._ready, *(op for line in self._lines.values() for op in line.waiting.values())]
            self._ready.clear()
            self._lines.clear()
            self._changed.notify_all()
        for job in waiting:
            job.future.set_exception(TrainerClosed("the trainer was closed before this job could run"))
        if self._thread is not None:
            self._thread.join(timeout)
            if self._thread.is_alive():
                logger.warning("interrupting a job that is still running after %.0f s", timeout)
                # A thread that is still inside torch would make the interpreter abort at exit.
                thread_id = ctypes.c_ulong(self._thread.ident or 0)
                ctypes.pythonapi.PyThreadState_SetAsyncExc(thread_id, ctypes.py_object(TrainerClosed))
                self._thread.join(timeout)

    def _work(self) -> None:
        with contextlib.suppress(TrainerClosed):  # raised in this thread by close()
            while (job := self._next()) is not None:
                job.execute()
                del job  # do not keep its result alive

    def _next(self) -> Job | None:
        """Waits for the next job; returns None once the trainer is closed."""
        with self._changed:
            while True:
                # Also while other models have jobs, which must not prolong the wait for a missing number.
                wait = self._skip_gaps()
                if self._closed:
                    return None
                if self._ready:
                    return self._ready.popleft()
                self._changed.wait(wait)

    def _skip_gaps(self) -> float | None:
        """Releases jobs that have waited too long; returns the seconds until the next ones will have."""
        now = time.monotonic()
        soonest: float | None = None
        for name, line in self._lines.items():
            if line.blocked_since is None:
                continue
            left = line.blocked_since + self._gap_timeout - now
            if left <= 0:
                logger.warning(
                    "%s: continuing with number %d because an earlier one did not arrive within %.0f s",
                    name,
                    min(line.waiting),
                    self._gap_timeout,
                )
                self._ready.extend(line.skip())
                left = self._gap_timeout
            soonest = left if soonest is None else min(soonest, left)
        return soonest

    def _drop_old(self) -> None:
        now = time.monotonic()
        if now < self._next_cleaning:
            return
        self._next_cleaning = now + min(self._retention, self._fetched_retention) / 10
        for name, job in list(self._jobs.items()):
            retention = self._fetched_retention if job.fetched else self._retention
            if job.kept_since is not None and job.kept_since + retention < now:
                del self._jobs[name]
