"""A pass that is not sent yet: a custom loss whose value is not needed yet, or a pass that waits for its step."""

from __future__ import annotations

import concurrent.futures
import contextlib
import threading
import time
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias

from typing_extensions import override

from tinker_lightning.client.dialects.surrogate import times
from tinker_lightning.client.futures import TinkerFuture
from tinker_lightning.errors import InvalidLoss, OperationFailed, TinkerLightningError
from tinker_lightning.losses import custom
from tinker_lightning.losses.regularizers import composition
from tinker_lightning.losses.regularizers.composition import as_regularizers
from tinker_lightning.lossgraph.server_loss import ServerLoss
from tinker_lightning.types import Datum, ForwardBackwardOutput

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from torch import Tensor

    from tinker_lightning.client.passes.queue import PassQueue
    from tinker_lightning.client.passes.request import ServerPass
    from tinker_lightning.losses.custom import Evaluation, LossFn
    from tinker_lightning.losses.regularizers.composition import Regularizer

    Evaluate: TypeAlias = Callable[[list[Any], list[Tensor]], Evaluation]


@dataclass(frozen=True, slots=True)
class CustomLoss:
    """A custom loss of one call.

    Args:
        model_id: The model, for errors.
        data: The datums as the caller passed them, which the loss receives.
        datums: The same datums in our type.
        evaluate: Runs the loss and its backward.
    """

    model_id: str
    data: list[Any]
    datums: list[Datum]
    evaluate: Evaluate


