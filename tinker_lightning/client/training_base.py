"""Passes and custom losses: the part of training that our client and the official SDK's adapter share."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

from tinker_lightning.client.files.peft_folder import export_adapter
from tinker_lightning.client.futures import UnreadFailures, submitted
from tinker_lightning.client.passes.pending import CustomLoss, evaluation
from tinker_lightning.client.passes.preparation import gap
from tinker_lightning.client.passes.queue import PassQueue
from tinker_lightning.client.server_losses import LossHandle, times, with_loss
from tinker_lightning.errors import InvalidInput, Unsupported
from tinker_lightning.losses import custom
from tinker_lightning.types.datum import check_batch, to_datums

if TYPE_CHECKING:
    import os
    from collections.abc import Iterator
    from pathlib import Path

    from torch import Tensor

    from tinker_lightning.client.backend import TrainingBackend
    from tinker_lightning.client.dialects.dialect import Dialect
    from tinker_lightning.client.futures import TinkerFuture
    from tinker_lightning.client.passes.pending import Evaluate
    from tinker_lightning.client.passes.request import ServerPass
    from tinker_lightning.client.passes.sender import Sender
    from tinker_lightning.client.transport.recording import Recording
    from tinker_lightning.client.transport.retries import Pause
    from tinker_lightning.losses.custom import LossFn
    from tinker_lightning.losses.regularizers.composition import Regularizer
    from tinker_lightning.lossgraph.server_loss import ServerLoss
    from tinker_lightning.types import Datum, ForwardBackwardOutput, LoadWeightsResponse
    from tinker_lightning.types.params import OptimParams

logger = logging.getLogger(__name__)

# A norm from here on clips nothing; it makes hosted Tinker report the norm.
_NO_CLIPPING = 1e9


class BaseTrainingClient:
    """Trains one model. Methods that reach the model return a future at once.

    Requests are numbered in the order of the calls and run in that order. A failure that nobody reads is raised at the
    next call.

    Args:
        sender: Sends its requests.
    """

    def __init__(self, sender: Sender) -> None:
        self.unread = UnreadFailures()
        self._sender = sender
        self._queue = PassQueue(sender, self.unread)
        self._warned_of_optimizer = False
        self._warned_of_gradient = False
        # Into a new model, which takes the place of this one.
        self._loading: TinkerFuture[LoadWeightsResponse] | None = None

    @property
    def model_id(self) -> str:
        """The model; another one after a state was loaded where that takes a new model."""
        return self._sender.model_id

    def forward(
        self,
        data: Sequence[Any],
        loss_fn: str | LossHandle | ServerLoss,
        loss_fn_config: Mapping[str, float | str] | None = None,
        *,
        loss_fn_inputs: Mapping[str, Any] | None = None,
    ) -> TinkerFuture[ForwardBackwardOutput]:
        """Computes the log-probabilities of every target and the loss, without a gradient; see `forward_backward`."""
        self._check()
        request = self.prepare(to_datums(data), loss_fn, loss_fn_config, loss_fn_inputs=loss_fn_inputs)
        handle = request.local
        if handle is None:
            return self.unread.add(self._queue.forward(request))
        forward = self._queue.logprobs(request.data)
        return self.unread.add(forward.then(lambda output: with_loss(output, request.data, handle)))

    forward_async = submitted(forward)

    def forward_backward(
        self,
        data: Sequence[Any],
        loss_fn: str | LossHandle | ServerLoss,
        loss_fn_config: Mapping[str, float | str] | None = None,
        *,
        loss_fn_inputs: Mapping[str, Any] | None = None,
        scale: float = 1.0,
    ) -> TinkerFuture[ForwardBackwardOutput]:
        """Runs a pass with a server-side loss and accumulates its gradient for the next step.

        Args:
            data: The datums.
            loss_fn: A server-side loss: its name, or what `custom_loss` or `create_custom_loss` returned.
            loss_fn_config: Its settings.
            loss_fn_inputs: Inputs of the loss given once for the batch instead of with each datum.
            scale: The factor by which the gradient is multiplied; metrics belong to the unscaled loss.
        """
        self._check()
        datums = to_datums(data)
        return self.send(self.prepare(datums, loss_fn, loss_fn_config, loss_fn_inputs=loss_fn_inputs, scale=scale))

    forward_backward_async = submitted(forward_backward)

    def prepare(
        self,
        data: list[Datum],
        loss_fn: str | LossHandle | ServerLoss,
        loss_fn_config: Mapping[str, float | str] | None = None,
        *,
        loss_fn_inputs: Mapping[str, Any] | None = None,
        scale: float = 1.0,
    ) -> ServerPass:
        """Checks a pass and converts it into the request that `send` takes; raises `InvalidInput` if it is invalid."""
        return self._sender.prepare(data, loss_fn, loss_fn_config, loss_fn_inputs, scale)

    def prepare_gradient(
        self,
        data: list[Datum],
        gradients: Sequence[Tensor],
        logprobs: Sequence[Tensor] | None = None,
        retained: tuple[tuple[int, int], ...] | None = None,
    ) -> ServerPass:
        """Converts the gradient of a custom loss into the request that `send` takes.

        Args:
            data: The datums.
            gradients: The gradient with respect to the log-probabilities of each datum.
            logprobs: These log-probabilities; requested again if the server needs them and they are not given.
            retained: What the result of their forward says about being retained.

        Raises:
            Unsupported: If no surrogate is known to be exact on this server.
        """
        return self._queue.prepare_gradient(data, gradients, logprobs, retained)

    def logprobs(self, data: list[Datum], *, retain: bool = False) -> TinkerFuture[ForwardBackwardOutput]:
        """Sends a forward for the log-probabilities of datums; `retain` keeps it for its gradient if possible."""
        self._check()
        return self.unread.add(self._queue.logprobs(data, retain=retain))

    def send(self, request: ServerPass) -> TinkerFuture[ForwardBackwardOutput]:
        """Sends a pass that `prepare` or `prepare_gradient` has returned."""
        self._check()
        handle = request.local
        if handle is None:
            return self.unread.add(self._queue.send(request))
        return self._submit_custom(request.data, request.data, evaluation(times(handle, request.scale)))

    def forward_backward_custom(
        self,
        data: Sequence[Any],
        loss_fn: LossFn | LossHandle | None = None,
        loss_type_input: Literal["logprobs"] | Iterable[Regularizer | Mapping[str, Any]] | None = None,
        *,
        regularizers: Iterable[Regularizer | Mapping[str, Any]] | None = None,
        base_loss_fn: LossFn | None = None,
        grad_norms: bool = True,
        regularizer_timeout: float | None = None,
    ) -> TinkerFuture[ForwardBackwardOutput]:
        """Runs a pass with a custom loss: `loss_fn(data, logprobs)` returns a scalar tensor and a dict of metrics.

        The forward is sent at once. The loss runs on the thread that first needs its value, by `.result()`, `await`, or
        this client's next `optim_step` or save, and the backward is sent then.

        Args:
            data: The datums.
            loss_fn: The loss; None if there are only regularizers. What `create_custom_loss` returned runs in one pass
                where the server can.
            loss_type_input: What the loss is computed from: `"logprobs"`, which None stands for. A list or another
                iterable in this place is `regularizers`.
            regularizers: Terms that are added to it, with their own telemetry in the result's metrics. Weights that
                are functions receive the number of `optim_step`s that were submitted before.
            base_loss_fn: Another name of `loss_fn`; give one of the two.
            grad_norms: Whether the telemetry includes the norm of each regularizer's gradient.
            regularizer_timeout: How many seconds async regularizers, and those in an executor, may take.
        """
        self._check()
        regularizers = _third_argument(loss_type_input, regularizers)
        if loss_fn is not None and base_loss_fn is not None:
            raise InvalidInput("loss_fn and base_loss_fn are two names of one argument; give one of them")
        loss_fn = base_loss_fn if loss_fn is None else loss_fn
        if isinstance(loss_fn, LossHandle) and not regularizers:
            return self.forward_backward(data, loss_fn)
        evaluate = evaluation(loss_fn, regularizers, self._queue.steps, grad_norms, regularizer_timeout)
        batch = check_batch(data)
        return self._submit_custom(batch, to_datums(batch), evaluate)

    forward_backward_custom_async = submitted(forward_backward_custom)

    async def forwards_async(self) -> None:
        """Waits for what a step or a save needs: the log-probabilities of pending custom losses, and a new model."""
        if self._loading is not None:
            await self._loading.wait_async()
        await self._queue.forwards_async()

    def load_state(self, path: str, weights_access_token: str | None = None) -> TinkerFuture[LoadWeightsResponse]:
        """Loads saved weights into this model and resets the optimizer state.

        Args:
            path: Where they were saved.
            weights_access_token: Grants access to weights of another account.
        """
        if not self.dialect.resets_optimizer and not self._warned_of_optimizer:
            self._warned_of_optimizer = True
            logger.warning(
                "load_state: servers of the dialect %r also restore the optimizer state, so the first steps follow the "
                "moments of the saved run. Warm the learning rate up to limit their effect.",
                self.dialect.name,
            )
        return self._load("load_state", path, weights_access_token)

    load_state_async = submitted(load_state, before=forwards_async)

    def load_state_with_optimizer(
        self, path: str, weights_access_token: str | None = None
    ) -> TinkerFuture[LoadWeightsResponse]:
        """Loads saved weights and optimizer state into this model; takes the arguments of `load_state`."""
        return self._load("load_state_with_optimizer", path, weights_access_token)

    load_state_with_optimizer_async = submitted(load_state_with_optimizer, before=forwards_async)

    def export_adapter(self: TrainingBackend, path: str | os.PathLike[str], *, overwrite: bool = False) -> Path:
        """Saves the current adapter as a local folder that peft and transformers load."""
        return export_adapter(self, path, overwrite=overwrite)

    @property
    def server(self) -> str:
        """The server's URL, or another name of it, for users."""
        return self._sender.server

    @property
    def storage(self) -> str:
        """Where saved states are: the folder of an embedded trainer, or the server."""
        return self._sender.storage

    @property
    def dialect(self) -> Dialect:
        """The dialect of the server."""
        return self._sender.dialect

    @property
    def pause(self) -> Pause | None:
        """What the requests of this client's session wait for; None if they get on, or if it is not known."""
        return self._sender.pause

    @property
    def retains(self) -> bool:
        """Whether the server can keep a forward pass until its gradient arrives."""
        return self._sender.retains

    def record(self, recording: Recording | None) -> None:
        """Adds all operations of this client's session to a recording; None stops that."""
        if recording is not None:
            raise Unsupported(
                f"the requests of a {type(self).__name__} cannot be measured: another library sends them. Train with a "
                "model that tinker_lightning.connect() creates, or with a RemoteModule that is given its name."
            )

    def computes(self, loss: str) -> bool:
        """Returns whether the server is known to train with a built-in loss as the protocol defines it.

        Raises:
            Unsupported: If the server is of an unknown kind, and its `cross_entropy` is not known to be a plain sum.
        """
        if loss == custom.SURROGATE and self.dialect.surrogate is None:
            self._sender.surrogate()
        return not gap(self.dialect, loss)

    def prepare_step(self, params: OptimParams) -> None:
        """Checks the settings of a step before anything of it is sent, so that `optim_step` need not wait or fail.

        Raises:
            Unsupported: If the server would ignore a setting.
            OperationFailed: If the gradient on the server is incomplete.
        """
        self._check_step(params)
        if self._sender.waits_for_samples:
            with self._changing():
                pass  # samples that the step must not overtake have ended now

    def drop_unsent(self, reason: str) -> int:
        """Drops passes that were not sent yet; returns the number of sequences sent since the last step."""
        self._queue.abandon()
        _, sent = self._queue.drop(reason)
        return sent

    def _check_step(self, params: OptimParams) -> None:
        if params.grad_clip_norm and params.grad_clip_norm < _NO_CLIPPING and not self.dialect.clips_gradients:
            raise Unsupported(
                f"grad_clip_norm={params.grad_clip_norm}: servers of the dialect {self.dialect.name!r} ignore it, and "
                "would train with the whole gradient. Set it to 0 (Trainer(gradient_clip_val=None))."
            )
        self._queue.check()

    @contextlib.contextmanager
    def _step(self, params: OptimParams) -> Iterator[list[TinkerFuture[None]]]:
        """Submits what belongs to a step and was not submitted yet; the step is to be submitted in the `with` block.

        Returns the samples that must end before it is posted.
        """
        self._check_step(params)
        self._flush()
        with self._changing() as samples, self._queue.step():
            yield samples

    @contextlib.contextmanager
    def _changing(self) -> Iterator[list[TinkerFuture[None]]]:
        """Surrounds the submission of a request that changes the weights.

        Returns the samples in flight that could put the weights before it back into the model.
        """
        if self.dialect.samples_old_weights:
            yield []
            return
        with self._sender.live.changing(self.model_id) as samples:
            if self._sender.waits_for_samples:
                for sample in samples:
                    sample.wait()
                samples = []
            yield samples

    def _load(self, name: str, path: str, token: str | None) -> TinkerFuture[LoadWeightsResponse]:
        self._before_load(name)
        with self._changing() as samples:
            loaded = self.unread.add(self._sender.load(name, path, token, samples))
        self._loading = loaded if self._sender.replaces_model else None
        return loaded

    def _before_load(self, name: str) -> None:
        """Evaluates pending losses. Gradients that the server would keep are no longer sent."""
        reason = f"dropped by {name}, before which no optim_step was called"
        if self.dialect.clears_gradient or self._sender.replaces_model:
            self._flush()
            self._queue.clear(reason)
            return
        self._check()
        self._queue.flush(hold=True)
        dropped, sent = self._queue.drop(reason)
        if (dropped or sent) and not self._warned_of_gradient:
            self._warned_of_gradient = True
            kept = f"{sent} sequences may stay on {self.server}, and the next step would apply it to the loaded weights"
            lost = f"{dropped} sequences was computed with other weights, and is not sent to {self.server}"
            logger.warning(
                "%s in the middle of an accumulation window: the gradient of %s. Call optim_step first, or create "
                "another model from the state, with create_training_client_from_state().",
                name,
                kept if sent else lost,
            )

    def _check(self) -> None:
        """Raises the first unhandled failure, or if the client can no longer be used."""
        self._sender.check()
        if self._loading is not None:
            self._loading.wait()
            self._loading = None
        self.unread.raise_first()

    def _flush(self) -> None:
        """Sends the backwards of pending custom losses, which must precede what is sent next."""
        self._check()
        self._queue.flush()

    def _submit_custom(
        self, data: list[Any], datums: list[Datum], evaluate: Evaluate
    ) -> TinkerFuture[ForwardBackwardOutput]:
        loss = CustomLoss(data, datums, evaluate)
        return self.unread.add(self._queue.submit(f"forward_backward_custom of {self.model_id}", loss))


def _third_argument(loss_type_input: Any, regularizers: Any) -> Any:
    """Returns the regularizers of a custom loss, which may be in the third place, in which the SDK has a string."""
    if isinstance(loss_type_input, Iterable) and not isinstance(loss_type_input, str):
        if regularizers is not None:
            raise InvalidInput("the third argument and regularizers are both regularizers; give one of them")
        return loss_type_input
    if loss_type_input not in (None, "logprobs"):
        raise InvalidInput(f"loss_type_input must be 'logprobs', or a list of regularizers, got {loss_type_input!r}")
    return regularizers
