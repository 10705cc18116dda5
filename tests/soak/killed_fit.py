"""A fit that may be killed at any moment and is then started again: `python killed_fit.py FOLDER LOADER`."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from torch.utils.data import DataLoader
from torchdata.stateful_dataloader import StatefulDataLoader

from tinker_lightning import Datum, RemoteModule, collate

DATA = [Datum.from_tokens(list(f"text {i}: {'hello world, ' * (i % 3 + 1)}".encode())) for i in range(22)]


class Noting(RemoteModule):
    """Notes what it trains on, and draws random numbers in its loss."""

    folder: Path

    def loss(self, data: list[Any], logprobs: list[torch.Tensor]) -> Any:
        tokens = [datum.model_input.tokens().tolist() for datum in data]
        with (self.folder / "trained.jsonl").open("a") as file:
            file.write(json.dumps([self.trainer.fit_loop.total_batch_idx, tokens]) + "\n")
        return -torch.cat(logprobs).mean() * (1 + 0.1 * torch.rand(())), {}

    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 20)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


class InTheMidst(pl.Callback):
    """Saves in the midst of windows, too."""

    def on_train_batch_end(self, trainer: pl.Trainer, module: pl.LightningModule, *_: Any) -> None:
        assert isinstance(module, Noting)
        if trainer.fit_loop.total_batch_idx % 5 == 3:
            trainer.save_checkpoint(module.folder / "files" / "last.ckpt")


def main(folder: Path, kind: str) -> None:
    torch.set_num_threads(1)
    pl.seed_everything(5)
    make: Any = StatefulDataLoader if kind == "stateful" else DataLoader
    loader = make(DATA, batch_size=2, shuffle=True, collate_fn=collate, num_workers=2 if kind == "workers" else 0)
    held_out: DataLoader[Any] = DataLoader(DATA[:3], batch_size=2, collate_fn=collate)  # type: ignore[arg-type]
    files = ModelCheckpoint(folder / "files", every_n_train_steps=2, save_last=True)
    trainer = pl.Trainer(
        strategy="tinker",
        max_epochs=4,
        accumulate_grad_batches=3,
        val_check_interval=4,
        logger=CSVLogger(folder, name="logs", version=len(list(folder.glob("logs/*"))), flush_logs_every_n_steps=1),
        log_every_n_steps=1,
        callbacks=[files, InTheMidst()],
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    last = folder / "files" / "last.ckpt"
    with Noting("tiny", rank=4, learning_rate=1e-2, seed=1, base_url="embedded") as module:
        module.folder = folder
        trainer.fit(module, loader, held_out, ckpt_path=last if last.exists() else None)
        rate = trainer.optimizers[0].param_groups[0]["lr"]
        state = module.lm.handle.remote.save(anew=True)
        (folder / "done.json").write_text(json.dumps({"state": state, "rate": rate, "steps": trainer.global_step}))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
