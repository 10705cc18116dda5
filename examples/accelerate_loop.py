"""Supervised fine-tuning in an Accelerate loop: accumulation, clipping, a schedule, W&B, `save_state` and `load_state`.

Run it with `python examples/accelerate_loop.py [FOLDER]`, after `python -m pip install accelerate`. If it is killed,
run it again: it resumes at the last epoch that was saved and ends with the same bits. It trains `tiny`; with
`smollm2-135m` in its place it learns to take orders.
"""

from __future__ import annotations

import math
import sys
from pathlib import Path
from typing import Any

from accelerate import Accelerator, DataLoaderConfiguration
from torch.optim.lr_scheduler import LinearLR

from tinker_lightning import RemoteAdamW, RemoteLM, connect, losses
from tinker_lightning.data import ChatData

ROWS = Path(__file__).parent / "data" / "orders_validation.jsonl"


def train(
    folder: Path | str = "runs/accelerate", model: str = "tiny", rows: Any = ROWS, *, epochs: int = 2
) -> RemoteLM:
    """Returns the trained model."""
    order = DataLoaderConfiguration(use_seedable_sampler=True, data_seed=0)
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=4, log_with="wandb", dataloader_config=order)
    accelerator.init_trackers("orders", init_kwargs={"wandb": {"mode": "offline", "dir": str(folder)}})
    remote = RemoteLM(connect("embedded").create_lora_training_client(model, rank=16, seed=0))
    data = ChatData(rows, batch_size=2, tokenizer=remote.backend.get_tokenizer())
    data.setup("fit")
    adamw = RemoteAdamW(remote.parameters(), lr=1e-3)
    linear = LinearLR(adamw, 1.0, 0.1, total_iters=epochs * math.ceil(len(data.train_dataloader()) / 4))
    lm, optimizer, schedule, loader = accelerator.prepare(remote, adamw, linear, data.train_dataloader())
    saved = sorted(Path(folder).glob("epoch-*/random_states_0.pkl"))  # which is written last
    if saved:
        accelerator.load_state(saved[-1].parent)
    for epoch in range(len(saved), epochs):
        loader.set_epoch(epoch)
        for batch in loader:
            with accelerator.accumulate(lm):
                loss, metrics = losses.cross_entropy(batch, lm(batch))
                accelerator.backward(loss / metrics["tokens"])
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(lm.parameters(), 1.0)
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
            if accelerator.sync_gradients:
                accelerator.log({"nll": metrics["nll"], "lr": schedule.get_last_lr()[0]}, step=linear.last_epoch)
        accelerator.save_state(Path(folder) / f"epoch-{epoch:03}")
    accelerator.end_training()
    return remote


if __name__ == "__main__":
    train(*sys.argv[1:])
