"""Futures of requests in flight, and the guarantee that none of their failures is lost.

Also derives the `_async` names of the official SDK from the methods without the suffix. They have the same arguments,
and an override of the method in a subclass changes its `_async` form too.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import functools
import logging
import os
import threading
from typing import TYPE_CHECKING, Any, Concatenate, Generic, ParamSpec, TypeVar

from typing_extensions import override

from tinker_lightning.errors import ClientClosed, ClientForked, ResultTimeout, SessionLost
from tinker_lightning.threads import background

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Coroutine, Generator, Iterable, Iterator, Sequence

P = ParamSpec("P")
S = TypeVar("S")
T = TypeVar("T")
F = TypeVar("F", bound="TinkerFuture[Any]")


def in_thread(method: Callable[Concatenate[S, P], T]) -> Callable[Concatenate[S, P], Coroutine[Any, Any, T]]:
    """Returns the async form of a method that waits for the server: it runs on a thread."""

    async def run(self: S, /, *args: P.args, **kwargs: P.kwargs) -> T:
        return await asyncio.to_thread(getattr(self, method.__name__), *args, **kwargs)

    return _named(run, method)


def submitted(
    method: Callable[Concatenate[S, P], F], before: Callable[[S], Awaitable[None]] | None = None
) -> Callable[Concatenate[S, P], Coroutine[Any, Any, F]]:
    """Returns the async form of a method that returns a future: awaiting it returns that future, with its request sent.

    Args:
        method: The method, which runs on the event loop's thread so that requests keep the order of the calls.
        before: Awaited first, where the method would otherwise block the event loop.
    """

    async def run(self: S, /, *args: P.args, **kwargs: P.kwargs) -> F:
        if before is not None:
            await before(self)
        future: F = getattr(self, method.__name__)(*args, **kwargs)
        await future.sent_async()
        return future

    return _named(run, method)


def awaited(
    method: Callable[Concatenate[S, P], Awaitable[T]],
) -> Callable[Concatenate[S, P], Coroutine[Any, Any, T]]:
    """Returns the async form of a method that returns a future: awaiting it returns the future's result."""

    async def run(self: S, /, *args: P.args, **kwargs: P.kwargs) -> T:
        result: T = await getattr(self, method.__name__)(*args, **kwargs)
        return result

    return _named(run, method)


def _named(
    run: Callable[Concatenate[S, P], Coroutine[Any, Any, T]], method: Callable[Concatenate[S, P], Any]
) -> Callable[Concatenate[S, P], Coroutine[Any, Any, T]]:
    functools.update_wrapper(run, method)  # `inspect.signature` follows it to the arguments
    run.__name__ = f"{method.__name__}_async"
    run.__qualname__ = f"{method.__qualname__}_async"
    return run


U = TypeVar("U")

logger = logging.getLogger("tinker_lightning.client")


