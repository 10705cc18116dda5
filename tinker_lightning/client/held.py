"""Passes that are held back until the optimizer step, for servers that divide by the sequences of the whole window."""

from __future__ import annotations

import concurrent.futures
import contextlib
import threading
from dataclasses import replace
from typing import TYPE_CHECKING, TypeAlias

from tinker_lightning.client.dialects.surrogate import times
from tinker_lightning.client.futures import TinkerFuture
from tinker_lightning.errors import OperationFailed
from tinker_lightning.types import ForwardBackwardOutput

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tinker_lightning.client.futures import UnreadFailures
    from tinker_lightning.client.server_pass import ServerPass

    Submit: TypeAlias = Callable[[ServerPass, bool], TinkerFuture[ForwardBackwardOutput]]


class HeldPasses:
    """The passes of one model that are held back, and the number of sequences that were sent since the last step.

    Args:
        submit: Sends a pass, or only its forward.
        unread: Receives the futures of passes whose result was needed before they were sent.
    """

    def __init__(self, submit: Submit, unread: UnreadFailures) -> None:
        self._submit = submit
        self._unread = unread
        self._held: list[HeldFuture] = []
        self._sequences = 0
        self._windows = 0
        self._holds_all = False
        self._lock = threading.Lock()

    def takes(self, request: ServerPass) -> bool:
        """Returns whether a pass is to be held back."""
        return request.per_batch == "window" or self._holds_all

    def add(self, request: ServerPass) -> HeldFuture:
        """Holds a pass back."""
        future = HeldFuture(request, self._submit)
        with self._lock:
            self._held.append(future)
        return future

    def count(self, sequences: int, passed: TinkerFuture[ForwardBackwardOutput]) -> None:
        """Counts the sequences of a pass that was not held back, unless it fails before the step."""
        with self._lock:
            self._sequences += sequences
            window = self._windows

        def uncount(source: concurrent.futures.Future[ForwardBackwardOutput]) -> None:
            if source.cancelled() or source.exception() is not None:
                with self._lock:
                    self._sequences -= sequences if self._windows == window else 0

        passed._source.add_done_callback(uncount)

    def release(self) -> None:
        """Sends the passes, in the order in which they were added, with the window's number of sequences undone.

        A pass whose forward has failed is neither sent nor counted. If a pass cannot be sent, those after it are not
        sent either.
        """
        with self._lock:
            held, self._held = [future for future in self._held if not future.failed], []
            window = self._sequences + sum(len(future.request.data) for future in held)
        for i, future in enumerate(held):
            try:
                late = future.send(window)
            except BaseException:
                for other in held[i:]:
                    other.abandon("not sent, because another pass of the same step could not be sent. Call it again.")
                raise
            with self._lock:
                self._sequences += len(future.request.data)
            if late is not None:
                self._unread.add(late)
        with self._lock:
            self._sequences = 0
            self._windows += 1

    @contextlib.contextmanager
    def holding_all(self) -> Iterator[None]:
        """Holds back all passes that are submitted in the `with` block."""
        self._holds_all = True
        try:
            yield
        finally:
            self._holds_all = False

    def drop(self, reason: str) -> tuple[int, int]:
        """Drops the passes; returns their number of sequences, and that of the passes since the last step."""
        with self._lock:
            held, self._held = self._held, []
            sent = self._sequences
        for future in held:
            future.abandon(reason)
        return sum(len(future.request.data) for future in held), sent


class HeldFuture(TinkerFuture[ForwardBackwardOutput]):
    """The result of a pass that is held back. Waiting for it before the step costs a forward of its own."""

    def __init__(self, request: ServerPass, submit: Submit) -> None:
        self._settled: concurrent.futures.Future[ForwardBackwardOutput] = concurrent.futures.Future()
        self._settled.set_running_or_notify_cancel()
        super().__init__(self._settled, "forward_backward")
        self.request = request
        self._submit = submit
        self._sent = False
        self._forward: TinkerFuture[ForwardBackwardOutput] | None = None
        self._lock = threading.RLock()

    @property
    def is_sent(self) -> bool:
        """Whether the pass was sent."""
        return self._sent

    def send(self, window: int) -> TinkerFuture[ForwardBackwardOutput] | None:
        """Sends the pass; returns its future if the result was already read from a forward.

        Args:
            window: The number of sequences by which the server divides.
        """
        with self._lock:
            backward = self._submit(replace(self.request, data=times(self.request.data, window)), False)
            self._sent = True
            if self._forward is not None:
                return backward
        backward._source.add_done_callback(self._settle)
        return None

    def abandon(self, reason: str) -> None:
        """Settles a pass that is never sent; what was already read from a forward stays valid."""
        with self._lock:
            self._sent = True
            self.was_read = True  # whoever waits for the result gets the reason
            if self._forward is None:
                self._settled.set_exception(OperationFailed(f"{self.operation}: {reason}"))

    def wait(self, timeout: float | None = None) -> None:
        """Waits for the result: of the pass if it was sent, else of a forward."""
        self._ask_forward()
        super().wait(timeout)

    async def wait_async(self) -> None:
        """Waits like `wait`."""
        self._ask_forward()
        await super().wait_async()

    def _ask_forward(self) -> None:
        with self._lock:
            if self._sent or self._forward is not None:
                return
            self._forward = self._submit(self.request, True)
        self._forward._source.add_done_callback(self._settle)

    def _settle(self, source: concurrent.futures.Future[ForwardBackwardOutput]) -> None:
        with contextlib.suppress(concurrent.futures.InvalidStateError):
            if (error := source.exception()) is not None:
                self._settled.set_exception(error)
            else:
                self._settled.set_result(source.result())
