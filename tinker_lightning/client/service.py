"""The entry point to a server: opens its session and creates the clients that train and sample."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any, Literal, Self

from tinker_lightning.client import checkpoints, download
from tinker_lightning.client.channel import Channel
from tinker_lightning.client.loss_uploads import Losses
from tinker_lightning.client.retry_policy import RetryPolicy
from tinker_lightning.client.sampling import SamplingClient
from tinker_lightning.client.session import fetch_capabilities
from tinker_lightning.client.training import TrainingClient
from tinker_lightning.errors import InvalidInput
from tinker_lightning.types import LoraConfig, WeightsInfoResponse
from tinker_lightning.types import requests as rq
from tinker_lightning.types import responses as rs

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path
    from types import TracebackType

    import httpx

    from tinker_lightning.client.dialects.dialect import Dialect
    from tinker_lightning.client.futures import TinkerFuture
    from tinker_lightning.client.loss_handle import LossHandle
    from tinker_lightning.client.session import Session
    from tinker_lightning.lossgraph.graph_loss import Source


class ServiceClient:
    """A client of one server. Create it with `connect()`; end it with `close()` or use it as a context manager.

    The handshake takes place at the first use.

    Args:
        url: The server's URL.
        api_key: The API key, if the server requires one.
        transport: Sends the requests; None for the network. Tests pass their own.
        retry_policy: How long failing requests are retried.
        on_close: Called after the client is closed.
        in_process: Registers a Python function as a loss of a session, where the trainer runs in this process.
        dialect: What the server speaks; detected if it is not given.
    """

    def __init__(
        self,
        url: str,
        api_key: str | None = None,
        *,
        transport: httpx.AsyncBaseTransport | None = None,
        retry_policy: RetryPolicy = RetryPolicy(300.0),  # noqa: B008  # immutable
        on_close: Callable[[], None] | None = None,
        in_process: Callable[[str, Callable[..., Any], Source, str], str] | None = None,
        dialect: Dialect | None = None,
    ) -> None:
        self.url = url
        self._channel = Channel(url, api_key, transport, retry_policy, on_close, dialect)
        self.losses = Losses(self._channel, in_process)

    @property
    def session(self) -> Session:
        """The session, opened at the first use."""
        return self._channel.session

    def get_server_capabilities(self) -> rs.ServerCapabilities:
        """Returns what the server supports."""
        self._channel.raise_left_over()
        return self._channel.wait(fetch_capabilities(self.session.connection))

    def create_lora_training_client(
        self,
        base_model: str | None = None,
        rank: int = 32,
        seed: int | None = None,
        train_mlp: bool = True,
        train_attn: bool = True,
        train_unembed: bool = True,
        user_metadata: dict[str, str] | None = None,
    ) -> TrainingClient:
        """Creates a model on a base model, `TINKER_BASE_MODEL` if none is given; waits until it exists."""
        self._channel.raise_left_over()
        base_model = base_model or os.environ.get("TINKER_BASE_MODEL")
        if not base_model:
            raise InvalidInput("there is no base model: pass base_model='tiny', or set TINKER_BASE_MODEL")
        lora = LoraConfig(rank, seed, train_unembed, train_mlp, train_attn)
        return TrainingClient.create(self._channel, self.losses, base_model, lora, user_metadata)

    def create_training_client_from_state(
        self, path: str, user_metadata: dict[str, str] | None = None
    ) -> TrainingClient:
        """Creates a model with saved weights and a new optimizer state."""
        client = self._client_for(path, user_metadata)
        client.load_state(path).result()
        return client

    def create_training_client_from_state_with_optimizer(
        self, path: str, user_metadata: dict[str, str] | None = None
    ) -> TrainingClient:
        """Creates a model with saved weights and optimizer state: training resumes exactly where it stopped."""
        client = self._client_for(path, user_metadata)
        client.load_state_with_optimizer(path).result()
        return client

    def create_sampling_client(self, model_path: str | None = None, base_model: str | None = None) -> SamplingClient:
        """Creates a client that samples from saved weights or from a base model."""
        self._channel.raise_left_over()
        return SamplingClient.create(self._channel, model_path, base_model)

    def checkpoint_exists(self, path: str) -> bool:
        """Returns whether the checkpoint at a `tinker://` path exists."""
        return self._channel.wait(checkpoints.exists(self.session.connection, path))

    def delete_checkpoint(self, path: str, *, missing_ok: bool = False) -> None:
        """Deletes the checkpoint at a `tinker://` path, and waits until it is gone.

        Raises:
            NotFound: If there is none and `missing_ok` is not set.
        """
        self._channel.wait(checkpoints.delete(self.session, path, missing_ok=missing_ok))

    def download_checkpoint(self, path: str, folder: Path) -> None:
        """Downloads the adapter saved at a `tinker://` path into an existing folder."""
        self._channel.wait(download.checkpoint(self.session.connection, path, folder))

    def weights_info(self, path: str) -> WeightsInfoResponse:
        """Returns which base model and adapter the checkpoint at a `tinker://` path belongs to."""
        return self._channel.call("/api/v1/weights_info", rq.WeightsInfoRequest(path), WeightsInfoResponse)

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

    def close(self, status: Literal["success", "errored", "interrupted"] = "success") -> None:
        """Ends the session and raises the first failure that nobody has read. Closing again does nothing.

        With `success` it first waits for everything in flight, and evaluates custom losses that are still pending.
        """
        self._channel.close(status, read_failures=True)

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

    def _client_for(self, path: str, user_metadata: dict[str, str] | None) -> TrainingClient:
        info = self.weights_info(path)
        if info.lora_rank is None:
            raise InvalidInput(f"{path}: the server does not report its LoRA rank, so no model can be created for it")
        return self.create_lora_training_client(
            info.base_model,
            info.lora_rank,
            train_mlp=info.train_mlp is not False,
            train_attn=info.train_attn is not False,
            train_unembed=info.train_unembed is not False,
            user_metadata=user_metadata,
        )
