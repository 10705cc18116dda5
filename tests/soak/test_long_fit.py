"""Ten thousand steps in one fit: memory, threads and descriptors of client and trainer stay the same."""  # R5.11

from __future__ import annotations

import gc
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch

from tests.helpers.soaking import size
from tests.helpers.trainers import loader
from tinker_lightning import RemoteModule

STEPS = size("FIT_STEPS", 10_000)
ROOT = Path(__file__).parents[2]


class Squares(RemoteModule):
    def loss(self, _: list[Any], logprobs: list[torch.Tensor]) -> Any:
        loss = torch.cat(logprobs).square().mean()
        return loss, {"squares": loss.detach()}


class Measure(pl.Callback):
    """Measures this process, which trains and serves, ten times."""

    def __init__(self) -> None:
        self.seen: list[tuple[int, int, int]] = []  # bytes, threads, descriptors

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        if trainer.global_step * 10 >= STEPS * (len(self.seen) + 1):
            gc.collect()
            with open("/proc/self/status") as file:
                numbers = dict(line.split(":", 1) for line in file)
            resident = int(numbers["VmRSS"].split()[0]) << 10
            self.seen.append((resident, int(numbers["Threads"]), len(os.listdir("/proc/self/fd"))))
            print(
                trainer.global_step, "steps, MiB, threads, descriptors:", resident >> 20, *self.seen[-1][1:], flush=True
            )


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    measure = Measure()
    trainer = pl.Trainer(
        strategy="tinker",
        max_steps=STEPS,
        max_epochs=-1,
        log_every_n_steps=10,
        default_root_dir=folder,
        callbacks=[measure],
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    with Squares("tiny", rank=4, learning_rate=1e-3, seed=1, base_url="embedded") as module:
        trainer.fit(module, loader())
    assert trainer.global_step == STEPS
    early, late = measure.seen[1], measure.seen[-1]
    assert late[0] - early[0] < 20 << 20, measure.seen
    assert late[1:] == early[1:], measure.seen


@pytest.mark.soak
def test_ten_thousand_steps_leave_nothing_behind(tmp_path: Path) -> None:
    environment = {**os.environ, "XDG_DATA_HOME": str(tmp_path)}
    command = [sys.executable, "-m", "tests.soak.test_long_fit", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, env=environment, text=True, capture_output=True, check=False)
    print(done.stdout)
    assert done.returncode == 0, done.stderr[-3000:]


if __name__ == "__main__":
    main(Path(sys.argv[1]))
