"""Sampling: the creation of samplers, their jobs, and the list of finished requests that clients poll."""

from __future__ import annotations

import threading
import time
from collections import deque
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeAlias

from tinker_lightning.errors import InvalidInput
from tinker_lightning.losses.builtin import NOT_PUBLISHED
from tinker_lightning.server.engine.interface import ModelCatalog, PromptScoring, SamplingRequest
from tinker_lightning.server.engine.interface import Sampler as EngineSampler
from tinker_lightning.server.trainer.checkpoint_store import CheckpointStore
from tinker_lightning.server.trainer.checkpoint_summary import TinkerPath
from tinker_lightning.server.trainer.jobs import Job
from tinker_lightning.server.trainer.memory import MemoryBudget
from tinker_lightning.server.trainer.registry import Registry, Sampler
from tinker_lightning.server.trainer.scheduler import RETENTION, Scheduler
from tinker_lightning.server.trainer.sizes import result_bytes, sample_result_bytes, tensor_bytes
from tinker_lightning.types import SampleResponse

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterator

    from tinker_lightning.server.engine.interface import BaseModel
    from tinker_lightning.types import requests as rq

    Target: TypeAlias = tuple[str, int]

MAX_SAMPLES = 256
# Each further client of a sampler numbers its requests from a multiple of this.
CLONE_STRIDE = 10**9
# The context length of a model that is not loaded yet.
_UNKNOWN_CONTEXT = 8192


class Completions:
    """The finished requests of each sampler and client, numbered in order. All methods are thread-safe."""

    def __init__(self, retention: float = RETENTION) -> None:
        self._retention = retention
        self._lock = threading.Lock()
        self._count = 0
        self._finished: dict[Target, deque[tuple[int, str, bool]]] = {}  # number, request id, whether it succeeded
        self._all: deque[tuple[float, int, Target]] = deque()  # when each finished, to forget old ones
        self._waiters: dict[Target, list[Callable[[], object]]] = {}

    def record(self, target: Target, request_id: str, *, succeeded: bool) -> None:
        """Adds a finished request and wakes the clients that wait for one."""
        with self._lock:
            self._count += 1
            now = time.monotonic()
            self._finished.setdefault(target, deque()).append((self._count, request_id, succeeded))
            self._all.append((now, self._count, target))
            while self._all and self._all[0][0] + self._retention < now:
                _, number, old = self._all.popleft()
                self._forget(old, number)
            waiters = list(self._waiters.get(target, ()))
        for wake in waiters:
            wake()

    def after(self, target: Target, cursor: int) -> list[tuple[int, str, bool]]:
        """Returns the requests after a cursor, and forgets earlier ones, which the client has seen."""
        with self._lock:
            self._forget(target, cursor)
            return list(self._finished.get(target, ()))

    @contextmanager
    def wake_on_finish(self, target: Target, wake: Callable[[], object]) -> Iterator[None]:
        """Calls `wake`, from any thread, when a request of the target finishes during the `with` block."""
        with self._lock:
            self._waiters.setdefault(target, []).append(wake)
        try:
            yield
        finally:
            with self._lock:
                self._waiters[target].remove(wake)
                if not self._waiters[target]:
                    del self._waiters[target]

    def _forget(self, target: Target, number: int) -> None:
        finished = self._finished.get(target)
        while finished and finished[0][0] <= number:
            finished.popleft()
        if finished is not None and not finished:
            del self._finished[target]


