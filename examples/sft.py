"""Teaches SmolLM2-135M to write a ticket in JSON for what a guest orders.

Supervised fine-tuning on 64 chats; 16 more are held out. Run it with `tox -e sft`, or
`python examples/sft.py [FOLDER]`. The quickstart does the same with a custom loss, a schedule and checkpoints.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.loggers import CSVLogger

from tinker_lightning.data import ChatData
from tinker_lightning.recipes import SFT, recommended_lr

DATA = Path(__file__).parent / "data"


def main(folder: Path | str = "runs/sft", model: str = "smollm2-135m") -> Any:
    """Returns the scores of the held-out chats before and after."""
    pl.seed_everything(0)
    data = ChatData(DATA / "orders_train.jsonl", DATA / "orders_validation.jsonl", batch_size=8)
    trainer = pl.Trainer(strategy="tinker", max_epochs=3, logger=CSVLogger(folder, name=""), log_every_n_steps=1)
    learning_rate = recommended_lr(model, batch_size=data.batch_size)
    with SFT(model, rank=16, learning_rate=learning_rate, base_url="embedded") as module:
        before = trainer.validate(module, data)
        trainer.fit(module, data)
        return *before, *trainer.validate(module, data)


if __name__ == "__main__":
    main(*sys.argv[1:])
