"""The way to a server: opens its session and makes the clients that train and sample."""

from __future__ import annotations

import os
import threading
import weakref
from concurrent.futures import CancelledError
from typing import TYPE_CHECKING, Any, Literal, Self, TypeVar
from urllib.parse import urlencode

from tinker_lightning.client import checkpoints, download, tokenizer
from tinker_lightning.client.connection import Connection
from tinker_lightning.client.credentials import Credentials
from tinker_lightning.client.futures import raise_together
from tinker_lightning.client.loop import BackgroundLoop
from tinker_lightning.client.loss_uploads import Losses
from tinker_lightning.client.operations import Operation, perform
from tinker_lightning.client.retry_policy import RetryPolicy
from tinker_lightning.client.sampling import SamplingClient
from tinker_lightning.client.session import Session, fetch_capabilities
from tinker_lightning.client.training import TrainingClient
from tinker_lightning.errors import ClientClosed, ClientForked, InvalidInput
from tinker_lightning.types import CreateModelResponse, LoraConfig, WeightsInfoResponse
from tinker_lightning.types import requests as rq
from tinker_lightning.types import responses as rs
from tinker_lightning.wire import json as wire_json

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Mapping
    from concurrent.futures import Future
    from pathlib import Path
    from types import TracebackType

    import httpx

    from tinker_lightning.client.futures import TinkerFuture, UnreadFailures
    from tinker_lightning.client.loss_handle import LossHandle
    from tinker_lightning.lossgraph.batch_loss import Source

T = TypeVar("T")
C = TypeVar("C", TrainingClient, SamplingClient)


