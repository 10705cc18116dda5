"""A remote model in a plain PyTorch loop: a custom loss, gradient accumulation and a schedule.

Run it with `python examples/plain_torch.py`. For whole fine-tuning runs see `fabric.py` and `accelerate_loop.py`.
"""

from __future__ import annotations

from typing import Any

import torch
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


def train(client: Any) -> list[float]:
    """Returns the mean loss of each epoch."""
    model = RemoteLM(client)
    optimizer = RemoteAdamW(model.parameters(), lr=1e-2)
    scheduler = LinearLR(optimizer, 1.0, 0.1, total_iters=18)
    data: Any = [Datum.from_tokens(list(text)) for text in SENTENCES]
    loader = DataLoader(data, batch_size=1, collate_fn=collate)

    means = []
    for _ in range(EPOCHS):
        losses = []
        for i, batch in enumerate(loader):
            loss = focal(model(batch))
            (loss / ACCUMULATE).backward()
            losses.append(loss.item())
            if (i + 1) % ACCUMULATE == 0 or i + 1 == len(loader):
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
        means.append(sum(losses) / len(losses))
    return means


if __name__ == "__main__":
    with connect("embedded") as service:
        for epoch, mean in enumerate(train(service.create_lora_training_client("tiny", rank=8, seed=0))):
            print(f"epoch {epoch}: loss {mean:.3f}")
