"""A client that samples from fixed weights on a server."""

from __future__ import annotations

import base64
import logging
import os
import secrets
import threading
from abc import ABC, abstractmethod
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Self

from tinker_lightning.client.awaitable import AwaitableClient
from tinker_lightning.client.dialects.dialect import Dialect
from tinker_lightning.client.files import checkpoints, tokenizer
from tinker_lightning.client.futures import TinkerFuture, UnreadFailures, awaited, in_thread
from tinker_lightning.client.transport.channel import joined
from tinker_lightning.client.transport.operations import Operation, encode, perform, recorded
from tinker_lightning.errors import InvalidInput, InvalidMessage, ResultExpired, Unsupported
from tinker_lightning.losses.builtin import UNPUBLISHED
from tinker_lightning.types import SampleResponse, SamplingParams, TensorData
from tinker_lightning.types.model_input import to_model_input
from tinker_lightning.types.params import to_sampling_params
from tinker_lightning.types.requests import CreateSamplingSessionRequest, SampleRequest
from tinker_lightning.types.responses import CreateSamplingSessionResponse, GetSamplerResponse
from tinker_lightning.wire import json as wire_json

if TYPE_CHECKING:
    from collections.abc import Callable

    from tinker_lightning.client.transport.channel import Channel
    from tinker_lightning.client.transport.session import Session


logger = logging.getLogger("tinker_lightning.client")


class BaseSamplingClient(ABC):
    """Samples from fixed weights. Sampling methods return a future at once."""

    def __init__(self) -> None:
        self.unread = UnreadFailures()

    def sample(
        self,
        prompt: Any,
        num_samples: int,
        sampling_params: Any,
        include_prompt_logprobs: bool = False,
        topk_prompt_logprobs: int = 0,
        topk_sample_logprobs: int = 0,
        target_prompt_logprobs: Any = None,
        prompt_alt_tokens_k: int = 0,
        prompt_logprobs_last_n: int | None = None,
    ) -> TinkerFuture[SampleResponse]:
        """Samples continuations of a prompt of T tokens.

        Args:
            prompt: The tokens.
            num_samples: The number of independent continuations.
            sampling_params: How tokens are chosen.
            include_prompt_logprobs: Whether to return the log-probabilities of the prompt's tokens.
            topk_prompt_logprobs: How many of the most likely tokens to return at each position of the prompt.
            topk_sample_logprobs: How many of the most likely tokens to return at each sampled position.
            target_prompt_logprobs: Token ids `[T - 1, K]` to score in place of the prompt's tokens from the second on;
                -1 skips an entry.
            prompt_alt_tokens_k: How many tokens to draw in place of each token of the prompt from the second on.
            prompt_logprobs_last_n: Limits the log-probabilities and most likely tokens of the prompt to its last n.

        Raises:
            Unsupported: If an option is given that the installed version of the official SDK does not have.
        """
        targets = None if target_prompt_logprobs is None else TensorData.from_data(target_prompt_logprobs)
        options = {
            "prompt_logprobs": include_prompt_logprobs,
            "topk_prompt_logprobs": topk_prompt_logprobs,
            "topk_sample_logprobs": topk_sample_logprobs,
            "target_prompt_logprobs": targets,
            "prompt_alt_tokens_k": prompt_alt_tokens_k,
            "prompt_logprobs_last_n": prompt_logprobs_last_n,
        }
        params = to_sampling_params(sampling_params)
        return self.unread.add(self._sample(prompt, num_samples, params, options))

    sample_async = awaited(sample)

    @abstractmethod
    def _sample(
        self, prompt: Any, num_samples: int, params: SamplingParams, options: dict[str, Any]
    ) -> TinkerFuture[SampleResponse]:
        """Sends a request; options have the names of `SampleRequest`."""


