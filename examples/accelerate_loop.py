"""A remote model in an Accelerate loop: a custom loss, gradient accumulation and a schedule.

Run it with `python examples/accelerate_loop.py`, after `python -m pip install accelerate`.
"""

from __future__ import annotations

from typing import Any

import torch
from accelerate import Accelerator
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
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=ACCUMULATE)
    remote = RemoteLM(client)
    adamw = RemoteAdamW(remote.parameters(), lr=1e-2)
    data: Any = [Datum.from_tokens(list(text)) for text in SENTENCES]
    model, optimizer, scheduler, loader = accelerator.prepare(
        remote,
        adamw,
        LinearLR(adamw, 1.0, 0.1, total_iters=18),
        DataLoader(data, batch_size=1, collate_fn=collate),
    )

    means = []
    for _ in range(EPOCHS):
        losses = []
        for batch in loader:
            with accelerator.accumulate(model):
                loss = focal(model(batch))
                accelerator.backward(loss)  # divides by the number of micro-batches
                optimizer.step()  # does nothing before the last one
                scheduler.step()
                optimizer.zero_grad()
            losses.append(loss.item())
        means.append(sum(losses) / len(losses))
    return means


if __name__ == "__main__":
    with connect("embedded") as service:
        for epoch, mean in enumerate(train(service.create_lora_training_client("tiny", rank=8, seed=0))):
            print(f"epoch {epoch}: loss {mean:.3f}")
