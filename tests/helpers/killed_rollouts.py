"""Fits on rollouts that are killed at any of their Python calls and started again; see `killed_fit`."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING, Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

import tinker_lightning.server  # noqa: F401  # takes its time, once
from tests.helpers.killed_fit import Killer, main
from tests.helpers.rollouts import rollouts
from tinker_lightning.recipes import GRPO

if TYPE_CHECKING:
    from pathlib import Path

KINDS = {"on-policy": {}, "epochs": {"epochs": 2}, "ahead": {"staleness": 2}}


def _reward(prompt: str, completion: str) -> float:
    return sum(map(ord, completion)) / 1000 + len(prompt) % 2


class Noting(GRPO):
    """Notes which prompts each batch trains, and on which tokens."""

    folder: Path

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        job = batch.loader.job(batch.job)
        groups = [job.groups[slot] for slot in sorted(job.groups)]
        tokens = [each.turns[0].completion.tokens for group in groups for each in group.trajectories]
        with (self.folder / "trained.jsonl").open("a") as file:
            numbers = [group.task.number for group in groups]
            file.write(json.dumps([batch.id, {"prompts": numbers, "tokens": tokens}]) + "\n")
        return loss


def fit(folder: Path, kind: str, killer: Killer) -> None:
    torch.set_num_threads(1)
    pl.seed_everything(5)
    folder.mkdir(exist_ok=True)
    trainer = pl.Trainer(
        strategy="tinker",
        max_steps=8,
        accumulate_grad_batches=2 if kind == "on-policy" else 1,
        logger=False,
        callbacks=[ModelCheckpoint(folder / "files", every_n_train_steps=1, save_last=True)],
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    with Noting("tiny", rank=4, learning_rate=1e-2, seed=1, base_url="embedded") as module:
        module.folder = folder
        sys.setprofile(killer)
        trainer.fit(module, rollouts(rewards=_reward, **KINDS[kind]), ckpt_path="last")
        sys.setprofile(None)
        done = {"state": module.lm.save(), "steps": trainer.global_step, "calls": killer.calls}
        (folder / "done.json").write_text(json.dumps({**done, "in_saves": killer.in_saves}))


if __name__ == "__main__":
    main(fit)
