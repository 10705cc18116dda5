"""Custom losses: the forward is sent at the call, the loss runs on the caller's thread when its value is needed."""

from __future__ import annotations

import concurrent.futures
import contextlib
import threading
import time
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias

from tinker_lightning.client.futures import TinkerFuture
from tinker_lightning.errors import InvalidLoss, OperationFailed, TinkerLightningError
from tinker_lightning.losses import surrogate
from tinker_lightning.losses.regularizers import composition
from tinker_lightning.losses.regularizers.composition import as_regularizers
from tinker_lightning.lossgraph.server_loss import ServerLoss
from tinker_lightning.types import ForwardBackwardOutput

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from torch import Tensor

    from tinker_lightning.losses.regularizers.composition import Regularizer
    from tinker_lightning.losses.surrogate import Evaluation, LossFn
    from tinker_lightning.types import Datum

    Send: TypeAlias = Callable[..., TinkerFuture[ForwardBackwardOutput]]
    Evaluate: TypeAlias = Callable[[list[Any], list[Tensor]], Evaluation]

OPERATION = "forward_backward_custom"


class CustomLosses:
    """The custom losses of one model that are still pending.

    Args:
        model_id: The model.
        forward: Requests the log-probabilities of datums.
        backward: Sends datums with the gradient of a loss and the log-probabilities it was computed from.
    """

    def __init__(self, model_id: str, forward: Send, backward: Send) -> None:
        self.steps = 0
        self._model_id = model_id
        self._forward = forward
        self._backward = backward
        self._pending: list[CustomLossFuture] = []
        # Held while losses run, so that a step on another thread does not overtake their backwards.
        self._lock = threading.RLock()

    def add(self, datums: list[Datum], loss_fn: LossFn) -> CustomLossFuture:
        """Sends the forward of a loss that was checked."""
        return self.submit(datums, datums, partial(surrogate.evaluate, loss_fn))

    def submit(self, given: list[Any], datums: list[Datum], evaluate: Evaluate) -> CustomLossFuture:
        """Sends the forward of a loss; `given` is what the loss receives, in the caller's types."""
        future = CustomLossFuture(
            self._model_id, given, datums, evaluate, self._forward(datums, retain=True), self._backward
        )
        with self._lock:
            self._pending.append(future)
        return future

    def stepped(self) -> None:
        """Counts an `optim_step`; the weights of regularizers may depend on the number of steps."""
        with self._lock:
            self.steps += 1

    async def forwards_async(self) -> None:
        """Waits for the log-probabilities of the pending losses, so that `flush` does not block an event loop."""
        with self._lock:
            pending = list(self._pending)
        for future in pending:
            await future.forward_async()

    def flush(self) -> None:
        """Evaluates the pending losses, then sends their backwards: all of them, or none if one fails.

        Raises the failure of a loss that fails; the others are abandoned. An interrupt leaves everything as it was, to
        be flushed again.
        """
        with self._lock:
            self._pending = [future for future in self._pending if not future.is_settled]
            for future in self._pending:
                future.evaluate()
                if future.failed:
                    self.drop()
                    future.result()
            for future in self._pending:
                future.send()
                if future.failed:
                    future.result()  # no step without this backward
            self._pending = []

    def drop(self) -> None:
        """Abandons the pending losses, because another pass of the same step failed."""
        with self._lock:
            abandoned, self._pending = self._pending, []
            for future in abandoned:
                future.abandon()


