"""A model to sample from on a server."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

from tinker_lightning.client import official
from tinker_lightning.client.futures import TinkerFuture, Unread
from tinker_lightning.client.operations import Operation, perform
from tinker_lightning.types import SampleResponse, SamplingParams
from tinker_lightning.types.requests import SampleRequest
from tinker_lightning.types.responses import GetSamplerResponse
from tinker_lightning.wire import json as wire_json

if TYPE_CHECKING:
    from tinker_lightning.client.service import ServiceClient


class SamplingClient:
    """Samples from fixed weights. Every method returns at once, with a future. Made by a `ServiceClient`."""

    def __init__(self, service: ServiceClient, sampler_id: str) -> None:
        self.sampler_id = sampler_id
        self._service = service
        self._unread = Unread()
        self._lock = threading.Lock()
        self._next_number = 0

    def sample(
        self,
        prompt: Any,
        num_samples: int,
        sampling_params: Any,
        include_prompt_logprobs: bool = False,
    ) -> TinkerFuture[SampleResponse]:
        """Samples continuations of a prompt."""
        self._service.check_usable()
        self._unread.raise_first()
        model_input = official.to_model_input(prompt)
        params = official.to_sampling_params(sampling_params)
        with self._lock:
            number = self._next_number
            request = SampleRequest(
                self.sampler_id, number, model_input, params, num_samples, prompt_logprobs=include_prompt_logprobs
            )
            operation = Operation("asample", wire_json.dumps(request), SampleResponse, self.sampler_id, number)
            self._next_number += 1
        future = TinkerFuture(self._service.run(perform(self._service.session, operation)), str(operation))
        self._unread.add(future)
        return future

    def compute_logprobs(self, prompt: Any) -> TinkerFuture[list[float | None]]:
        """The log-probability of each token of a prompt; None for the first, which nothing predicts."""
        future = self.sample(prompt, 1, SamplingParams(max_tokens=1), include_prompt_logprobs=True)
        scored = future.then(lambda response: response.prompt_logprobs or [])
        future.was_read = True  # its failure is the other's
        self._unread.add(scored)
        return scored

    def get_base_model(self) -> str:
        """The name of the base model."""
        sampler = self._sampler()
        return sampler.model_name or sampler.base_model

    def get_tokenizer(self) -> Any:
        """The tokenizer of the base model."""
        sampler = self._sampler()
        return self._service.tokenizer(sampler.model_name or sampler.base_model, sampler.base_model)

    def raise_unread(self, *, wait: bool = False) -> None:
        """Raises the first failure that nobody has read; with `wait`, of everything that is still under way."""
        if wait:
            self._unread.wait()
        self._unread.raise_first()

    def _sampler(self) -> GetSamplerResponse:
        self._service.check_usable()
        return self._service.fetch(f"/api/v1/samplers/{self.sampler_id}", GetSamplerResponse)
