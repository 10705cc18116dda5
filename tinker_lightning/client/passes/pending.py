"""A pass that is not sent yet: a custom loss whose value is not needed yet, or a pass that waits for its step."""

from __future__ import annotations

import concurrent.futures
import contextlib
import threading
import time
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from typing_extensions import override

from tinker_lightning.client.futures import TinkerFuture
from tinker_lightning.errors import InvalidLoss, OperationFailed
from tinker_lightning.losses import custom
from tinker_lightning.losses.regularizers import composition
from tinker_lightning.losses.regularizers.composition import as_regularizers
from tinker_lightning.lossgraph.server_loss import ServerLoss
from tinker_lightning.types import Datum, ForwardBackwardOutput

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from torch import Tensor

    from tinker_lightning.client.passes.request import ServerPass
    from tinker_lightning.losses.custom import Evaluation, LossFn
    from tinker_lightning.losses.regularizers.composition import Regularizer

    Evaluate: TypeAlias = Callable[[list[Any], list[Tensor]], Evaluation]
    Advance: TypeAlias = Callable[["PendingPass", float | None], None]


@dataclass(frozen=True, slots=True)
class CustomLoss:
    """A custom loss of one call.

    Args:
        data: The datums as the caller passed them, which the loss receives.
        datums: The same datums in our type.
        evaluate: Runs the loss and its backward.
    """

    data: list[Any]
    datums: list[Datum]
    evaluate: Evaluate


class PendingPass(TinkerFuture[ForwardBackwardOutput]):
    """A pass that is not sent yet: the future of its result, and the data that a queue needs to send it.

    For a custom loss, `.result()`, `await`, or the client's next step or save makes the queue evaluate the loss on the
    calling thread and send the pass. So N calls in a row wait for the network once. A pass that is held for its step
    costs a forward of its own if its result is read before.

    Args:
        operation: The call, for errors.
        advance: Does what the result waits for, within a number of seconds; a queue's method.
        forward: The forward of a custom loss, which was sent.
        loss: The custom loss.
        request: The pass, if it is held and has no custom loss.
    """

    def __init__(
        self,
        operation: str,
        advance: Advance,
        forward: TinkerFuture[ForwardBackwardOutput] | None = None,
        loss: CustomLoss | None = None,
        request: ServerPass | None = None,
    ) -> None:
        super().__init__(concurrent.futures.Future(), operation)
        self._source.set_running_or_notify_cancel()
        self.state: Literal["forwarded", "evaluated", "sent", "dropped"] = "evaluated" if request else "forwarded"
        self.forward = forward
        # None as soon as they are not needed: a future may be kept for long, and should not keep datums or the client.
        self.advance: Advance | None = advance
        self.loss = loss
        self.leaves: list[Tensor] | None = None
        self.evaluation: Evaluation | None = None
        self.request = request
        self.lock = threading.RLock()
        if forward is not None:
            # Without a forward there will be no loss: the next use of the client raises the failure.
            forward._source.add_done_callback(self.settle_failure)

    @property
    @override
    def is_sent(self) -> bool:
        return self.state in ("sent", "dropped")

    @property
    @override
    def is_held(self) -> bool:
        return self.state == "evaluated" and not self.failed

    @property
    def sequences(self) -> int:
        """The number of sequences of a pass that is held."""
        return len(self.request.data) if self.request is not None else 0

    def abandon(self, reason: str) -> None:
        """Drops the pass; a result that comes from its forward stays valid."""
        with self.lock:
            if self.loss is not None or self.forward is None:
                if self.done():
                    return
                self.was_read = True  # whoever waits for the result gets the reason
                self.fail(OperationFailed(f"{self.operation}: {reason}"))
            self.state, self.advance = "dropped", None

    def settle(self, source: concurrent.futures.Future[ForwardBackwardOutput]) -> None:
        """Takes the result of a request, or its failure."""
        if not self.settle_failure(source):
            with contextlib.suppress(concurrent.futures.InvalidStateError):
                self._source.set_result(source.result())

    def settle_failure(self, source: concurrent.futures.Future[ForwardBackwardOutput]) -> bool:
        """Takes the failure of a request; returns whether there is one."""
        error = source.exception()
        if error is not None:
            self.fail(error)
        return error is not None

    def fail(self, error: BaseException) -> None:
        """Takes a failure, unless there is a result."""
        with contextlib.suppress(concurrent.futures.InvalidStateError):
            self._source.set_exception(error)

    @override
    def finish(self) -> bool:
        if self.is_held:
            self.abandon("dropped by close(), before which no optim_step was called")
            return False
        return super().finish()

    @override
    def wait(self, timeout: float | None = None) -> None:
        started = time.monotonic()
        self._advance(timeout)
        super().wait(None if timeout is None else max(0.0, timeout - (time.monotonic() - started)))

    @override
    async def wait_async(self) -> None:
        """Waits like `wait`; the loss runs on the thread of the event loop that awaits it."""
        await self.sent_async()
        self._advance()
        await super().wait_async()

    @override
    async def sent_async(self) -> None:
        """Waits for the log-probabilities of a custom loss, evaluates it, and sends its pass."""
        if self.loss is not None and self.forward is not None:
            await self.forward.wait_async()
            self._advance()

    def _advance(self, timeout: float | None = None) -> None:
        advance = self.advance
        if advance is not None and not self.done():
            advance(self, timeout)


def evaluation(
    loss_fn: LossFn | None,
    regularizers: Iterable[Regularizer | Mapping[str, Any]] | None = None,
    step: int = 0,
    grad_norms: bool = True,
    timeout: float | None = None,
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
    names = ([] if loss_fn is None else [custom.function_name(loss_fn)], [term.name for term in terms])
    name = " with ".join(", ".join(each) for each in names if each)
    total = partial(composition.evaluate, step=step, grad_norms=grad_norms, timeout=timeout)
    return lambda data, logprobs: custom.differentiate(
        lambda: total(data, logprobs, loss_fn, terms), logprobs, name=name
    )