class ServiceClient:
    """The way to a server. `connect()` makes it; a context manager or `close()` ends it.

    The handshake takes place at the first use.

    Args:
        url: Where the server is.
        api_key: What it wants to see.
        transport: How requests get there; None for the network. The seam for tests.
        retry_policy: How long failing requests are tried again.
        on_close: Called when the client was closed.
        in_process: Registers a Python function as a loss of a session, where the trainer runs in this process.
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
    ) -> None:
        self.url = url
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._connection = Connection(url, Credentials(api_key), transport, retry_policy)
        self._loop = BackgroundLoop(self._connection.close)
        self._session: Session | None = None
        self._closed = False
        # Also for a client that nobody closes: its threads end with it.
        self._release = weakref.finalize(self, _release, self._pid, self._loop, on_close)
        self.losses = Losses(self, in_process)
        # What each client has not read yet, kept for those that are gone.
        self._unread: list[tuple[weakref.ref[TrainingClient | SamplingClient], UnreadFailures]] = []

    def get_server_capabilities(self) -> rs.ServerCapabilities:
        """What the server has."""
        self._check()
        return self._wait(fetch_capabilities(self.session.connection))

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
        """A new model on a base model, `TINKER_BASE_MODEL` if none is named; waits until it is there."""
        self._check()
        base_model = base_model or os.environ.get("TINKER_BASE_MODEL")
        if not base_model:
            raise InvalidInput("no base model is named: pass base_model='tiny', or set TINKER_BASE_MODEL")
        config = LoraConfig(rank, seed, train_unembed, train_mlp, train_attn)
        session = self.session
        request = rq.CreateModelRequest(
            session.session_id, self.count("model"), base_model, config, user_metadata, {"type": "adamw"}
        )
        operation = Operation("create_model", "create_model", wire_json.dumps(request), CreateModelResponse)
        return self._known(TrainingClient(self, self._wait(perform(session, operation)).model_id))

    def create_training_client_from_state(
        self, path: str, user_metadata: dict[str, str] | None = None
    ) -> TrainingClient:
        """A new model with saved weights; AdamW starts anew."""
        client = self._client_for(path, user_metadata)
        client.load_state(path).result()
        return client

    def create_training_client_from_state_with_optimizer(
        self, path: str, user_metadata: dict[str, str] | None = None
    ) -> TrainingClient:
        """A new model with saved weights and AdamW's state: training goes on as if it had never stopped."""
        client = self._client_for(path, user_metadata)
        client.load_state_with_optimizer(path).result()
        return client

    def create_sampling_client(self, model_path: str | None = None, base_model: str | None = None) -> SamplingClient:
        """A client that samples from saved weights or from a base model."""
        self._check()
        request = rq.CreateSamplingSessionRequest(
            self.session.session_id, self.count("sampler"), base_model, model_path
        )
        path = "/api/v1/create_sampling_session"
        created = self.call(path, request, rs.CreateSamplingSessionResponse)
        return self.sampling_client(created.sampling_session_id)

    def checkpoint_exists(self, path: str) -> bool:
        """Whether what was saved under a `tinker://` path is still there."""
        self.check_usable()
        return self._wait(checkpoints.exists(self.session.connection, path))

    def delete_checkpoint(self, path: str, *, missing_ok: bool = False) -> None:
        """Removes what was saved under a `tinker://` path, and waits until it is gone.

        Raises:
            NotFound: If there is nothing under that path and `missing_ok` is not set.
        """
        self.check_usable()
        self._wait(checkpoints.delete(self.session.connection, path, missing_ok=missing_ok))

    def download_checkpoint(self, path: str, folder: Path) -> None:
        """Downloads the adapter that was saved under a `tinker://` path into a folder that exists."""
        self.check_usable()
        self._wait(download.checkpoint(self.session.connection, path, folder))

    def create_custom_loss(self, fn: Callable[..., Any], input_ranks: Mapping[str, int]) -> TinkerFuture[LossHandle]:
        """A loss of one datum, `fn(logprobs, *inputs) -> (loss, metrics)`, traced and uploaded.

        A future of the handle to pass to `forward_backward`, which then costs one pass. Where the server does not run
        such losses, the handle is computed here and costs two.

        Args:
            fn: The function. Metrics are called `custom/<name>:sum` or `custom/<name>:mean`.
            input_ranks: The number of dimensions of `logprobs` and of each input: 0, 1 for `[T]`, 2 for `[T, K]`.

        Raises:
            LossNotTraceable: If the function does what cannot be traced; names the line.
        """
        self._check()
        return self.losses.create(fn, input_ranks)

    def list_loss_functions(self) -> dict[str, Any]:
        """The losses that passes can name, under `available_loss_functions`, and what each is, under `descriptions`."""
        self._check()
        return self.losses.listing()

    def close(self, status: Literal["success", "errored", "interrupted"] = "success") -> None:
        """Ends the session, and raises the first failure that nobody has read. Closing again does nothing."""
        if not self._begin_closing():
            return
        failures: list[BaseException] = []
        try:
            for _, unread in self._unread:
                if status == "success":
                    unread.wait()
                failures += unread.take_failures()
        finally:
            self._end("errored" if failures else status)
        raise_together(failures)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if error is None:
            self.close()
        elif self._begin_closing():  # the error that is under way is the one to show
            self._end("interrupted" if isinstance(error, KeyboardInterrupt) else "errored")

    # What the clients of this service need of it.

    @property
    def session(self) -> Session:
        """The session, opened at the first use."""
        self.check_usable()
        with self._lock:
            if self._session is None:
                self._session = self._wait(Session.open(self._connection))
            return self._session

    def count(self, kind: str) -> int:
        """The next number of a kind in this session."""
        session = self.session
        with self._lock:
            return session.count(kind)

    def run(self, coroutine: Coroutine[Any, Any, T]) -> Future[T]:
        """Runs a coroutine in the background."""
        return self._loop.run(coroutine)

    def call(self, path: str, request: Any, result: type[T]) -> T:
        """A request that is answered at once."""
        self.check_usable()
        return self._wait(self._connection.post(path, request, result))

    def fetch(self, path: str, result: type[T]) -> T:
        """Something that is there to be read."""
        self.check_usable()
        return self._wait(self._connection.get(path, result))

    def weights_info(self, path: str) -> WeightsInfoResponse:
        """Which base model and adapter were saved under a path."""
        return self.call("/api/v1/weights_info", rq.WeightsInfoRequest(path), WeightsInfoResponse)

    def sampling_client(self, sampler_id: str) -> SamplingClient:
        """A client for a sampler that the server has made."""
        return self._known(SamplingClient(self, sampler_id))

    def saves_external_weights(self) -> bool:
        """Whether the server has a way of its own to save what will be downloaded."""
        self.check_usable()
        return self._wait(checkpoints.can_be_external(self.session.connection))

    def tokenizer(self, model_name: str, tokenizer_id: str | None) -> Any:
        """The tokenizer of a model: from the server if it hands it out, else from a folder or the hub."""
        if self.session.extensions.tokenizer_files:
            found = self.fetch(f"/ext/v1/tokenizer?{urlencode({'model': model_name})}", tokenizer.TokenizerFiles)
            return tokenizer.load_files(found.files)
        return tokenizer.load(tokenizer_id or model_name)

    def check_usable(self) -> None:
        """Refuses use after close and in a forked process."""
        if os.getpid() != self._pid:
            raise ClientForked(
                "this client was made in another process, whose threads and connections did not come along. Make a new "
                "one here, or use the 'spawn' start method."
            )
        if self._closed:
            raise ClientClosed("this client was closed. Make a new one with connect().")

    def _client_for(self, path: str, user_metadata: dict[str, str] | None) -> TrainingClient:
        info = self.weights_info(path)
        if info.lora_rank is None:
            raise InvalidInput(
                f"{path}: the server does not say which LoRA rank it has, so no model can be made for it"
            )
        parts = {
            name: value
            for name in ("train_mlp", "train_attn", "train_unembed")
            if (value := getattr(info, name)) is not None
        }
        return self.create_lora_training_client(info.base_model, info.lora_rank, user_metadata=user_metadata, **parts)

    def _check(self) -> None:
        """Refuses use after close, and raises what clients that are gone have left unread."""
        self.check_usable()
        with self._lock:
            self._forget_the_gone()
            left = [unread for client, unread in self._unread if client() is None]
        for unread in left:
            unread.raise_first()

    def _known(self, client: C) -> C:
        with self._lock:
            self._forget_the_gone()  # a run that makes a sampler at each step makes many
            self._unread.append((weakref.ref(client), client.unread))
        return client

    def _forget_the_gone(self) -> None:
        """Lets go of clients that nobody has any more and that leave no failure."""
        self._unread = [(client, unread) for client, unread in self._unread if client() or not unread.is_empty]

    def _wait(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Runs a coroutine in the background and waits for it; whoever is interrupted stops it."""
        future = self._loop.run(coroutine)
        try:
            return future.result()
        except CancelledError:
            raise ClientClosed("this client was closed meanwhile. Make a new one with connect().") from None
        finally:
            future.cancel()

    def _begin_closing(self) -> bool:
        """Whether it is for the caller to close."""
        if os.getpid() != self._pid:
            return False
        with self._lock:
            closed, self._closed = self._closed, True
        return not closed

    def _end(self, status: str) -> None:
        try:
            if self._session is not None:
                self._wait(self._session.finish(status))
        finally:
            self._release()


def _release(pid: int, loop: BackgroundLoop, on_close: Callable[[], None] | None) -> None:
    if os.getpid() != pid:
        return  # a fork has the threads only on paper
    loop.close()
    if on_close is not None:
        on_close()
