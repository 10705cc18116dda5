"""Results that are on their way, and the promise that no failure among them is lost."""

from __future__ import annotations

import asyncio
import concurrent.futures
import threading
from collections import deque
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from tinker_lightning.errors import ResultTimeout

if TYPE_CHECKING:
    from collections.abc import Callable, Generator

T = TypeVar("T")
U = TypeVar("U")


class TinkerFuture(Generic[T]):
    """A result that is on its way. Wait for it with `.result()`, or with `await` from any event loop.

    Args:
        source: Where the result comes from.
        operation: What was asked for, for messages.
    """

    def __init__(self, source: concurrent.futures.Future[T], operation: str) -> None:
        self.operation = operation
        self.was_read = False
        self._source = source

    def result(self, timeout: float | None = None) -> T:
        """The result, waiting for it if need be.

        Raises:
            ResultTimeout: If it does not come within `timeout` seconds. The operation goes on; ask again.
            TinkerLightningError: Whatever made the operation fail.
        """
        try:
            value = self._source.result(timeout)
        except concurrent.futures.TimeoutError:
            if self._source.done():
                self.was_read = True
                raise
            raise ResultTimeout(
                f"{self.operation}: no result within {timeout} s. It still runs: call .result() again, with more time."
            ) from None
        except BaseException:
            self.was_read = self._source.done()
            raise
        self.was_read = True
        return value

    def done(self) -> bool:
        """Whether the result, or a failure, is there."""
        return self._source.done()

    @property
    def was_sent(self) -> bool:
        """Whether the result comes without anybody here doing anything more."""
        return True

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """What made the operation fail, or None; reading it counts as having read the failure."""
        try:
            self.result(timeout)
        except ResultTimeout:
            raise
        except BaseException as error:
            if not self._source.done():
                raise
            return error
        return None

    def __await__(self) -> Generator[Any, None, T]:
        return self._wait().__await__()

    async def _wait(self) -> T:
        # Shielded: whoever stops waiting must not cancel an operation that the server carries out anyway.
        try:
            value = await asyncio.shield(asyncio.wrap_future(self._source))
        finally:
            self.was_read = self._source.done()
        return value

    def then(self, change: Callable[[T], U]) -> TinkerFuture[U]:
        """The same result in another form."""
        changed: concurrent.futures.Future[U] = concurrent.futures.Future()
        changed.set_running_or_notify_cancel()

        def forward(source: concurrent.futures.Future[T]) -> None:
            try:
                changed.set_result(change(source.result()))
            except BaseException as error:
                changed.set_exception(error)

        self._source.add_done_callback(forward)
        return TinkerFuture(changed, self.operation)


class Unread:
    """Futures whose failure nobody has seen yet; the client raises it at its next use."""

    def __init__(self) -> None:
        self._futures: deque[TinkerFuture[Any]] = deque()
        self._lock = threading.Lock()

    def add(self, future: TinkerFuture[Any]) -> None:
        """Keeps an eye on a future."""
        with self._lock:
            self._futures.append(future)

    def wait(self) -> None:
        """Waits until all that was sent is done, whatever comes of it."""
        with self._lock:
            sources = [future._source for future in self._futures if future.was_sent]
        concurrent.futures.wait(sources)

    def raise_first(self) -> None:
        """Raises the first failure that nobody has read, and forgets the futures that are settled."""
        failed: BaseException | None = None
        with self._lock:
            for _ in range(len(self._futures)):
                future = self._futures.popleft()
                if not future.done():
                    self._futures.append(future)
                elif failed is None and not future.was_read:
                    failed = future.exception()
                elif not future.was_read and future._source.exception() is not None:
                    self._futures.append(future)
        if failed is not None:
            raise failed
