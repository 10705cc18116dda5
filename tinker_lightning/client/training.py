"""A client that trains one model on a server."""

from __future__ import annotations

import threading
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar

from tinker_lightning.client import checkpoints, chunking, download, loss_handle, server_pass, tokenizer
from tinker_lightning.client.connection import PROTOBUF
from tinker_lightning.client.custom import CustomLosses, CustomLossFuture
from tinker_lightning.client.export import export_adapter
from tinker_lightning.client.futures import TinkerFuture, UnreadFailures
from tinker_lightning.client.operations import Operation
from tinker_lightning.client.sampling import SamplingClient
from tinker_lightning.client.sdk import inputs
from tinker_lightning.client.server_pass import ServerPass
from tinker_lightning.client.submit_order import SubmitOrder, perform_all
from tinker_lightning.errors import InvalidInput
from tinker_lightning.losses import surrogate
from tinker_lightning.losses.surrogate import SURROGATE
from tinker_lightning.types import (
    AdamParams,
    ForwardBackwardOutput,
    GetInfoResponse,
    LoadWeightsResponse,
    OptimStepResponse,
    SaveWeightsForSamplerResponse,
    SaveWeightsResponse,
)
from tinker_lightning.types import requests as rq
from tinker_lightning.types.responses import SaveWeightsExternalResponse
from tinker_lightning.wire import json as wire_json
from tinker_lightning.wire import protobuf

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Iterable, Mapping, Sequence
    from pathlib import Path

    from tinker_lightning.client.channel import Channel
    from tinker_lightning.client.loss_handle import LossHandle
    from tinker_lightning.client.loss_uploads import Losses
    from tinker_lightning.client.session import Session
    from tinker_lightning.losses.regularizers.regularizer import Regularizer
    from tinker_lightning.losses.surrogate import LossFn
    from tinker_lightning.lossgraph.server_loss import ServerLoss
    from tinker_lightning.types import Datum

T = TypeVar("T")
F = TypeVar("F", bound=TinkerFuture[Any])


