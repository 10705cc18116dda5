"""Fine-tuning with regularizers: terms with names and weights, added to the loss and logged one by one.

Run it with `python examples/regularizers.py [MODEL]`; the model is `tiny` or, for a model that can read,
`smollm2-135m`.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor

from tinker_lightning import Regularizer
from tinker_lightning.data import ChatData
from tinker_lightning.losses import regularizers
from tinker_lightning.recipes import SFT

ROWS = Path(__file__).parent / "data" / "orders_validation.jsonl"


def weakest(data: list[Any], logprobs: list[Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
    """Penalizes the least likely token of each answer: a single wrong one spoils it."""
    answers = [p[datum.loss_fn_inputs["weights"].to_torch() > 0] for datum, p in zip(data, logprobs, strict=True)]
    least = torch.stack([answer.min() for answer in answers])
    return -least.mean(), {"probability": least.exp().mean()}


class Regularized(SFT):
    regularizers = [  # noqa: RUF012
        Regularizer(weakest, 0.1, "weakest"),
        Regularizer(regularizers.topology, lambda step: 0.01 * min(step, 10), "topology"),  # more from step to step
    ]


def main(model: str = "tiny") -> dict[str, float]:
    """Returns the metrics of the last step."""
    trainer = pl.Trainer(strategy="tinker", max_epochs=1, log_every_n_steps=1, logger=False, enable_checkpointing=False)
    with Regularized(model, rank=16, learning_rate=1e-3, base_url="embedded") as module:
        trainer.fit(module, ChatData(ROWS, batch_size=4))
    return {name: float(value) for name, value in trainer.callback_metrics.items()}


if __name__ == "__main__":
    for name, value in main(*sys.argv[1:]).items():
        print(f"{name:40} {value:.4g}")
