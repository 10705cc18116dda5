"""Jobs, the queues in which numbered jobs wait for their turn, and the submission of the jobs of a model."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Generator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from tinker_lightning.errors import MemoryLimitExceeded, OperationFailed, RequestConflict, TinkerLightningError
from tinker_lightning.server.trainer.sizes import result_bytes as measure_result

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tinker_lightning.server.engine.interface import Adapter, BaseModel
    from tinker_lightning.server.trainer.memory import Charge, MemoryBudget
    from tinker_lightning.server.trainer.registry import Registry
    from tinker_lightning.server.trainer.scheduler import Scheduler

logger = logging.getLogger("tinker_lightning.server")

Progress: TypeAlias = Literal["ended", "paused", "blocked"]

# The memory of a job in addition to its request and its result.
JOB_BYTES = 2048


class Job:
    """A unit of work and its result, which can be fetched any number of times.

    Args:
        request_id: The id; equal requests have the same one.
        kind: The operation.
        run: The work: returns the result, or a generator that yields where it pauses and returns the result.
        owner: The session that the job belongs to.
        can_pause: Whether `run` returns a generator.
        request_bytes: The memory of the request, from its submission until it has run.
        result_bytes: The most memory that the result takes.
        measure: Returns the memory that a result takes.
        tokens: The number of tokens that it reads.
        **labels: Fields for the log.
    """

    def __init__(
        self,
        request_id: str,
        kind: str,
        run: Callable[[], Any],
        *,
        owner: str | None = None,
        can_pause: bool = False,
        request_bytes: int = 0,
        result_bytes: int = 0,
        measure: Callable[[Any], int] | None = None,
        tokens: int = 0,
        **labels: object,
    ) -> None:
        self.request_id = request_id
        self.kind = kind
        self.owner = owner
        self.can_pause = can_pause
        self.tokens = tokens  # that it reads and, when it has sampled, draws
        labels |= {"tokens": tokens} if tokens else {}
        self.labels = "".join(f"{name}={value} " for name, value in labels.items())
        self.future: Future[Any] = Future()
        self.future.set_running_or_notify_cancel()  # so that a waiter that times out cannot cancel it
        self.kept_since: float | None = None  # when it finished, or was last fetched
        self.fetched = False
        self.cancelled = False
        self.digest: str | None = None  # of its request, once that was accepted
        self.queue: str | None = None  # the name of the queue in which it is numbered
        self.queue_seconds = self.run_seconds = 0.0  # pauses count as waiting
        self._created = time.perf_counter()
        self._run: Callable[[], Any] | None = run
        self._slices: Generator[None, None, Any] | None = None
        self._was_blocked = False
        self._request_bytes, self._result_bytes, self._measure = request_bytes, result_bytes, measure
        self._charge: Charge | None = None
        self._settled = 0  # what is charged for the result
        self._lock = threading.Lock()
        self._senders = 0
        self._forgotten = False

    @property
    def size(self) -> int:
        """The memory of the request and its result."""
        return JOB_BYTES + self._request_bytes + self._result_bytes

    def admit(self, memory: MemoryBudget, evict: Callable[[Job], object], *, spare: int = 0, reason: str = "") -> None:
        """Charges the request and its result; raises `MemoryLimitExceeded` if they do not fit.

        Args:
            memory: The budget.
            evict: Forgets the finished job, if its memory is needed.
            spare: The number of bytes that must be left for other requests of the owner.
            reason: The reason why they are left, as a sentence for the error message.
        """
        if self._charge is not None:
            if self.kept_since is not None:
                self._readmit(self._charge)
            return
        what = f"{self.kind}: the request and its result"
        fix = f"{reason}Fetch the results of earlier requests, or send smaller ones."
        self._charge = memory.charge(what, self.size, "messages", owner=self.owner, spare=spare, fix=fix)
        self._evict = evict

    def _readmit(self, charge: Charge) -> None:
        """Charges the result of a job that was forgotten and is submitted again by an owner that still has it."""
        with self._lock:
            self._forgotten = False
        try:
            # Without the lock, because this may evict other jobs.
            charge.resize(max(charge.size, self._settled))
        except BaseException:
            self.release()
            raise
        with self._lock:
            if not self._senders:
                charge.set_evict(lambda: self._evict(self), expendable=self.fetched)

    def execute(self, *, may_block: bool = False) -> Progress:
        """Runs the job until it pauses or ends, and then stores its result or exception.

        With `may_block`, a job that lacks memory which other work holds is blocked: it has to be executed again.
        """
        assert self._run is not None  # noqa: S101  # a job that has ended is not executed
        started = time.perf_counter()
        failure: BaseException | None = None
        result: Any = None
        try:
            result = self._run() if self._slices is None else self._slices
            if isinstance(result, Generator):
                self._slices = result
                try:
                    next(self._slices)
                except StopIteration as ended:
                    result = ended.value
                else:
                    self.run_seconds += time.perf_counter() - started
                    return "paused"
        except MemoryLimitExceeded as error:
            if may_block and error.fits_without_work:
                self._log_blocked(error)
                self._slices = None
                return "blocked"
            failure = error
        except BaseException as error:
            failure = error
        now = time.perf_counter()
        self.run_seconds += now - started
        self.queue_seconds = now - self._created - self.run_seconds
        if failure is None:
            self._end(min(self._result_bytes, self._measure(result)) if self._measure else self._result_bytes)
            self.future.set_result(result)
        else:
            self._end(0)
            self.future.set_exception(failure)
        outcome = "ok" if failure is None else "failed: " + str(failure).partition("\n")[0]
        defect = None if isinstance(failure, TinkerLightningError) else failure
        level = logging.INFO if defect is None else logging.ERROR
        logger.log(
            level, "op=%s %sms=%.1f %s", self.kind, self.labels, 1000 * self.run_seconds, outcome, exc_info=defect
        )
        _clear_frames(failure)
        return "ended"

    def fail(self, error: TinkerLightningError) -> None:
        """Ends a job that is not running."""
        self._end(0)
        self.future.set_exception(error)

    def _end(self, result_bytes: int) -> None:
        """Frees the request, and keeps the memory of the result charged."""
        self._run = None
        if self._slices is not None:
            self._slices.close()
            self._slices = None
        self._settle(result_bytes)
        self.kept_since = time.monotonic()

    def _log_blocked(self, error: MemoryLimitExceeded) -> None:
        if not self._was_blocked:
            self._was_blocked = True
            logger.info("op=%s %swaits until other work ends: %s", self.kind, self.labels, error)

    def _settle(self, result_bytes: int) -> None:
        """Keeps charging for the result alone, which can be evicted from now on."""
        if self._charge is not None:
            self._settled = JOB_BYTES + result_bytes
            self._charge.resize(self._settled)
            self._charge.set_evict(lambda: self._evict(self))

    def release(self) -> None:
        """Returns the memory of a job that is forgotten, once its result is not being sent any more."""
        with self._lock:
            self._forgotten = True
            if self._charge is not None and not self._senders:
                self._charge.release()

    @contextmanager
    def sending(self) -> Iterator[None]:
        """Keeps the memory of the result charged while it is sent, also if the job is forgotten meanwhile.

        Raises:
            MemoryLimitExceeded: If it was evicted at the last moment and others have its memory now, or if its session
                keeps too much already.
        """
        if self._charge is None:
            yield
            return
        with self._lock:
            self._charge.set_evict(None)
            self._senders += 1
        try:
            # Without the lock, because this may evict other jobs.
            self._charge.resize(max(self._charge.size, self._settled))
            yield
        finally:
            with self._lock:
                self._senders -= 1
                if not self._senders:
                    self._charge.set_evict(lambda: self._evict(self), expendable=self.fetched)
                    if self._forgotten:
                        self._charge.release()

    def claim(self, digest: str) -> None:
        """Records the digest of the accepted request; raises `RequestConflict` if the job belongs to another one."""
        with self._lock:
            self.digest = self.digest or digest
        if self.digest != digest:
            raise RequestConflict(
                f"request {self.request_id}: its number was already used for {self.kind} with the digest "
                f"{self.digest}, but this request has the digest {digest}. Give each request a number of its own. Do "
                "two clients train this model?"
            )

    def raise_if_cancelled(self) -> None:
        """Raises `OperationFailed` if the client has cancelled the job."""
        if self.cancelled:
            raise OperationFailed(f"{self.kind} was cancelled by the client")

    def mark_fetched(self) -> None:
        """Records that the result was fetched, and keeps it a little longer in case the response was lost."""
        self.fetched = True
        self.kept_since = time.monotonic()
        if self._charge is not None:
            self._charge.expendable = True


def _clear_frames(error: BaseException | None) -> None:
    """Frees the local variables of the calls that failed, such as tensors, which an error keeps with its traceback."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        error.__traceback__ = None
        error = error.__cause__ or error.__context__


