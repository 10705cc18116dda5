"""Fits that are killed at any of their Python calls and started again, each in a fresh process.

Reads one job per line, `{"folder": ..., "kind": ..., "kill": ...}`, and answers with the exit status of its process.
What is imported is imported once: a job is a fork.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import traceback
from pathlib import Path
from typing import TYPE_CHECKING, Any

import lightning.pytorch as pl
import torch
from lightning.fabric.loggers.csv_logs import _ExperimentWriter
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from torch.utils.data import DataLoader
from torchdata.stateful_dataloader import StatefulDataLoader

import tinker_lightning.server  # noqa: F401  # takes its time, once
from tinker_lightning import Datum, RemoteModule, collate

if TYPE_CHECKING:
    from collections.abc import Callable

DATA = [Datum.from_tokens(list(f"text {i}: {'hello world, ' * (i % 3 + 1)}".encode())) for i in range(14)]


class Noting(RemoteModule):
    """Notes what it trains on, and draws random numbers in its loss."""

    folder: Path

    def loss(self, data: list[Any], logprobs: list[torch.Tensor]) -> Any:
        tokens = [datum.model_input.tokens().tolist() for datum in data]
        with (self.folder / "trained.jsonl").open("a") as file:
            file.write(json.dumps([self.trainer.fit_loop.total_batch_idx, tokens]) + "\n")
        loss = -torch.cat(logprobs).mean() * (1 + 0.1 * torch.rand(()))
        self.log("mean_of_epoch", loss.detach(), on_step=False, on_epoch=True, batch_size=len(data))
        return loss, {}

    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 20)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


class InTheMiddle(pl.Callback):
    """Saves in the middle of accumulation windows, too."""

    def on_train_batch_end(self, trainer: pl.Trainer, module: pl.LightningModule, *_: Any) -> None:
        assert isinstance(module, Noting)
        if trainer.fit_loop.total_batch_idx % 5 == 3:
            trainer.save_checkpoint(module.folder / "files" / "last.ckpt")


class Killer:
    """Counts the calls of a fit, and those within each save; ends the process at the one that is asked for.

    Args:
        save: The number of the save within which to count; None to count from the start of the fit.
        call: Which call it is; None for no kill.
        function: The name of the function whose calls count; None for all functions.
    """

    def __init__(self, save: int | None = None, call: int | None = None, function: str | None = None) -> None:
        self.save, self.call, self.function = save, call, function
        self.calls = 0
        self.in_saves: list[int] = []
        self._saving = self._rewriting = False

    def __call__(self, frame: Any, event: str, _: object) -> None:
        if event not in ("call", "return"):  # C's, such as a file's __exit__, have the frame that calls them
            return
        code = frame.f_code
        if code is pl.Trainer.save_checkpoint.__code__:
            self._saving = event == "call"
            if self._saving:
                self.in_saves.append(0)
        elif code is _ExperimentWriter._rewrite_with_new_header.__code__:
            self._rewriting = event == "call"  # Lightning's own: who is killed there has lost his rows
        if event != "call" or self.function not in (None, code.co_name):
            return
        self.calls += 1
        if self._saving:
            self.in_saves[-1] += 1
        in_save = self.in_saves[-1] if self._saving and len(self.in_saves) == self.save else -1
        reached = self.calls if self.save is None else in_save
        if self.call is not None and reached >= self.call and not self._rewriting:
            os.kill(os.getpid(), signal.SIGKILL)


def fit(folder: Path, kind: str, killer: Killer) -> None:
    torch.set_num_threads(1)
    pl.seed_everything(5)
    make: Any = StatefulDataLoader if kind == "stateful" else DataLoader
    loader = make(DATA, batch_size=2, shuffle=True, collate_fn=collate, num_workers=2 if kind == "workers" else 0)
    held_out: DataLoader[Any] = DataLoader(DATA[:3], batch_size=2, collate_fn=collate)  # type: ignore[arg-type]
    files = ModelCheckpoint(folder / "files", every_n_train_steps=2, save_last=True)
    trainer = pl.Trainer(
        strategy="tinker",
        max_epochs=3,
        accumulate_grad_batches=3,
        val_check_interval=4,
        logger=CSVLogger(folder, name="logs", version=len(list(folder.glob("logs/*")))),
        log_every_n_steps=1,
        callbacks=[files, InTheMiddle()],
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    url = folder / "url"  # of a server that outlives the fit
    base_url = url.read_text() if url.exists() else "embedded"
    with Noting("tiny", rank=4, learning_rate=1e-2, seed=1, base_url=base_url) as module:
        module.folder = folder
        sys.setprofile(killer)
        trainer.fit(module, loader, held_out, ckpt_path="last")
        sys.setprofile(None)
        done = {
            "state": module.lm.save(),
            "rate": trainer.optimizers[0].param_groups[0]["lr"],
            "steps": trainer.global_step,
            "calls": killer.calls,
            "in_saves": killer.in_saves,
        }
        (folder / "done.json").write_text(json.dumps(done))


def main(fit: Callable[[Path, str, Killer], None]) -> None:
    """Runs the jobs of the standard input."""
    for line in sys.stdin:
        job = json.loads(line)
        process = os.fork()
        if process == 0:
            os.setsid()
            folder = Path(job["folder"])
            os.environ["XDG_DATA_HOME"] = str(folder / "data")
            try:
                fit(folder, job["kind"], Killer(**job["kill"]))
            except BaseException:
                traceback.print_exc()
                os._exit(1)
            os._exit(0)
        _, status = os.waitpid(process, 0)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process, signal.SIGKILL)  # workers that have outlived it
        print(json.dumps(status), flush=True)


if __name__ == "__main__":
    main(fit)