@dataclass(frozen=True, slots=True)
class Sampling:
    """Creates samplers and samples from them."""

    _registry: Registry
    _catalog: ModelCatalog
    _store: CheckpointStore
    _scheduler: Scheduler
    _memory: MemoryBudget
    _sampling_seed: int | None = None
    completions: Completions = field(default_factory=Completions)
    _decoders: dict[str, EngineSampler] = field(default_factory=dict)  # by base model
    _outcomes: dict[str, SampleResponse | Exception] = field(default_factory=dict)  # by request

    def create_sampling_session(self, request: rq.CreateSamplingSessionRequest) -> Sampler:
        """Creates a sampler from a base model or from saved weights."""
        session = self._registry.session(request.session_id, must_be_open=True)
        sampler_id = f"{session.session_id}:sample:{request.sampling_session_seq_id}"
        if request.model_path is not None:
            path = TinkerPath.parse(request.model_path)
            # Charged while they are loaded, because many requests may do so at a time.
            size = 2 * self._store.summary(path).size_bytes
            fix = "Create fewer samplers at once, or save weights of a lower rank."
            with self._memory.charge("the weights of a sampler", size, fix=fix):
                saved = self._store.load(path)
                base_model = self._catalog.resolve(saved.base_model)
                sampler = Sampler(sampler_id, base_model, saved.weights, str(path))
                return self._registry.add_sampler(session.session_id, sampler)
        base_model = self._catalog.resolve(request.base_model or "")
        return self._registry.add_sampler(session.session_id, Sampler(sampler_id, base_model))

    def sample(self, request: rq.SampleRequest) -> Job:
        """Submits a sampling job. The jobs of a sampler may run in any order."""
        sampler = self._registry.sampler(request.sampling_session_id)
        if request.num_samples > MAX_SAMPLES:
            raise InvalidInput(f"num_samples: {request.num_samples} exceeds the maximum of {MAX_SAMPLES}")
        if request.record_stability_info:
            raise InvalidInput(f"record_stability_info: {NOT_PUBLISHED}")

        # The session is left out of the sampler's name, because its random id would differ between runs.
        name = sampler.sampler_id.partition(":")[2]
        fallback_seed = None if self._sampling_seed is None else f"{self._sampling_seed}/{name}/{request.seq_id}"

        def run() -> Generator[None, None, SampleResponse]:
            job.raise_if_cancelled()  # it may have waited for memory
            base = self._catalog.get(sampler.base_model)
            weights = sampler.weights
            if weights is None and sampler.model_path is not None:
                weights = self._store.load(TinkerPath.parse(sampler.model_path)).weights
                self._registry.keep_weights(sampler.sampler_id, weights)
            if weights is not None:
                base.lora.check(weights)
            decoder = self._decoder(base)
            needed = decoder.memory(request.prompt.length, request.sampling_params.max_tokens)
            # From the limit and not from the load, so that a repeated request runs in the same waves. The other half is
            # for what other sessions run while this one is paused.
            wave = needed.wave(request.num_samples, self._memory.work_limit // 2)
            what = f"sampling {wave} of {request.num_samples} sequences at a time"
            fix = "Send a shorter prompt, or set a smaller max_tokens."
            with self._memory.charge(what, needed.bytes(wave), fix=fix):
                admitted = SamplingRequest(
                    job.request_id,
                    request.prompt,
                    request.sampling_params,
                    weights,
                    num_samples=request.num_samples,
                    scoring=PromptScoring(
                        request.prompt_logprobs,
                        request.prompt_logprobs_last_n,
                        request.topk_prompt_logprobs,
                        request.target_prompt_logprobs,
                        request.prompt_alt_tokens_k,
                    ),
                    topk_sample_logprobs=request.topk_sample_logprobs,
                    fallback_seed=fallback_seed,
                    wave=wave,
                )
                response = yield from self._decode(decoder, admitted, job)
                job.tokens = request.prompt.length + sum(len(each.tokens) for each in response.sequences)
                return response

        job = Job(
            f"{sampler.sampler_id}:{request.seq_id}",
            "sample",
            run,
            owner=sampler.sampler_id.partition(":")[0],
            can_pause=True,
            request_bytes=4 * request.prompt.length + tensor_bytes(request.target_prompt_logprobs),
            result_bytes=sample_result_bytes(request, self._context(sampler.base_model)),
            measure=result_bytes,
            sampler=sampler.sampler_id,
            seq=request.seq_id,
            samples=request.num_samples,
        )
        submitted = self._scheduler.submit(job)
        if submitted is job:
            target = sampler.sampler_id, request.seq_id // CLONE_STRIDE
            # Without the job: a future keeps its callbacks, and the result would wait for the garbage collector.
            request_id = job.request_id
            job.future.add_done_callback(
                lambda future: self.completions.record(target, request_id, succeeded=future.exception() is None)
            )
        return submitted

    def _decoder(self, base: BaseModel) -> EngineSampler:
        if base.name not in self._decoders:
            self._decoders[base.name] = base.new_sampler()
        return self._decoders[base.name]

    def _decode(
        self, decoder: EngineSampler, request: SamplingRequest, job: Job
    ) -> Generator[None, None, SampleResponse]:
        """Samples to the end; yields where it pauses for other sessions."""
        request_id = request.request_id

        def should_stop() -> bool:
            return job.cancelled or self._scheduler.should_pause()

        decoder.admit(request)
        try:
            while request_id not in self._outcomes:
                self._outcomes.update(decoder.step([request_id], should_stop))
                if request_id not in self._outcomes and should_stop():
                    job.raise_if_cancelled()
                    yield  # it may end meanwhile, if the engine decodes the requests of several jobs together
                    job.raise_if_cancelled()
            outcome = self._outcomes[request_id]
        finally:
            decoder.cancel(request_id)
            self._outcomes.pop(request_id, None)
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    def _context(self, base_model: str) -> int:
        base = self._catalog.loaded(base_model)
        return _UNKNOWN_CONTEXT if base is None else base.max_context_length

    def cancel(self, request_id: str) -> None:
        """Cancels a sampling job, before it starts or at its next token."""
        job = self._scheduler.find(request_id, self._registry.owns)
        if job.kind != "sample":
            raise InvalidInput(f"request_id: {request_id} is a {job.kind}; only sampling can be cancelled")
        job.cancelled = True
