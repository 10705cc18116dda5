"""A queue that divides the time of a trainer equally among API keys, and the time of a key among its sessions.

    all the time ─┬─ alice 1/2 ─┬─ session 1/4        thirty sessions of bob
                  │             └─ session 1/4        take no more than one
                  └─ bob   1/2 ─── session 1/2

Without keys, all sessions share equally. The jobs of a session run in order.
"""

from __future__ import annotations

import time
from collections import defaultdict, deque
from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from tinker_lightning.server.trainer.jobs import Job, Progress

# A group and a member of it.
_Member: TypeAlias = "tuple[str | None, str | None]"

# The least time that a job runs before it pauses. A pause costs a millisecond: another adapter has to be activated.
MIN_SLICE = 0.1
# Sessions and keys whose time is remembered while they have no jobs.
_MAX_IDLE = 1024
# The group of all keys. No key has this name.
_ALL = ""


class FairQueue:
    """The jobs that can run, by session. Not thread-safe.

    The key that has had least time is next, and of its sessions the one that has. A new or returning session, or key,
    starts at the fair share among its like, so that nobody can save up time. A paused job stays the first of its
    session.

    A job that is blocked, because paused jobs hold the memory that it needs, is tried again when one of them has ended.
    Until then no further job starts that could pause, so that other sessions cannot take turns holding the memory.

    Args:
        clock: Returns the time in seconds.
        key_of: Returns the key that a session belongs to.
    """

    def __init__(
        self,
        clock: Callable[[], float] = time.monotonic,
        key_of: Callable[[str | None], str | None] = lambda _: None,
    ) -> None:
        self._clock = clock
        self._key_of = key_of
        self._keys: dict[str | None, str | None] = {}  # by session
        self._queues: dict[str | None, deque[Job]] = {}
        self._spent: dict[_Member, float] = {}  # seconds
        # The time of a member that has had jobs from the beginning, by group.
        self._share: defaultdict[str | None, float] = defaultdict(float)
        self._running: Job | None = None
        self._is_resumed = False
        self._since = self._counted = 0.0
        self._paused: set[Job] = set()
        self._blocked: set[str | None] = set()

    def __len__(self) -> int:
        """Returns how many jobs wait, the running one not counted."""
        return sum(map(len, self._queues.values()))

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
        owner = min(owners, key=lambda owner: self._time_of(owner, 0.0))
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
        times = self._time_of(job.owner, self._clock() - self._since)
        self._spent.update(zip(self._members(job.owner), times, strict=True))
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
        elapsed = 0.0 if self._running is None else self._clock() - self._since
        if self._running is None or elapsed < MIN_SLICE:
            return False
        owner = self._running.owner
        spent = self._time_of(owner, elapsed)
        return any(
            other != owner and self._time_of(other, elapsed) < spent and self._may_start(queue[0])
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

    def _members(self, owner: str | None) -> tuple[_Member, _Member]:
        """Returns the key of a session as a member of all keys, and the session as one of those of its key."""
        key = self._keys[owner]
        return (_ALL, key), (key, owner)

    def _join(self, owner: str | None) -> None:
        """Starts to count the time of a session that had no jobs."""
        self._count()
        active = self._active()
        if len(self._spent) > _MAX_IDLE + len(self._queues):
            # Those that have had less than their share would start at it anyway.
            kept = {member for each in active for member in self._members(each)}
            self._spent = {each: t for each, t in self._spent.items() if t > self._share[each[0]] or each in kept}
            self._keys = {each: key for each, key in self._keys.items() if each in active or (key, each) in self._spent}
        self._keys[owner] = self._key_of(owner)
        key, session = self._members(owner)
        self._raise_to_share(session)
        if all(self._keys[each] != key[1] for each in active):
            self._raise_to_share(key)

    def _raise_to_share(self, member: _Member) -> None:
        self._spent[member] = max(self._spent.get(member, 0.0), self._share[member[0]])

    def _unblock(self) -> None:
        could_run = {self._keys[each] for each in self._active() - self._blocked}
        for owner in self._blocked:
            key, session = self._members(owner)
            self._raise_to_share(session)
            if key[1] not in could_run:
                self._raise_to_share(key)
        self._blocked.clear()

    def _count(self) -> None:
        """Divides the time since the last call among those that could have run."""
        if self._running is not None:
            now = self._clock()
            keys = [self._keys[each] for each in self._active() - self._blocked]
            key = self._keys[self._running.owner]
            self._share[_ALL] += (now - self._counted) / len(set(keys))
            self._share[key] += (now - self._counted) / keys.count(key)
            self._counted = now

    def _active(self) -> set[str | None]:
        return {*self._queues, *(() if self._running is None else (self._running.owner,))}

    def _time_of(self, owner: str | None, elapsed: float) -> tuple[float, float]:
        """Returns the time of the key of a session, and of the session, if the running job has run for so long."""
        running = () if self._running is None else self._members(self._running.owner)
        key, session = self._members(owner)
        return self._spent[key] + elapsed * (key in running), self._spent[session] + elapsed * (session in running)