class PendingPass(TinkerFuture[ForwardBackwardOutput]):
    """The result of a pass that is not sent yet.

    For a custom loss, `.result()`, `await`, or the client's next step or save evaluates the loss on the calling thread
    and sends the pass. So N calls in a row wait for the network once. A pass that is held for its step costs a forward
    of its own if its result is read before.

    Args:
        operation: The call, for errors.
        queue: Sends the pass.
        forward: The forward of a custom loss, which was sent.
        loss: The custom loss.
        request: The pass, if it is held and has no custom loss.
    """

    def __init__(
        self,
        operation: str,
        queue: PassQueue,
        forward: TinkerFuture[ForwardBackwardOutput] | None = None,
        loss: CustomLoss | None = None,
        request: ServerPass | None = None,
    ) -> None:
        self._settled: concurrent.futures.Future[ForwardBackwardOutput] = concurrent.futures.Future()
        self._settled.set_running_or_notify_cancel()
        super().__init__(self._settled, operation)
        self._queue: PassQueue | None = queue
        self._loss = loss
        self._request = request
        self._evaluation: Evaluation | None = None
        self._leaves: list[Tensor] = []
        self._sent = False
        self._lock = threading.RLock()
        self._forward: TinkerFuture[ForwardBackwardOutput] | None = None
        if forward is not None:
            # Without a forward there will be no loss: the next use of the client raises the failure.
            self._forward = forward.then(lambda output: output)
            self._forward._source.add_done_callback(self._settle_failure)

    @property
    @override
    def is_sent(self) -> bool:
        return self._sent

    @property
    @override
    def is_held(self) -> bool:
        return self._request is not None and not (self._sent or self.failed)

    @property
    def is_evaluated(self) -> bool:
        """Whether the pass is known: nothing but the step is missing."""
        return self._request is not None

    @property
    def is_settled(self) -> bool:
        """Whether nothing is left to do for a step: the pass was sent, or its failure was read."""
        return self._sent or (self.failed and self.was_read)

    @property
    def sequences(self) -> int:
        """The number of sequences of a pass that is held."""
        return len(self._request.data) if self._request is not None else 0

    def evaluate(self, timeout: float | None = None) -> None:
        """Waits for the log-probabilities and runs the loss; a failure becomes the future's outcome."""
        if self._forward is None:
            return
        self._forward.wait(timeout)
        with self._lock:
            loss = self._loss
            if self._settle_failure(self._forward._source) or loss is None or self._evaluation is not None:
                return
            try:
                self._leaves = custom.logprob_leaves(self._forward.result(), loss.datums)
                self._evaluation = loss.evaluate(loss.data, self._leaves)
            except Exception as error:
                if isinstance(error, TinkerLightningError) and error.operation is None:
                    error.operation, error.model_id = "forward_backward_custom", loss.model_id
                self._fail(error)

    def send(self) -> None:
        """Sends the pass of an evaluated loss, or leaves it to the step."""
        with self._lock:
            evaluation, loss, queue, forward = self._evaluation, self._loss, self._queue, self._forward
            if evaluation is None or loss is None or queue is None or forward is None or self.failed:
                return
            output = forward.result()
            try:
                request = queue.prepare_gradient(loss.datums, evaluation.gradients, self._leaves, output.retained)
                backward = queue.follow(self, request)
            except Exception as error:
                self._fail(error)
                return
            self._sent = backward is not None  # not earlier: what an interrupt prevented is sent by the next step
            # A future may be kept for long; it no longer needs the datums or the client.
            self._loss, self._leaves, self._queue = None, [], None
        # A held pass is sent with the step, which raises its failure; the loss and its log-probabilities are known.
        passed = forward if backward is None else backward
        merged = passed.then(lambda result: custom.add_loss_metrics(_with_logprobs(result, output), evaluation))
        merged._source.add_done_callback(self._settle)

    def hold(self, request: ServerPass) -> None:
        """Leaves the pass of an evaluated loss to the step."""
        self._request = request

    def claim(self, window: int) -> ServerPass:
        """Returns the held pass, which is sent now; from here on, waiting sends no forward.

        Args:
            window: The number of sequences by which the server divides.
        """
        with self._lock:
            assert self._request is not None  # noqa: S101 only evaluated passes are held
            self._sent, self._queue = True, None
            return replace(self._request, data=times(self._request.data, window))

    def settle_from(self, backward: TinkerFuture[ForwardBackwardOutput]) -> bool:
        """Takes the result of the pass that was sent; returns whether it was already read from a forward."""
        self._request = None  # a future may be kept for long, and needs its datums no more
        if self._forward is not None:
            return True
        backward._source.add_done_callback(self._settle)
        return False

    @override
    def finish(self) -> bool:
        if self.is_held:
            self.abandon("dropped by close(), before which no optim_step was called")
            return False
        return super().finish()

    def abandon(self, reason: str) -> None:
        """Settles a held pass that is never sent; what was already read from a forward stays valid."""
        with self._lock:
            self._sent, self._queue = True, None
            if self._forward is None:
                self.was_read = True  # whoever waits for the result gets the reason
                self._fail(OperationFailed(f"{self.operation}: {reason}"))

    def abandon_loss(self) -> None:
        """Settles a custom loss that is not sent, because another one of the same step failed."""
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

    @override
    def wait(self, timeout: float | None = None) -> None:
        started = time.monotonic()
        self._ask_forward()
        if not (self._sent or self.done()):
            self.evaluate(timeout)
            self.send()
        super().wait(None if timeout is None else max(0.0, timeout - (time.monotonic() - started)))

    @override
    async def wait_async(self) -> None:
        """Waits like `wait`; the loss runs on the thread of the event loop that awaits it."""
        self._ask_forward()
        await self.sent_async()
        await super().wait_async()

    @override
    async def sent_async(self) -> None:
        """Evaluates a custom loss when the log-probabilities have arrived, and sends its pass."""
        if self._evaluation is None and self._loss is not None and not self.done():
            await self.forward_async()
            self.evaluate()
            self.send()

    async def forward_async(self) -> None:
        """Waits for the log-probabilities of a custom loss."""
        if self._forward is not None:
            await self._forward.wait_async()

    def _ask_forward(self) -> None:
        """Sends a forward for the result of a held pass that is read before its step."""
        with self._lock:
            if self._sent or self._forward is not None or self._request is None or self._queue is None:
                return
            self._forward = self._queue.forward(self._request)
            self._queue = None  # the client, which may be collected before this future
        self._forward._source.add_done_callback(self._settle)

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
    """Returns the result of a backward with log-probabilities, which retained forwards and some servers leave out."""
    return output if custom.has_logprobs(output) else replace(output, loss_fn_outputs=forward.loss_fn_outputs)


def evaluation(
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
        custom.check_arguments(loss_fn)
        if not terms:
            return partial(custom.evaluate, loss_fn)
    added = ", ".join(term.name for term in terms)
    name = added if loss_fn is None else f"{custom.function_name(loss_fn)} with {added}"

    def evaluate(data: list[Any], logprobs: list[Tensor]) -> Evaluation:
        def composed() -> tuple[Tensor, dict[str, Any]]:
            return composition.evaluate(
                data, logprobs, loss_fn, terms, step=step, grad_norms=grad_norms, timeout=timeout
            )

        return custom.differentiate(composed, logprobs, name=name)

    return evaluate
