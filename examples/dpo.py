"""Teaches SmolLM2-135M to prefer an answer with a measure, "for 6 minutes", to one without, "it depends".

Direct preference optimization on 48 pairs of answers; 16 more are held out. Run it with `tox -e dpo`, or
`python examples/dpo.py [FOLDER]`. Like the quickstart it needs no account and no GPU.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.loggers import CSVLogger

from tinker_lightning.data import PreferenceData
from tinker_lightning.recipes import DPO

DATA = Path(__file__).parent / "data"


def main(folder: Path | str = "runs/dpo", model: str = "smollm2-135m", *, learning_rate: float = 2e-4) -> Any:
    """Returns the scores of the held-out pairs before and after."""
    pl.seed_everything(0)
    files = DATA / "preferences_train.jsonl", DATA / "preferences_validation.jsonl"
    data = PreferenceData(*files, batch_size=4, system="Answer briefly.")
    trainer = pl.Trainer(strategy="tinker", max_epochs=2, logger=CSVLogger(folder, name=""), log_every_n_steps=1)
    with DPO(model, rank=16, learning_rate=learning_rate, base_url="embedded") as module:
        before = trainer.validate(module, data)
        trainer.fit(module, data)
        return *before, *trainer.validate(module, data)


if __name__ == "__main__":
    main(*sys.argv[1:])
