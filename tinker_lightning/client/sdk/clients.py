"""Wraps the official SDK's training and sampling clients with the methods, types and errors of ours.

Imported only after the user has passed such a client, so that `tinker` stays an extra.
"""

from __future__ import annotations

import asyncio
import inspect
import weakref
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import httpx
import tinker
from tinker import types as sdk

from tinker_lightning.client.files import checkpoints, download
from tinker_lightning.client.futures import TinkerFuture, awaited
from tinker_lightning.client.sampling import BaseSamplingClient
from tinker_lightning.client.sdk import convert
from tinker_lightning.client.sdk.convert import Calls
from tinker_lightning.client.sdk.sender import SdkSender
from tinker_lightning.client.training_base import BaseTrainingClient
from tinker_lightning.errors import InvalidInput, NotFound, Unsupported
from tinker_lightning.threads.background import BackgroundLoop
from tinker_lightning.types import (
    GetInfoResponse,
    OptimStepResponse,
    SampleResponse,
    SaveWeightsForSamplerResponse,
    SaveWeightsResponse,
)
from tinker_lightning.types.params import to_optim_params
from tinker_lightning.types.responses import Checkpoint, ModelData, SaveWeightsExternalResponse

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tinker_lightning.client.dialects.dialect import Dialect
    from tinker_lightning.client.server_losses import Losses
    from tinker_lightning.types import SamplingParams

T = TypeVar("T")

# How long a process that ends waits for requests in flight, in seconds.
_EXIT_SECONDS = 5.0
_SET_TTL = "set_checkpoint_ttl_from_tinker_path"  # of newer versions of the SDK