class TrainingClient:
    """Trains one model. Methods that reach the model return a future at once. Created by a `ServiceClient`.

    Requests are numbered in the order of the calls and run in that order. A failure that nobody reads is raised at the
    next call.
    """

    def __init__(self, channel: Channel, losses: Losses, model_id: str) -> None:
        self.model_id = model_id
        self.losses = losses
        self.unread = UnreadFailures()
        self._channel = channel
        self._lock = threading.Lock()
        self._last_number = 0
        self._custom = CustomLosses(
            model_id,
            lambda data: self._submit_pass(self._surrogate(data), forward_only=True),
            lambda data: self._submit_pass(self._surrogate(data), forward_only=False),
        )
        self._order = SubmitOrder()

    def forward(
        self,
        data: Sequence[Any],
        loss_fn: str | LossHandle | ServerLoss,
        loss_fn_config: Mapping[str, float | str] | None = None,
        *,
        loss_fn_inputs: Mapping[str, Any] | None = None,
    ) -> TinkerFuture[ForwardBackwardOutput]:
        """Computes the log-probabilities of every target and the loss, without a gradient.

        Args:
            data: The datums.
            loss_fn: A server-side loss: its name, or what `custom_loss` or `create_custom_loss` returned.
            loss_fn_config: Its settings.
            loss_fn_inputs: Inputs of the loss given once for the batch instead of with each datum.
        """
        self._check()
        request = self.prepare(inputs.to_datums(data), loss_fn, loss_fn_config, loss_fn_inputs=loss_fn_inputs)
        return self.send(request, forward_only=True)

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
            scale: The factor by which the gradient is multiplied; the metrics are those of the unscaled loss.
        """
        self._check()
        datums = inputs.to_datums(data)
        return self.send(self.prepare(datums, loss_fn, loss_fn_config, loss_fn_inputs=loss_fn_inputs, scale=scale))

    def prepare(
        self,
        data: list[Datum],
        loss_fn: str | LossHandle | ServerLoss,
        loss_fn_config: Mapping[str, float | str] | None = None,
        *,
        loss_fn_inputs: Mapping[str, Any] | None = None,
        scale: float = 1.0,
    ) -> ServerPass:
        """Checks a pass and converts it into the request that `send` takes; takes `Datum`s only.

        Raises:
            InvalidInput: If the pass cannot be sent.
        """
        session = self._channel.session
        request = server_pass.prepare(session, self.losses, data, loss_fn, loss_fn_config, loss_fn_inputs, scale)
        return request if request.local is not None else self._chunked(request, session)

    def send(self, request: ServerPass, *, forward_only: bool = False) -> TinkerFuture[ForwardBackwardOutput]:
        """Sends a pass that `prepare` has returned."""
        self._check()
        handle = request.local
        if handle is None:
            return self._watched(self._submit_pass(request, forward_only=forward_only))
        if not forward_only:
            loss = loss_handle.times(handle, request.scale)
            return self._watched(self._custom.add(request.data, loss))
        datums = surrogate.forward_datums(request.data)
        forward = self._submit_pass(self._surrogate(datums), forward_only=True)
        return self._watched(forward.then(lambda output: loss_handle.with_loss(output, request.data, handle)))

    def forward_backward_custom(
        self,
        data: Sequence[Any],
        loss_fn: LossFn | None = None,
        regularizers: Iterable[Regularizer | Mapping[str, Any]] | None = None,
        *,
        base_loss_fn: LossFn | None = None,
        grad_norms: bool = True,
        regularizer_timeout: float | None = None,
    ) -> CustomLossFuture:
        """Runs a pass with a custom loss: `loss_fn(data, logprobs)` returns a scalar tensor and a dict of metrics.

        The forward is sent at once. The loss runs on the thread that first needs its value, by `.result()`, `await`, or
        this client's next `optim_step` or save, and the backward is sent then.

        Args:
            data: The datums.
            loss_fn: The loss; None if there are only regularizers.
            regularizers: Terms that are added to it, with their own telemetry in the result's metrics. Weights that
                are functions receive the number of `optim_step`s that were submitted before.
            base_loss_fn: Another name of `loss_fn`; give one of the two.
            grad_norms: Whether the telemetry includes the norm of each regularizer's gradient.
            regularizer_timeout: How many seconds async regularizers, and those in an executor, may take.
        """
        self._check()
        return self._watched(
            self._custom.forward_backward(
                data, loss_fn, regularizers, base_loss_fn, grad_norms=grad_norms, timeout=regularizer_timeout
            )
        )

    def optim_step(self, optim_params: Any = None) -> TinkerFuture[OptimStepResponse]:
        """Takes an AdamW step on the accumulated gradient.

        Pending custom losses are evaluated first. If one fails, none of their backwards is sent, the step is not taken,
        and the error is raised here; all of them have to be called again.
        """
        self._check()
        params = AdamParams() if optim_params is None else inputs.to_adam_params(optim_params)
        self._custom.flush()
        future = self._submit(
            "optim_step",
            "optim_step",
            OptimStepResponse,
            lambda number: rq.OptimStepRequest(self.model_id, number, params),
        )
        self._custom.stepped()
        return future

    def save_state(
        self,
        name: str,
        ttl_seconds: int | None = None,
        overwrite: bool = False,
        user_metadata: dict[str, str] | None = None,
    ) -> TinkerFuture[SaveWeightsResponse]:
        """Saves weights and optimizer state under a name; the result has the `path`."""
        self._check()
        self._custom.flush()
        return self._submit(
            "save_state",
            "save_weights",
            SaveWeightsResponse,
            lambda number: rq.SaveWeightsRequest(self.model_id, number, name, ttl_seconds, overwrite, user_metadata),
        )

    def load_state(self, path: str) -> TinkerFuture[LoadWeightsResponse]:
        """Loads saved weights into this model and resets the optimizer state."""
        return self._load(path, optimizer=False)

    def load_state_with_optimizer(self, path: str) -> TinkerFuture[LoadWeightsResponse]:
        """Loads saved weights and optimizer state into this model."""
        return self._load(path, optimizer=True)

    def save_weights_for_sampler(
        self, name: str, ttl_seconds: int | None = None, user_metadata: dict[str, str] | None = None
    ) -> TinkerFuture[SaveWeightsForSamplerResponse]:
        """Saves weights for sampling under a name; the result has the `path`."""
        self._check()
        self._custom.flush()
        return self._submit(
            "save_weights_for_sampler",
            "save_weights_for_sampler",
            SaveWeightsForSamplerResponse,
            lambda number: rq.SaveWeightsForSamplerRequest(
                self.model_id, number, name, ttl_seconds=ttl_seconds, user_metadata=user_metadata
            ),
        )

    def save_weights_and_get_sampling_client(self, name: str | None = None) -> SamplingClient:
        """Returns a client that samples from the current weights; without a name nothing is kept on disk."""
        if name is not None:
            return SamplingClient.create(self._channel, self.save_weights_for_sampler(name).result().path)
        self._check()
        self._custom.flush()
        sampler_number = self._channel.count("sampler")
        saved = self._submit(
            "save_weights_for_sampler",
            "save_weights_for_sampler",
            SaveWeightsForSamplerResponse,
            lambda number: rq.SaveWeightsForSamplerRequest(
                self.model_id, number, sampling_session_seq_id=sampler_number
            ),
        )
        return self._channel.watch(SamplingClient(self._channel, saved.result().sampling_session_id or ""))

    def create_sampling_client(self, model_path: str) -> SamplingClient:
        """Returns a client that samples from saved weights."""
        return SamplingClient.create(self._channel, model_path)

    def get_info(self) -> GetInfoResponse:
        """Returns the base model, the LoRA rank and the tokenizer's name."""
        self._check()
        return self._channel.call("/api/v1/get_info", rq.GetInfoRequest(self.model_id), GetInfoResponse)

    def get_tokenizer(self) -> Any:
        """Returns the model's tokenizer."""
        data = self.get_info().model_data
        return tokenizer.fetch(self._channel, data.model_name or "", data.tokenizer_id)

    def save_weights_external(
        self, name: str, ttl_seconds: int | None = None
    ) -> TinkerFuture[SaveWeightsExternalResponse]:
        """Saves weights for download under a name; the result has the `path`.

        Older servers offer weights for download that are saved for sampling, so that is done there.
        """
        self._check()
        if not self._channel.wait(checkpoints.can_be_external(self._channel.session.connection)):
            saved = self.save_weights_for_sampler(name, ttl_seconds)
            return self._watched(saved.then(lambda result: SaveWeightsExternalResponse(result.path or "")))
        self._custom.flush()
        return self._submit(
            "save_weights_external",
            "save_weights_external",
            SaveWeightsExternalResponse,
            lambda number: rq.SaveWeightsExternalRequest(self.model_id, number, name, ttl_seconds),
        )

    def export_adapter(self, path: str | os.PathLike[str], *, overwrite: bool = False) -> Path:
        """Saves the current adapter as a local folder that peft and transformers load."""
        return export_adapter(self, path, overwrite=overwrite)

    def download_checkpoint(self, path: str, folder: Path) -> None:
        """Downloads the adapter saved at a `tinker://` path into an existing folder."""
        self._channel.wait(download.checkpoint(self._channel.session.connection, path, folder))

    def checkpoint_exists(self, path: str) -> bool:
        """Returns whether the checkpoint at a `tinker://` path, of this model or another, exists."""
        return self._channel.wait(checkpoints.exists(self._channel.session.connection, path))

    def delete_checkpoint(self, path: str, *, missing_ok: bool = False) -> None:
        """Deletes the checkpoint at a `tinker://` path, of this model or another."""
        self._channel.wait(checkpoints.delete(self._channel.session.connection, path, missing_ok=missing_ok))

    def _load(self, path: str, *, optimizer: bool) -> TinkerFuture[LoadWeightsResponse]:
        self._check()
        self._custom.flush()
        return self._submit(
            "load_state_with_optimizer" if optimizer else "load_state",
            "load_weights",
            LoadWeightsResponse,
            lambda number: rq.LoadWeightsRequest(self.model_id, number, path, optimizer),
        )

    def _check(self) -> None:
        self._channel.check_usable()
        self.unread.raise_first()

    def _surrogate(self, data: list[Datum]) -> ServerPass:
        return self._chunked(ServerPass(data, SURROGATE), self._channel.session)

    def _chunked(self, request: ServerPass, session: Session) -> ServerPass:
        config = session.config
        chunks = chunking.split(request.data, config.fwdbwd_max_chunk_len, config.fwdbwd_max_chunk_bytes_count)
        if request.whole and len(chunks) > 1:
            raise InvalidInput(
                f"data: {len(request.data)} datums do not fit into one request, and {request.loss} is computed from "
                "the whole batch at once. Send a smaller batch."
            )
        return replace(request, chunks=chunks)

    def _submit_pass(self, request: ServerPass, *, forward_only: bool) -> TinkerFuture[ForwardBackwardOutput]:
        session = self._channel.session
        name = "forward" if forward_only else "forward_backward"

        def operation(number: int, chunk: list[Datum]) -> Operation[ForwardBackwardOutput]:
            message = rq.ForwardBackwardRequest(
                self.model_id, number, chunk, request.loss, request.config, forward_only, request.inputs, request.scale
            )
            body = protobuf.encode_forward_backward(message)
            return Operation(name, "forward_backward", body, ForwardBackwardOutput, self.model_id, number, PROTOBUF)

        with self._lock:
            first = self._last_number + 1
            operations = [operation(number, chunk) for number, chunk in enumerate(request.chunks, first)]
            future = self._start(session, operations, chunking.combine)
        return request.received(future)

    def _submit(self, name: str, endpoint: str, result: type[T], request: Callable[[int], Any]) -> TinkerFuture[T]:
        session = self._channel.session
        with self._lock:
            number = self._last_number + 1
            operation = Operation(name, endpoint, wire_json.dumps(request(number)), result, self.model_id, number)
            future = self._start(session, [operation], lambda results: results[0])
        return self._watched(future)

    def _start(
        self, session: Session, operations: list[Operation[T]], combine: Callable[[list[T]], T]
    ) -> TinkerFuture[T]:
        """Starts operations that were numbered and encoded under the lock, so that none is lost or overtaken.

        The session is passed, not looked up later, so that what was submitted before `close()` is still sent.
        """
        self._last_number += len(operations)
        result = perform_all(session, self._order, operations, combine)
        return TinkerFuture(self._channel.run(result), str(operations[0]))

    def _watched(self, future: F) -> F:
        """Tracks a future that the user gets: its failure is raised at the next call if nobody reads it."""
        self.unread.add(future)
        return future
