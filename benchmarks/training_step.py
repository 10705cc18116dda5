"""Time and memory of a training step of smollm2-135m, rank 32, next to plain Lightning with transformers and peft.

A step is a forward and backward pass over 8 sequences and an optimizer step: with a built-in and with a custom loss, by
the client and by `Trainer.fit` on the embedded trainer in one process, and in a `LightningModule` that holds the model
itself and pads to the longest sequence, in another. Medians of interleaved rounds. The memory is the peak of a process
that only does this.
"""

from __future__ import annotations

import os
import tempfile
import time
from functools import partial
from typing import TYPE_CHECKING, Any

import lightning.pytorch as pl
import torch
from torch.utils.data import DataLoader

from benchmarks import lightning_step, report
from benchmarks.engine_passes import EQUAL, MIXED, RANK, Plain, make_data, measure
from benchmarks.pass_memory import peak
from benchmarks.processes import process, worker
from tinker_lightning import RemoteModule, collate
from tinker_lightning.server import EmbeddedTrainer
from tinker_lightning.server.engine.catalog import Catalog
from tinker_lightning.testing import embedded_service
from tinker_lightning.types import AdamParams, Datum

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import ExitStack

    from torch import Tensor

MODEL = "smollm2-135m"
PLAIN = "Lightning + transformers + peft"
STEPS = 2  # of a round


def mean_nll(_: Any, logprobs: list[Tensor]) -> tuple[Tensor, dict[str, Any]]:
    """What the default loss computes, in Python."""
    loss = -torch.cat(logprobs).mean()
    return loss, {"nll": loss.detach()}


class Custom(RemoteModule):
    """A custom loss."""

    def loss(self, data: list[Datum], logprobs: list[Tensor]) -> Any:
        return mean_nll(data, logprobs)


class PlainModule(pl.LightningModule):
    """The model in this process, as users of transformers and peft write it."""

    def __init__(self, path: str) -> None:
        super().__init__()
        self.plain = Plain(path)
        self.model = self.plain.model

    def training_step(self, batch: list[Datum]) -> Tensor:
        loss: Tensor = self.plain.loss(batch)
        return loss

    def configure_optimizers(self) -> Any:
        trained = [parameter for parameter in self.parameters() if parameter.requires_grad]
        return torch.optim.AdamW(trained, lr=1e-4)


class _Start(pl.Callback):
    clock: Clock

    def on_train_start(self, *_: Any) -> None:
        self.clock = Clock()


class Clock:
    """The wall and processor time of the steps from now on."""

    def __init__(self) -> None:
        self._wall, self._cpu = time.perf_counter(), time.process_time()

    def per_step(self) -> tuple[float, float]:
        return (time.perf_counter() - self._wall) / STEPS, (time.process_time() - self._cpu) / STEPS


def fit(module: pl.LightningModule, strategy: str, data: list[Datum]) -> tuple[float, float]:
    """Returns the wall and processor time of a step of `Trainer.fit`, with the wait for the last one."""
    start = _Start()
    trainer = pl.Trainer(
        strategy=strategy,
        accelerator="cpu",
        devices=1,
        max_steps=STEPS,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[start],
    )
    trainer.fit(module, DataLoader(data * STEPS, len(data), collate_fn=collate))  # type: ignore[arg-type]
    return start.clock.per_step()


def loop(client: Any, data: list[Datum], *, custom: bool) -> tuple[float, float]:
    """Returns the wall and processor time of a step of the client."""
    clock = Clock()
    for _ in range(STEPS):
        if custom:
            client.forward_backward_custom(data, mean_nll)
        else:
            client.forward_backward(data, "cross_entropy")
        client.optim_step(AdamParams(learning_rate=1e-4)).result()
    return clock.per_step()


def use_memory(path: str | None, ready: Callable[[float], None]) -> None:
    """Reports the peak of a process that fits one round of mixed lengths: the model in a folder, or ours."""
    lightning_step.quiet()
    torch.set_num_threads(2)
    data = make_data(MIXED)
    if path is not None:
        fit(PlainModule(path), "auto", data)
    else:
        with tempfile.TemporaryDirectory() as folder:
            trainer = EmbeddedTrainer([MODEL], data_dir=folder)
            with embedded_service(trainer) as service:
                fit(RemoteModule(service.create_lora_training_client(MODEL, rank=RANK)), "tinker", data)
    ready(peak(os.getpid()))