class OfficialTrainingClient(BaseTrainingClient):
    """The official SDK's `TrainingClient` as a `TrainingBackend`; takes the SDK's types and ours, returns ours.

    Args:
        client: The client that is called.
        inner: The SDK's client, if that is another one, which the first wraps.
        dialect: What the server speaks; detected at the first use if it is not given.
        sender: Sends the requests, in place of one that calls `client`.
    """

    losses: Losses | None = None  # the SDK has no call to upload losses
    optimizer_kind: str | None = None  # the SDK's client does not report it, and its server checks it

    def __init__(
        self, client: Any, inner: Any = None, dialect: Dialect | None = None, *, sender: SdkSender | None = None
    ) -> None:
        self._sdk = sender or SdkSender(client, client if inner is None else inner, dialect)
        super().__init__(self._sdk)
        weakref.finalize(self, self.unread.log_failures, _EXIT_SECONDS)

    @property
    def client(self) -> Any:
        """The client that is called: the one that was passed."""
        return self._sdk.client

    @property
    def _calls(self) -> Calls:
        return self._sdk.calls

    def optim_step(self, optim_params: Any = None) -> TinkerFuture[OptimStepResponse]:
        """Takes an AdamW step on the accumulated gradient."""
        ours = to_optim_params(optim_params)
        params = convert.settings(getattr(self._sdk.types, type(ours).__name__), ours)
        with self._step(ours):
            return self._submit(
                "optim_step", lambda: self.client.optim_step(params), lambda r: OptimStepResponse(r.metrics)
            )

    def save_state(
        self,
        name: str,
        ttl_seconds: int | None = None,
        overwrite: bool = False,
        user_metadata: dict[str, str] | None = None,
    ) -> TinkerFuture[SaveWeightsResponse]:
        """Saves weights and optimizer state under a name."""
        self._flush()
        return self._submit(
            "save_state",
            partial(
                self._save,
                "save_state",
                name,
                ttl_seconds=ttl_seconds,
                overwrite=overwrite,
                user_metadata=user_metadata,
            ),
            lambda r: SaveWeightsResponse(r.path),
        )

    def save_weights_for_sampler(
        self, name: str, ttl_seconds: int | None = None, user_metadata: dict[str, str] | None = None
    ) -> TinkerFuture[SaveWeightsForSamplerResponse]:
        """Saves weights for sampling under a name."""
        self._flush()
        version = None if self.dialect.samples_old_weights else self._sender.live.version(self.model_id)
        future = self._submit(
            "save_weights_for_sampler",
            partial(self._save, "save_weights_for_sampler", name, ttl_seconds=ttl_seconds, user_metadata=user_metadata),
            lambda r: SaveWeightsForSamplerResponse(path=r.path),
        )
        if version is not None:
            self._sender.live.saving(version, future._source)
        return future

    def save_weights_and_get_sampling_client(self, name: str | None = None) -> OfficialSamplingClient:
        """Returns a client that samples from the current weights."""
        if name is not None:
            return self.create_sampling_client(self.save_weights_for_sampler(name).result().path or "")
        self._flush()
        save = self.client.save_weights_and_get_sampling_client
        if self.dialect.samples_old_weights:
            return self._sampler("save_weights_for_sampler", save)
        version = self._sender.live.version(self.model_id)
        guard = partial(self._sender.live.sample_version, f"weights of {self.model_id} that were saved before", version)
        return self._sampler("save_weights_for_sampler", save, guard)

    def submit_sampling_client(self) -> TinkerFuture[OfficialSamplingClient]:
        """Returns a client that samples from the current weights as a future; waits, because the SDK does."""
        return TinkerFuture.from_result(self.save_weights_and_get_sampling_client(), "save_weights_for_sampler")

    def create_sampling_client(self, model_path: str) -> OfficialSamplingClient:
        """Returns a client that samples from saved weights."""
        create = partial(self.client.create_sampling_client, model_path)
        if self.dialect.samples_old_weights:
            return self._sampler("create_sampling_client", create)
        guard = partial(self._sender.live.sample, model_path, checkpoints.run_of(model_path))
        return self._sampler("create_sampling_client", create, guard)

    def create_base_sampling_client(self, base_model: str | None = None) -> OfficialSamplingClient:
        """Returns a client that samples from a base model; by default the one that is trained."""
        name = base_model or self._info().model_data.model_name  # from which the SDK loads the tokenizer
        create = partial(tinker.SamplingClient.create, self._sdk.inner.holder, base_model=name)
        return self._sampler("create_sampling_client", create)

    def _sampler(
        self, operation: str, create: Callable[[], Any], guard: Callable[..., Any] = lambda send: send()
    ) -> OfficialSamplingClient:
        return OfficialSamplingClient(self._calls.translated(operation, create), guard)

    def max_context_length(self) -> int | None:
        """Returns None: the SDK's training client does not report it, and the server checks it."""
        return None

    def get_info(self) -> GetInfoResponse:
        """Returns the base model and the LoRA rank."""
        info = self._info()
        name, tokenizer_id = info.model_data.model_name, info.model_data.tokenizer_id
        if name == tokenizer_id and info.model_name:
            name = info.model_name  # our trainer tells SDK 0.38 the folder of the tokenizer in place of the name
        data = ModelData(info.model_data.arch, name, tokenizer_id)
        return GetInfoResponse(info.model_id, data, bool(info.is_lora), info.lora_rank, info.model_name)

    def _info(self) -> Any:
        """Returns what the SDK's client knows about its model."""
        self._check()
        return self._calls.translated("get_info", self.client.get_info)

    def get_tokenizer(self) -> Any:
        """Returns the model's tokenizer."""
        self._check()
        return self._calls.translated("get_tokenizer", self.client.get_tokenizer)

    def save_weights_external(
        self, name: str, ttl_seconds: int | None = None, age_encryption_recipients: list[str] | None = None
    ) -> TinkerFuture[SaveWeightsExternalResponse]:
        """Saves weights for download under a name, encrypted for recipients if any are given."""
        self._flush()
        return self._submit(
            "save_weights_external",
            partial(
                self._save,
                "save_weights_external",
                name,
                ttl_seconds=ttl_seconds,
                age_encryption_recipients=age_encryption_recipients,
            ),
            lambda r: SaveWeightsExternalResponse(r.path),
        )

    def download_checkpoint(self, path: str, folder: Path) -> None:
        """Downloads the adapter that `save_weights_external` saved into an existing folder."""

        def sign() -> download.Addresses:
            answer = self._rest.get_external_weights_urls(path).result()
            return download.Addresses(answer.urls, answer.expires)

        ask = partial(asyncio.to_thread, self._calls.translated, "get_external_weights_urls", sign)
        client = httpx.AsyncClient(follow_redirects=True)
        loop = BackgroundLoop(client.aclose)
        try:
            loop.run(download.files(partial(client.stream, "GET"), ask, folder)).result()
        finally:
            loop.close()

    def checkpoint_exists(self, path: str) -> bool:
        """Returns whether the checkpoint at a `tinker://` path exists."""
        run, _ = checkpoints.parse(path)
        try:
            listing = self._calls.translated("list_checkpoints", lambda: self._rest.list_checkpoints(run).result())
        except NotFound:
            return False
        return any(found.tinker_path == path for found in listing.checkpoints)

    def list_checkpoints(self) -> list[Checkpoint]:
        """Returns everything that the user has saved on the server, also by other models."""
        found: list[Checkpoint] = []
        while True:
            ask = partial(self._rest.list_user_checkpoints, checkpoints.PAGE, len(found))
            page = self._calls.translated("list_checkpoints", ask)
            found += map(convert.checkpoint, page.checkpoints)
            if not page.checkpoints or page.cursor is None or len(found) >= page.cursor.total_count:
                return found

    def delete_checkpoint(self, path: str, *, missing_ok: bool = False) -> None:
        """Deletes the checkpoint at a `tinker://` path."""
        checkpoint = checkpoints.parse(path)
        unsupported = Unsupported(f"{path} stays on the server, which cannot delete checkpoints")
        if not self.dialect.deletes_checkpoints:
            raise unsupported
        if not missing_ok and not self.checkpoint_exists(path):
            raise checkpoints.missing(path)
        try:
            self._calls.translated("delete_checkpoint", lambda: self._rest.delete_checkpoint(*checkpoint).result())
        except NotFound:  # gone since, or there is no such endpoint
            if self.checkpoint_exists(path):
                raise unsupported from None

    @property
    def can_expire(self) -> bool:
        """Whether the server supports `ttl_seconds` on saved states and lets clients change it later."""
        known = inspect.signature(self.client.save_state).parameters
        fields = (self.dialect.knows(each, "ttl_seconds") for each in ("save_weights", "ttl"))
        return "ttl_seconds" in known and _SET_TTL in dir(tinker.RestClient) and all(fields)

    def set_checkpoint_ttl(self, path: str, ttl_seconds: int | None) -> None:
        """Sets after how many seconds the checkpoint at a `tinker://` path is deleted; None keeps it."""
        checkpoints.parse(path)
        self._calls.translated("set_checkpoint_ttl", lambda: getattr(self._rest, _SET_TTL)(path, ttl_seconds).result())

    @property
    def _rest(self) -> tinker.RestClient:
        return tinker.RestClient(self._sdk.inner.holder)

    def _save(self, method: str, name: str, **optional: Any) -> Any:
        """Calls a save with the arguments that have a value; versions of the SDK differ in the arguments they know."""
        given = {each: value for each, value in optional.items() if value}
        return convert.build(getattr(self.client, method), name, **given)

    def _submit(self, operation: str, send: Callable[[], Any], result: Callable[[Any], T]) -> TinkerFuture[T]:
        """Sends with the SDK; returns a tracked future of the converted result."""
        return self.unread.add(self._calls.submit(operation, send, result))


