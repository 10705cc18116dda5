"""Teaches SmolLM2-135M by rewards to read a number off a sentence: GRPO on a task that one line verifies.

"Ivy has 3 keys and 7 hats. Number of keys:" is answered rightly by a 3 and nothing else. Half of the prompts ask for
the first thing, half for the second, and each number is right equally often, so neither a constant answer nor a fixed
place helps. The names in the 32 held-out prompts do not occur in the 128 prompts to train on. Run it with
`tox -e grpo`, or `python examples/grpo.py [FOLDER [MODEL [SEED]]]`.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.loggers import CSVLogger

from tinker_lightning.data import RolloutData
from tinker_lightning.recipes import GRPO

DATA = Path(__file__).parent / "data"
OFTEN: Any = {"check_val_every_n_epoch": None, "val_check_interval": 8}  # validates after every 8 steps


def right(_: str, completion: str, answer: str) -> float:
    """1 if the answer starts with the right number."""
    found = re.match(r"\s*(\d+)", completion)
    return float(found is not None and found[1] == answer)


def digits(_: str, completion: str) -> float:
    """The share of digits, a hint of what is asked for. The configuration in `configs/grpo.yaml` adds it."""
    return sum(each.isdigit() for each in completion) / max(1, len(completion.strip()))


def improve(module: GRPO, data: RolloutData, folder: Any, steps: int) -> Any:
    """Trains a module, and returns the scores of the held-out prompts before and after."""
    logger = CSVLogger(folder, name="")
    trainer = pl.Trainer(strategy="tinker", max_steps=steps, logger=logger, log_every_n_steps=1, **OFTEN)
    before = trainer.validate(module, data)
    trainer.fit(module, data)
    return *before, *trainer.validate(module, data)


def main(
    folder: Path | str = "runs/grpo",
    model: str = "smollm2-135m",
    seed: int | str = 0,
    *,
    rewards: Any = right,
    steps: int = 24,
) -> Any:
    """Returns the rewards of the held-out prompts before and after."""
    seed = pl.seed_everything(int(seed))
    train, held_out = (DATA / f"numbers_{part}.jsonl" for part in ("train", "validation"))
    data = RolloutData(
        train, held_out, rewards=rewards, batch_size=8, group_size=8, max_tokens=3, as_text=True, seed=seed
    )
    with GRPO(model, rank=8, learning_rate=3e-4, seed=seed, base_url="embedded") as module:
        return improve(module, data, folder, steps)


if __name__ == "__main__":
    main(*sys.argv[1:])
