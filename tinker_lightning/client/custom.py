"""Custom losses on their way: forwards are under way, a loss runs on the caller's thread when its value is needed."""

from __future__ import annotations

import concurrent.futures
import contextlib
import threading
import time
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias

from tinker_lightning.client.futures import TinkerFuture
from tinker_lightning.client.sdk.inputs import batch, to_datums
from tinker_lightning.errors import InvalidLoss, OperationFailed, TinkerLightningError
from tinker_lightning.losses import surrogate
from tinker_lightning.losses.regularizers import composition
from tinker_lightning.losses.regularizers.regularizer import as_regularizers
from tinker_lightning.types import ForwardBackwardOutput

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from torch import Tensor

    from tinker_lightning.losses.regularizers.regularizer import Regularizer
    from tinker_lightning.losses.surrogate import Evaluation, LossFn
    from tinker_lightning.types import Datum

    Send: TypeAlias = Callable[[list[Datum]], TinkerFuture[ForwardBackwardOutput]]
    Evaluate: TypeAlias = Callable[[list[Any], list[Tensor]], Evaluation]

OPERATION = "forward_backward_custom"


class CustomLosses:
    """The custom losses of one model that wait to be evaluated. What they are sent with is the client's own.

    Args:
        model_id: The model.
        forward: Sends a forward pass of the surrogate loss.
        backward: Sends its forward-backward pass.
    """

    def __init__(self, model_id: str, forward: Send, backward: Send) -> None:
        self._model_id = model_id
        self._forward = forward
        self._backward = backward
        self._waiting: list[CustomLossFuture] = []
        # Held while losses run, so that a step on another thread does not overtake their backwards.
        self._lock = threading.RLock()
        self._steps = 0

    def add(
        self,
        data: Sequence[Any],
        loss_fn: LossFn | None,
        regularizers: Iterable[Regularizer | Mapping[str, Any]] | None = None,
        *,
        grad_norms: bool = True,
        timeout: float | None = None,
    ) -> CustomLossFuture:
        """Sends the forward of a loss."""
        evaluate = _evaluation(loss_fn, as_regularizers(regularizers), self._steps, grad_norms, timeout)
        given = batch(data)
        datums = to_datums(given)
        forward = self._forward(surrogate.forward_datums(datums))
        future = CustomLossFuture(self._model_id, given, datums, evaluate, forward, self._backward)
        with self._lock:
            self._waiting.append(future)
        return future

    def stepped(self) -> None:
        """An `optim_step` was submitted; the weights of regularizers may depend on how many there were."""
        with self._lock:
            self._steps += 1

    def flush(self) -> None:
        """Evaluates the losses that wait, then sends their backwards: all of them, or none if one fails.

        What it raises for a loss that fails is that loss's failure, and the others are given up. An interrupt leaves
        everything as it was, to be flushed again.
        """
        with self._lock:
            self._waiting = [future for future in self._waiting if not future.is_settled]
            for future in self._waiting:
                future.evaluate()
                if future.failed:
                    given_up, self._waiting = self._waiting, []
                    for other in given_up:
                        other.give_up()
                    future.result()
            for future in self._waiting:
                future.send()
                if future.failed:
                    future.result()  # the step must not go without it
            self._waiting = []


