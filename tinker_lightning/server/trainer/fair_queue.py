"""A queue that divides the time of a trainer equally among its sessions; the jobs of a session run in order."""

from __future__ import annotations

import time
from collections import deque
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from tinker_lightning.server.trainer.jobs import Job, Progress

# The least time that a job runs before it pauses. A pause costs a millisecond: another adapter has to be activated.
MIN_SLICE = 0.1
# Sessions whose time is remembered while they have no jobs.
_MAX_IDLE = 1024


class FairQueue:
    """The jobs that can run, by session. Not thread-safe.

    The session that has run least is next. A new or returning session starts at the fair share of a session, so that no
    session can save up time. A paused job stays the first of its session.

    A job that is blocked, because paused jobs hold the memory that it needs, is tried again when one of them has ended.
    Until then no further job starts that could pause, so that other sessions cannot take turns holding the memory.

    Args:
        clock: Returns the time in seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._queues: dict[str | None, deque[Job]] = {}
        self._spent: dict[str | None, float] = {}  # seconds by session
        self._share = 0.0  # the time of a session that has had jobs from the beginning
        self._running: Job | None = None
        self._is_resumed = False
        self._since = self._counted = 0.0
        self._paused: set[Job] = set()
        self._blocked: set[str | None] = set()

    def add(self, jobs: Iterable[Job]) -> None:
        """Adds jobs at the end of their sessions."""
        for job in jobs:
            if job.owner not in self._active():
                self._join(job.owner)
            self._queues.setdefault(job.owner, deque()).append(job)

    def start(self) -> Job | None:
        """Returns the next job, which runs from now on, or None if there is none."""
        owners = [owner for owner, queue in self._queues.items() if self._may_start(queue[0])]
        if not owners:
            return None
        owner = min(owners, key=self._time_of)
        queue = self._queues[owner]
        job = queue.popleft()
        if not queue:
            del self._queues[owner]
        self._is_resumed = job in self._paused
        self._paused.discard(job)
        self._running, self._since = job, self._clock()
        self._counted = self._since
        return job

    def stop(self, progress: Progress) -> None:
        """Records that the running job has ended, or that it paused or was blocked and stays in the queue."""
        job = self._running
        assert job is not None  # noqa: S101  # start() has returned it
        self._count()
        self._spent[job.owner] = self._time_of(job.owner)
        self._running = None
        if progress == "ended":
            if self._is_resumed:
                self._unblock()
            return
        self._queues.setdefault(job.owner, deque()).appendleft(job)
        if progress == "paused":
            self._paused.add(job)
        else:
            self._blocked.add(job.owner)

    def has_paused_jobs(self) -> bool:
        """Returns whether a job other than the running one is paused and keeps its memory."""
        return bool(self._paused)

    def should_pause(self) -> bool:
        """Returns whether the running job has had its share of the time and a job of another session can start."""
        if self._running is None or self._clock() - self._since < MIN_SLICE:
            return False
        owner = self._running.owner
        spent = self._time_of(owner)
        return any(
            other != owner and self._spent[other] < spent and self._may_start(queue[0])
            for other, queue in self._queues.items()
        )

    def clear(self) -> list[Job]:
        """Removes and returns all jobs but the running one."""
        jobs = [job for queue in self._queues.values() for job in queue]
        self._queues.clear()
        self._paused.clear()
        self._blocked.clear()
        return jobs

    def _may_start(self, job: Job) -> bool:
        return job.owner not in self._blocked and (job in self._paused or not (self._blocked and job.can_pause))

    def _join(self, owner: str | None) -> None:
        """Starts to count the time of a session that had no jobs."""
        self._count()
        if len(self._spent) > _MAX_IDLE + len(self._queues):
            # Sessions that have had less than their share would start at it anyway.
            active = self._active()
            self._spent = {each: spent for each, spent in self._spent.items() if spent > self._share or each in active}
        self._spent[owner] = max(self._spent.get(owner, 0.0), self._share)

    def _unblock(self) -> None:
        for owner in self._blocked:
            self._spent[owner] = max(self._spent[owner], self._share)
        self._blocked.clear()

    def _count(self) -> None:
        """Divides the time since the last call among the sessions that could have run."""
        if self._running is not None:
            now = self._clock()
            self._share += (now - self._counted) / len(self._active() - self._blocked)
            self._counted = now

    def _active(self) -> set[str | None]:
        return {*self._queues, *(() if self._running is None else (self._running.owner,))}

    def _time_of(self, owner: str | None) -> float:
        is_running = self._running is not None and self._running.owner == owner
        return self._spent[owner] + (self._clock() - self._since if is_running else 0.0)
