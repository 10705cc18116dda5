"""Fits of modules with the same loss by name and by function, and what they log."""

from __future__ import annotations

import csv
from collections import defaultdict
from typing import TYPE_CHECKING, Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.loggers import CSVLogger
from torch.utils.data import DataLoader

from tinker_lightning import Datum, RemoteModule, losses

if TYPE_CHECKING:
    from pathlib import Path

    from tinker_lightning.server import EmbeddedTrainer

DATA = [Datum.from_tokens(list(f"text {i}: {'hello world, ' * (i % 3 + 1)}".encode())) for i in range(8)]


class ByName(RemoteModule):
    loss = "cross_entropy"  # type: ignore[assignment]
    reduction = "sum"  # as the library's function


class ByFunction(RemoteModule):
    def loss(self, data: list[Any], logprobs: list[torch.Tensor]) -> Any:
        return losses.cross_entropy(data, logprobs)


def fit(
    module: RemoteModule,
    tmp_path: Path,
    *,
    strategy: str = "tinker",
    n: int = 2,
    size: int = 2,
    ckpt_path: Path | None = None,
    **kwargs: Any,
) -> dict[int, dict[str, str]]:
    """Fits, and gives what the CSV logger has written, by step."""
    logger = CSVLogger(tmp_path, name=type(module).__name__, version=strategy)
    trainer = pl.Trainer(
        strategy=strategy,
        accelerator="cpu",
        max_epochs=1,
        accumulate_grad_batches=n,
        logger=logger,
        log_every_n_steps=1,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **kwargs,
    )
    trainer.fit(module, DataLoader(DATA, batch_size=size), ckpt_path=ckpt_path)  # type: ignore[arg-type]
    rows: dict[int, dict[str, str]] = defaultdict(dict)
    with open(f"{logger.log_dir}/metrics.csv") as file:
        for row in csv.DictReader(file):
            rows[int(row["step"])] |= {name: value for name, value in row.items() if value}
    return rows


def weights_of(trainer: EmbeddedTrainer, module: RemoteModule) -> torch.Tensor:
    module.drain()
    _, adapter = trainer.registry.model(module.lm.backend.model_id).ready()  # type: ignore[attr-defined]
    return torch.cat([tensor.flatten() for tensor in adapter.weights.tensors.values()])
