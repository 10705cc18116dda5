"""The entry point to a server: opens its session and creates the clients that train and sample."""

from __future__ import annotations

import os
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, Self

from tinker_lightning.client import models
from tinker_lightning.client.awaitable import starts
from tinker_lightning.client.files import checkpoints, peft_folder
from tinker_lightning.client.futures import TinkerFuture, in_thread
from tinker_lightning.client.rest import RestClient
from tinker_lightning.client.sampling import SamplingClient, check_sampler_options
from tinker_lightning.client.server_losses import Losses
from tinker_lightning.client.training import TrainingClient
from tinker_lightning.client.transport import discovery
from tinker_lightning.client.transport.channel import Channel
from tinker_lightning.client.transport.retries import RetryPolicy
from tinker_lightning.client.transport.session import SDK_VERSION, Session, fetch_capabilities
from tinker_lightning.client.transport.target import without_password
from tinker_lightning.errors import InvalidInput
from tinker_lightning.threads import background
from tinker_lightning.types import LoraConfig, WeightsInfoResponse
from tinker_lightning.types import responses as rs
from tinker_lightning.types.params import optimizer_kind
from tinker_lightning.types.requests import CreateSessionRequest

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from types import TracebackType

    import httpx

    from tinker_lightning.client.dialects.dialect import Dialect
    from tinker_lightning.client.server_losses import LossHandle
    from tinker_lightning.lossgraph.graph_loss import Source


