"""Memory, threads and descriptors of client and server over 10,000 steps of one fit.

A step trains `tiny` on a single token, so that what a step leaves behind is not hidden by what it computes. The figures
are taken after a tenth of the steps, when caches are full, and then until the end.
"""

from __future__ import annotations

import gc
import os
import tempfile
import warnings
from typing import TYPE_CHECKING, Any

import lightning.pytorch as pl
import torch
from torch.utils.data import DataLoader

from benchmarks import report
from benchmarks.processes import process, serve_app, tiny_trainer
from tinker_lightning import Datum, RemoteModule, collate

if TYPE_CHECKING:
    from collections.abc import Callable

SAMPLES = 40


class Custom(RemoteModule):
    """A custom loss, so that every step has a forward, a backward and an optimizer step."""

    def loss(self, _: list[Any], logprobs: list[torch.Tensor]) -> Any:
        loss = -torch.cat(logprobs).mean()
        return loss, {"perplexity": loss.exp()}


class Watch(pl.Callback):
    """Notes memory, threads and descriptors of processes, by name, while a fit runs."""

    def __init__(self, processes: dict[str, int], every: int) -> None:
        self.processes = processes
        self.every = every
        self.seen: dict[str, list[dict[str, int]]] = {name: [] for name in processes}

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        if trainer.global_step % self.every == 0:
            gc.collect()
            for name, pid in self.processes.items():
                self.seen[name].append(_usage(pid))


def serve(folder: str, ready: Callable[[tuple[str, int]], None]) -> None:
    """Serves `tiny`; reports the URL and the id of the process."""
    from tinker_lightning.server import create_app

    serve_app(create_app(tiny_trainer(folder)), lambda url: ready((url, os.getpid())))


def fit(steps: int, url: str, server: int | None) -> dict[str, list[dict[str, int]]]:
    """Returns what each process used over a fit, from a tenth of its steps on."""
    processes = {"client and server": os.getpid()} if server is None else {"client": os.getpid(), "server": server}
    watch = Watch(processes, steps // SAMPLES)
    outputs = ("logger", "enable_progress_bar", "enable_checkpointing", "enable_model_summary")
    quiet: dict[str, Any] = dict.fromkeys(outputs, False)
    trainer = pl.Trainer(strategy="tinker", max_steps=steps, callbacks=[watch], **quiet)
    data: DataLoader[Datum] = DataLoader([Datum.from_tokens([5, 6])] * steps, batch_size=1, collate_fn=collate)  # type: ignore[arg-type]
    with Custom("tiny", rank=4, base_url=url) as module:
        trainer.fit(module, data)
    return {name: seen[SAMPLES // 10 :] for name, seen in watch.seen.items()}


def _usage(pid: int) -> dict[str, int]:
    with open(f"/proc/{pid}/status") as file:
        fields = dict(line.split(":", 1) for line in file)
    return {
        "kilobytes": int(fields["VmRSS"].split()[0]),
        "threads": int(fields["Threads"]),
        "descriptors": len(os.listdir(f"/proc/{pid}/fd")),
    }


def main() -> None:
    options = report.arguments(__doc__)
    steps = 1_000 if options.quick else 10_000
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder, process(serve, folder) as (url, pid):
        seen = fit(steps, url, pid)
    seen |= fit(steps, "embedded", None)
    rows = []
    for name, used in seen.items():
        first, last = used[0], used[-1]
        row: dict[str, Any] = {"process": name, "MB": first["kilobytes"] / 1024}
        row["growth, MB"] = (last["kilobytes"] - first["kilobytes"]) / 1024
        for what in ("threads", "descriptors"):
            row[what] = f"{first[what]} to {last[what]}"
        rows.append(row)
    print(f"One fit of {steps:,} steps, after a tenth of them:")
    report.show(rows)
    report.write(options.json, {"steady state": seen})


if __name__ == "__main__":
    main()
