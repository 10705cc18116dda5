"""Fine-tuning that is evaluated by what the model writes: the best checkpoint is the one with the most right answers.

Run it with `python examples/generation_eval.py [MODEL] [FOLDER]`; the model is `tiny` or, for a model that can read,
`smollm2-135m`.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint

from tinker_lightning import SamplingParams
from tinker_lightning.callbacks import GenerationEval, SampleTable
from tinker_lightning.data import ChatData
from tinker_lightning.recipes import SFT

DATA = Path(__file__).parent / "data"
FIELDS = ("count", "size", "drink", "extra")


def score(text: str, row: dict[str, Any]) -> dict[str, float]:
    """Returns whether a ticket is JSON, and the share of its fields that are right."""
    expected = json.loads(row["messages"][-1]["content"])
    try:
        ticket = json.loads(text)
    except ValueError:
        ticket = None
    if not isinstance(ticket, dict):
        return {"is_json": 0.0, "fields": 0.0}
    return {"is_json": 1.0, "fields": sum(ticket.get(name) == expected[name] for name in FIELDS) / len(FIELDS)}


def main(model: str = "tiny", folder: Path | str = "runs/generation_eval", **options: Any) -> dict[str, float]:
    """Returns the metrics of the last epoch."""
    lines = (DATA / "orders_validation.jsonl").read_text(encoding="utf-8").splitlines()
    orders = [json.loads(line) for line in lines[:4]]
    greedy = SamplingParams(max_tokens=40, temperature=0)
    callbacks = [
        GenerationEval(score, orders, name="ticket", sampling_params=greedy),
        SampleTable(orders[:1], sampling_params=greedy),
        ModelCheckpoint(folder, filename="best", monitor="ticket/fields", mode="max"),
        EarlyStopping("ticket/fields", mode="max", patience=1),
    ]
    trainer = pl.Trainer(strategy="tinker", max_epochs=2, callbacks=callbacks, logger=False, **options)
    with SFT(model, rank=16, learning_rate=1e-3, base_url="embedded") as module:
        trainer.fit(module, ChatData(DATA / "orders_train.jsonl", batch_size=8))
    return {name: float(value) for name, value in trainer.callback_metrics.items()}


if __name__ == "__main__":
    print(main(*sys.argv[1:]))
