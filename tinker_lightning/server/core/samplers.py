"""Creation of samplers, and sampling jobs."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tinker_lightning.errors import InvalidInput
from tinker_lightning.server.core.checkpoint_store import CheckpointStore, TinkerPath
from tinker_lightning.server.core.registry import Registry, Sampler
from tinker_lightning.server.core.scheduler import Job, Scheduler
from tinker_lightning.server.engine.sampler import MAX_SAMPLES, sample

if TYPE_CHECKING:
    from tinker_lightning.server.engine.catalog import Catalog
    from tinker_lightning.types import SampleResponse
    from tinker_lightning.types import requests as rq

# Options of the protocol that are not supported; any value other than these defaults raises.
_NOT_SUPPORTED = {
    "topk_prompt_logprobs": 0,
    "topk_sample_logprobs": 0,
    "target_prompt_logprobs": None,
    "prompt_alt_tokens_k": 0,
    "prompt_logprobs_last_n": None,
}


class Sampling:
    """Creates samplers and samples from them."""

    def __init__(
        self,
        registry: Registry,
        catalog: Catalog,
        store: CheckpointStore,
        scheduler: Scheduler,
        sampling_seed: int | None = None,
    ) -> None:
        self._registry = registry
        self._catalog = catalog
        self._store = store
        self._scheduler = scheduler
        self._sampling_seed = sampling_seed

    def create_sampling_session(self, request: rq.CreateSamplingSessionRequest) -> Sampler:
        """Creates a sampler from a base model or from saved weights."""
        session = self._registry.session(request.session_id, must_be_open=True)
        sampler_id = f"{session.session_id}:sample:{request.sampling_session_seq_id}"
        if request.model_path is not None:
            path = TinkerPath.parse(request.model_path)
            saved = self._store.load(path)
            sampler = Sampler(sampler_id, saved.base_model, saved.weights, str(path))
        else:
            sampler = Sampler(sampler_id, request.base_model or "")
        self._catalog.check(sampler.base_model)
        return self._registry.add_sampler(session.session_id, sampler)

    def sample(self, request: rq.SampleRequest) -> Job:
        """Submits a sampling job. The jobs of a sampler may run in any order."""
        sampler = self._registry.sampler(request.sampling_session_id)
        for name, off in _NOT_SUPPORTED.items():
            if getattr(request, name) != off:
                raise InvalidInput(f"{name} is not supported; omit it")
        if request.num_samples > MAX_SAMPLES:
            raise InvalidInput(f"num_samples: {request.num_samples} exceeds the maximum of {MAX_SAMPLES}")

        # The session is left out of the sampler's name, because its random id would differ between runs.
        name = sampler.sampler_id.partition(":")[2]
        unseeded = None if self._sampling_seed is None else f"{self._sampling_seed}/{name}/{request.seq_id}"

        def run() -> SampleResponse:
            base = self._catalog.get(sampler.base_model)
            weights = sampler.weights
            if weights is None and sampler.model_path is not None:
                weights = self._store.load(TinkerPath.parse(sampler.model_path)).weights
                self._registry.keep_weights(sampler.sampler_id, weights)
            if weights is not None:
                base.lora.check(weights)
            return sample(
                base,
                weights,
                request.prompt,
                request.sampling_params,
                num_samples=request.num_samples,
                prompt_logprobs=request.prompt_logprobs,
                unseeded=unseeded,
            )

        job = Job(
            f"{sampler.sampler_id}:{request.seq_id}",
            "sample",
            run,
            sampler=sampler.sampler_id,
            seq=request.seq_id,
            samples=request.num_samples,
        )
        return self._scheduler.submit(job)
