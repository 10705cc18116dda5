"""Runs operations one at a time, each model's in the order of their numbers, each number once.

A submission may arrive before an earlier number (it waits), again (it gets the same operation), or never (after
`gap_timeout` the numbers behind it go on; should it still arrive then, it is refused, so that its sender knows).
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

from tinker_lightning.errors import InvalidInput, NotFound, TinkerLightningError, TrainerClosed

if TYPE_CHECKING:
    from collections.abc import Callable

logger = logging.getLogger("tinker_lightning.server")

# Longer than a client needs to notice that a request was lost (they wait a minute for an answer) and to send it again:
# otherwise one broken connection would cost a step.
GAP_TIMEOUT = 120.0
# A result that nobody has fetched yet waits for a client that may be away; one that was fetched only has to survive
# the loss of the answer that carried it.
RETENTION = 3600.0
FETCHED_RETENTION = 300.0


class Job:
    """Something to be done, and later its result, which may be fetched any number of times.

    Args:
        request_id: The name under which its result is fetched; made of the operation's natural key.
        kind: What is done, e.g. `forward_backward`.
        run: Does it and returns the result; called once, on the scheduler's thread.
        **labels: What the log says of it: model, seq, datums, tokens.
    """

    def __init__(self, request_id: str, kind: str, run: Callable[[], Any], **labels: object) -> None:
        self.request_id = request_id
        self.kind = kind
        self.labels = "".join(f"{name}={value} " for name, value in labels.items())
        self.future: Future[Any] = Future()
        self.future.set_running_or_notify_cancel()  # so that a waiter that gives up cannot cancel it
        self.kept_since: float | None = None  # when it finished, or was last fetched
        self.fetched = False
        self._run: Callable[[], Any] | None = run

    def execute(self) -> None:
        """Runs it and keeps the result or the error."""
        run, self._run = self._run, None  # what it was asked with is no longer needed
        assert run is not None  # noqa: S101  # operations are executed once
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

    def mark_fetched(self) -> None:
        """Says that its result was handed out; it is kept a little longer, should that answer be lost."""
        self.fetched = True
        self.kept_since = time.monotonic()


@dataclass(slots=True)
class _Line:
    """The numbered operations of one model."""

    last: int = 0  # the highest number that was let through
    waiting: dict[int, Job] = field(default_factory=dict)
    freed: set[int] = field(default_factory=set)  # numbers whose submission was refused
    blocked_since: float | None = None

    def release(self) -> list[Job]:
        """The operations whose turn it is."""
        ready = []
        while self.waiting:
            number = self.last + 1
            while number in self.freed:
                number += 1
            if number not in self.waiting:
                break
            ready.append(self.waiting.pop(number))
            self._pass(number)
        if not self.waiting:
            self.blocked_since = None
        elif ready or self.blocked_since is None:
            self.blocked_since = time.monotonic()
        return ready

    def skip(self) -> list[Job]:
        """Gives up waiting for the numbers that are missing."""
        self._pass(min(self.waiting) - 1)
        self.blocked_since = None
        return self.release()

    def _pass(self, number: int) -> None:
        self.last = number
        self.freed = {n for n in self.freed if n > number}


class Scheduler:
    """One thread that executes; any thread may submit.

    Args:
        gap_timeout: How many seconds the numbers behind a missing one wait for it.
        retention: How many seconds a result is kept for whoever has not fetched it.
        fetched_retention: How many seconds it is kept after it was fetched.
    """

    def __init__(
        self,
        gap_timeout: float = GAP_TIMEOUT,
        retention: float = RETENTION,
        fetched_retention: float = FETCHED_RETENTION,
    ) -> None:
        self._gap_timeout = gap_timeout
        self._retention = retention
        self._fetched_retention = fetched_retention
        self._next_cleaning = 0.0
        self._operations: dict[str, Job] = {}
        self._lines: dict[str, _Line] = {}
        self._ready: deque[Job] = deque()
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._closed = False

    def submit(self, operation: Job, line: str | None = None, number: int = 0) -> Job:
        """Queues an operation, or returns the one that the same request made before.

        Args:
            operation: What to do.
            line: The model whose order it belongs to; None if it may run at any time.
            number: Its number in that order, from 1.

        Raises:
            InvalidInput: If the number was used for something else, or its turn has passed.
            TrainerClosed: If the trainer was closed.
        """
        with self._changed:
            if self._closed:
                raise TrainerClosed("the trainer has been closed; connect to one that runs")
            known = self._operations.get(operation.request_id)
            if known is not None:
                if known.kind != operation.kind:
                    raise InvalidInput(f"number {number} of {line} was already used, for {known.kind}")
                return known
            if operation.kept_since is not None:
                operation.mark_fetched()  # it ran long ago and was dropped, but its owner still has it
            elif line is None:
                self._ready.append(operation)
            else:
                entry = self._lines.setdefault(line, _Line())
                if number <= entry.last:
                    raise InvalidInput(
                        f"number {number} of {line} comes too late: {entry.last} was let through already. Its result "
                        "was dropped long ago, or it was missing for so long that the numbers behind it went on."
                    )
                entry.freed.discard(number)
                entry.waiting[number] = operation
                self._ready.extend(entry.release())
            self._operations[operation.request_id] = operation
            self._drop_old()
            self._start()
            self._changed.notify_all()
        return operation

    def free(self, line: str, number: int) -> None:
        """Says that a submission was refused, so that the numbers behind it need not wait for it."""
        with self._changed:
            if self._closed:
                return
            entry = self._lines.setdefault(line, _Line())
            if number > entry.last and number not in entry.waiting:
                entry.freed.add(number)
                self._ready.extend(entry.release())
                self._changed.notify_all()

    def find(self, request_id: str) -> Job:
        """The operation of that name.

        Raises:
            NotFound: If there is none, or its result was dropped.
        """
        with self._changed:
            operation = self._operations.get(request_id)
        if operation is None:
            raise NotFound(f"request_id {request_id!r} is not known here, or its result is no longer kept")
        return operation

    def close(self, timeout: float = 30.0) -> None:
        """Fails what waits, lets what runs finish (after `timeout` seconds breaks it off), and stops the thread."""
        with self._changed:
            self._closed = True
            waiting = [*self._ready, *(op for line in self._lines.values() for op in line.waiting.values())]
            self._ready.clear()
            self._lines.clear()
            self._changed.notify_all()
        for operation in waiting:
            operation.future.set_exception(TrainerClosed("the trainer was closed before this operation's turn"))
        if self._thread is not None:
            self._thread.join(timeout)
            if self._thread.is_alive():
                logger.warning("an operation still runs after %.0f s and is broken off", timeout)
                # A thread that is left behind inside torch makes the interpreter abort at its exit.
                thread_id = ctypes.c_ulong(self._thread.ident or 0)
                ctypes.pythonapi.PyThreadState_SetAsyncExc(thread_id, ctypes.py_object(TrainerClosed))
                self._thread.join(timeout)

    def _start(self) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name="tinker-lightning-trainer", daemon=True)
            self._thread.start()

    def _work(self) -> None:
        with contextlib.suppress(TrainerClosed):  # sent by close()
            while (operation := self._next()) is not None:
                operation.execute()
                del operation  # its result must not live on here

    def _next(self) -> Job | None:
        """Waits for the operation whose turn it is; None once the trainer is closed."""
        with self._changed:
            while True:
                # Also while others have work: a busy neighbour must not lengthen the wait for a lost number.
                wait = self._skip_gaps()
                if self._closed:
                    return None
                if self._ready:
                    return self._ready.popleft()
                self._changed.wait(wait)

    def _skip_gaps(self) -> float | None:
        """Lets through what has waited too long; returns the seconds until the next one will have."""
        now = time.monotonic()
        soonest: float | None = None
        for name, line in self._lines.items():
            if line.blocked_since is None:
                continue
            left = line.blocked_since + self._gap_timeout - now
            if left <= 0:
                logger.warning(
                    "%s: going on with number %d, for one before it has not come in %.0f s",
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
        for name, operation in list(self._operations.items()):
            retention = self._fetched_retention if operation.fetched else self._retention
            if operation.kept_since is not None and operation.kept_since + retention < now:
                del self._operations[name]
