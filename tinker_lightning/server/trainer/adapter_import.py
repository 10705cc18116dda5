"""Copies uploaded PEFT adapters into the checkpoint store, from where models and samplers are created."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

from safetensors import SafetensorError
from safetensors.torch import load

from tinker_lightning.errors import InvalidInput
from tinker_lightning.server.trainer.checkpoint_store import TinkerPath
from tinker_lightning.server.trainer.jobs import Job
from tinker_lightning.types import SaveWeightsResponse

if TYPE_CHECKING:
    from tinker_lightning.server.engine.base import BaseModel
    from tinker_lightning.server.engine.lora import LoraWeights
    from tinker_lightning.server.trainer.trainer import EmbeddedTrainer
    from tinker_lightning.types.requests import ImportAdapterRequest

# The copy is needed until a model was created from it.
_KEPT_SECONDS = 86400


def import_adapter(trainer: EmbeddedTrainer, request: ImportAdapterRequest) -> Job:
    """Submits a job that saves an adapter for a day. The same adapter has the same path."""
    trainer.registry.session(request.session_id, must_be_open=True)
    trainer.catalog.check(request.base_model)
    about = f"{request.base_model}/{request.scaling!r}/".encode()
    digest = hashlib.blake2b(about + request.weights, digest_size=8).hexdigest()
    path = TinkerPath(f"import-{digest}", "sampler_weights", "adapter")

    def run() -> SaveWeightsResponse:
        base = trainer.catalog.get(request.base_model)
        # The tensors as they are loaded, and in the dtype and shape of an adapter.
        with trainer.memory.charge("an uploaded adapter", 3 * len(request.weights), fix="Use a smaller rank."):
            try:
                tensors = load(request.weights)
            except SafetensorError as error:
                raise InvalidInput(f"weights: not a safetensors file: {error}") from error
            return save(base.lora.import_weights(tensors, request.scaling), base)

    def save(weights: LoraWeights, base: BaseModel) -> SaveWeightsResponse:
        trainer.store.save(
            path,
            base_model=base.name,
            weights=weights,
            peft_config=base.lora.peft_config(weights.config),
            steps=0,
            ttl_seconds=_KEPT_SECONDS,
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
    return trainer.scheduler.submit(job)
