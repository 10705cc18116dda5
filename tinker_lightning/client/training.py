"""A client that trains one model on a server."""

from __future__ import annotations

import logging
import uuid
from dataclasses import asdict, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, Self, TypeVar

from tinker_lightning.client import models
from tinker_lightning.client.awaitable import AwaitableClient, starts
from tinker_lightning.client.dialects import measure
from tinker_lightning.client.files import checkpoints, download, tokenizer
from tinker_lightning.client.futures import TinkerFuture, in_thread, submitted
from tinker_lightning.client.passes.sender import ProtocolSender
from tinker_lightning.client.sampling import SamplingClient, check_sampler_options
from tinker_lightning.client.training_base import BaseTrainingClient
from tinker_lightning.client.transport.session import fetch_capabilities
from tinker_lightning.errors import InvalidInput, NotFound, OperationFailed, Unsupported
from tinker_lightning.types import (
    AdamParams,
    GetInfoResponse,
    LoraConfig,
    OptimStepResponse,
    SaveWeightsForSamplerResponse,
    SaveWeightsResponse,
)
from tinker_lightning.types import requests as rq
from tinker_lightning.types.params import OPTIMIZERS, optimizer_kind, to_optim_params
from tinker_lightning.types.responses import Checkpoint, SaveWeightsExternalResponse

if TYPE_CHECKING:
    from pathlib import Path

    from tinker_lightning.client.server_losses import Losses
    from tinker_lightning.client.transport.channel import Channel
    from tinker_lightning.client.transport.recording import Recording
    from tinker_lightning.types import WeightsInfoResponse

T = TypeVar("T")

logger = logging.getLogger("tinker_lightning.client")