class TinkerFuture(Generic[T]):
    """The result of a request in flight. Wait for it with `.result()`, or with `await` from any event loop."""

    def __init__(self, source: concurrent.futures.Future[T], operation: str) -> None:
        self.operation = operation
        self.was_read = False
        self._source = source
        self._pid = os.getpid()

    @classmethod
    def from_result(cls, result: T, operation: str) -> TinkerFuture[T]:
        """Returns a future of a result that is known."""
        source: concurrent.futures.Future[T] = concurrent.futures.Future()
        source.set_result(result)
        return TinkerFuture(source, operation)

    def result(self, timeout: float | None = None) -> T:
        """Returns the result, waiting for it if necessary.

        Raises:
            ResultTimeout: If it does not arrive within `timeout` seconds. The operation continues; ask again.
            TinkerLightningError: Whatever made the operation fail.
        """
        self.wait(timeout)
        return self._outcome()

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Returns the exception of a failed operation, or None; this counts as reading the failure."""
        self.wait(timeout)
        try:
            self._outcome()
        except BaseException as error:
            return error
        return None

    def wait(self, timeout: float | None = None) -> None:
        """Waits for the result or a failure.

        Raises:
            ResultTimeout: If that takes longer than `timeout` seconds.
        """
        if self.done():
            return
        if os.getpid() != self._pid:
            raise ClientForked(
                f"{self.operation}: its result arrives in the process that sent the request, not in this fork of it. "
                "Wait for it there, or create a new client here."
            )
        background.wait([self._source], timeout)
        if not self.done():
            raise self._timed_out(timeout)

    def done(self) -> bool:
        """Returns whether the result or a failure has arrived."""
        return self._source.done()

    @property
    def is_sent(self) -> bool:
        """Whether everything was sent, so that the result arrives without further calls."""
        return True

    @property
    def is_held(self) -> bool:
        """Whether the gradient is still to be sent by a step, even if the result is already known."""
        return False

    async def sent_async(self) -> None:
        """Waits until everything is sent; only custom losses are sent later than the call."""

    def finish(self) -> bool:
        """Waits for the result or a failure; returns False if there is none, because only a step would send it."""
        self.wait()
        return True

    @property
    def failed(self) -> bool:
        """Whether the operation has failed."""
        return self._source.done() and (self._source.cancelled() or self._source.exception() is not None)

    def __await__(self) -> Generator[Any, None, T]:
        return self.result_async().__await__()

    async def result_async(self, timeout: float | None = None) -> T:
        """Returns the result like `result`, without blocking the event loop; `await future` does the same."""
        try:
            async with asyncio.timeout(timeout):
                await self.wait_async()
        except TimeoutError:
            raise self._timed_out(timeout) from None
        return self._outcome()

    async def wait_async(self) -> None:
        """Waits like `wait`. Cancelling the waiting task does not cancel the operation on the server."""
        if self.done():
            return
        background.end_openmp()
        loop = asyncio.get_running_loop()
        woken = asyncio.Event()

        self._source.add_done_callback(lambda _: background.call_soon(loop, woken.set))
        await woken.wait()

    async def coroutine(self) -> T:
        """Returns the result like `await future`, for functions that only take coroutines."""
        return await self.result_async()

    def future(self) -> concurrent.futures.Future[T]:
        """Returns a future for `concurrent.futures.wait` and the like; cancelling it does not cancel the operation.

        A pending custom loss is evaluated on a thread of its own then.
        """
        return self.handed(lambda result: result)

    def handed(self, change: Callable[[T], U]) -> concurrent.futures.Future[U]:
        """Returns a future like `future()`, of the converted result."""
        if not self.is_sent:
            background.run_on_thread(self.wait, self.operation)
        handed = _StandardFuture[U](self)
        # What is settled is let go of then: the source lives as long as the result, which may be what keeps the source.
        unsettled = [(handed, change)]

        def settle(_: object) -> None:
            handed, change = unsettled.pop()
            if handed.set_running_or_notify_cancel():
                # Not raised here: its traceback would keep this frame, and with it all callers and the client.
                if (error := self._failure()) is not None:
                    handed.set_exception(error)
                    return
                try:
                    handed.set_result(change(self._result()))
                except BaseException as error:
                    handed.set_exception(error)
                finally:
                    del handed, change  # which the traceback of the error would keep

        self._source.add_done_callback(settle)
        return handed

    def then(
        self, change: Callable[[T], U], explain: Callable[[BaseException], BaseException] | None = None
    ) -> TinkerFuture[U]:
        """Returns a future of the converted result; `explain` converts failures."""
        changed: concurrent.futures.Future[U] = concurrent.futures.Future()
        changed.set_running_or_notify_cancel()

        def settle(_: object) -> None:
            try:
                changed.set_result(change(self._outcome()))
            except BaseException as error:
                changed.set_exception(error if explain is None else explain(error))

        self._source.add_done_callback(settle)
        return TinkerFuture(changed, self.operation)

    def _timed_out(self, timeout: float | None) -> ResultTimeout:
        return ResultTimeout(
            f"{self.operation}: no result within {timeout} s. It is still running: call .result() again with a longer "
            "timeout."
        )

    def _outcome(self) -> T:
        self.was_read = True
        return self._result()

    def _result(self) -> T:
        if self._source.cancelled():
            raise self._closed()
        return self._source.result()

    def _failure(self) -> BaseException | None:
        return self._closed() if self._source.cancelled() else self._source.exception()

    def _closed(self) -> ClientClosed:
        return ClientClosed(f"{self.operation}: the client was closed before the result arrived")


class _StandardFuture(concurrent.futures.Future[T]):
    """A future of the standard library; reading it reads the failure of the operation."""

    def __init__(self, operation: TinkerFuture[Any]) -> None:
        super().__init__()
        self._operation = operation

    @override
    def exception(self, timeout: float | None = None) -> BaseException | None:
        error = super().exception(timeout)
        self._operation.was_read = True
        return error

    @override
    def result(self, timeout: float | None = None) -> T:
        self.exception(timeout)
        return super().result()


class UnreadFailures:
    """The futures of a client with unhandled failures, which are raised at the client's next use."""

    def __init__(self) -> None:
        self._futures: dict[int, TinkerFuture[Any]] = {}
        self._lock = threading.Lock()
        self._held = 0

    def add(self, future: F, *others: TinkerFuture[Any]) -> F:
        """Tracks futures, unless they are tracked already, and returns the first one."""
        with self._lock:
            self._futures[id(future)] = future
            self._futures.update((id(each), each) for each in others)
        return future

    def wait(self, timeout: float | None = None) -> bool:
        """Waits for everything that was sent, at most `timeout` seconds; returns whether it is done."""
        with self._lock:
            sources = [future._source for future in self._futures.values() if future.is_sent]
        return not background.wait(sources, timeout).not_done

    def finish(self) -> None:
        """Waits until everything is done, evaluating custom losses that are still pending on this thread.

        Passes that are held back for a step are dropped, since no step follows.
        """
        dropped = 0
        while futures := self._unfinished():  # evaluating a custom loss may add a pass that is held back
            dropped += sum(not future.finish() for future in futures)
        if dropped:
            logger.warning(
                "%d backward passes were dropped by close(), because no optim_step was called after them", dropped
            )

    def _unfinished(self) -> list[TinkerFuture[Any]]:
        with self._lock:
            return [future for future in self._futures.values() if not future.done() or future.is_held]

    def log_failures(self, timeout: float) -> None:
        """Waits for requests in flight, and logs the unhandled failures of a client that ends without `close()`."""
        self.wait(timeout)
        with self._lock:
            futures, self._futures = self._futures, {}
        for future in futures.values():
            if future.is_held:
                logger.error("%s was dropped, because no optim_step was called after it", future.operation)
            elif not future.done():
                reason = "had no result yet" if future.is_sent else "was never evaluated, so nothing was trained"
                logger.error("%s %s when its client ended. Call close() or use a with block.", future.operation, reason)
            elif future.failed and not future.was_read:
                error = future.exception()
                logger.error("unhandled failure: %s: %s", type(error).__name__, error)

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Raises present failures on entry; those that arrive during the `with` block are raised after it.

        This keeps requests together that only have a meaning together, such as the passes of a step and the step.
        """
        self.raise_first()
        self._held += 1
        try:
            yield
        finally:
            self._held -= 1

    def raise_first(self, settle_seconds: float = 0.0) -> None:
        """Raises the first unhandled failure, with the others as its notes.

        Args:
            settle_seconds: How long to wait for other requests before a failure is raised: more may have failed with
                it.
        """
        if self._held:
            return
        with self._lock:
            failed = self._forget_settled()
        if failed:
            self.wait(settle_seconds)
            raise_together(self.take_failures())

    def take_failures(self) -> list[BaseException]:
        """Returns all unhandled failures, and marks them as read."""
        with self._lock:
            return [error for future in self._forget_settled() if (error := future.exception()) is not None]

    @property
    def is_empty(self) -> bool:
        """Whether nothing is in flight and no failure is left."""
        with self._lock:
            self._forget_settled()
            return not self._futures

    def _forget_settled(self) -> list[TinkerFuture[Any]]:
        """Drops futures that succeeded or were read, unless they are held back; returns the failed ones."""
        self._futures = {
            key: future
            for key, future in self._futures.items()
            if not future.done() or future.is_held or (future.failed and not future.was_read)
        }
        return [future for future in self._futures.values() if future.failed]


def raise_together(failures: Sequence[BaseException]) -> None:
    """Raises the first failure, if any, with the others as its notes."""
    if failures:
        note_failures(failures[0], failures[1:])
        raise failures[0]


def note_failures(error: BaseException, failures: Iterable[BaseException]) -> None:
    """Adds unhandled failures as notes to an error that is raised instead."""
    for other in failures:
        is_same = isinstance(error, SessionLost) and isinstance(other, SessionLost)  # what ends all requests at once
        if other is not error and not is_same:
            error.add_note(f"Another unhandled failure: {type(other).__name__}: {other}")
