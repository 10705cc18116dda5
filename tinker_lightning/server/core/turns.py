"""Whose turn it is: the sessions of a trainer share its time equally, and the jobs of each run in their order."""

from __future__ import annotations

import time
from collections import deque
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from tinker_lightning.server.core.jobs import Job, Progress

# The least time that a job runs before it pauses. A pause costs a millisecond: another adapter has to be activated.
MIN_SLICE = 0.1
# Sessions whose time is remembered while they have no jobs.
_MAX_IDLE = 1024


class Turns:
    """The jobs that can run, by session. Not thread-safe.

    The session that has run least goes first. One that returns or is new starts where the least of the others is, so
    that nobody saves up time. A job that pauses keeps the first place among those of its session.

    Args:
        clock: Returns the time in seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._queues: dict[str | None, deque[Job]] = {}
        self._spent: dict[str | None, float] = {}  # seconds by session
        self._least = 0.0  # of the sessions that have jobs
        self._running: Job | None = None
        self._since = 0.0
        self._paused: set[Job] = set()
        self._waiting_for_memory: set[str | None] = set()

    def add(self, jobs: Iterable[Job]) -> None:
        """Adds jobs behind those of their sessions."""
        for job in jobs:
            self._join(job.owner)
            self._queues.setdefault(job.owner, deque()).append(job)

    def start(self) -> Job | None:
        """Returns the next job, which runs from now on, or None if there is none."""
        owners = [owner for owner in self._queues if owner not in self._waiting_for_memory]
        if not owners:
            return None
        owner = min(owners, key=self._time_of)
        queue = self._queues[owner]
        self._running, self._since = queue.popleft(), self._clock()
        if not queue:
            del self._queues[owner]
        self._paused.discard(self._running)
        return self._running

    def stop(self, progress: Progress) -> None:
        """Records what has become of the running job: it has ended, or it goes on or starts again in a later turn."""
        job = self._running
        assert job is not None  # noqa: S101  # start() has returned it
        self._update_least()
        self._spent[job.owner] = self._time_of(job.owner)
        self._running = None
        if progress == "ended":
            self._waiting_for_memory.clear()
            return
        self._queues.setdefault(job.owner, deque()).appendleft(job)
        if progress == "paused":
            self._paused.add(job)
        else:
            self._waiting_for_memory.add(job.owner)

    def others_hold_memory(self) -> bool:
        """Returns whether a job is paused, which keeps its memory."""
        return bool(self._paused)

    def should_pause(self) -> bool:
        """Returns whether the running job has had its share of the time, and another session has a job that can run."""
        if self._running is None or self._clock() - self._since < MIN_SLICE:
            return False
        owner = self._running.owner
        spent = self._time_of(owner)
        return any(
            other != owner and other not in self._waiting_for_memory and self._spent[other] < spent
            for other in self._queues
        )

    def clear(self) -> list[Job]:
        """Removes and returns all jobs but the running one."""
        jobs = [job for queue in self._queues.values() for job in queue]
        self._queues.clear()
        self._paused.clear()
        self._waiting_for_memory.clear()
        return jobs

    def _join(self, owner: str | None) -> None:
        if owner in self._queues or (self._running is not None and self._running.owner == owner):
            return
        self._update_least()
        if len(self._spent) > _MAX_IDLE + len(self._queues):
            # What is not above the least has no effect.
            active = self._active()
            self._spent = {each: spent for each, spent in self._spent.items() if spent > self._least or each in active}
        self._spent[owner] = max(self._spent.get(owner, 0.0), self._least)

    def _update_least(self) -> None:
        self._least = max(self._least, min(map(self._time_of, self._active()), default=0.0))

    def _active(self) -> set[str | None]:
        return {*self._queues, *(() if self._running is None else (self._running.owner,))}

    def _time_of(self, owner: str | None) -> float:
        spent = self._spent[owner]
        running = self._running is not None and self._running.owner == owner
        return spent + self._clock() - self._since if running else spent