def check_sampler_options(
    dialect: Dialect, retry_config: Any, record_stability_info: bool, kind: str = "snapshot"
) -> None:
    """Checks the arguments of the SDK's sampling clients that ours does not use, or not on all servers.

    Raises:
        Unsupported: If the server is to record data for a loss that it does not have, or if later saves are to change
            the weights that the client samples from.
    """
    if kind != "snapshot":
        raise Unsupported(
            f"kind={kind!r} is not supported: the weights of a sampling client never change. Leave kind out, and "
            "create another sampling client after each step that should count."
        )
    if retry_config is not None:
        logger.info("retry_config is not used: requests are retried as ServiceClient(retry_policy=...) says")
    if record_stability_info:
        dialect.check_loss(UNPUBLISHED)


# How often a sample is requested again whose result the server no longer has.
_RESAMPLINGS = 3
# How many copies of a sampling client, and how many requests of each, can be told apart.
_CLONES = 10**9


class SamplingClient(AwaitableClient, BaseSamplingClient):
    """Samples from fixed weights. Sampling methods return a future at once. Created by a `ServiceClient`.

    It can be pickled, with the API key, for other processes, which may use it as long as the `ServiceClient` is open.
    """

    def __init__(
        self,
        channel: Channel,
        sampler_id: str,
        model_path: str | None = None,
        record_stability_info: bool = False,
        first_number: int = 0,
    ) -> None:
        super().__init__()
        self.sampler_id = sampler_id
        self._model_path = model_path
        self._record_stability_info = record_stability_info
        self._channel = channel
        self._lock = threading.Lock()
        self._next_number = first_number

    @classmethod
    def create(
        cls,
        channel: Channel,
        model_path: str | None,
        base_model: str | None = None,
        record_stability_info: bool = False,
    ) -> Self:
        """Creates a sampler on the server from saved weights or a base model."""
        request = CreateSamplingSessionRequest(
            channel.session.session_id, channel.count("sampler"), base_model, model_path
        )
        created = channel.call("/api/v1/create_sampling_session", request, CreateSamplingSessionResponse)
        return channel.watch(cls(channel, created.sampling_session_id, model_path, record_stability_info))

    def __reduce__(self) -> tuple[Any, ...]:
        return self._from_state, (self._state(), self._channel.target.api_key)

    def get_sampler_handle(self) -> str:
        """Returns a string that `from_sampler_handle` turns back into this client. It does not contain the API key."""
        return base64.urlsafe_b64encode(wire_json.dumps(self._state())).decode()

    @classmethod
    def from_sampler_handle(cls, handle: str, *, api_key: str | None = None) -> Self:
        """Creates the client that a handle was made from; the API key is `TINKER_API_KEY` if it is not given."""
        try:
            state = wire_json.loads(base64.urlsafe_b64decode(handle))
            return cls._from_state(state, api_key or os.environ.get("TINKER_API_KEY") or None)
        except (InvalidMessage, KeyError, ValueError) as error:
            raise InvalidInput(f"handle: not what get_sampler_handle() returned: {error!r}") from error

    def _state(self) -> dict[str, Any]:
        target, session = self._channel.target, self._channel.session
        if target.transport is not None:
            raise InvalidInput(
                "this sampling client cannot be passed to another process, because its trainer runs in this one. Start "
                "`tinker-lightning serve --model ...`, and connect to its URL."
            )
        if not session.dialect.samples_old_weights and (model_id := self._channel.live.model_of(*self._weights())):
            raise Unsupported(
                f"this sampling client cannot be passed to another process, because {model_id} is trained in this one: "
                f"on servers of the dialect {session.dialect.name!r}, weights that are no longer the present ones "
                "cannot be sampled. Sample in this process."
            )
        return {
            "url": target.url,
            "headers": dict(self._channel.headers),
            "session_id": session.session_id,
            "dialect": session.dialect.to_dict(),
            "sampler_id": self.sampler_id,
            "model_path": self._model_path,
            "record_stability_info": self._record_stability_info,
        }

    @classmethod
    def _from_state(cls, state: dict[str, Any], api_key: str | None) -> Self:
        channel = joined(
            state["url"], api_key, state["session_id"], Dialect.from_dict(state["dialect"]), state["headers"]
        )
        # Other clients of the sampler count from other multiples, so that no number is used twice (PROTOCOL.md §15).
        first = secrets.randbelow(_CLONES) * _CLONES + _CLONES
        return channel.watch(
            cls(channel, state["sampler_id"], state["model_path"], state["record_stability_info"], first)
        )

    def _sample(
        self, prompt: Any, num_samples: int, params: SamplingParams, options: dict[str, Any]
    ) -> TinkerFuture[SampleResponse]:
        return self._submit("sample", prompt, num_samples, params, options)

    def compute_logprobs(
        self, prompt: Any, prompt_logprobs_last_n: int | None = None
    ) -> TinkerFuture[list[float | None]]:
        """Returns the log-probability of each token of a prompt; None for the first, which nothing predicts.

        With `prompt_logprobs_last_n`, only the last n are computed, and the others are None.
        """
        options = {"prompt_logprobs": True, "prompt_logprobs_last_n": prompt_logprobs_last_n}
        future = self._submit("compute_logprobs", prompt, 1, SamplingParams(max_tokens=1), options)
        return self.unread.add(future.then(lambda response: response.prompt_logprobs or []))

    compute_logprobs_async = awaited(compute_logprobs)

    def get_base_model(self) -> str:
        """Returns the name of the base model."""
        sampler = self._sampler()
        return sampler.model_name or sampler.base_model

    get_base_model_async = in_thread(get_base_model)

    def get_tokenizer(self) -> Any:
        """Returns the tokenizer of the base model."""
        sampler = self._sampler()
        return tokenizer.fetch(self._channel, sampler.model_name or sampler.base_model, sampler.base_model)

    def _submit(
        self, name: str, prompt: Any, num_samples: int, params: SamplingParams, options: dict[str, Any]
    ) -> TinkerFuture[SampleResponse]:
        self._channel.check_usable()
        self.unread.raise_first()
        session = self._channel.session
        model_input = to_model_input(prompt)
        if self._record_stability_info:
            options["record_stability_info"] = True

        def operation() -> Operation[SampleResponse]:
            with self._lock:
                number = self._next_number
                request = SampleRequest(self.sampler_id, number, model_input, params, num_samples, **options)
                encoded = encode(session.dialect, "asample", request, SampleResponse, name)
                self._next_number += 1
            (submitted,) = recorded(session, [encoded])
            return submitted

        def send() -> TinkerFuture[SampleResponse]:
            first = operation()
            return TinkerFuture(self._channel.run(_sample(session, first, operation)), str(first))

        is_free = session.dialect.samples_old_weights
        future = send() if is_free else self._channel.live.sample(*self._weights(), send)
        if not options["prompt_logprobs"]:
            return future
        return future.then(lambda response: _aligned(response, model_input.length))

    def _weights(self) -> tuple[str, str | None]:
        """Returns the path of the weights, or the sampler's id, and the model that the path names, if it names one."""
        if self._model_path is None:
            return self.sampler_id, None
        return self._model_path, checkpoints.run_of(self._model_path)

    def _sampler(self) -> GetSamplerResponse:
        return self._channel.fetch(f"/api/v1/samplers/{self.sampler_id}", GetSamplerResponse)


def _aligned(response: SampleResponse, length: int) -> SampleResponse:
    """Returns a response with one log-probability per token of the prompt; some servers leave out the first."""
    logprobs = response.prompt_logprobs
    if logprobs is None or len(logprobs) != length - 1:
        return response
    return replace(response, prompt_logprobs=[None, *logprobs])


async def _sample(
    session: Session, operation: Operation[SampleResponse], again: Callable[[], Operation[SampleResponse]]
) -> SampleResponse:
    """Samples, again if the server has lost the result: unlike a step, sampling may be repeated."""
    for _ in range(_RESAMPLINGS):
        try:
            return await perform(session, operation)
        except ResultExpired:
            operation = again()
    return await perform(session, operation)
