"""The operations on a model, as jobs: create and unload it, take optimizer steps, save and load weights."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from safetensors import SafetensorError
from safetensors.torch import load

from tinker_lightning.errors import InvalidInput
from tinker_lightning.server.engine.interface import ModelCatalog
from tinker_lightning.server.trainer.checkpoint_store import CheckpointStore, Encryption
from tinker_lightning.server.trainer.checkpoint_summary import CheckpointSummary, TinkerPath
from tinker_lightning.server.trainer.jobs import Job, ModelJobs
from tinker_lightning.server.trainer.memory import MemoryBudget
from tinker_lightning.server.trainer.passes import RetainedForwards
from tinker_lightning.server.trainer.registry import Metadata, Model, Registry, Sampler, metadata_bytes
from tinker_lightning.server.trainer.scheduler import Scheduler
from tinker_lightning.types import AdamParams, LoraConfig, OptimStepResponse, SaveWeightsResponse
from tinker_lightning.types import requests as rq
from tinker_lightning.types import responses as rs

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from torch import Tensor

    from tinker_lightning.server.engine.interface import Adapter, BaseModel


# The configuration of the only optimizer.
OPTIMIZER_CONFIG = {"type": "adamw"}
# Seconds for which an imported adapter is kept, until a model is created from it.
_IMPORT_SECONDS = 86400
# The most tensors of an imported adapter: those of a model with hundreds of layers.
_IMPORT_TENSORS = 8192


@dataclass(frozen=True, slots=True)
class Training:
    """Turns requests into jobs. Each method returns immediately; the job provides the result."""

    _jobs: ModelJobs
    _registry: Registry
    _catalog: ModelCatalog
    _store: CheckpointStore
    _scheduler: Scheduler
    _retained: RetainedForwards
    _memory: MemoryBudget

    def create_model(self, request: rq.CreateModelRequest) -> Job:
        """Creates an adapter on a base model."""
        config = request.lora_config or LoraConfig()
        return self._create(request, "create_model", request.base_model, config, lambda *_: None)

    def create_from_weights(self, request: rq.CreateFromWeightsRequest) -> Job:
        """Creates a model with saved weights, optionally with the optimizer state."""
        path = TinkerPath.parse(request.path)
        saved = self._store.summary(path)
        if request.base_model is not None and self._catalog.resolve(request.base_model) != saved.base_model:
            raise InvalidInput(f"base_model: {path} was trained on {saved.base_model}, not on {request.base_model}")

        def load(base: BaseModel, adapter: Adapter) -> rs.LoadWeightsResponse:
            self._load(path, base, adapter, optimizer=request.optimizer)
            return rs.LoadWeightsResponse(str(path), request.model_id)

        return self._create(request, "load_weights", saved.base_model, saved.lora_config, load, path=request.path)

    def _create(
        self,
        request: rq.CreateModelRequest | rq.CreateFromWeightsRequest,
        kind: str,
        base_model: str,
        config: LoraConfig,
        fill: Callable[[BaseModel, Adapter], rs.LoadWeightsResponse | None],
        **labels: Any,
    ) -> Job:
        """Creates an adapter; `fill` may change it, and return the result. The labels distinguish two creations."""
        if request.model_seq_id < 0:
            raise InvalidInput(f"model_seq_id must be at least 0, got {request.model_seq_id}")
        optimizer = (request.optimizer_config or {}).get("type", "adamw")
        if optimizer != "adamw":
            raise InvalidInput(f"optimizer_config: only adamw is supported, not {optimizer!r}")
        session = self._registry.session(request.session_id, must_be_open=True)
        base_model = self._catalog.resolve(base_model)
        model_id = f"{session.session_id}:train:{request.model_seq_id}"

        def run() -> rs.CreateModelResponse | rs.LoadWeightsResponse:
            base = self._catalog.get(base_model)
            # The weights, their gradient and two moments of the optimizer.
            size = 4 * base.lora.weights_bytes(config)
            fix = "Use a smaller rank, or unload models that are no longer needed."
            charge = self._memory.charge(f"an adapter of rank {config.rank}", size, "weights", fix=fix)
            try:
                adapter = base.new_adapter(config)
                result = fill(base, adapter)
            except BaseException:
                charge.release()
                raise
            model.charge, model.base, model.adapter = charge, base, adapter
            return result or rs.CreateModelResponse(model_id)

        creation = Job(
            f"{model_id}:create",
            kind,
            run,
            owner=session.session_id,
            model=model_id,
            base=base_model,
            rank=config.rank,
            **labels,
        )
        metadata = Metadata(self._memory, "model", user_metadata=request.user_metadata)
        model = Model(model_id, session.session_id, base_model, config, metadata, creation)
        return self._scheduler.submit(self._registry.add_model(model).creation)

    def unload_model(self, request: rq.UnloadModelRequest) -> Job:
        """Frees the memory of a model after all jobs that were submitted earlier."""
        model = self._registry.model(request.model_id)

        def run() -> rs.UnloadModelResponse:
            model.unload()
            self._retained.drop(model.model_id)
            return rs.UnloadModelResponse(model.model_id)

        job = Job(f"{model.model_id}:unload", "unload_model", run, owner=model.session_id, model=model.model_id)
        return self._scheduler.submit(job, frees_memory=True)

    def optim_step(self, request: rq.OptimStepRequest) -> Job:
        """Takes an AdamW step with the accumulated gradient."""
        if request.optimizer_params is not None:
            kind = request.optimizer_params.get("type")
            raise InvalidInput(f"optimizer_params: only adamw is supported, not {kind!r}; send adam_params")
        params = request.adam_params or AdamParams()

        def run(_: BaseModel, adapter: Adapter) -> OptimStepResponse:
            self._retained.drop(request.model_id)
            # A copy of the weights and the moments, in case the step has to be undone, and the clipped gradient.
            with self._memory.charge("optim_step", 5 * adapter.weights.nbytes):
                return OptimStepResponse(adapter.step(params))

        return self._jobs.submit(request, "optim_step", run)

    def save_weights(self, request: rq.SaveWeightsRequest) -> Job:
        """Saves weights and optimizer state under a name."""
        name = f"checkpoint-{request.seq_id:06d}" if request.path is None else request.path
        path = TinkerPath(request.model_id, "weights", name)

        def run(base: BaseModel, adapter: Adapter) -> rs.SaveWeightsResponse:
            self._save(path, base, adapter, request, adapter.training_state())
            return rs.SaveWeightsResponse(str(path))

        return self._jobs.submit(request, "save_weights", run)

    def load_weights(self, request: rq.LoadWeightsRequest) -> Job:
        """Loads saved weights into a model, optionally with the optimizer state."""
        path = TinkerPath.parse(request.path)

        def run(base: BaseModel, adapter: Adapter) -> rs.LoadWeightsResponse:
            self._load(path, base, adapter, optimizer=request.optimizer)
            self._retained.drop(request.model_id)
            return rs.LoadWeightsResponse(str(path), request.model_id)

        return self._jobs.submit(request, "load_weights", run)

    def _load(self, path: TinkerPath, base: BaseModel, adapter: Adapter, *, optimizer: bool) -> None:
        # The weights and the state of the optimizer, as they are loaded.
        with self._memory.charge("load_weights", 4 * adapter.weights.nbytes):
            saved = self._store.load(path, training_state=optimizer)
        if saved.base_model != base.name:
            raise InvalidInput(f"path: {path} was trained on {saved.base_model}, but this model is {base.name}")
        loaded, current = saved.weights.config, adapter.weights.config
        for name in ("rank", "train_unembed", "train_mlp", "train_attn"):
            if getattr(loaded, name) != getattr(current, name):
                raise InvalidInput(
                    f"path: {path} has {name}={getattr(loaded, name)}, but this model has {getattr(current, name)}. "
                    "Create a model from the state instead."
                )
        base.lora.check(saved.weights)
        adapter.load(saved.weights, saved.training_state)
        if saved.training_state is not None and saved.token_budget is not None:
            adapter.token_budget = saved.token_budget  # so that a resumed run rounds as it did before

    def save_weights_for_sampler(self, request: rq.SaveWeightsForSamplerRequest) -> Job:
        """Saves weights for sampling: under a name on disk, or without a name in memory as a new sampler."""
        if request.kind not in (None, "snapshot"):
            raise InvalidInput(
                f"kind: only 'snapshot' is supported, not {request.kind!r}: the weights of a sampler of this trainer "
                "never change. Omit kind, and create a sampler after each step that samples are to see."
            )
        model = self._registry.model(request.model_id)
        # A retry has the same seq_id but a new sampling_session_seq_id, so the sampler is named after the former.
        sampler_id = f"{model.model_id}:sample:{request.seq_id}"
        path = None if request.path is None else TinkerPath(model.model_id, "sampler_weights", request.path)

        def run(base: BaseModel, adapter: Adapter) -> rs.SaveWeightsForSamplerResponse:
            if path is not None:
                self._save(path, base, adapter, request, None)
                return rs.SaveWeightsForSamplerResponse(path=str(path))
            sampler = Sampler(sampler_id, model.base_model, adapter.weights.copy())
            self._registry.add_sampler(model.session_id, sampler)
            return rs.SaveWeightsForSamplerResponse(sampling_session_id=sampler_id)

        return self._jobs.submit(request, "save_weights_for_sampler", run)

    def save_weights_external(self, request: rq.SaveWeightsExternalRequest) -> Job:
        """Saves weights for download under a name, encrypted if the request names recipients."""
        recipients = request.age_encryption_recipients
        encryption = None if recipients is None else Encryption(recipients)
        path = TinkerPath(request.model_id, "external_weights", request.path)

        def run(base: BaseModel, adapter: Adapter) -> rs.SaveWeightsExternalResponse:
            saved = self._save(path, base, adapter, request, None, encryption)
            return rs.SaveWeightsExternalResponse(str(path), saved.size_bytes)

        return self._jobs.submit(request, "save_weights_external", run)

    def import_adapter(self, request: rq.ImportAdapterRequest) -> Job:
        """Saves an uploaded adapter for a day. The same adapter has the same path.

        Takes time for a large adapter, so it is not called on an event loop.
        """
        self._registry.session(request.session_id, must_be_open=True)
        _check_header(request.weights)
        base_model = self._catalog.resolve(request.base_model)
        owner = self._store.owner.name
        about = f"{'' if owner is None else f'{owner}/'}{base_model}/{request.scaling!r}/".encode()
        digest = hashlib.blake2b(about + request.weights, digest_size=8).hexdigest()
        path = TinkerPath(f"import-{digest}", "sampler_weights", "adapter")

        def run() -> SaveWeightsResponse:
            base = self._catalog.get(base_model)
            # The tensors as they are loaded, and in the dtype and shape of an adapter.
            with self._memory.charge("an uploaded adapter", 3 * len(request.weights), fix="Use a smaller rank."):
                try:
                    tensors = load(request.weights)
                except SafetensorError as error:
                    raise InvalidInput(f"weights: not a safetensors file: {error}") from error
                weights = base.lora.import_weights(tensors, request.scaling)
                if request.rank not in (None, weights.config.rank):
                    raise InvalidInput(
                        f"rank: the configuration of the adapter says {request.rank}, but its tensors have the rank "
                        f"{weights.config.rank}, so its scaling is unknown. Correct r in adapter_config.json."
                    )
                self._store.save(
                    path,
                    base_model=base.name,
                    weights=weights,
                    peft_config=base.lora.peft_config(weights.config),
                    steps=0,
                    ttl_seconds=_IMPORT_SECONDS,
                    overwrite=True,
                )
            return SaveWeightsResponse(str(path))

        job = Job(
            f"{request.session_id}:{path.run}",
            "import_adapter",
            run,
            owner=request.session_id,
            request_bytes=len(request.weights),
        )
        return self._scheduler.submit(job)

    def _save(
        self,
        path: TinkerPath,
        base: BaseModel,
        adapter: Adapter,
        request: rq.SaveWeightsRequest | rq.SaveWeightsForSamplerRequest | rq.SaveWeightsExternalRequest,
        training_state: Mapping[str, Tensor] | None,
        encryption: Encryption | None = None,
    ) -> CheckpointSummary:
        metadata = None if isinstance(request, rq.SaveWeightsExternalRequest) else request.user_metadata
        metadata_bytes({"user_metadata": metadata})  # raises if it is too large
        return self._store.save(
            path,
            base_model=base.name,
            weights=adapter.weights,
            peft_config=base.lora.peft_config(adapter.weights.config),
            steps=adapter.steps,
            token_budget=adapter.token_budget,
            training_state=training_state,
            ttl_seconds=request.ttl_seconds,
            overwrite=isinstance(request, rq.SaveWeightsRequest) and request.overwrite,
            user_metadata=metadata,
            encryption=encryption,
        )


def _check_header(weights: bytes) -> None:
    """Raises `InvalidInput` for a safetensors file with too many tensors, before any of them is created."""
    size = int.from_bytes(weights[:8], "little")
    most = min(_IMPORT_TENSORS * 256, len(weights) - 8)
    if not 0 < size <= most:
        raise InvalidInput(f"weights: not a safetensors file of an adapter: its header of {size} bytes exceeds {most}")
    count = weights.count(b"{", 8, 8 + size) - 1  # an object for each tensor, however its fields are escaped
    if count > _IMPORT_TENSORS:
        raise InvalidInput(f"weights: {count} tensors; an adapter has at most {_IMPORT_TENSORS}")
