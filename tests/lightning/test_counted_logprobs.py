"""Built-in losses ask our server only for the log-probabilities that they depend on; what is logged stays the same."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import lightning.pytorch as pl
import pytest
import torch
from torch.utils.data import DataLoader

from tests.helpers.backends import recording
from tests.helpers.trainers import quiet
from tinker_lightning import Datum, RemoteModule, collate
from tinker_lightning.server import EmbeddedTrainer, create_app

if TYPE_CHECKING:
    from tests.helpers.backends import Recorded

pytestmark = [
    pytest.mark.filterwarnings("ignore::lightning.fabric.utilities.warnings.PossibleUserWarning"),
    pytest.mark.filterwarnings("ignore:.*LeafSpec.* is deprecated"),
]

PROMPT = 5


class Weighted(RemoteModule):
    loss = "cross_entropy"  # type: ignore[assignment]


class Policy(RemoteModule):
    loss = "ppo"  # type: ignore[assignment]


class Logged(pl.Callback):
    """Keeps the metrics of every step, which arrive after it."""

    def __init__(self) -> None:
        self.metrics: dict[str, float] = {}

    def on_train_end(self, trainer: pl.Trainer, _: Any) -> None:
        self.metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}


def data(module: type[RemoteModule]) -> list[Datum]:
    draw = torch.Generator().manual_seed(0)
    mask = [0.0] * PROMPT + [1.0, 2.0, 0.5]
    tokens = torch.randint(0, 256, (4, len(mask)), generator=draw)
    if module is Weighted:
        return [Datum.from_targets(row, row.roll(-1), weights=mask) for row in tokens]
    return [Datum.from_targets(row, row.roll(-1), logprobs=[-5.5 * m for m in mask], advantages=mask) for row in tokens]


def fit(recorded: Recorded, module: type[RemoteModule]) -> dict[str, float]:
    logged = Logged()
    trainer = quiet(max_steps=2, callbacks=[logged])
    model = recorded.service.create_lora_training_client("tiny", rank=4, seed=1)
    trainer.fit(module(model, learning_rate=1e-2), DataLoader(data(module), 2, collate_fn=collate))  # type: ignore[arg-type]
    return logged.metrics


@pytest.mark.parametrize("module", [Weighted, Policy])
def test_built_in_losses_leave_out_log_probabilities_and_log_the_same(  # R5.7
    trainer: EmbeddedTrainer, module: type[RemoteModule]
) -> None:
    with recording(create_app(trainer)) as ours, recording(create_app(trainer, extended=False)) as plain:
        found, expected = fit(ours, module), fit(plain, module)
        assert ours.paths().count("counted_forward_backward") == 2
        assert "forward_backward" not in ours.paths()
        assert plain.paths().count("forward_backward") == 2
        # The client's own call returns the log-probabilities of all positions.
        client = ours.service.create_lora_training_client("tiny", rank=4, seed=1)
        output = client.forward_backward(data(Weighted), "cross_entropy").result()
        assert all(each["logprobs"].to_torch().all() for each in output.loss_fn_outputs)
    assert {"train_loss", "grad_norm"} <= found.keys()
    assert found == pytest.approx(expected, rel=1e-4)