class TrainingClient(AwaitableClient, BaseTrainingClient):
    """Trains one model on a server. Created by a `ServiceClient`."""

    def __init__(self, channel: Channel, losses: Losses, model_id: str, model: rq.CreateModelRequest) -> None:
        sender = ProtocolSender(channel, losses, model_id, model, partial(_cross_entropy_fault, channel, losses))
        super().__init__(sender)
        self.losses = losses
        self.optimizer_kind: str | None = optimizer_kind(model.optimizer_config)
        self._channel = channel
        self.sender = sender

    @classmethod
    def create(
        cls,
        channel: Channel,
        losses: Losses,
        base_model: str,
        lora: LoraConfig,
        user_metadata: dict[str, str] | None,
        optimizer: str = AdamParams.kind,
        state: tuple[WeightsInfoResponse, str, str] | None = None,
    ) -> Self:
        """Creates a model on the server and waits until it exists.

        Args:
            channel: The connection and session.
            losses: The losses of the session that run on the server.
            base_model: The base model.
            lora: The adapter.
            user_metadata: What the server records about the model.
            optimizer: Its optimizer, by the protocol's name.
            state: What the server reports about a state from which the model is created in one request, its path, and
                `load_state` or `load_state_with_optimizer`.
        """
        session = channel.session
        is_known = session.dialect.knows("create_model", "optimizer_config")
        config = dict(OPTIMIZERS[optimizer].config) if is_known or optimizer != AdamParams.kind else None
        request = rq.CreateModelRequest(
            session.session_id, channel.count("model"), base_model, lora, user_metadata, config
        )
        if state is None:
            model_id = channel.wait(models.create(session, request))
        else:
            model_id = channel.wait(models.create_from_state(session, request, *state))
        return channel.watch(cls(channel, losses, model_id, request))

    def find_optimizer(self) -> None:
        """Asks for the optimizer of a model that was created from a state of which the server does not report it.

        If the server does not report that of the model either, the settings of each step decide, and the server checks
        them.
        """
        if not self.dialect.knows("create_model", "optimizer_config"):
            return  # a generation of servers that has AdamW only
        config = self.get_info().optimizer_config
        self.optimizer_kind = None if config is None else optimizer_kind(config)
        if self.optimizer_kind is not None:
            self.sender.model = replace(self.sender.model, optimizer_config=config)

    def optim_step(self, optim_params: Any = None, *, adam_params: Any = None) -> TinkerFuture[OptimStepResponse]:
        """Takes an optimizer step on the accumulated gradient.

        Pending custom losses are evaluated first. If one fails, no backward is sent, the step is not taken, and the
        error is raised here; all of them have to be called again.

        Args:
            optim_params: The hyperparameters of this step: `AdamParams`, or `DimuonParams` for its models.
            adam_params: Their name in older versions of the official SDK.
        """
        params = to_optim_params(adam_params if optim_params is None else optim_params, self.optimizer_kind)
        is_adam = isinstance(params, AdamParams)
        settings = {"adam_params": params} if is_adam else {"optimizer_params": {"type": params.kind, **asdict(params)}}
        with self._step(params) as samples:
            request, result = rq.OptimStepRequest, OptimStepResponse
            step = self.sender.submit("optim_step", "optim_step", result, request, after=samples, **settings)
            if self.optimizer_kind is None:
                step = step.then(lambda taken: taken, partial(_explained, kind=params.kind))
            return self.unread.add(step)

    optim_step_async = submitted(optim_step, before=BaseTrainingClient.forwards_async)

    def save_state(
        self,
        name: str,
        ttl_seconds: int | None = None,
        overwrite: bool = False,
        user_metadata: dict[str, str] | None = None,
    ) -> TinkerFuture[SaveWeightsResponse]:
        """Saves weights and optimizer state under a name; the result has the `path`."""
        self._flush()
        settings = name, ttl_seconds, overwrite, user_metadata
        return self._submit("save_state", "save_weights", SaveWeightsResponse, rq.SaveWeightsRequest, *settings)

    save_state_async = submitted(save_state, before=BaseTrainingClient.forwards_async)

    def save_weights_for_sampler(
        self, name: str, ttl_seconds: int | None = None, user_metadata: dict[str, str] | None = None
    ) -> TinkerFuture[SaveWeightsForSamplerResponse]:
        """Saves weights for sampling under a name; the result has the `path`."""
        self._flush()
        return self._save_for_sampler(path=name, ttl_seconds=ttl_seconds, user_metadata=user_metadata)

    save_weights_for_sampler_async = submitted(save_weights_for_sampler, before=BaseTrainingClient.forwards_async)

    def save_weights_and_get_sampling_client(
        self,
        name: str | None = None,
        retry_config: Any = None,
        record_stability_info: bool = False,
        kind: Literal["snapshot"] = "snapshot",
    ) -> SamplingClient:
        """Returns a client that samples from the current weights; without a name nothing is kept on disk.

        Args:
            name: The name to save the weights under.
            retry_config: Not used; retries follow the retry policy of the `ServiceClient`.
            record_stability_info: Whether hosted Tinker records what its loss `stable_reinforce` needs.
            kind: Must be `"snapshot"`: later steps do not change the weights that the client samples from.
        """
        check_sampler_options(self.dialect, retry_config, record_stability_info, kind)
        saved = self._save_unnamed() if name is None else self.save_weights_for_sampler(name)

        def create() -> SamplingClient:
            result = saved.result()
            if name is None:
                return self._sampler_of(result, record_stability_info)
            return SamplingClient.create(self._channel, result.path, None, record_stability_info)

        return SamplingClient.started(self._channel, create, "save_weights_and_get_sampling_client")

    async def save_weights_and_get_sampling_client_async(
        self,
        name: str | None = None,
        retry_config: Any = None,
        record_stability_info: bool = False,
        kind: Literal["snapshot"] = "snapshot",
    ) -> SamplingClient:
        """Returns a client that samples from the current weights, without blocking the event loop."""
        await self.forwards_async()
        return await self.save_weights_and_get_sampling_client(name, retry_config, record_stability_info, kind)

    def submit_sampling_client(self) -> TinkerFuture[SamplingClient]:
        """Returns a future of a client that samples from the weights as they are after all requests so far."""
        return self._save_unnamed().then(self._sampler_of)

    @starts(SamplingClient)
    def create_sampling_client(
        self, model_path: str, retry_config: Any = None, record_stability_info: bool = False
    ) -> SamplingClient:
        """Returns a client that samples from saved weights; see `save_weights_and_get_sampling_client`."""
        check_sampler_options(self.dialect, retry_config, record_stability_info)
        return SamplingClient.create(self._channel, model_path, None, record_stability_info)

    create_sampling_client_async = in_thread(create_sampling_client)

    def create_base_sampling_client(self, base_model: str | None = None) -> SamplingClient:
        """Returns a client that samples from a base model; by default the one that is trained."""
        return SamplingClient.create(self._channel, None, base_model or self.get_info().model_data.model_name)

    def max_context_length(self) -> int | None:
        """Returns the maximum number of tokens of an input; None if the server does not report it."""
        name = self.get_info().model_data.model_name
        models = self._channel.wait(fetch_capabilities(self._channel.session.connection)).supported_models
        return next((model.max_context_length for model in models if model.model_name == name), None)

    def get_info(self) -> GetInfoResponse:
        """Returns the base model, the LoRA rank and the tokenizer's name."""
        self._check()
        return self._channel.call("/api/v1/get_info", rq.GetInfoRequest(self.model_id), GetInfoResponse)

    get_info_async = in_thread(get_info)

    def get_tokenizer(self) -> Any:
        """Returns the model's tokenizer."""
        data = self.get_info().model_data
        return tokenizer.fetch(self._channel, data.model_name or "", data.tokenizer_id)

    def save_weights_external(
        self, name: str, ttl_seconds: int | None = None, age_encryption_recipients: list[str] | None = None
    ) -> TinkerFuture[SaveWeightsExternalResponse]:
        """Saves weights for download under a name; the result has the `path`.

        Args:
            name: The name.
            ttl_seconds: How long the server keeps them; None keeps them forever.
            age_encryption_recipients: Public keys for which hosted Tinker encrypts the files.
        """
        self._check()
        # Older servers offer the weights that are saved for sampling.
        if not self._channel.wait(checkpoints.can_be_external(self._channel.session)):
            if age_encryption_recipients:
                raise Unsupported(f"{self._channel.url} does not encrypt weights: leave out age_encryption_recipients")
            saved = self.save_weights_for_sampler(name, ttl_seconds)
            return self.unread.add(saved.then(lambda result: SaveWeightsExternalResponse(result.path or "")))
        self._flush()
        endpoint, request = "save_weights_external", rq.SaveWeightsExternalRequest
        settings = name, ttl_seconds, age_encryption_recipients
        return self._submit(endpoint, endpoint, SaveWeightsExternalResponse, request, *settings)

    async def _before_external_async(self) -> None:
        await self.forwards_async()
        asks = checkpoints.can_be_external(self._channel.session)
        await TinkerFuture(self._channel.run(asks), "save_weights_external")

    save_weights_external_async = submitted(save_weights_external, before=_before_external_async)

    def download_checkpoint(self, path: str, folder: Path) -> None:
        """Downloads the adapter saved at a `tinker://` path into an existing folder."""
        self._channel.wait(download.checkpoint(self._channel.session.connection, path, folder))

    def checkpoint_exists(self, path: str) -> bool:
        """Returns whether the checkpoint at a `tinker://` path, of this model or another, exists."""
        return self._channel.wait(checkpoints.exists(self._channel.session.connection, path))

    def list_checkpoints(self) -> list[Checkpoint]:
        """Returns everything that the user has saved on the server, also by other models."""
        return self._channel.wait(checkpoints.listing(self._channel.session.connection))

    def delete_checkpoint(self, path: str, *, missing_ok: bool = False) -> None:
        """Deletes the checkpoint at a `tinker://` path, of this model or another."""
        self._channel.wait(checkpoints.delete(self._channel.session, path, missing_ok=missing_ok))

    @property
    def can_expire(self) -> bool:
        """Whether the server supports `ttl_seconds` on saved states and lets clients change it later."""
        return self.dialect.knows("save_weights", "ttl_seconds") and self.dialect.knows("ttl", "ttl_seconds")

    def set_checkpoint_ttl(self, path: str, ttl_seconds: int | None) -> None:
        """Sets after how many seconds the checkpoint at a `tinker://` path is deleted; None keeps it."""
        self._channel.wait(checkpoints.set_ttl(self._channel.session, path, ttl_seconds))

    def record(self, recording: Recording | None) -> None:
        """Adds all operations of this client's session to a recording; None stops that."""
        self._channel.session.recording = recording

    def _save_unnamed(self) -> TinkerFuture[SaveWeightsForSamplerResponse]:
        self._flush()
        return self._save_for_sampler(sampling_session_seq_id=self._channel.count("sampler"))

    def _sampler_of(self, saved: SaveWeightsForSamplerResponse, record_stability_info: bool = False) -> SamplingClient:
        sampler_id = saved.sampling_session_id or ""
        return self._channel.watch(SamplingClient(self._channel, sampler_id, None, record_stability_info))

    def _save_for_sampler(self, **settings: Any) -> TinkerFuture[SaveWeightsForSamplerResponse]:
        endpoint, request = "save_weights_for_sampler", rq.SaveWeightsForSamplerRequest
        version = None if self.dialect.samples_old_weights else self._sender.live.version(self.model_id)
        if self.dialect.knows(endpoint, "kind"):
            settings["kind"] = "snapshot"
        future = self._submit(endpoint, endpoint, SaveWeightsForSamplerResponse, request, **settings)
        if version is not None:
            self._sender.live.saving(version, future._source)
        return future

    def _submit(self, *args: Any, **kw: Any) -> TinkerFuture[Any]:
        """Sends one request and tracks its future; see `ProtocolSender.submit`."""
        return self.unread.add(self.sender.submit(*args, **kw))


