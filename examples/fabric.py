"""A remote model in a Fabric loop: a custom loss, gradient accumulation, a schedule and a checkpoint.

Run it with `python examples/fabric.py`.
"""

from __future__ import annotations

from typing import Any

import torch
from lightning import Fabric
from torch import Tensor
from torch.optim.lr_scheduler import LinearLR
from torch.utils.data import DataLoader

from tinker_lightning import Datum, RemoteAdamW, RemoteLM, collate, connect

SENTENCES = [
    b"All happy families are alike.",
    b"Call me Ishmael.",
    b"It was a bright cold day in April.",
    b"I am an invisible man.",
    b"The sun shone, having no alternative.",
]
EPOCHS, ACCUMULATE = 6, 2


def focal(logprobs: list[Tensor]) -> Tensor:
    """Focal loss: cross-entropy with less weight on tokens that are already likely."""
    p = torch.cat(logprobs)
    return -((1 - p.exp()) ** 2 * p).mean()


def train(client: Any, checkpoint: str) -> list[float]:
    """Returns the mean loss of each epoch."""
    fabric = Fabric(accelerator="cpu", devices=1)  # the passes run on the server: one process is enough
    remote = RemoteLM(client)
    model, optimizer = fabric.setup(remote, RemoteAdamW(remote.parameters(), lr=1e-2))
    scheduler = LinearLR(optimizer, 1.0, 0.1, total_iters=18)
    data: Any = [Datum.from_tokens(list(text)) for text in SENTENCES]
    loader = fabric.setup_dataloaders(DataLoader(data, batch_size=1, collate_fn=collate))

    means = []
    for _ in range(EPOCHS):
        losses = []
        for i, batch in enumerate(loader):
            loss = focal(model(batch))
            fabric.backward(loss / ACCUMULATE)
            losses.append(loss.item())
            if (i + 1) % ACCUMULATE == 0 or i + 1 == len(loader):
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
        means.append(sum(losses) / len(losses))
    # The weights and AdamW's moments are on the server; the file records their path.
    path = client.save_state("end").result().path
    fabric.save(checkpoint, {"remote": path, "optimizer": optimizer, "scheduler": scheduler})
    return means


if __name__ == "__main__":
    with connect("embedded") as service:
        means = train(service.create_lora_training_client("tiny", rank=8, seed=0), "fabric.ckpt")
        for epoch, mean in enumerate(means):
            print(f"epoch {epoch}: loss {mean:.3f}")
        resumed = service.create_training_client_from_state_with_optimizer(torch.load("fabric.ckpt")["remote"])
        print(f"resumed as {resumed.model_id}")
