"""The token budget decides how sums are rounded: it is recorded with a run, and a resumed run keeps it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.helpers.client_data import DATA
from tests.helpers.reference import bits
from tinker_lightning import AdamParams
from tinker_lightning.errors import InvalidInput
from tinker_lightning.server import EmbeddedTrainer
from tinker_lightning.server.engine.causal_lm import CausalLM
from tinker_lightning.testing import embedded_service

if TYPE_CHECKING:
    from pathlib import Path

    from torch import Tensor

    from tinker_lightning.client import TrainingClient


def step(client: TrainingClient) -> None:
    client.forward_backward(DATA * 4, "cross_entropy")
    client.optim_step(AdamParams(learning_rate=1e-2)).result()


def test_a_resumed_run_keeps_the_budget_of_its_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:  # R5.11
    calls: list[int] = []
    hidden_states = CausalLM.hidden_states

    def counted(base: CausalLM, tokens: Tensor) -> Tensor:
        calls.append(tokens.numel())
        return hidden_states(base, tokens)

    monkeypatch.setattr(CausalLM, "hidden_states", counted)
    budget = 2 * max(datum.model_input.length for datum in DATA)
    first = EmbeddedTrainer(["tiny"], data_dir=tmp_path, token_budget=budget)
    with embedded_service(first) as service:
        client = service.create_lora_training_client("tiny", rank=4, seed=1)
        step(client)
        path = client.save_state("middle").result().path
        calls.clear()
        step(client)
        expected, sizes = bits(first, client.model_id), list(calls)
        assert max(sizes) <= budget
    first.close()
    other = EmbeddedTrainer(["tiny"], data_dir=tmp_path)
    with embedded_service(other) as service:
        client = service.create_lora_training_client("tiny", rank=4, seed=1)
        client.load_state_with_optimizer(path).result()
        calls.clear()
        step(client)
        assert calls == sizes
        assert bits(other, client.model_id) == expected
        new = service.create_lora_training_client("tiny", rank=4, seed=1)
        new.load_state(path).result()  # a new run on these weights
        calls.clear()
        step(new)
        assert len(calls) < len(sizes)
    other.close()


def test_a_budget_of_zero_raises(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match="token_budget must be at least 1"):
        EmbeddedTrainer(["tiny"], data_dir=tmp_path, token_budget=0)
