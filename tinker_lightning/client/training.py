"""A model in training on a server."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any, TypeVar

from tinker_lightning.client import chunking, loss_handle, server_pass
from tinker_lightning.client.connection import PROTOBUF
from tinker_lightning.client.custom import CustomLosses, CustomLossFuture
from tinker_lightning.client.export import export_adapter
from tinker_lightning.client.futures import TinkerFuture, UnreadFailures
from tinker_lightning.client.loss_handle import LossHandle
from tinker_lightning.client.operations import Operation
from tinker_lightning.client.sdk import inputs
from tinker_lightning.client.server_pass import ServerPass
from tinker_lightning.client.submit_order import SubmitOrder, perform_all
from tinker_lightning.errors import InvalidInput
from tinker_lightning.losses import surrogate
from tinker_lightning.losses.regularizers import composition
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

    from tinker_lightning.client.loss_uploads import Losses
    from tinker_lightning.client.sampling import SamplingClient
    from tinker_lightning.client.service import ServiceClient
    from tinker_lightning.client.session import Session
    from tinker_lightning.losses.regularizers.regularizer import Regularizer
    from tinker_lightning.losses.surrogate import LossFn
    from tinker_lightning.lossgraph.server_loss import ServerLoss
    from tinker_lightning.types import Datum

T = TypeVar("T")
F = TypeVar("F", bound=TinkerFuture[Any])


class TrainingClient:
    """A model in training. Every method that reaches the model returns at once, with a future.

    Requests are numbered as they are called and run in that order. A failure that nobody reads is raised at the next
    call. Made by a `ServiceClient`.
    """

    def __init__(self, service: ServiceClient, model_id: str) -> None:
        self.model_id = model_id
        self._service = service
        self.unread = UnreadFailures()
        self._lock = threading.Lock()
        self._last_number = 0
        self._custom = CustomLosses(
            model_id,
            lambda data: self._pass(data, SURROGATE, None, forward_only=True),
            lambda data: self._pass(data, SURROGATE, None, forward_only=False),
        )
        self._turns = SubmitOrder()

    def forward(
        self,
        data: Sequence[Any],
        loss_fn: str | LossHandle | ServerLoss,
        loss_fn_config: Mapping[str, float | str] | None = None,
        *,
        loss_fn_inputs: Mapping[str, Any] | None = None,
    ) -> TinkerFuture[ForwardBackwardOutput]:
        """The log-probabilities of every target, and the loss; no gradient.

        Args:
            data: The datums.
            loss_fn: A loss of the server's: its name, or what `custom_loss` or `create_custom_loss` gave.
            loss_fn_config: Its settings.
            loss_fn_inputs: Inputs of the loss given once for the batch, in place of with each datum.
        """
        self._check()
        datums = inputs.to_datums(data)
        if isinstance(loss_fn, LossHandle) and loss_fn.loss_id is None:
            datums = server_pass.handle_data(self._service, datums, loss_fn, loss_fn_config, loss_fn_inputs)
            forward = self._pass(surrogate.forward_datums(datums), SURROGATE, None, forward_only=True)
            return self._watched(forward.then(lambda output: loss_handle.with_loss(output, datums, loss_fn)))
        prepared = server_pass.prepare(self._service, datums, loss_fn, loss_fn_config, loss_fn_inputs, 1.0)
        return self._watched(self._server_pass(prepared, forward_only=True))

    def forward_backward(
        self,
        data: Sequence[Any],
        loss_fn: str | LossHandle | ServerLoss,
        loss_fn_config: Mapping[str, float | str] | None = None,
        *,
        loss_fn_inputs: Mapping[str, Any] | None = None,
        scale: float = 1.0,
    ) -> TinkerFuture[ForwardBackwardOutput]:
        """A pass with one of the server's losses; its gradient is added to what waits for the next step.

        Args:
            data: The datums.
            loss_fn: A loss of the server's: its name, or what `custom_loss` or `create_custom_loss` gave.
            loss_fn_config: Its settings.
            loss_fn_inputs: Inputs of the loss given once for the batch, in place of with each datum.
            scale: What the gradient is multiplied by; the metrics are those of the loss itself.
        """
        self._check()
        datums = inputs.to_datums(data)
        if isinstance(loss_fn, LossHandle) and loss_fn.loss_id is None:
            datums = server_pass.handle_data(self._service, datums, loss_fn, loss_fn_config, loss_fn_inputs)
            return self._watched(self._custom.add(datums, loss_handle.times(loss_fn, scale)))
        prepared = server_pass.prepare(self._service, datums, loss_fn, loss_fn_config, loss_fn_inputs, scale)
        return self._watched(self._server_pass(prepared, forward_only=False))

    def check_pass(
        self, data: Sequence[Any], loss_fn: Any, loss_fn_config: Mapping[str, float | str] | None, *, scale: float = 1.0
    ) -> None:
        """Raises what `forward_backward` would raise at the call; sends no pass."""
        self._service.check_usable()
        if not (isinstance(loss_fn, LossHandle) and loss_fn.loss_id is None):
            datums = inputs.to_datums(data)
            self._chunks(server_pass.prepare(self._service, datums, loss_fn, loss_fn_config, None, scale))

    def forward_backward_custom(
        self,
        data: Sequence[Any],
        loss_fn: LossFn | None = None,
        regularizers: Iterable[Regularizer | Mapping[str, Any]] | None = None,
        *,
        grad_norms: bool = True,
        regularizer_timeout: float | None = None,
    ) -> CustomLossFuture:
        """A pass with a loss of one's own: `loss_fn(data, logprobs)` returns a scalar tensor and a dict of metrics.

        The forward is sent at once. The loss runs on the thread that first needs its value, by `.result()`, `await`, or
        this client's next `optim_step` or save, and the backward is sent then.

        Args:
            data: The datums.
            loss_fn: The loss; None if there are only regularizers.
            regularizers: Terms that are added to it, with telemetry of their own in the result's metrics. Weights that
                are functions are given the number of `optim_step`s that were submitted before.
            grad_norms: Whether that has the norm of each one's gradient.
            regularizer_timeout: How many seconds async ones, and those in an executor, may take.
        """
        self._check()
        composition.check_timeout("regularizer_timeout", regularizer_timeout)
        return self._watched(
            self._custom.add(data, loss_fn, regularizers, grad_norms=grad_norms, timeout=regularizer_timeout)
        )

    def optim_step(self, optim_params: Any = None) -> TinkerFuture[OptimStepResponse]:
        """A step of AdamW on the gathered gradient.

        Custom losses that wait are evaluated first. If one fails, no backward of theirs is sent, the step is not
        taken, and the error is raised here; then all of them have to be called again.
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
        """Saves weights and optimizer under a name; the result has the `path`."""
        self._check()
        self._custom.flush()
        return self._submit(
            "save_state",
            "save_weights",
            SaveWeightsResponse,
            lambda number: rq.SaveWeightsRequest(self.model_id, number, name, ttl_seconds, overwrite, user_metadata),
        )

    def load_state(self, path: str) -> TinkerFuture[LoadWeightsResponse]:
        """Puts saved weights into this model; AdamW starts anew."""
        return self._load(path, optimizer=False)

    def load_state_with_optimizer(self, path: str) -> TinkerFuture[LoadWeightsResponse]:
        """Puts saved weights and AdamW's state into this model."""
        return self._load(path, optimizer=True)

    def save_weights_for_sampler(
        self, name: str, ttl_seconds: int | None = None, user_metadata: dict[str, str] | None = None
    ) -> TinkerFuture[SaveWeightsForSamplerResponse]:
        """Saves weights to sample from under a name; the result has the `path`."""
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
        """A client that samples from this model as it is now; without a name nothing is kept on the server's disk."""
        if name is not None:
            path = self.save_weights_for_sampler(name).result().path
            return self._service.create_sampling_client(model_path=path)
        self._check()
        self._custom.flush()
        sampler_number = self._service.count("sampler")
        saved = self._submit(
            "save_weights_for_sampler",
            "save_weights_for_sampler",
            SaveWeightsForSamplerResponse,
            lambda number: rq.SaveWeightsForSamplerRequest(
                self.model_id, number, sampling_session_seq_id=sampler_number
            ),
        )
        return self._service.sampling_client(saved.result().sampling_session_id or "")

    def create_sampling_client(self, model_path: str) -> SamplingClient:
        """A client that samples from saved weights."""
        return self._service.create_sampling_client(model_path=model_path)

    def get_info(self) -> GetInfoResponse:
        """What the model is."""
        self._check()
        return self._service.call("/api/v1/get_info", rq.GetInfoRequest(self.model_id), GetInfoResponse)

    def get_tokenizer(self) -> Any:
        """The model's tokenizer."""
        data = self.get_info().model_data
        return self._service.tokenizer(data.model_name or "", data.tokenizer_id)

    def save_weights_external(
        self, name: str, ttl_seconds: int | None = None
    ) -> TinkerFuture[SaveWeightsExternalResponse]:
        """Saves weights to download under a name; the result has the `path`.

        Servers of older generations give out what is saved to sample from, so there that is done.
        """
        self._check()
        if not self._service.saves_external_weights():
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
        """Saves the adapter as it is now into a folder on this machine, which peft and transformers load."""
        return export_adapter(self, path, overwrite=overwrite)

    def download_checkpoint(self, path: str, folder: Path) -> None:
        """Downloads the adapter that was saved under a `tinker://` path into a folder that exists."""
        self._service.download_checkpoint(path, folder)

    @property
    def losses(self) -> Losses:
        """The losses that this client has brought to its server."""
        return self._service.losses

    def checkpoint_exists(self, path: str) -> bool:
        """Whether what was saved under a `tinker://` path, of this model or another, is still there."""
        return self._service.checkpoint_exists(path)

    def delete_checkpoint(self, path: str, *, missing_ok: bool = False) -> None:
        """Removes what was saved under a `tinker://` path, of this model or another."""
        self._service.delete_checkpoint(path, missing_ok=missing_ok)

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
        self._service.check_usable()
        self.unread.raise_first()

    def _pass(
        self,
        data: list[Datum],
        loss_fn: str,
        loss_fn_config: Mapping[str, float | str] | None,
        *,
        forward_only: bool,
    ) -> TinkerFuture[ForwardBackwardOutput]:
        return self._server_pass(ServerPass(data, loss_fn, dict(loss_fn_config or {})), forward_only=forward_only)

    def _server_pass(self, asked: ServerPass, *, forward_only: bool) -> TinkerFuture[ForwardBackwardOutput]:
        session = self._service.session
        name = "forward" if forward_only else "forward_backward"
        chunks = self._chunks(asked)

        def operation(number: int, chunk: list[Datum]) -> Operation[ForwardBackwardOutput]:
            request = rq.ForwardBackwardRequest(
                self.model_id, number, chunk, asked.loss, asked.config, forward_only, asked.inputs, asked.scale
            )
            body = protobuf.encode_forward_backward(request)
            return Operation(name, "forward_backward", body, ForwardBackwardOutput, self.model_id, number, PROTOBUF)

        with self._lock:
            first = self._last_number + 1
            operations = [operation(number, chunk) for number, chunk in enumerate(chunks, first)]
            future = self._start(session, operations, chunking.combine)
        return asked.received(future)

    def _chunks(self, asked: ServerPass) -> list[list[Datum]]:
        config = self._service.session.config
        chunks = chunking.split(asked.data, config.fwdbwd_max_chunk_len, config.fwdbwd_max_chunk_bytes_count)
        if asked.whole and len(chunks) > 1:
            raise InvalidInput(
                f"data: {len(asked.data)} datums do not fit into one request, and {asked.loss} sees the whole batch at "
                "once. Send a smaller batch."
            )
        return chunks

    def _submit(self, name: str, endpoint: str, result: type[T], request: Callable[[int], Any]) -> TinkerFuture[T]:
        session = self._service.session
        with self._lock:
            number = self._last_number + 1
            operation = Operation(name, endpoint, wire_json.dumps(request(number)), result, self.model_id, number)
            future = self._start(session, [operation], lambda results: results[0])
        return self._watched(future)

    def _start(
        self, session: Session, operations: list[Operation[T]], combine: Callable[[list[T]], T]
    ) -> TinkerFuture[T]:
        """Hands over operations that were numbered and encoded under the lock, so that none is lost or overtaken.

        The session is given, not looked up later: what was submitted before `close()` is still sent.
        """
        self._last_number += len(operations)
        result = perform_all(session, self._turns, operations, combine)
        return TinkerFuture(self._service.run(result), str(operations[0]), self._service)

    def _watched(self, future: F) -> F:
        """A future that the user gets; its failure is raised at the next call if nobody reads it."""
        self.unread.add(future)
        return future
