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
    from collections.abc import Callable, Iterable, Iterator

    from tinker_lightning.client.futures import UnreadFailures
    from tinker_lightning.client.passes.request import ServerPass

    Forward: TypeAlias = Callable[[ServerPass], TinkerFuture[ForwardBackwardOutput]]
    Backwards: TypeAlias = Callable[[list[ServerPass]], Iterable[TinkerFuture[ForwardBackwardOutput]]]


class HeldPasses:
    """The passes of one model that are held back, and the number of sequences that were sent since the last step.

    Args:
        forward: Sends only the forward of a pass.
        backwards: Sends passes, and returns the future of each when it is sent.
        unread: Receives the futures of passes whose result was needed before they were sent.
    """

    def __init__(self, forward: Forward, backwards: Backwards, unread: UnreadFailures) -> None:
        self._forward = forward
        self._backwards = backwards
        self._unread = unread
        self._held: list[HeldFuture] = []
        self._sequences = 0
        self._windows = 0
        self._holds_all = False
        self._lock = threading.Lock()
        self._stepping = threading.Lock()
        self._is_incomplete = False

    def takes(self, request: ServerPass) -> bool:
        """Returns whether a pass is to be held back."""
        return request.per_batch == "window" or self._holds_all

    def add(self, request: ServerPass) -> HeldFuture:
        """Holds a pass back."""
        future = HeldFuture(request, self._forward)
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

    def check(self) -> None:
        """Raises `OperationFailed` if passes were sent whose step was not: they are scaled for that step only."""
        with self._stepping:
            self._check()

    @contextlib.contextmanager
    def released(self) -> Iterator[None]:
        """Sends the passes, in the order in which they were added, with the window's number of sequences undone.

        Their step is to be sent in the `with` block. A pass whose forward has failed is neither sent nor counted. If a
        pass cannot be sent, those after it are not sent either.
        """
        with self._stepping:
            self._check()
            self._release()
            yield
            self._begin_window()

    def clear(self, reason: str) -> None:
        """Drops the passes, and begins a window: the server drops those that were sent."""
        with self._stepping:
            self.drop(reason)
            self._begin_window()

    def _begin_window(self) -> None:
        self._is_incomplete = False
        with self._lock:
            self._sequences = 0
            self._windows += 1

    def _check(self) -> None:
        if self._is_incomplete:
            raise OperationFailed(
                "optim_step: an earlier step failed or was interrupted while its backward passes were being sent. The "
                "server keeps their gradient, which would distort this step, so the step is not sent. The weights are "
                "intact: call save_state, and continue with a new model that "
                "create_training_client_from_state_with_optimizer() creates from it."
            )

    def _release(self) -> None:
        with self._lock:
            held, self._held = [future for future in self._held if not future.failed], []
            window = self._sequences + sum(len(future.request.data) for future in held)
        if not held:
            return
        sent = 0
        try:
            for future, backward in zip(held, self._backwards([each.claim(window) for each in held]), strict=True):
                sent += 1
                self._is_incomplete = True
                with self._lock:
                    self._sequences += len(future.request.data)
                if future.follow(backward):
                    self._unread.add(backward)
        except BaseException as error:
            # An interrupt may come between the sending and the return of the futures.
            self._is_incomplete |= not isinstance(error, Exception)
            for other in held[sent:]:
                other.abandon("not sent, because another pass of the same step could not be sent. Call it again.")
            raise

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

    def __init__(self, request: ServerPass, forward: Forward) -> None:
        self._settled: concurrent.futures.Future[ForwardBackwardOutput] = concurrent.futures.Future()
        self._settled.set_running_or_notify_cancel()
        super().__init__(self._settled, "forward_backward")
        self.request = request
        self._send_forward: Forward | None = forward
        self._sent = False
        self._forward: TinkerFuture[ForwardBackwardOutput] | None = None
        self._lock = threading.RLock()

    @property
    def is_sent(self) -> bool:
        """Whether the pass was sent."""
        return self._sent

    @property
    def is_held(self) -> bool:
        """Whether the pass is still to be sent."""
        return not (self._sent or self.failed)

    def claim(self, window: int) -> ServerPass:
        """Returns the pass that is sent now; from here on, waiting sends no forward.

        Args:
            window: The number of sequences by which the server divides.
        """
        with self._lock:
            request = replace(self.request, data=times(self.request.data, window))
            self._sent = True
        return request

    def follow(self, backward: TinkerFuture[ForwardBackwardOutput]) -> bool:
        """Takes the result of the pass that was sent; returns whether it was already read from a forward."""
        if self._forward is not None:
            return True
        backward._source.add_done_callback(self._settle)
        return False

    def finish(self) -> bool:
        """Waits if the pass was sent, and drops it otherwise; returns whether it was sent."""
        if self.is_held:
            self.abandon("dropped by close(), before which no optim_step was called")
            return False
        return super().finish()

    def abandon(self, reason: str) -> None:
        """Settles a pass that is never sent; what was already read from a forward stays valid."""
        with self._lock:
            self._sent = True
            if self._forward is None:
                self.was_read = True  # whoever waits for the result gets the reason
                with contextlib.suppress(concurrent.futures.InvalidStateError):  # it was abandoned before
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
            if self._sent or self._send_forward is None:
                return
            self._forward = self._send_forward(self.request)
            self._send_forward = None  # the client, which may be collected before this future
        self._forward._source.add_done_callback(self._settle)

    def _settle(self, source: concurrent.futures.Future[ForwardBackwardOutput]) -> None:
        with contextlib.suppress(concurrent.futures.InvalidStateError):
            if (error := source.exception()) is not None:
                self._settled.set_exception(error)
            else:
                self._settled.set_result(source.result())