class CustomLossFuture(TinkerFuture[ForwardBackwardOutput]):
    """The result of a pass with a custom loss, whose forward was sent.

    `.result()`, `await`, or the client's next step or save evaluates the loss on the calling thread and sends the
    backward. So N calls in a row wait for the network once.
    """

    def __init__(
        self,
        model_id: str,
        data: list[Any],
        datums: list[Datum],
        evaluate: Evaluate,
        forward: TinkerFuture[ForwardBackwardOutput],
        send: Send,
    ) -> None:
        self._settled: concurrent.futures.Future[ForwardBackwardOutput] = concurrent.futures.Future()
        self._settled.set_running_or_notify_cancel()
        super().__init__(self._settled, f"{OPERATION} of {model_id}")
        self._model_id = model_id
        self._data = data
        self._datums = datums
        self._evaluate = evaluate
        self._send_backward: Send | None = send
        self._evaluation: Evaluation | None = None
        self._leaves: list[Tensor] = []
        self._sent = False
        self._lock = threading.RLock()
        # Without a forward there will be no loss: the next use of the client raises the failure.
        self._forward = forward.then(lambda output: output)
        self._forward._source.add_done_callback(self._settle_failure)

    @property
    def is_sent(self) -> bool:
        """Whether the backward was sent."""
        return self._sent

    @property
    def is_settled(self) -> bool:
        """Whether nothing is left to do for a step: the backward was sent, or its failure is known."""
        return self._sent or (self.failed and self.was_read)

    def evaluate(self, timeout: float | None = None) -> None:
        """Waits for the log-probabilities and runs the loss; a failure becomes the future's outcome."""
        self._forward.wait(timeout)
        with self._lock:
            if self._settle_failure(self._forward._source) or self._evaluation is not None or self.done():
                return
            try:
                self._leaves = surrogate.logprob_leaves(self._forward.result(), self._datums)
                self._evaluation = self._evaluate(self._data, self._leaves)
            except Exception as error:
                if isinstance(error, TinkerLightningError) and error.operation is None:
                    error.operation, error.model_id = OPERATION, self._model_id
                self._fail(error)

    def send(self) -> None:
        """Sends the backward of an evaluated loss."""
        with self._lock:
            evaluation, send = self._evaluation, self._send_backward
            if send is None or evaluation is None or self.done():
                return
            try:
                forward = self._forward.result()
                backward = send(self._datums, evaluation.gradients, self._leaves, forward.retained)
            except Exception as error:
                self._fail(error)
                return
            self._sent = True  # not earlier: if an interrupt prevented the sending, the next step sends it
            # A future may be kept for long; it no longer needs the datums or the client.
            self._data, self._datums, self._leaves, self._send_backward = [], [], [], None
        if not backward.is_sent:
            # It is sent with the step, which raises its failure; the loss and the log-probabilities are known now.
            backward = self._forward
        merged = backward.then(lambda output: surrogate.add_loss_metrics(_with_logprobs(output, forward), evaluation))
        merged._source.add_done_callback(self._settle)

    def abandon(self) -> None:
        """Settles a loss that is not sent, because another one of the same step failed."""
        with self._lock:
            if self._sent or self.done():
                return
            self.was_read = True  # the other loss's failure is the one that is raised
            self._fail(
                OperationFailed(
                    f"{self.operation}: not sent, because another loss of the same step failed. Fix that one, and call "
                    "this one again too."
                )
            )

    def wait(self, timeout: float | None = None) -> None:
        """Waits for the result, evaluating the loss if that has not happened yet."""
        started = time.monotonic()
        if not (self._sent or self.done()):
            self.evaluate(timeout)
            self.send()
        super().wait(None if timeout is None else max(0.0, timeout - (time.monotonic() - started)))

    async def wait_async(self) -> None:
        """Waits like `wait`; the loss runs on the thread of the event loop that awaits it."""
        await self.sent_async()
        await super().wait_async()

    async def sent_async(self) -> None:
        """Evaluates the loss when the log-probabilities have arrived, and sends the backward."""
        if not (self._sent or self.done()):
            await self.forward_async()
            self.evaluate()
            self.send()

    async def forward_async(self) -> None:
        """Waits for the log-probabilities."""
        await self._forward.wait_async()

    def _settle(self, source: concurrent.futures.Future[ForwardBackwardOutput]) -> None:
        if not self._settle_failure(source):
            with contextlib.suppress(concurrent.futures.InvalidStateError):
                self._settled.set_result(source.result())

    def _settle_failure(self, source: concurrent.futures.Future[ForwardBackwardOutput]) -> bool:
        error = source.exception()
        if error is not None:
            self._fail(error)
        return error is not None

    def _fail(self, error: BaseException) -> None:
        with contextlib.suppress(concurrent.futures.InvalidStateError):
            self._settled.set_exception(error)


def _with_logprobs(output: ForwardBackwardOutput, forward: ForwardBackwardOutput) -> ForwardBackwardOutput:
    """Returns the result of a backward; that of a retained forward, or of some servers, has no log-probabilities."""
    return output if surrogate.has_logprobs(output) else replace(output, loss_fn_outputs=forward.loss_fn_outputs)


def evaluation_of(
    loss_fn: LossFn | None,
    regularizers: Iterable[Regularizer | Mapping[str, Any]] | None,
    step: int,
    grad_norms: bool,
    timeout: float | None,
) -> Evaluate:
    """Checks a loss before anything is sent; returns the function that evaluates it.

    Raises:
        InvalidLoss: If it is not a function of (data, logprobs).
    """
    composition.check_timeout("regularizer_timeout", timeout)
    terms = as_regularizers(regularizers)
    if isinstance(loss_fn, ServerLoss) and loss_fn.source != "logprobs":
        raise InvalidLoss(
            f"loss_fn: {loss_fn.name} is computed from logits, which stay on the server. Call forward_backward(data, "
            f"{loss_fn.name!r}), or write it as a function of (data, logprobs)."
        )
    if not callable(loss_fn) and (loss_fn is not None or not terms):
        unless = "" if loss_fn is not None else "; it may be None only if there are regularizers"
        raise InvalidLoss(f"loss_fn must be a function of (data, logprobs), got {type(loss_fn).__name__}{unless}")
    if loss_fn is not None:
        surrogate.check_arguments(loss_fn)
        if not terms:
            return partial(surrogate.evaluate, loss_fn)
    added = ", ".join(term.name for term in terms)
    name = added if loss_fn is None else f"{surrogate.function_name(loss_fn)} with {added}"

    def evaluate(data: list[Any], logprobs: list[Tensor]) -> Evaluation:
        def composed() -> tuple[Tensor, dict[str, Any]]:
            return composition.evaluate(
                data, logprobs, loss_fn, terms, step=step, grad_norms=grad_norms, timeout=timeout
            )

        return surrogate.differentiate(composed, logprobs, name=name)

    return evaluate