def build_ours(stack: ExitStack, share: int) -> dict[str, Callable[[], tuple[float, float]]]:
    """Returns the ways with a trainer in this process, on every `share`-th sequence."""
    lightning_step.quiet()
    torch.set_num_threads(2)
    equal, mixed = make_data(EQUAL[::share]), make_data(MIXED[::share])
    folder = stack.enter_context(tempfile.TemporaryDirectory())
    service = stack.enter_context(embedded_service(EmbeddedTrainer([MODEL], data_dir=folder)))
    client = service.create_lora_training_client(MODEL, rank=RANK)
    built_in, custom = (kind(service.create_lora_training_client(MODEL, rank=RANK)) for kind in (RemoteModule, Custom))
    return {
        "client, built-in loss": lambda: loop(client, equal, custom=False),
        "client, custom loss": lambda: loop(client, equal, custom=True),
        "Trainer.fit, built-in loss": lambda: fit(built_in, "tinker", equal),
        "Trainer.fit, custom loss": lambda: fit(custom, "tinker", equal),
        "client, built-in loss, mixed lengths": lambda: loop(client, mixed, custom=False),
        "Trainer.fit, built-in loss, mixed lengths": lambda: fit(built_in, "tinker", mixed),
    }


def build_plain(stack: ExitStack, path: str, share: int) -> dict[str, Callable[[], tuple[float, float]]]:
    """Returns the ways with a model in this process."""
    del stack
    lightning_step.quiet()
    torch.set_num_threads(2)
    equal, mixed = make_data(EQUAL[::share]), make_data(MIXED[::share])
    module = PlainModule(path)
    return {
        PLAIN: lambda: fit(module, "auto", equal),
        f"{PLAIN}, mixed lengths": lambda: fit(module, "auto", mixed),
    }


def main() -> None:
    options = report.arguments(__doc__)
    rounds = 1 if options.quick else 5
    share = 4 if options.quick else 1  # of the sequences
    path = Catalog([MODEL]).get(MODEL).tokenizer_id
    ours = ("client, built-in loss", "client, custom loss", "Trainer.fit, built-in loss", "Trainer.fit, custom loss")
    ours_mixed = ("client, built-in loss, mixed lengths", "Trainer.fit, built-in loss, mixed lengths")
    # A process each: the threads of two models in one process slow each other down, even while one of them waits.
    with worker(build_ours, share) as run, worker(build_plain, path, share) as run_plain:
        plain = {name: partial(run_plain, name) for name in (PLAIN, f"{PLAIN}, mixed lengths")}
        parts = [
            measure({name: partial(run, name) for name in names} | {other: plain[other]}, rounds)
            for names, other in ((ours, PLAIN), (ours_mixed, f"{PLAIN}, mixed lengths"))
        ]
    rows = []
    for found in parts:
        *_, (plain_wall, plain_cpu) = found.values()
        rows += [
            {
                "step": name,
                "seconds": wall,
                "times faster than transformers + peft": plain_wall / wall,
                "by processor time": plain_cpu / cpu,
            }
            for name, (wall, cpu) in found.items()
        ]
    report.show(rows)
    customs = [
        {
            "custom loss": way,
            "times the built-in": parts[0][f"{way}, custom loss"][0] / parts[0][f"{way}, built-in loss"][0],
            "by processor time": parts[0][f"{way}, custom loss"][1] / parts[0][f"{way}, built-in loss"][1],
        }
        for way in ("client", "Trainer.fit")
    ]
    report.show(customs)
    memory = []
    for name, model in (("Trainer.fit, mixed lengths", None), (f"{PLAIN}, mixed lengths", path)):
        with process(use_memory, model) as megabytes:
            memory.append({"process": name, "peak, MB": megabytes})
    report.show(memory)
    equal, mixed = ({name.removesuffix(", mixed lengths"): wall for name, (wall, _) in part.items()} for part in parts)
    drawn = [{"way": name, "8 x 128 tokens": equal[name], "32 to 256 tokens": mixed[name]} for name in mixed]
    report.bars(options.plots, "training_step", "seconds per step", drawn, scale="linear")
    report.write(options.json, {"training step": rows, "custom loss": customs, "step memory": memory})


if __name__ == "__main__":
    main()