class OfficialSamplingClient(BaseSamplingClient):
    """The official SDK's `SamplingClient` with our methods and types.

    Args:
        client: The SDK's client.
        guard: Sends a sample, or raises if sampling would harm a model in training.
    """

    def __init__(self, client: tinker.SamplingClient, guard: Callable[..., Any] = lambda send: send()) -> None:
        super().__init__()
        self.client = client
        self._guard = guard
        self._calls = Calls(None)

    def _sample(
        self, prompt: Any, num_samples: int, params: SamplingParams, options: dict[str, Any]
    ) -> TinkerFuture[SampleResponse]:
        self.unread.raise_first()
        if num_samples < 1:
            raise InvalidInput(f"num_samples must be at least 1, got {num_samples}")
        targets = options.pop("target_prompt_logprobs")
        send = partial(
            convert.build,
            self.client.sample,
            prompt=convert.model_input(prompt),
            num_samples=num_samples,
            sampling_params=convert.settings(sdk.SamplingParams, params),
            include_prompt_logprobs=options.pop("prompt_logprobs"),
            target_prompt_logprobs=None if targets is None else convert.tensor(targets),
            **options,
        )
        sent: TinkerFuture[SampleResponse] = self._guard(partial(self._calls.submit, "sample", send, convert.sampled))
        return sent

    def compute_logprobs(
        self, prompt: Any, prompt_logprobs_last_n: int | None = None
    ) -> TinkerFuture[list[float | None]]:
        """Returns the log-probability of each token of a prompt, or of its last n."""
        self.unread.raise_first()
        compute, text = self.client.compute_logprobs, convert.model_input(prompt)
        send = partial(convert.build, compute, prompt=text, prompt_logprobs_last_n=prompt_logprobs_last_n)
        sent: TinkerFuture[list[float | None]] = self._guard(
            partial(self._calls.submit, "compute_logprobs", send, list)
        )
        return self.unread.add(sent)

    compute_logprobs_async = awaited(compute_logprobs)

    def get_base_model(self) -> str:
        """Returns the name of the base model."""
        return str(self._calls.translated("get_base_model", self.client.get_base_model))

    def get_tokenizer(self) -> Any:
        """Returns the tokenizer of the base model."""
        return self._calls.translated("get_tokenizer", self.client.get_tokenizer)