def _explained(error: BaseException, kind: str) -> BaseException:
    """Returns the failure of a step on a model whose optimizer the server does not report, with what may be wrong."""
    if isinstance(error, InvalidInput):
        others = " or ".join(each.__name__ for each in OPTIMIZERS.values() if each.kind != kind)
        error.args = (
            f"{error}. The server does not report the optimizer of the state from which this model was created, and "
            f"this step has the settings of {kind}. If the state was saved with another optimizer, pass {others}.",
        )
    return error


def _cross_entropy_fault(channel: Channel, losses: Losses, model_id: str) -> str | None:
    """Returns why `cross_entropy` is not a plain sum, measured on a second model, which is removed afterwards."""
    info = channel.call("/api/v1/get_info", rq.GetInfoRequest(model_id), GetInfoResponse)
    logger.info("measuring on a second model whether %s computes cross_entropy as a plain sum", channel.url)
    clients: list[TrainingClient] = []
    paths: list[str] = []
    try:
        name = info.model_data.model_name or ""
        clients.append(TrainingClient.create(channel, losses, name, LoraConfig(rank=8, seed=0), None))
        paths.append(clients[0].save_state(f"measured-{uuid.uuid4().hex[:8]}").result().path)
        return measure.cross_entropy_fault(measure.Scratch(clients[0], paths[0]))
    except (InvalidInput, OperationFailed, NotFound) as error:
        return f"it could not be measured: {error}"
    finally:
        for path in models.remove(channel, clients, paths):
            logger.warning(
                "%s was saved to measure gradients, and stays on %s, which did not delete it", path, channel.url
            )
