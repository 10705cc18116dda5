"""Runs jobs one at a time. The jobs of a model run in the order of their numbers, and each number runs exactly once.

Sessions take turns: while a job pauses, jobs of other sessions run.

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
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from tinker_lightning.errors import InvalidInput, NotFound, OperationFailed, TrainerClosed
from tinker_lightning.server.trainer.fair_queue import FairQueue
from tinker_lightning.server.trainer.jobs import Job, JobQueue
from tinker_lightning.server.trainer.memory import MemoryBudget

logger = logging.getLogger("tinker_lightning.server")

# Longer than a client takes to notice a lost request (clients wait a minute for an answer) and to send it again.
# Otherwise one broken connection would cost a step.
GAP_TIMEOUT = 120.0
# A number that a client skipped: it drew the number and failed before it sent the request.
POLLED_GAP_TIMEOUT = 6.0
# An unfetched result is kept for a client that may be disconnected, a fetched one in case the response was lost.
RETENTION = 3600.0
FETCHED_RETENTION = 300.0
# For a client that finishes its session while a response is under way.
FINISHED_RETENTION = 60.0
# Fetched results of one session beyond this number are dropped, oldest first.
MAX_FETCHED = 1024
_CLOSED = "the trainer was closed before this job could finish"


@dataclass(slots=True)
class JobTotals:
    """The jobs of a kind that have run, with the same outcome."""

    jobs: int = 0
    tokens: int = 0
    run_seconds: float = 0.0
    queue_seconds: float = 0.0

    def add(self, job: Job) -> None:
        """Adds a job."""
        self.jobs += 1
        self.tokens += job.tokens
        self.run_seconds += job.run_seconds
        self.queue_seconds += job.queue_seconds


@dataclass(eq=False)
class Scheduler:
    """Executes jobs on a dedicated thread. All methods are thread-safe, and all timeouts are in seconds."""

    gap_timeout: float = GAP_TIMEOUT
    polled_gap_timeout: float = POLLED_GAP_TIMEOUT
    retention: float = RETENTION
    fetched_retention: float = FETCHED_RETENTION
    finished_retention: float = FINISHED_RETENTION
    memory: MemoryBudget | None = None
    key_of: Callable[[str | None], str | None] = lambda _: None  # the API key that a session belongs to
    has_ended: Callable[[str | None], bool] = lambda _: False  # whether a session is finished
    # Called with each job that is dropped; returns the model, which is the name of its queue, that ended with it.
    forget_model: Callable[[Job], str | None] = lambda _: None

    def __post_init__(self) -> None:
        self._fetched: dict[str | None, dict[str, None]] = {}  # request ids by owner, oldest first
        self._next_cleaning = 0.0
        self._jobs: dict[str, Job] = {}
        self._queues: dict[str, JobQueue] = {}
        self._ready = FairQueue(key_of=self.key_of)
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._closed = False
        self.totals: dict[tuple[str, Literal["ok", "failed"]], JobTotals] = {}  # by kind and outcome

    def submit(self, job: Job, queue: str | None = None, number: int = 0, *, frees_memory: bool = False) -> Job:
        """Queues a job, or returns the job that was submitted earlier with the same request id.

        The jobs of a queue run in the order of their numbers, from 1. A job without a queue may run at any time. A job
        that frees memory is not charged, because it must run even if none is left.

        Raises:
            MemoryLimitExceeded: If the request or its result do not fit into memory.
        """
        if self.get(job.request_id) is None and self.memory is not None and not frees_memory:
            spare, reason = self._spare(job, queue, number)
            job.admit(self.memory, self._forget, spare=spare, reason=reason)
        try:
            submitted = self._submit(job, queue, number)
        except BaseException:
            job.release()
            raise
        if submitted is not job:
            job.release()
        return submitted

    def _spare(self, job: Job, queue: str | None, number: int) -> tuple[int, str]:
        """Returns the memory to leave for the number that a job waits for, and the reason.

        It is as much as the waiting jobs take. Otherwise they could take all that their session may have: the number
        that they wait for would be rejected until it is skipped. After that time, nothing is left for it.
        """
        with self._changed:
            entry = JobQueue() if queue is None else self._queues.setdefault(queue, JobQueue())
            if queue is None or number <= entry.missing:
                return 0, ""
            now = time.monotonic()
            entry.blocked_since = entry.blocked_since or now
            if now - entry.blocked_since >= self.gap_timeout:
                return 0, ""
            reason = f"Number {entry.missing} of {queue} has to arrive first, and memory is left for it. "
            return job.size + sum(each.size for each in entry.waiting.values()), reason

    def _submit(self, job: Job, queue: str | None, number: int) -> Job:
        with self._changed:
            if self._closed:
                raise TrainerClosed("the trainer has been closed; connect to a running one")
            earlier = self._jobs.get(job.request_id)
            if earlier is not None:
                return earlier
            if job.kept_since is not None:
                job.mark_fetched()  # its result was dropped, but its owner still has the job
            elif queue is None:
                self._ready.add([job])
            else:
                if self.has_ended(job.owner):  # otherwise it would wait for numbers that were dropped with the session
                    raise NotFound(f"{job.kind} arrived after its session was finished")
                entry = self._queues.setdefault(queue, JobQueue())
                if number <= entry.last:
                    raise InvalidInput(
                        f"number {number} of {queue} arrived too late: {entry.last} has already run. Either its result "
                        "has expired, or it was missing for so long that later numbers ran without it."
                    )
                entry.skipped.discard(number)
                entry.waiting[number] = job
                job.queue = queue
                self._ready.add(entry.release())
            self._jobs[job.request_id] = job
            self._drop_old()
            if self._thread is None:
                # The thread cleans up as well, so that results expire even if nothing is submitted.
                self._thread = threading.Thread(target=self._work, name="tinker-lightning-trainer", daemon=True)
                self._thread.start()
            self._changed.notify_all()
        return job

    def get(self, request_id: str) -> Job | None:
        """Returns the job that was submitted with this id, if its result is still kept."""
        with self._changed:
            return self._jobs.get(request_id)

    def skip(self, queue: str, number: int) -> None:
        """Marks the number of a rejected submission, so that the jobs after it do not wait for it."""
        with self._changed:
            if self._closed:
                return
            entry = self._queues.setdefault(queue, JobQueue())
            if number > entry.last and number not in entry.waiting:
                entry.skipped.add(number)
                self._ready.add(entry.release())
                self._changed.notify_all()

    def find(self, request_id: str, owns: Callable[[str], bool] = lambda _: True) -> Job:
        """Returns the job with this id; raises `NotFound` if there is none, or its result has been dropped.

        The same error is raised for a job that is not the caller's own.
        """
        job = self.get(request_id)
        if job is None or not owns(request_id):
            raise NotFound(f"request_id {request_id!r} is unknown, or its result has expired")
        return job

    def mark_fetched(self, job: Job) -> None:
        """Records that a result was fetched; it is kept a little longer in case the response was lost."""
        job.mark_fetched()
        with self._changed:
            if self._jobs.get(job.request_id) is not job:
                return  # forgotten meanwhile
            fetched = self._fetched.setdefault(job.owner, {})
            fetched[job.request_id] = None
            while len(fetched) > MAX_FETCHED:
                self._drop(self._jobs[next(iter(fetched))])

    def finish(self, owner: str) -> None:
        """Fails the waiting jobs of a finished session, and drops its results after a moment."""
        with self._changed:
            waiting: list[Job] = []
            for queue in self._queues.values():
                for number in [number for number, job in queue.waiting.items() if job.owner == owner]:
                    waiting.append(queue.waiting.pop(number))
            self._queues = {
                name: queue for name, queue in self._queues.items() if queue.waiting or not name.startswith(f"{owner}:")
            }
            until = time.monotonic() - self.fetched_retention + self.finished_retention
            for job in self._jobs.values():
                if job.owner == owner and job.kept_since is not None:
                    job.mark_fetched()
                    job.kept_since = until
            self._fetched.pop(owner, None)
        for job in waiting:
            job.fail(
                OperationFailed(f"{job.kind} waited for a request that never arrived, and its session was finished")
            )

    def missing_before(self, job: Job, *, submits_in_turn: bool) -> int | None:
        """Returns the number that a job waits for because it has not arrived, or None.

        Args:
            job: The job whose result a client asks for.
            submits_in_turn: Whether the client sends a request only after the one before was accepted or given up. The
                missing number will then never arrive. If the client keeps asking, it is skipped.
        """
        with self._changed:
            queue = self._queues.get(job.queue or "")
            if queue is None or job not in queue.waiting.values():
                return None
            if submits_in_turn:
                now = time.monotonic()
                queue.polled_since = queue.polled_since or now
                if now - queue.polled_since >= self.polled_gap_timeout:
                    logger.warning("%s: continuing without number %d, which was never sent", job.queue, queue.missing)
                    self._ready.add(queue.skip())
                    self._changed.notify_all()
                    return None
            return queue.missing

    @property
    def waiting(self) -> int:
        """The number of jobs that wait for their turn, or for a request with a lower number."""
        with self._changed:
            return len(self._ready) + sum(len(queue.waiting) for queue in self._queues.values())

    def should_pause(self) -> bool:
        """Returns whether the running job should pause, because it is the turn of another session."""
        with self._changed:
            return self._ready.should_pause()

    def close(self, timeout: float = 30.0) -> None:
        """Fails waiting jobs and stops the thread; a job that still runs after `timeout` seconds is interrupted."""
        with self._changed:
            self._closed = True
            waiting = [
                *self._ready.clear(),
                *(job for queue in self._queues.values() for job in queue.waiting.values()),
            ]
            self._queues.clear()
            self._changed.notify_all()
        for job in waiting:
            job.fail(TrainerClosed(_CLOSED))
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
                progress = job.execute(may_block=self._ready.has_paused_jobs())
                with self._changed:
                    is_left = self._closed and progress != "ended"
                    self._ready.stop("ended" if is_left else progress)
                if is_left:
                    job.fail(TrainerClosed(_CLOSED))
                if progress == "ended":
                    outcome: Literal["ok", "failed"] = "ok" if job.future.exception() is None else "failed"
                    self.totals.setdefault((job.kind, outcome), JobTotals()).add(job)
                del job  # do not keep its result alive

    def _next(self) -> Job | None:
        """Waits for the next job; returns None once the trainer is closed."""
        with self._changed:
            while True:
                self._drop_old()
                # Also while other models have jobs, which must not prolong the wait for a missing number.
                wait = self._skip_gaps()
                if self._closed:
                    return None
                if (job := self._ready.start()) is not None:
                    return job
                if self._jobs:
                    cleaning = max(1.0, self._next_cleaning - time.monotonic())
                    wait = cleaning if wait is None else min(wait, cleaning)
                self._changed.wait(wait)

    def _skip_gaps(self) -> float | None:
        """Releases jobs that have waited too long; returns the seconds until the next ones will have."""
        now = time.monotonic()
        soonest: float | None = None
        for name, queue in self._queues.items():
            if queue.blocked_since is None or not queue.waiting:
                continue
            left = queue.blocked_since + self.gap_timeout - now
            if left <= 0:
                logger.warning(
                    "%s: continuing with number %d because an earlier one did not arrive within %.0f s",
                    name,
                    min(queue.waiting),
                    self.gap_timeout,
                )
                self._ready.add(queue.skip())
                left = self.gap_timeout
            soonest = left if soonest is None else min(soonest, left)
        return soonest

    def _drop_old(self) -> None:
        now = time.monotonic()
        if now < self._next_cleaning:
            return
        self._next_cleaning = now + min(self.retention, self.fetched_retention) / 10
        for job in list(self._jobs.values()):
            retention = self.fetched_retention if job.fetched else self.retention
            if job.kept_since is not None and job.kept_since + retention < now:
                self._drop(job)

    def _forget(self, job: Job) -> None:
        with self._changed:
            self._drop(job)

    def _drop(self, job: Job) -> None:
        if self._jobs.get(job.request_id) is job:
            del self._jobs[job.request_id]
            fetched = self._fetched.get(job.owner, {})
            fetched.pop(job.request_id, None)
            if not fetched:
                self._fetched.pop(job.owner, None)
            queue = self.forget_model(job)
            if queue in self._queues and not self._queues[queue].waiting:
                del self._queues[queue]
        job.release()
