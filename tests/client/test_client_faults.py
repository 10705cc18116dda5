"""Network faults do not change the trained weights."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch

from tests.helpers.backends import QUICK
from tests.helpers.client_data import DATA
from tests.helpers.reference import bits
from tinker_lightning import AdamParams
from tinker_lightning.server import EmbeddedTrainer
from tinker_lightning.testing import FaultyTransport, embedded_service

if TYPE_CHECKING:
    from pathlib import Path

    import httpx

    from tinker_lightning.client import TrainingClient

STEPS = 8


def train(model: TrainingClient, steps: int) -> list[float]:
    def loss(_: list[Any], logprobs: list[torch.Tensor]) -> tuple[torch.Tensor, dict[str, float]]:
        return -torch.cat(logprobs).mean() / 3, {}

    norms = []
    for _ in range(steps):
        for datum in DATA:
            model.forward_backward_custom([datum], loss)
        norms.append((model.optim_step(AdamParams(learning_rate=1e-3)).result().metrics or {})["grad_norm"])
    return norms


def test_faults_change_nothing(tmp_path: Path) -> None:  # DESIGN §4.2
    """With a fault in almost a third of its requests, a run ends as a clean one does, to the bit."""
    faulty: list[FaultyTransport] = []

    def wrap(inner: httpx.AsyncBaseTransport) -> httpx.AsyncBaseTransport:
        faulty.append(FaultyTransport(inner, rate=0.3, seed=4))
        return faulty[0]

    trainer = EmbeddedTrainer(["tiny"], data_dir=tmp_path)
    ends = []
    for transport in (None, wrap):
        with embedded_service(trainer, wrap=transport, retry_policy=QUICK) as service:
            model = service.create_lora_training_client("tiny", rank=4, seed=1)
            norms = train(model, STEPS)
            kinds = [trainer.scheduler.find(f"{model.model_id}:{number}").kind for number in range(1, STEPS * 7 + 1)]
            assert kinds == (["forward"] * 3 + ["forward_backward"] * 3 + ["optim_step"]) * STEPS
            with pytest.raises(LookupError):
                trainer.scheduler.find(f"{model.model_id}:{STEPS * 7 + 1}")
            ends.append((norms, bits(trainer, model.model_id)))
    trainer.close()
    assert ends[0] == ends[1]
    met = {fault for fault, _ in faulty[0].injected}
    assert met == {"reset", "500", "429", "408", "lost answer", "duplicate"}
    assert len(faulty[0].injected) >= 20
