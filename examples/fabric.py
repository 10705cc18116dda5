"""Supervised fine-tuning in a Fabric loop: accumulation, clipping, a schedule, W&B, and a checkpoint to resume from.

Run it with `python examples/fabric.py [FOLDER]`. If it is killed, run it again: it resumes at the last epoch that was
saved and ends with the same bits. It trains `tiny`; with `smollm2-135m` in its place it learns to take orders.
"""

from __future__ import annotations

import math
import sys
from pathlib import Path
from typing import Any

from lightning import Fabric
from lightning.pytorch.loggers import WandbLogger
from torch.optim.lr_scheduler import LinearLR

from tinker_lightning import RemoteAdamW, RemoteLM, connect, losses
from tinker_lightning.data import ChatData

ROWS = Path(__file__).parent / "data" / "orders_validation.jsonl"


def train(folder: Any = "runs/fabric", model: str = "tiny", rows: Any = ROWS, *, epochs: int = 2) -> RemoteLM:
    """Returns the trained model."""
    fabric = Fabric(accelerator="cpu", devices=1, loggers=WandbLogger(save_dir=folder, offline=True))
    remote = RemoteLM(connect("embedded").create_lora_training_client(model, rank=16, seed=0))
    data = ChatData(rows, batch_size=2, tokenizer=remote.backend.get_tokenizer())
    data.setup("fit")
    loader = fabric.setup_dataloaders(data.train_dataloader())
    lm, optimizer = fabric.setup(remote, RemoteAdamW(remote.parameters(), lr=1e-3))
    schedule = LinearLR(optimizer, 1.0, 0.1, total_iters=epochs * math.ceil(len(loader) / 4))
    state = {"lm": lm, "optimizer": optimizer, "schedule": schedule, "epochs": 0, "steps": 0}
    checkpoint = Path(folder) / "last.ckpt"
    if checkpoint.exists():
        fabric.load(checkpoint, state)
    for epoch in range(state["epochs"], epochs):
        fabric.seed_everything(epoch)  # the order of the rows
        for i, batch in enumerate(loader, 1):
            loss, metrics = losses.cross_entropy(batch, lm(batch))
            fabric.backward(loss / metrics["tokens"] / 4)
            if i % 4 == 0 or i == len(loader):
                fabric.clip_gradients(lm, optimizer, max_norm=1.0)
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
                state["steps"] += 1
                fabric.log_dict({"nll": metrics["nll"], "lr": schedule.get_last_lr()[0]}, state["steps"])
        state["epochs"] += 1
        fabric.save(checkpoint, state)
    return remote


if __name__ == "__main__":
    train(*sys.argv[1:])
