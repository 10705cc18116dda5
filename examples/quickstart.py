"""Teaches SmolLM2-135M to take orders in a café: it turns what a guest says into a ticket that a program can read.

Run it with `tox -e demo`, or `python examples/quickstart.py [FOLDER]`. It needs no account and no GPU, because the
trainer runs in this process. To train on a Tinker server instead, pass its URL as `base_url`.
"""

from __future__ import annotations

import csv
import json
import math
import sys
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
import wandb
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger, WandbLogger
from matplotlib.figure import Figure
from torch import Tensor
from torch.optim.lr_scheduler import CosineAnnealingLR, LinearLR, SequentialLR

from tinker_lightning import Datum, RemoteModule, SamplingParams
from tinker_lightning.callbacks import ExportAdapter, GenerationEval
from tinker_lightning.data import ChatData

DATA = Path(__file__).parent / "data"
GREEDY = SamplingParams(max_tokens=40, temperature=0)


class Barista(RemoteModule):
    def loss(self, data: list[Datum], logprobs: list[Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        """Returns the mean over tokens plus a penalty on the least likely token of each ticket.

        A single wrong token spoils a ticket. The penalty ends where that token has half of the probability, because
        greedy sampling then always chooses it.
        """
        tickets = [p[datum.loss_fn_inputs["weights"].to_torch() > 0] for datum, p in zip(data, logprobs, strict=True)]
        nll = -torch.cat(tickets).mean()
        weakest = torch.stack([ticket.min() for ticket in tickets])
        doubt = (math.log(0.5) - weakest).relu().mean()
        return nll + 0.1 * doubt, {"ticket_nll": nll, "doubt": doubt}

    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()
        steps = int(self.trainer.estimated_stepping_batches)
        warmup = LinearLR(optimizer, start_factor=0.25, total_iters=steps // 8)
        cosine = CosineAnnealingLR(optimizer, T_max=steps - steps // 8)
        schedule = SequentialLR(optimizer, [warmup, cosine], milestones=[steps // 8])
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


class Tickets:
    """Scores tickets: 1 for the right one, 0 for any other. Keeps them, to show how they change."""

    def __init__(self) -> None:
        self.written: dict[str, list[str]] = {}

    def __call__(self, text: str, row: dict[str, Any]) -> bool:
        *_, order, ticket = row["messages"]
        self.written.setdefault(order["content"], []).append(" ".join(text.split()))
        return bool(text == ticket["content"])


def main(folder: Path | str = "runs/quickstart", model: str = "smollm2-135m") -> None:
    pl.seed_everything(0)
    Path(folder).mkdir(parents=True, exist_ok=True)
    data = ChatData(DATA / "orders_train.jsonl", DATA / "orders_validation.jsonl", batch_size=2)
    tickets, orders = Tickets(), read_orders()
    table = CSVLogger(folder, name="")
    trainer = pl.Trainer(
        strategy="tinker",
        max_epochs=3,
        accumulate_grad_batches=4,
        logger=[table, WandbLogger(save_dir=folder, offline=True, settings=wandb.Settings(silent=True))],
        log_every_n_steps=1,
        callbacks=[
            GenerationEval(tickets, orders, name="tickets_right", sampling_params=GREEDY),
            ModelCheckpoint(monitor="val_loss", filename="best"),
            ExportAdapter(Path(folder) / "adapter", "best", overwrite=True),
        ],
        enable_model_summary=False,
        num_sanity_val_steps=0,
    )
    with Barista(model, rank=16, learning_rate=1e-3, base_url="embedded") as barista:
        (before,) = trainer.validate(barista, data)
        trainer.fit(barista, data)

    for order, (old, *_, new) in tickets.written.items():
        print(f"\n{order}\n  before  {old if len(old) < 90 else old[:89] + '…'}\n  after   {new}")
    shares = before["tickets_right"], trainer.callback_metrics["tickets_right"]
    right = [f"{round(float(share) * len(orders))} of {len(orders)}" for share in shares]
    print(f"\nTickets that are right: {right[0]} before, {right[1]} after.")
    plot(Path(table.log_dir))
    print(f"\nThe loss curve, the table behind it and the best checkpoint are in {table.log_dir}.")
    print(f"The adapter is in {folder}/adapter. Talk to it: tinker-lightning chat {folder}")


def read_orders() -> list[dict[str, Any]]:
    """Reads eight chats that are not in the training data."""
    lines = (DATA / "orders_validation.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines[:8]]


def plot(folder: Path) -> None:
    with (folder / "metrics.csv").open() as file:
        rows = list(csv.DictReader(file))
    train = [(int(row["step"]), float(row["ticket_nll"])) for row in rows if row["ticket_nll"]]
    # A validation is logged under the step before it; the first one has none before it.
    first, *later = [(int(row["step"]), float(row["val_nll"])) for row in rows if row["val_nll"]]
    validation = [first, *((step + 1, loss) for step, loss in later)]
    figure = Figure(figsize=(7, 3.6), layout="constrained")
    axes = figure.subplots()
    axes.semilogy(*zip(*train, strict=True), ".-", alpha=0.6, label="training (the 8 lessons of each step)")
    axes.semilogy(*zip(*validation, strict=True), "o-", linewidth=2, label="validation (16 orders not in the lessons)")
    axes.set(title="A chat model learns to take orders", xlabel="optimizer steps", ylabel="loss (nats per token)")
    axes.set_xticks(range(0, validation[-1][0] + 1, 4))
    axes.yaxis.set_major_formatter("{x:g}")
    axes.grid(alpha=0.25)
    axes.legend(frameon=False)
    figure.savefig(folder / "loss.png", dpi=120)


if __name__ == "__main__":
    main(*sys.argv[1:])