class CustomLossFuture(TinkerFuture[ForwardBackwardOutput]):
    """The result of a pass with a loss of one's own.

    Its forward was sent. `.result()`, `await`, or the client's next step or save evaluates the loss, on the thread that
    calls it, and sends the backward. So N calls in a row wait for the network once.
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
        self._send_backward = send
        self._evaluation: Evaluation | None = None
        self._sent = False
        self._lock = threading.RLock()
        # Without a forward there will be no loss: whoever uses the client next learns it.
        self._forward = forward.then(lambda output: output)
        self._forward._source.add_done_callback(self._settle_failure)

    @property
    def comes_by_itself(self) -> bool:
        """Whether the backward is on its way."""
        return self._sent

    @property
    def is_settled(self) -> bool:
        """Whether there is nothing left to do for a step: the backward is on its way, or its failure is known."""
        return self._sent or (self.failed and self.was_read)

    def evaluate(self, timeout: float | None = None) -> None:
        """Waits for the log-probabilities and runs the loss; if it fails, that is the future's outcome."""
        self._forward.wait(timeout)
        with self._lock:
            if self._settle_failure(self._forward._source) or self._evaluation is not None or self.done():
                return
            try:
                leaves = surrogate.leaves(self._forward.result(), self._datums)
                self._evaluation = self._evaluate(self._data, leaves)
            except Exception as error:
                if isinstance(error, TinkerLightningError) and error.operation is None:
                    error.operation, error.model_id = OPERATION, self._model_id
                self._fail(error)

    def send(self) -> None:
        """Sends the backward of a loss that was evaluated."""
        with self._lock:
            evaluation = self._evaluation
            if self._sent or evaluation is None or self.done():
                return
            try:
                linear = surrogate.linear_datums(self._datums, evaluation.gradients)
                backward = self._send_backward(linear)
            except Exception as error:
                self._fail(error)
                return
            self._sent = True  # not before: what an interrupt has kept from being sent is sent by the next step
            self._data, self._datums = [], []  # a future may be kept for long, and needs them no more
        merged = backward.then(lambda output: surrogate.with_metrics(output, evaluation))
        merged._source.add_done_callback(self._settle)

    def give_up(self) -> None:
        """Settles a loss that is not to be sent, because another one of its step failed."""
        with self._lock:
            if self._sent or self.done():
                return
            self.was_read = True  # the failure of the other one is what is raised
            self._fail(
                OperationFailed(
                    f"{self.operation}: not sent, for another loss of the same step failed. Mend that one, and call "
                    "this one again too."
                )
            )

    def wait(self, timeout: float | None = None) -> None:
        """Waits for the result; evaluates the loss if that has not happened yet."""
        started = time.monotonic()
        if not (self._sent or self.done()):
            self.evaluate(timeout)
            self.send()
        super().wait(None if timeout is None else max(0.0, timeout - (time.monotonic() - started)))

    async def arrival(self) -> None:
        """Waits as `wait` does; the loss runs on the thread of the event loop that awaits it."""
        if not (self._sent or self.done()):
            await self._forward.arrival()
            self.evaluate()
            self.send()
        await super().arrival()

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


def _evaluation(
    loss_fn: LossFn | None,
    regularizers: tuple[Regularizer, ...],
    step: int,
    grad_norms: bool,
    timeout: float | None,
) -> Evaluate:
    """How a loss will be evaluated; refuses what cannot be called before anything is sent."""
    if not callable(loss_fn) and (loss_fn is not None or not regularizers):
        beside = "" if loss_fn is not None else "; only beside regularizers it may be None"
        raise InvalidLoss(f"loss_fn must be a function of (data, logprobs), got {type(loss_fn).__name__}{beside}")
    if loss_fn is not None:
        _check_arguments(loss_fn)
    if loss_fn is not None and not regularizers:
        return partial(surrogate.evaluate, loss_fn)

    terms = ", ".join(term.name for term in regularizers)
    name = terms if loss_fn is None else f"{surrogate.function_name(loss_fn)} with {terms}"

    def evaluate(data: list[Any], logprobs: list[Tensor]) -> Evaluation:
        def composed() -> tuple[Tensor, dict[str, Any]]:
            return composition.evaluate(
                data, logprobs, loss_fn, regularizers, step=step, grad_norms=grad_norms, timeout=timeout
            )

        return surrogate.differentiate(composed, logprobs, name=name)

    return evaluate


def _check_arguments(loss_fn: Any) -> None:
    if getattr(loss_fn, "source", "logprobs") != "logprobs":
        raise InvalidLoss(
            f"loss_fn: {loss_fn.name} is computed from logits, which stay on the server. Call forward_backward(data, "
            f"{loss_fn.name!r}), or write it as a function of (data, logprobs)."
        )
    surrogate.check_arguments(loss_fn)
