"""Inputs of a loss that are given once for a batch, on every route of a fit and in validation."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import lightning.pytorch as pl
import pytest
import torch
from torch.utils.data import DataLoader

from tests.helpers.soaking import mostly_soak
from tests.helpers.trainers import SMALL, logprobs_of, new, quiet
from tinker_lightning import Datum, LossFnOutput, Regularizer, RemoteModule, custom_loss, losses
from tinker_lightning.losses import regularizers

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from tinker_lightning.client import ServiceClient

pytestmark = SMALL

BARE = [Datum.from_targets(range(40, 44 + i), range(41, 45 + i)) for i in range(4)]
ROWS = {
    "logprobs": torch.full((4, 8), -5.0),
    "advantages": torch.linspace(-1, 1, 32).reshape(4, 8),
}
WHOLE = [
    Datum.from_targets(range(40, 44 + i), range(41, 45 + i), **{n: row[i, : 4 + i] for n, row in ROWS.items()})  # type: ignore[arg-type]
    for i in range(4)
]
TERMS = (Regularizer(regularizers.sparsity, 0.1, "sparsity"),)
KINDS: dict[str, dict[str, Any]] = {
    "built-in": {"loss": "ppo"},
    "library on the server": {"loss": losses.ppo},
    "two-pass": {"loss": "ppo", "route": "two-pass"},
    "regularized": {"loss": "ppo", "route": "builtin", "regularizers": TERMS},
}


class OncePerBatch(RemoteModule):
    """A batch is the numbers of its datums."""

    def datums(self, batch: list[int]) -> list[Datum]:
        return [BARE[i] for i in batch]

    def loss_fn_inputs(self, batch: list[int]) -> Mapping[str, Any]:
        return {name: rows[batch] for name, rows in ROWS.items()}


class WithEachDatum(RemoteModule):
    def datums(self, batch: list[int]) -> list[Datum]:
        return [WHOLE[i] for i in batch]


def loader() -> Any:
    return DataLoader(range(4), batch_size=2, collate_fn=list)  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", mostly_soak(KINDS, but=["built-in", "two-pass"]))
def test_inputs_given_once_train_as_those_of_each_datum(service: ServiceClient, kind: str) -> None:  # R3.4
    fitted = []
    for base in (OncePerBatch, WithEachDatum):
        module: RemoteModule = new(service, type("Module", (base,), KINDS[kind]))
        trainer = quiet(max_epochs=1, accumulate_grad_batches=2)
        trainer.fit(module, loader(), loader())
        fitted.append((logprobs_of(module), trainer.callback_metrics))
    assert torch.equal(fitted[0][0], fitted[1][0])
    assert fitted[0][1] == fitted[1][1]
    assert "val_loss" in fitted[0][1]


def test_a_registered_loss_gets_them_as_they_are(service: ServiceClient, tmp_path: Path) -> None:  # R3.4
    @custom_loss(service, name="tempered")
    def tempered(model_outputs: Any, loss_fn_inputs: Any, attention_mask: Any) -> LossFnOutput:
        logits = model_outputs / loss_fn_inputs["temperature"]
        logprobs = logits.log_softmax(-1).gather(-1, loss_fn_inputs["target_tokens"].unsqueeze(-1)).squeeze(-1)
        return LossFnOutput(-(logprobs * attention_mask).sum() / attention_mask.sum(), logprobs)

    class Tempered(OncePerBatch):
        loss = tempered
        temperature = 2.0

        def loss_fn_inputs(self, batch: list[int]) -> Mapping[str, Any]:
            del batch
            return {"temperature": torch.tensor(self.temperature)}

    class SavesInAWindow(pl.Callback):
        def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
            if trainer.fit_loop.total_batch_idx == 0:
                trainer.save_checkpoint(tmp_path / "window.ckpt")

    client = service.create_lora_training_client("tiny", rank=4, seed=1)
    expected = [
        client.forward(BARE[i : i + 2], "tempered", loss_fn_inputs={"temperature": torch.tensor(2.0)}).result().metrics
        for i in (0, 2)
    ]
    whole, resumed = new(service, Tempered), new(service, Tempered)
    trainer = quiet(max_epochs=1, accumulate_grad_batches=2, callbacks=[SavesInAWindow()])
    trainer.fit(whole, loader())
    mean = sum(metrics["loss:sum"] for metrics in expected) / 2
    assert trainer.callback_metrics["train_loss"] == pytest.approx(mean, rel=1e-5)
    quiet(max_epochs=1, accumulate_grad_batches=2).fit(resumed, loader(), ckpt_path=tmp_path / "window.ckpt")
    assert torch.equal(logprobs_of(resumed), logprobs_of(whole))
    (scores,) = quiet().validate(whole, loader(), verbose=False)
    assert scores["val_loss"] > 0