@dataclass(slots=True)
class JobQueue:
    """Numbered jobs that run in the order of their numbers, from 1."""

    last: int = 0  # the highest number that was released
    waiting: dict[int, Job] = field(default_factory=dict)
    skipped: set[int] = field(default_factory=set)  # numbers of rejected submissions
    blocked_since: float | None = None
    polled_since: float | None = None  # when a client first asked for a result beyond the missing number

    @property
    def missing(self) -> int:
        """The lowest number that has neither arrived nor been rejected."""
        number = self.last + 1
        while number in self.skipped:
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
            self._advance(number)
        if not self.waiting:
            self.blocked_since = self.polled_since = None
        elif ready or self.blocked_since is None:
            self.blocked_since = time.monotonic()
            self.polled_since = None
        return ready

    def skip(self) -> list[Job]:
        """Stops waiting for missing numbers and returns the jobs after them."""
        self._advance(min(self.waiting) - 1)
        self.blocked_since = None
        return self.release()

    def _advance(self, number: int) -> None:
        self.last = number
        self.skipped = {n for n in self.skipped if n > number}


class ModelJobs:
    """Submits the numbered jobs of models. Each model has its own queue."""

    def __init__(self, registry: Registry, scheduler: Scheduler) -> None:
        self._registry = registry
        self._scheduler = scheduler

    def submit(
        self,
        request: Any,
        kind: str,
        run: Callable[[BaseModel, Adapter], Any],
        *,
        can_pause: bool = False,
        request_bytes: int = 0,
        result_bytes: int = 0,
        tokens: int = 0,
        **labels: object,
    ) -> Job:
        """Queues a job under the number of its request. `run` gets the model when it is its turn.

        Args:
            request: The request, with the model and the number.
            kind: The operation.
            run: The work.
            can_pause: Whether it returns a generator, which pauses where `should_pause` says so.
            request_bytes: The memory of the request.
            result_bytes: The most memory that the result takes.
            tokens: The number of tokens that it reads.
            **labels: Fields for the log.
        """
        model = self._registry.model(request.model_id)
        model.last_request_time = datetime.now(UTC)
        job = Job(
            f"{model.model_id}:{request.seq_id}",
            kind,
            lambda: run(*model.ready()),
            owner=model.session_id,
            can_pause=can_pause,
            request_bytes=request_bytes,
            result_bytes=result_bytes,
            measure=measure_result,
            tokens=tokens,
            model=model.model_id,
            seq=request.seq_id,
            **labels,
        )
        return self._scheduler.submit(job, queue=model.model_id, number=request.seq_id)

    def should_pause(self) -> bool:
        """Returns whether the running job should pause, because it is the turn of another session."""
        return self._scheduler.should_pause()

    def get(self, model_id: str, number: int) -> Job | None:
        """Returns the job that was submitted with this number, if its result is still kept."""
        return self._scheduler.get(f"{model_id}:{number}")

    def find(self, request_id: str) -> Job:
        """Returns the job with this id; raises `NotFound` if there is none, or its result has been dropped."""
        job = self._scheduler.find(request_id, self._registry.owns)
        self._registry.see(request_id)
        return job

    def skip(self, model_id: str, number: int) -> None:
        """Marks the number of a rejected request as skipped, because the client continues with the next one."""
        if self._registry.has_model(model_id):
            self._scheduler.skip(model_id, number)
