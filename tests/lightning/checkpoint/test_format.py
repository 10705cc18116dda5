"""The declared format of checkpoint files is the format of the files that are written."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import lightning.pytorch as pl
import torch
import wandb
from lightning.pytorch.loggers import WandbLogger
from torch.utils.data import DataLoader
from torchmetrics import MeanMetric
from typing_extensions import override

from tests.helpers.trainers import SMALL, new, quiet
from tinker_lightning import Datum, RemoteModule, collate
from tinker_lightning.lightning.checkpoint.format import KEYS, SECTION, VERSION

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    import pytest

    from tinker_lightning.client import ServiceClient

pytestmark = SMALL


class Logs(RemoteModule):
    """Logs a value and a metric by epoch, and has calls of both kinds in its window."""

    def __init__(self, model: Any, **settings: Any) -> None:
        super().__init__(model, **settings)
        self.mean = MeanMetric()

    @override
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        logprobs = torch.cat(self.lm(batch))
        self.mean.update(logprobs.detach())
        self.log("mean", self.mean, on_epoch=True)
        self.log("value", 1.0, on_epoch=True)
        return self.lm.server_loss(batch, "cross_entropy") - logprobs.mean()


class SavesInWindow(pl.Callback):
    """Saves a file after the first micro-batch."""

    def __init__(self, file: Path) -> None:
        self.file = file

    @override
    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        if trainer.fit_loop.total_batch_idx == 0:
            trainer.save_checkpoint(self.file)


def test_the_keys_of_a_file_are_those_declared(
    service: ServiceClient, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    wandb.finish()  # a run of another test
    data: Any = [Datum.from_tokens([1, 2, 3 + i]) for i in range(4)]
    middle, end = tmp_path / "middle.ckpt", tmp_path / "end.ckpt"
    trainer = quiet(
        max_epochs=1,
        accumulate_grad_batches=2,
        callbacks=[SavesInWindow(middle)],
        logger=WandbLogger(save_dir=tmp_path),
    )
    trainer.fit(new(service, Logs), DataLoader(data, batch_size=2, collate_fn=collate))
    trainer.save_checkpoint(end)
    wandb.finish()
    checkpoint = torch.load(middle, weights_only=True)
    section = checkpoint[SECTION]
    assert section["version"] == VERSION
    loops = section["strategy"]["loop_position"]
    calls = {call["loss"] is None: call for call in section["windows"]["lm.handle"]}
    (loader,) = checkpoint["loops"]["fit_loop"]["state_dict"]["combined_loader"]
    (resting,) = torch.load(end, weights_only=True)["loops"]["fit_loop"]["state_dict"]["combined_loader"]
    parts: dict[str, Iterable[str]] = {
        "section": section.keys() - {"wandb", "rows"},
        "call": calls[True],
        "server call": calls[False],
        "datum": calls[True]["datums"][0],
        "run": section["wandb"][0],
        "rows": section["rows"],
        "position": section["strategy"],
        "rng": section["strategy"]["rng"],
        "loops": loops,
        "epoch": loops["epoch_metrics"],
        "logged": loops["epoch_metrics"]["logged"][0],
        "metric": loops["epoch_metrics"]["metrics"]["mean"],
        "loader": loader.keys() - {"before"},
        "loader start": loader["start"],
        "resting loader": resting["before"],
    }
    assert {name: set(part) for name, part in parts.items()} == {name: set(keys) for name, keys in KEYS.items()}