class ServiceClient:
    """A client of one server, with the arguments and methods of the official SDK's `ServiceClient`.

    End it with `close()` or use it as a context manager. The handshake takes place at the first use.

    Args:
        user_metadata: What the server records about the session.
        project_id: The project that the session belongs to, on hosted Tinker; `TINKER_PROJECT_ID` if not given.
        display_name: How hosted Tinker shows the session.
        base_url: The server, chosen as by `connect()`.
        api_key: The API key; `TINKER_API_KEY` if not given.
        default_headers_overrides: Headers to send with every request.
        dialect: What the server speaks, as in `connect()`.
        transport: Sends the requests instead of the network. Tests pass their own.
        retry_policy: How long failing requests are retried.
        in_process: Registers a Python function as a loss of a session, where the trainer runs in this process.
    """

    def __init__(
        self,
        user_metadata: Mapping[str, str] | None = None,
        project_id: str | None = None,
        *,
        display_name: str | None = None,
        base_url: str | None = None,
        api_key: str | None = None,
        default_headers_overrides: Mapping[str, str] | None = None,
        dialect: str | os.PathLike[str] | Dialect | None = "auto",
        transport: httpx.AsyncBaseTransport | None = None,
        retry_policy: RetryPolicy = RetryPolicy(300.0),  # noqa: B008  # immutable
        in_process: Callable[[str, Callable[..., Any], Source, str], str] | None = None,
    ) -> None:
        if isinstance(user_metadata, str):
            raise InvalidInput(
                f"pass the server by name: ServiceClient(base_url={without_password(user_metadata)!r}), or call "
                "connect()"
            )
        target = discovery.find(base_url, api_key, dialect)
        if transport is not None:
            target = replace(target, transport=transport, in_process=in_process)
        if target.in_process is not None:
            background.enable_openmp_end()
        self.url = without_password(target.url)
        self.storage = target.storage  # where saved states are: a folder of this machine, or the server
        project_id = project_id or os.environ.get("TINKER_PROJECT_ID") or None
        tags = [tag.strip() for tag in os.environ.get("TINKER_TAGS", "").split(",") if tag.strip()]
        request = CreateSessionRequest(tags, dict(user_metadata or {}), SDK_VERSION, display_name, project_id)
        headers = dict(default_headers_overrides or {})
        self._channel = Channel(target, retry_policy, partial(Session.open, request=request), headers)
        self.losses = Losses(self._channel, target.in_process)

    @property
    def session(self) -> Session:
        """The session, opened at the first use."""
        return self._channel.session

    def get_server_capabilities(self) -> rs.ServerCapabilities:
        """Returns what the server supports."""
        self._channel.raise_left_over()
        return self._channel.wait(fetch_capabilities(self.session.connection))

    get_server_capabilities_async = in_thread(get_server_capabilities)

    @starts(TrainingClient)
    def create_lora_training_client(
        self,
        base_model: str | None = None,
        rank: int = 32,
        seed: int | None = None,
        train_mlp: bool = True,
        train_attn: bool = True,
        train_unembed: bool = True,
        user_metadata: dict[str, str] | None = None,
        optimizer: Any = None,
    ) -> TrainingClient:
        """Creates a model on a base model, `TINKER_BASE_MODEL` if none is given.

        Waits until the model exists; where an event loop is running, awaiting the client does.

        Args:
            base_model: The base model.
            rank: The rank of the adapter.
            seed: Makes the initial adapter reproducible.
            train_mlp: Whether the feed-forward layers get an adapter.
            train_attn: Whether the attention layers get one.
            train_unembed: Whether the output layer gets one.
            user_metadata: What the server records about the model.
            optimizer: The optimizer of the model: `"adamw"` (default), `"dimuon"`, or the SDK's configuration of one.
        """
        self._channel.raise_left_over()
        kind = optimizer_kind(optimizer)
        base_model = base_model or os.environ.get("TINKER_BASE_MODEL")
        if not base_model:
            raise InvalidInput("there is no base model: pass base_model='tiny', or set TINKER_BASE_MODEL")
        lora = LoraConfig(rank, seed, train_unembed, train_mlp, train_attn)
        return TrainingClient.create(self._channel, self.losses, base_model, lora, user_metadata, kind)

    create_lora_training_client_async = in_thread(create_lora_training_client)

    @starts(TrainingClient)
    def create_training_client_from_state(
        self,
        path: str,
        base_model: str | None = None,
        user_metadata: dict[str, str] | None = None,
        weights_access_token: str | None = None,
        optimizer: Any = None,
    ) -> TrainingClient:
        """Creates a model with saved weights and a new optimizer state.

        Args:
            path: Where the weights were saved.
            base_model: A base model that is compatible with the one of the weights, e.g. with another context length.
            user_metadata: What the server records about the model.
            weights_access_token: Grants access to weights of another account.
            optimizer: As in `create_lora_training_client`.
        """
        return self._create_from("load_state", path, base_model, user_metadata, weights_access_token, optimizer)

    create_training_client_from_state_async = in_thread(create_training_client_from_state)

    @starts(TrainingClient)
    def create_training_client_from_state_with_optimizer(
        self,
        path: str,
        base_model: str | None = None,
        user_metadata: dict[str, str] | None = None,
        weights_access_token: str | None = None,
    ) -> TrainingClient:
        """Creates a model with saved weights and optimizer state: training resumes exactly where it stopped."""
        return self._create_from("load_state_with_optimizer", path, base_model, user_metadata, weights_access_token)

    create_training_client_from_state_with_optimizer_async = in_thread(create_training_client_from_state_with_optimizer)

    @starts(TrainingClient)
    def create_lora_training_client_from_adapter(
        self,
        path: str | os.PathLike[str],
        base_model: str | None = None,
        user_metadata: dict[str, str] | None = None,
    ) -> TrainingClient:
        """Creates a model that starts from a local PEFT folder, with a new optimizer state.

        Args:
            path: A folder with `adapter_config.json` and `adapter_model.safetensors` of a plain LoRA adapter. Layers
                of the same kind (attention, feed-forward, output) that it leaves out are trained too, from zero.
            base_model: The server's name for the base model; the one in `adapter_config.json` if it is not given.
            user_metadata: What the server records about the model.
        """
        self._channel.raise_left_over()
        uploaded = peft_folder.upload_adapter(self._channel, path, base_model)
        return self.create_training_client_from_state(uploaded, user_metadata=user_metadata)

    create_lora_training_client_from_adapter_async = in_thread(create_lora_training_client_from_adapter)

    @starts(SamplingClient)
    def create_sampling_client(
        self,
        model_path: str | None = None,
        base_model: str | None = None,
        retry_config: Any = None,
        record_stability_info: bool = False,
    ) -> SamplingClient:
        """Creates a client that samples from saved weights or from a base model.

        Args:
            model_path: Where the weights were saved.
            base_model: The base model to sample from, if there is no `model_path`.
            retry_config: Not used; retries follow this client's `retry_policy`.
            record_stability_info: Whether hosted Tinker records what its loss `stable_reinforce` needs.
        """
        self._channel.raise_left_over()
        check_sampler_options(self.session.dialect, retry_config, record_stability_info)
        return SamplingClient.create(self._channel, model_path, base_model, record_stability_info)

    create_sampling_client_async = in_thread(create_sampling_client)

    def create_rest_client(self) -> RestClient:
        """Returns a client that lists and manages training runs, checkpoints and sessions."""
        self._channel.raise_left_over()
        return RestClient(self._channel)

    def checkpoint_exists(self, path: str) -> bool:
        """Returns whether the checkpoint at a `tinker://` path exists."""
        return self._channel.wait(checkpoints.exists(self.session.connection, path))

    def delete_checkpoint(self, path: str, *, missing_ok: bool = False) -> None:
        """Deletes the checkpoint at a `tinker://` path, and waits until it is gone.

        Raises:
            NotFound: If there is none and `missing_ok` is not set.
        """
        self._channel.wait(checkpoints.delete(self.session, path, missing_ok=missing_ok))

    def weights_info(self, path: str) -> WeightsInfoResponse:
        """Returns which base model and adapter the checkpoint at a `tinker://` path belongs to."""
        return self._channel.wait(checkpoints.weights_info(self.session.connection, path))

    def create_custom_loss(self, fn: Callable[..., Any], input_ranks: Mapping[str, int]) -> TinkerFuture[LossHandle]:
        """Traces and uploads a per-datum loss, `fn(logprobs, *inputs) -> (loss, metrics)`.

        Returns a future of the handle to pass to `forward_backward`, which then takes one pass. If the server does not
        run such losses, the loss is computed locally and takes two.

        Args:
            fn: The function. Its metrics are called `custom/<name>:sum` or `custom/<name>:mean`.
            input_ranks: The number of dimensions of `logprobs` and of each input: 0, 1 for `[T]`, 2 for `[T, K]`.

        Raises:
            LossNotTraceable: If the function cannot be traced; names the line.
        """
        self._channel.raise_left_over()
        return self.losses.create(fn, input_ranks)

    def list_loss_functions(self) -> dict[str, Any]:
        """Returns the names of losses under `available_loss_functions`, and what each is under `descriptions`."""
        self._channel.raise_left_over()
        return self.losses.listing()

    def close(
        self, status: Literal["success", "errored", "interrupted"] = "success", detail: str | None = None
    ) -> TinkerFuture[None]:
        """Ends the session and raises the first unhandled failure. Closing again does nothing.

        With `success` it first waits for everything in flight, and evaluates custom losses that are still pending. All
        of that has happened when it returns; the future is there for code that was written for the official SDK.

        Args:
            status: How the session ended.
            detail: What the server records about it.
        """
        self._channel.close(status, read_failures=True, detail=detail)
        return TinkerFuture.from_result(None, "close")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if error is None:
            self.close()
        else:  # the error of the with block is the one to raise
            status = "interrupted" if isinstance(error, KeyboardInterrupt) else "errored"
            self._channel.close(status, read_failures=False)

    def _create_from(
        self,
        operation: Literal["load_state", "load_state_with_optimizer"],
        path: str,
        base_model: str | None,
        user_metadata: dict[str, str] | None,
        token: str | None,
        optimizer: Any = None,
    ) -> TrainingClient:
        self._channel.raise_left_over()
        info = self.weights_info(path)
        if info.lora_rank is None:
            raise InvalidInput(f"{path}: the server does not report its LoRA rank, so no model can be created for it")
        layers = (getattr(info, name) is not False for name in ("train_unembed", "train_mlp", "train_attn"))
        lora, kind = LoraConfig(info.lora_rank, None, *layers), optimizer_kind(optimizer or info.optimizer_config)
        settings = self._channel, self.losses, base_model or info.base_model, lora, user_metadata, kind
        if models.in_one_request(self.session.dialect) and token is None:
            client = TrainingClient.create(*settings, (info, path, operation))
        else:
            client = TrainingClient.create(*settings)
            load = client.load_state if operation == "load_state" else client.load_state_with_optimizer
            load(path, token).result()
        if operation == "load_state_with_optimizer" and info.optimizer_config is None:
            client.find_optimizer()
        return client


def connect(
    url: str | None = None, *, api_key: str | None = None, dialect: str | os.PathLike[str] | Dialect = "auto"
) -> ServiceClient:
    """Connects to a Tinker server.

    Args:
        url: The server's URL, or `"embedded"` for a trainer in this process. If not given: `TINKER_BASE_URL`, then
            hosted Tinker if there is an API key, then the embedded trainer.
        api_key: The API key; `TINKER_API_KEY` if not given.
        dialect: What the server speaks: `"auto"` to detect it, the name of a known dialect, a `Dialect`, or the path of
            a JSON file that `tinker-lightning doctor --save` has written.

    Raises:
        InvalidInput: If the URL or the dialect is invalid.
    """
    return ServiceClient(base_url=url, api_key=api_key, dialect=dialect)
