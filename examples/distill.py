"""Distils a fine-tuned SmolLM2-135M into a new adapter, on what the student itself writes.

The teacher learns to write orders as JSON by supervised fine-tuning, as in `sft.py`. The student sees prompts only: it
answers them, and the teacher's log-probabilities of its tokens are its reward. Run it with
`python examples/distill.py [FOLDER [MODEL [SEED]]]`.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.loggers import CSVLogger

from tinker_lightning import connect
from tinker_lightning.data import ChatData, RolloutData
from tinker_lightning.recipes import SFT, Distill
from tinker_lightning.rl import no_reward

DATA = Path(__file__).parent / "data"


def main(
    folder: Path | str = "runs/distill",
    model: str = "smollm2-135m",
    seed: int | str = 0,
    *,
    lessons: int = 8,
    steps: int = 24,
    rates: tuple[float, float] = (5e-4, 3e-4),  # of the teacher and of the student
    **settings: Any,
) -> Path:
    """Returns the folder with the metrics, among them `policy/kl_teacher` of each step."""
    seed = pl.seed_everything(int(seed))
    prompts = [json.loads(line)["messages"][:-1] for line in (DATA / "orders_train.jsonl").read_text().splitlines()]
    with connect("embedded") as service:
        teacher = service.create_lora_training_client(model, rank=8, seed=seed)
        pl.Trainer(strategy="tinker", max_steps=lessons, logger=False, enable_checkpointing=False).fit(
            SFT(teacher, learning_rate=rates[0]), ChatData(DATA / "orders_train.jsonl", batch_size=8)
        )
        path = teacher.save_weights_for_sampler("teacher").result().path

        student = service.create_lora_training_client(model, rank=8, seed=seed)
        sizes = {"batch_size": 8, "group_size": 4, "max_tokens": 16, **settings}
        data = RolloutData(prompts, rewards=no_reward, seed=seed, **sizes)
        trainer = pl.Trainer(strategy="tinker", max_steps=steps, logger=CSVLogger(folder, name=""), log_every_n_steps=1)
        trainer.fit(Distill(student, teacher=path, learning_rate=rates[1]), data)
    return Path(trainer.log_dir or folder)


if __name__ == "__main__":
    main(*sys.argv[1:])
