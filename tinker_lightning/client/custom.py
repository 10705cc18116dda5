"""Custom losses on their way: forwards are under way, a loss runs on the caller's thread when its value is needed."""

from __future__ import annotations

import asyncio
import concurrent.futures
import threading
from typing import TYPE_CHECKING, Any, TypeAlias

from tinker_lightning import custom_loss
from tinker_lightning.client.futures import TinkerFuture
from tinker_lightning.client.official import to_datums
from tinker_lightning.types import ForwardBackwardOutput

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Sequence

    from tinker_lightning.custom_loss import Evaluation, LossFn
    from tinker_lightning.types import Datum

    Send: TypeAlias = Callable[[list[Datum]], TinkerFuture[ForwardBackwardOutput]]


class CustomLosses:
    """The custom losses of one model that wait to be evaluated. What they are sent with is the client's own.

    Args:
        forward: Sends a forward pass of the surrogate loss.
        backward: Sends its forward-backward pass.
    """

    def __init__(self, forward: Send, backward: Send) -> None:
        self._forward = forward
        self._backward = backward
        self._waiting: list[CustomLossFuture] = []

    def add(self, data: Sequence[Any], loss_fn: LossFn) -> CustomLossFuture:
        """Sends the forward of a loss."""
        given = list(data)
        datums = to_datums(given)
        future = CustomLossFuture(
            given, datums, loss_fn, self._forward(custom_loss.forward_datums(datums)), self._backward
        )
        self._waiting.append(future)
        return future

    def flush(self) -> None:
        """Evaluates the losses that wait, then sends their backwards: all of them, or none."""
        waiting, self._waiting = [future for future in self._waiting if not future.was_sent], []
        for future in waiting:
            future.evaluate()
        for future in waiting:
            future.send()


class CustomLossFuture(TinkerFuture[ForwardBackwardOutput]):
    """The result of a pass with a loss of one's own.

    Its forward was sent. `.result()`, `await`, or the client's next step or save evaluates the loss, on the thread that
    calls it, and sends the backward. So N calls in a row wait for the network once.
    """

    def __init__(
        self,
        data: list[Any],
        datums: list[Datum],
        loss_fn: LossFn,
        forward: TinkerFuture[ForwardBackwardOutput],
        send: Send,
    ) -> None:
        self._settled: concurrent.futures.Future[ForwardBackwardOutput] = concurrent.futures.Future()
        self._settled.set_running_or_notify_cancel()
        super().__init__(self._settled, "forward_backward_custom")
        self._data = data
        self._datums = datums
        self._loss_fn = loss_fn
        self._forward = forward
        self._send_backward = send
        self._evaluation: Evaluation | None = None
        self._sent = False
        self._lock = threading.RLock()

    @property
    def was_sent(self) -> bool:
        """Whether there is nothing left to do here: the backward is on its way, or the loss has failed."""
        return self._sent

    def evaluate(self, timeout: float | None = None) -> None:
        """Waits for the log-probabilities and runs the loss; whatever it raises is also what `.result()` raises."""
        with self._lock:
            if self._evaluation is not None or self._sent:
                return
            output = self._fail_with(lambda: self._forward.result(timeout))
            self._run(output)

    def send(self) -> None:
        """Sends the backward of a loss that was evaluated."""
        with self._lock:
            if self._sent:
                return
            evaluation = self._evaluation
            assert evaluation is not None  # noqa: S101  # evaluate() comes first
            self._sent = True
            backward = self._fail_with(
                lambda: self._send_backward(custom_loss.linear_datums(self._datums, evaluation.gradients))
            )
        merged = backward.then(lambda output: custom_loss.with_metrics(output, evaluation))
        merged._source.add_done_callback(self._settle)

    def result(self, timeout: float | None = None) -> ForwardBackwardOutput:
        """The result; evaluates the loss if that has not happened yet."""
        if not self._sent:
            self.evaluate(timeout)
            self.send()
        return super().result(timeout)

    def __await__(self) -> Generator[Any, None, ForwardBackwardOutput]:
        return self._resolve().__await__()

    async def _resolve(self) -> ForwardBackwardOutput:
        if not self._sent and self._evaluation is None:
            await self._forward
            self.evaluate()  # on this thread, the caller's; the log-probabilities are here
        if not self._sent:
            self.send()
        return await self._wait()

    def _run(self, output: ForwardBackwardOutput) -> None:
        def run() -> Evaluation:
            return custom_loss.evaluate(self._loss_fn, self._data, custom_loss.leaves(output, self._datums))

        self._evaluation = self._fail_with(run)

    def _fail_with(self, action: Callable[[], Any]) -> Any:
        try:
            return action()
        except (TimeoutError, KeyboardInterrupt, asyncio.CancelledError):
            raise
        except BaseException as error:
            self._sent = True
            if not self._settled.done():
                self._settled.set_exception(error)
            self.was_read = True
            raise

    def _settle(self, source: concurrent.futures.Future[ForwardBackwardOutput]) -> None:
        error = source.exception()
        if error is not None:
            self._settled.set_exception(error)
        else:
            self._settled.set_result(source.result())
