"""The passes of one model that are not sent yet, in the order of their calls.

    forwarded ──evaluate──► evaluated ──post──► sent

A custom loss starts as forwarded: its forward was sent at the call, and the loss runs on the caller's thread when its
value is needed. A pass with a built-in loss starts as evaluated. Most passes are sent as soon as they are evaluated;
where a server divides by the sequences of the whole accumulation window, they are held until the optimizer step.
"""

from __future__ import annotations

import contextlib
import threading
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from tinker_lightning.client.dialects.surrogate import times
from tinker_lightning.client.passes.pending import PendingPass
from tinker_lightning.client.passes.request import ServerPass, surrogate_pass
from tinker_lightning.errors import OperationFailed, TinkerLightningError, Unsupported
from tinker_lightning.losses import custom

if TYPE_CHECKING:
    import concurrent.futures
    from collections.abc import Iterator, Sequence

    from torch import Tensor

    from tinker_lightning.client.futures import TinkerFuture, UnreadFailures
    from tinker_lightning.client.passes.pending import CustomLoss
    from tinker_lightning.client.passes.sender import Sender
    from tinker_lightning.types import Datum, ForwardBackwardOutput


class PassQueue:
    """The pending passes of one model, and the number of sequences that were sent since the last step.

    Args:
        sender: Posts passes.
        unread: Receives the futures of passes whose result was read before they were sent.
    """

    def __init__(self, sender: Sender, unread: UnreadFailures) -> None:
        self.steps = 0  # the optimizer steps so far, on which the weights of regularizers may depend
        self._sender = sender
        self._unread = unread
        self._pending: list[PendingPass] = []
        self._sequences = 0
        self._windows = 0
        self._is_incomplete = False
        self._lock = threading.Lock()
        # Held while losses run, so that a step on another thread does not overtake their backwards.
        self._evaluating = threading.RLock()
        self._stepping = threading.RLock()

    def forward(self, request: ServerPass) -> TinkerFuture[ForwardBackwardOutput]:
        """Sends the forward of a pass."""
        (future,) = self._sender.post([request], forward_only=True)
        return request.received(future)

    def logprobs(self, data: list[Datum], *, retain: bool = False) -> TinkerFuture[ForwardBackwardOutput]:
        """Sends a forward for the log-probabilities of datums; `retain` keeps it for its gradient if possible."""
        retain = retain and self._sender.retains
        datums = custom.forward_datums(data, with_weights=not retain)  # the weights would be the gradient
        return self.forward(ServerPass(datums, custom.SURROGATE, retain=retain))

    def send(self, request: ServerPass) -> TinkerFuture[ForwardBackwardOutput]:
        """Sends a pass, or holds it until the step."""
        if request.forward_only:
            raise Unsupported(request.forward_only)
        if request.per_batch == "window":
            return self._add(PendingPass("forward_backward", self._advance, request=request))
        return self._post(request)

    def submit(self, operation: str, loss: CustomLoss) -> PendingPass:
        """Sends the forward of a custom loss, which is evaluated when its value is needed."""
        return self._add(PendingPass(operation, self._advance, self.logprobs(loss.datums, retain=True), loss))

    def prepare_gradient(
        self,
        data: list[Datum],
        gradients: Sequence[Tensor],
        logprobs: Sequence[Tensor] | None = None,
        retained: tuple[tuple[int, int], ...] | None = None,
    ) -> ServerPass:
        """Converts the gradient of a custom loss with respect to its log-probabilities into a pass."""
        carrier = self._sender.surrogate()
        if carrier.loss == "importance_sampling" and logprobs is None:
            logprobs = custom.logprob_leaves(self.logprobs(data).result(), data)
        return surrogate_pass(carrier, data, gradients, logprobs, retained)

    async def forwards_async(self) -> None:
        """Waits for the log-probabilities of the pending losses, so that `flush` does not block an event loop."""
        with self._lock:
            forwards = [each.forward for each in self._pending if each.state == "forwarded"]
        for forward in forwards:
            if forward is not None:
                await forward.wait_async()

    def flush(self, *, hold: bool = False) -> None:
        """Evaluates the pending losses, then sends their passes, or holds them: all of them, or none if one fails.

        Raises the failure of a loss that fails; the others are abandoned. An interrupt leaves everything as it was, to
        be flushed again.
        """
        with self._evaluating:
            pending = self._unevaluated()
            for each in pending:
                self._evaluate(each)
                if each.failed:
                    self.abandon()
                    each.result()
            for each in pending:
                self._send(each, hold=hold)
                if each.failed:
                    each.result()  # no step without this pass

    def abandon(self) -> None:
        """Abandons the losses that are not sent, because another pass of the same step failed."""
        with self._evaluating:
            for each in self._unevaluated():
                with self._lock:
                    self._forget(each)
                each.abandon(
                    "not sent, because another loss of the same step failed. Fix that one, and call this one again too."
                )

    @contextlib.contextmanager
    def step(self) -> Iterator[None]:
        """Sends the held passes in their order, with the division by the window's number of sequences undone.

        Their step is to be sent in the `with` block. A pass whose forward has failed is neither sent nor counted. If a
        pass cannot be sent, those after it are not sent either.
        """
        with self._stepping:
            self.check()
            self._release()
            yield
            self._begin_window()
            self.steps += 1

    def check(self) -> None:
        """Raises `OperationFailed` if passes were sent whose step was not: they are scaled for that step only."""
        with self._stepping:
            if self._is_incomplete:
                raise OperationFailed(
                    "optim_step: an earlier step failed or was interrupted while its backward passes were being sent. "
                    "The server keeps their gradient, which would distort this step, so the step is not sent. The "
                    "weights are intact: call save_state, and continue with a new model that "
                    "create_training_client_from_state_with_optimizer() creates from it."
                )

    def clear(self, reason: str) -> None:
        """Drops the held passes, and begins a window: the server drops those that were sent."""
        with self._stepping:
            self.drop(reason)
            self._begin_window()

    def drop(self, reason: str) -> tuple[int, int]:
        """Drops the held passes; returns their number of sequences, and the number sent since the last step."""
        with self._lock:
            held = self._take_held()
            sent = self._sequences
        for each in held:
            each.abandon(reason)
        return sum(each.sequences for each in held), sent

    def _add(self, pending: PendingPass) -> PendingPass:
        with self._lock:
            self._pending.append(pending)
        return pending

    def _forget(self, pending: PendingPass) -> None:
        self._pending = [each for each in self._pending if each is not pending]

    def _advance(self, pending: PendingPass, timeout: float | None) -> None:
        """Does what the result of a pass waits for.

        A custom loss is evaluated and its pass sent. For a pass that is held until the step, a forward is sent.
        """
        if pending.loss is not None:
            self._evaluate(pending, timeout)
            self._send(pending)
            return
        with pending.lock:
            if pending.state != "evaluated" or pending.forward is not None or pending.request is None:
                return
            pending.forward = self.forward(pending.request)
            pending.advance = None  # the client, which may be collected before this future
        pending.forward._source.add_done_callback(pending.settle)

    def _evaluate(self, pending: PendingPass, timeout: float | None = None) -> None:
        """Waits for the log-probabilities and runs the loss; a failure becomes the outcome of the pass."""
        forward = pending.forward
        assert forward is not None  # noqa: S101 a custom loss has one
        forward.wait(timeout)
        with pending.lock:
            loss = pending.loss
            if pending.settle_failure(forward._source) or loss is None or pending.evaluation is not None:
                return
            try:
                pending.leaves = custom.logprob_leaves(forward.result(), loss.datums)
                pending.evaluation = loss.evaluate(loss.data, pending.leaves)
            except Exception as error:
                if isinstance(error, TinkerLightningError) and error.operation is None:
                    error.operation, error.model_id = "forward_backward_custom", self._sender.model_id
                pending.fail(error)

    def _send(self, pending: PendingPass, *, hold: bool = False) -> None:
        """Sends the pass of an evaluated loss, or leaves it to the step."""
        with pending.lock:
            evaluation, loss, forward = pending.evaluation, pending.loss, pending.forward
            if evaluation is None or loss is None or forward is None or pending.failed:
                return
            output = forward.result()
            try:
                request = self.prepare_gradient(loss.datums, evaluation.gradients, pending.leaves, output.retained)
                is_held = hold or request.per_batch == "window"
                # The step raises the failure of a held pass; the loss and its log-probabilities are known.
                passed = forward if is_held else self._post(request)
            except Exception as error:
                pending.fail(error)
                return
            # Not earlier: what an interrupt prevented is sent by the next step.
            with self._lock:
                self._forget(pending)
                if is_held:  # behind passes that were evaluated before
                    pending.request = request
                    self._pending.append(pending)
            pending.state = "evaluated" if is_held else "sent"
            pending.advance = pending.loss = pending.leaves = pending.evaluation = None
        merged = passed.then(lambda result: custom.add_loss_metrics(_with_logprobs(result, output), evaluation))
        merged._source.add_done_callback(pending.settle)

    def _unevaluated(self) -> list[PendingPass]:
        """Returns the custom losses that a step has to send, and forgets those whose failure was read."""
        with self._lock:
            self._pending = [each for each in self._pending if each.is_held or not (each.failed and each.was_read)]
            return [each for each in self._pending if each.state == "forwarded"]

    def _take_held(self) -> list[PendingPass]:
        """Removes the evaluated passes and returns those that have not failed."""
        held = [each for each in self._pending if each.is_held]
        self._pending = [each for each in self._pending if each.state == "forwarded"]
        return held

    def _post(self, request: ServerPass) -> TinkerFuture[ForwardBackwardOutput]:
        (future,) = self._sender.post([request])
        received = request.received(future)
        self._count(len(request.data), received)
        return received

    def _count(self, sequences: int, passed: TinkerFuture[ForwardBackwardOutput]) -> None:
        """Counts the sequences of a pass that was not held, unless it fails before the step."""
        with self._lock:
            self._sequences += sequences
            window = self._windows

        def uncount(source: concurrent.futures.Future[Any]) -> None:
            if source.cancelled() or source.exception() is not None:
                with self._lock:
                    self._sequences -= sequences if self._windows == window else 0

        passed._source.add_done_callback(uncount)

    def _begin_window(self) -> None:
        self._is_incomplete = False
        with self._lock:
            self._sequences = 0
            self._windows += 1

    def _release(self) -> None:
        with self._lock:
            held = self._take_held()
            window = self._sequences + sum(each.sequences for each in held)
        if not held:
            return
        sent = 0
        try:
            requests = [self._claim(each, window) for each in held]
            for each, request, future in zip(held, requests, self._sender.post(requests), strict=True):
                backward = request.received(future)
                sent += 1
                self._is_incomplete = True
                with self._lock:
                    self._sequences += each.sequences
                each.request = None
                if each.forward is None:
                    backward._source.add_done_callback(each.settle)
                else:  # whose result is the caller's
                    self._unread.add(backward)
        except BaseException as error:
            # An interrupt may come between the sending and the return of the futures.
            self._is_incomplete |= not isinstance(error, Exception)
            for other in held[sent:]:
                other.abandon("not sent, because another pass of the same step could not be sent. Call it again.")
            raise

    @staticmethod
    def _claim(pending: PendingPass, window: int) -> ServerPass:
        """Returns a held pass, which is sent now, for a window of so many sequences.

        From here on, waiting for its result sends no forward.
        """
        with pending.lock:
            assert pending.request is not None  # noqa: S101 only evaluated passes are held
            pending.state, pending.advance = "sent", None
            return replace(pending.request, data=times(pending.request.data, window))


def _with_logprobs(output: ForwardBackwardOutput, forward: ForwardBackwardOutput) -> ForwardBackwardOutput:
    """Returns the result of a backward with log-probabilities, which retained forwards and some servers leave out."""
    return output if custom.has_logprobs(output) else replace(output, loss_fn_outputs=forward.loss_fn_outputs)
