"""Which sampling requests have finished, in order, so that one poll can wait for many of them."""

from __future__ import annotations

import threading
import time
from collections import deque
from contextlib import contextmanager
from typing import TYPE_CHECKING, TypeAlias

from tinker_lightning.server.trainer.scheduler import RETENTION

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    # A sampler, and which of its clients: clones number their requests from a multiple of CLONE_STRIDE.
    Target: TypeAlias = tuple[str, int]

CLONE_STRIDE = 10**9


class Completions:
    """The finished requests of each sampler and client, numbered in order. All methods are thread-safe."""

    def __init__(self, retention: float = RETENTION) -> None:
        self._retention = retention
        self._lock = threading.Lock()
        self._count = 0
        self._finished: dict[Target, deque[tuple[int, str, bool]]] = {}  # number, request id, whether it succeeded
        self._all: deque[tuple[float, int, Target]] = deque()  # when each finished, to forget those nobody asks for
        self._waiters: dict[Target, list[Callable[[], object]]] = {}

    def record(self, target: Target, request_id: str, *, succeeded: bool) -> None:
        """Adds a finished request and wakes those who wait for one."""
        with self._lock:
            self._count += 1
            now = time.monotonic()
            self._finished.setdefault(target, deque()).append((self._count, request_id, succeeded))
            self._all.append((now, self._count, target))
            while self._all and self._all[0][0] + self._retention < now:
                _, number, old = self._all.popleft()
                self._forget(old, number)
            waiters = list(self._waiters.get(target, ()))
        for wake in waiters:
            wake()

    def after(self, target: Target, cursor: int) -> list[tuple[int, str, bool]]:
        """Returns the requests after a cursor, and forgets those before it, which the client has seen."""
        with self._lock:
            self._forget(target, cursor)
            return list(self._finished.get(target, ()))

    @contextmanager
    def waking(self, target: Target, wake: Callable[[], object]) -> Iterator[None]:
        """Calls `wake`, from any thread, when a request of the target finishes during the `with` block."""
        with self._lock:
            self._waiters.setdefault(target, []).append(wake)
        try:
            yield
        finally:
            with self._lock:
                self._waiters[target].remove(wake)
                if not self._waiters[target]:
                    del self._waiters[target]

    def _forget(self, target: Target, number: int) -> None:
        finished = self._finished.get(target)
        while finished and finished[0][0] <= number:
            finished.popleft()
        if finished is not None and not finished:
            del self._finished[target]
