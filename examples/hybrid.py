"""A remote model and a local parameter trained by one optimizer: matching answers to questions.

As in CLIP, every question is scored with every answer, and a learned temperature scales the scores. The scoring model
is remote; the temperature is a local parameter. Run it with `python examples/hybrid.py`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from tinker_lightning import Datum, RemoteAdamW, RemoteLM, connect

PAIRS = [(b"sky?", b" blue"), (b"grass?", b" green"), (b"snow?", b" white"), (b"night?", b" black")]


class Matcher(nn.Module):
    """Scores every question (row) with every answer (column)."""

    def __init__(self, client: Any) -> None:
        super().__init__()
        self.lm = RemoteLM(client)
        self.log_scale = nn.Parameter(torch.zeros(()))

    def forward(self, pairs: list[tuple[bytes, bytes]]) -> Tensor:
        data = [
            Datum.from_tokens([*question, *answer], weights=[0.0] * len(question) + [1.0] * len(answer))
            for question, _ in pairs
            for _, answer in pairs
        ]
        answers = [len(answer) for _ in pairs for _, answer in pairs]
        means = [p[-n:].mean() for p, n in zip(self.lm(data), answers, strict=True)]
        return self.log_scale.exp() * torch.stack(means).view(len(pairs), len(pairs))


def train(client: Any, steps: int = 30) -> tuple[Matcher, list[float]]:
    """Returns the trained matcher and the loss of each step."""
    model = Matcher(client)
    optimizer = RemoteAdamW(model.parameters(), lr=3e-3)
    right = torch.arange(len(PAIRS))
    losses = []
    for step in range(steps):
        scores = model(PAIRS)
        loss = (cross_entropy(scores, right) + cross_entropy(scores.T, right)) / 2
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()  # steps the remote model on the server and the temperature locally
        losses.append(loss.item())
        if step % 5 == 0:
            hits = int((scores.argmax(1) == right).sum())
            print(f"step {step:2}: loss {loss:.3f}, {hits} of {len(PAIRS)} right, scale {model.log_scale.exp():.3f}")
    return model, losses


if __name__ == "__main__":
    with connect("embedded") as service:
        train(service.create_lora_training_client("tiny", rank=8, seed=0))
