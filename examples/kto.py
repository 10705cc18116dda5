"""Teaches SmolLM2-135M to answer with a measure, "for 6 minutes", from single answers that are labeled good or bad.

Kahneman-Tversky optimization on 48 answers, each to a prompt of its own; scored on 16 held-out pairs. Run it with
`tox -e kto`, or `python examples/kto.py [FOLDER]`. Like the quickstart it needs no account and no GPU.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.loggers import CSVLogger

from tinker_lightning.data import PreferenceData
from tinker_lightning.recipes import KTO

DATA = Path(__file__).parent / "data"


def main(folder: Path | str = "runs/kto", model: str = "smollm2-135m", *, learning_rate: float = 2e-4) -> Any:
    """Returns the scores of the held-out answers before and after."""
    pl.seed_everything(0)
    files = DATA / "answers_train.jsonl", DATA / "preferences_validation.jsonl"
    data = PreferenceData(*files, batch_size=8, system="Answer briefly.")
    trainer = pl.Trainer(strategy="tinker", max_epochs=4, logger=CSVLogger(folder, name=""), log_every_n_steps=1)
    with KTO(model, rank=16, learning_rate=learning_rate, base_url="embedded") as module:
        before = trainer.validate(module, data)
        trainer.fit(module, data)
        return *before, *trainer.validate(module, data)


if __name__ == "__main__":
    main(*sys.argv[1:])
