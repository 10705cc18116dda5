"""Runs to compare bit for bit: one that is saved at every place of its loops, and those that go on from there."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import lightning.pytorch as pl
import numpy as np
import torch
from lightning.pytorch.callbacks import Checkpoint, GradientAccumulationScheduler
from lightning.pytorch.loggers.logger import Logger
from torch.utils.data import DataLoader, Dataset, IterableDataset
from torchdata.stateful_dataloader import StatefulDataLoader
from torchmetrics import MeanMetric

from tinker_lightning import Datum, RemoteModule, collate

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tinker_lightning.client import ServiceClient
    from tinker_lightning.server import EmbeddedTrainer

DATA = [Datum.from_tokens(list(f"{i} {'hello ' * (i % 3 + 1)}".encode())) for i in range(9)]


class Noisy(Dataset[Datum]):
    """Its texts are random by all three kinds of numbers."""

    def __len__(self) -> int:
        return len(DATA)

    def __getitem__(self, i: int) -> Datum:
        if i >= len(self):
            raise IndexError(i)
        length = int(torch.randint(1, 9, ())) + np.random.randint(1, 9) + random.randint(1, 9)  # noqa: S311
        return Datum.from_tokens(list(f"{i} {'x' * length}".encode()))


class Stream(IterableDataset[Datum]):
    """The same without a length."""

    def __iter__(self) -> Iterator[Datum]:
        return iter(Noisy())


def loaders(kind: str) -> Any:
    """Training data for five batches an epoch."""
    options: dict[str, Any] = {"batch_size": 2, "collate_fn": collate}
    match kind:
        case "shuffled":
            return DataLoader(Noisy(), shuffle=True, **options)
        case "generator":
            return DataLoader(Noisy(), shuffle=True, generator=torch.Generator().manual_seed(5), **options)
        case "workers":
            return DataLoader(Noisy(), shuffle=True, num_workers=2, **options)
        case "stateful":
            return StatefulDataLoader(Noisy(), shuffle=True, **options)
        case "stateful workers":
            return StatefulDataLoader(DATA, shuffle=True, num_workers=2, **options)
        case "unsized":
            return DataLoader(Stream(), **options)
        case "several":
            short: DataLoader[Any] = DataLoader(DATA[:4], shuffle=True, **options)  # type: ignore[arg-type]
            return {"long": DataLoader(Noisy(), shuffle=True, **options), "short": short}
    raise ValueError(kind)


KINDS = ["shuffled", "generator", "workers", "stateful", "stateful workers", "unsized", "several"]


class Mean(RemoteModule):
    """A loss with random numbers, metrics of steps and of epochs, and a scheduler."""

    scheduler = "step"

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.seen: list[tuple[int, int, list[bytes]]] = []
        self.train_mean = MeanMetric()
        self.temperature = torch.nn.Parameter(torch.zeros(()))  # local, trained with the remote model

    def datums(self, batch: Any) -> list[Any]:
        return [datum for part in batch.values() for datum in part] if isinstance(batch, dict) else batch

    def loss(self, data: list[Datum], logprobs: list[torch.Tensor]) -> Any:
        noise = torch.rand(())
        nll = -torch.cat(logprobs).mean() * (1 + 0.1 * noise) * (1 - 0.1 * self.temperature).exp()
        if self.trainer.training:
            texts = [datum.model_input.tokens().tobytes() for datum in data]
            self.seen.append((self.trainer.current_epoch, self.trainer.global_step, texts))
        return nll, {"noise": noise, "python": random.random(), "numpy": np.random.rand()}  # noqa: S311

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = super().training_step(batch, batch_idx)
        self.train_mean.update(loss.detach(), weight=1 + batch_idx)
        self.log("metric", self.train_mean, on_step=False, on_epoch=True)
        self.log("both", loss.detach(), on_step=True, on_epoch=True, batch_size=1 + batch_idx)
        self.log("highest", loss.detach(), on_step=False, on_epoch=True, reduce_fx="max", batch_size=1)
        return loss

    def on_train_epoch_end(self) -> None:
        self.log("end", torch.rand(()))

    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()
        plateau: dict[str, Any] = {"factor": 0.5, "patience": 0, "threshold": 1.0}
        schedulers = torch.optim.lr_scheduler
        match self.scheduler:
            case "step":
                scheduler: Any = {"scheduler": schedulers.CosineAnnealingLR(optimizer, 20), "interval": "step"}
            case "epoch":
                scheduler = {"scheduler": schedulers.ExponentialLR(optimizer, 0.5), "interval": "epoch"}
            case "plateau":
                scheduler = {"scheduler": schedulers.ReduceLROnPlateau(optimizer, **plateau), "monitor": "val_loss"}
            case "plateau of steps":
                scheduler = {
                    "scheduler": schedulers.ReduceLROnPlateau(optimizer, **plateau),
                    "monitor": "train_loss",
                    "interval": "step",
                }
        return {"optimizer": optimizer, "lr_scheduler": scheduler}


class Rows(Logger):
    """The last value that was logged under each step; `saved` is what would outlive the process."""

    name = "rows"
    version = 0

    def __init__(self) -> None:
        super().__init__()
        self.rows: dict[tuple[int | None, str], float] = {}
        self.saved: dict[tuple[int | None, str], float] = {}

    def log_hyperparams(self, *args: Any, **kwargs: Any) -> None:
        """None are kept."""

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        self.rows |= {(step, name): value for name, value in metrics.items()}

    def save(self) -> None:
        self.saved = dict(self.rows)


@dataclass(frozen=True)
class File:
    """A checkpoint: where it was written, and what had been seen and logged until then."""

    path: Path
    place: str
    seen: int
    rows: dict[tuple[int | None, str], float]


class Everywhere(Checkpoint):
    """Saves at every place where a callback can, or only at some."""

    def __init__(self, folder: Path, *only: str) -> None:
        self.folder = folder
        self.only = only
        self.files: list[File] = []

    def save(self, trainer: pl.Trainer, place: str) -> None:
        if trainer.sanity_checking:
            return
        place = f"{place} {trainer.current_epoch}.{trainer.fit_loop.epoch_loop.batch_progress.current.ready}"
        if self.only and place not in self.only:
            return
        path = self.folder / f"{len(self.files):03d}.ckpt"
        trainer.save_checkpoint(path)
        module: Any = trainer.lightning_module
        rows: Any = trainer.logger
        self.files.append(File(path, place, len(module.seen), rows.saved))

    def on_train_epoch_start(self, trainer: pl.Trainer, *_: Any) -> None:
        self.save(trainer, "epoch start")

    def on_train_batch_start(self, trainer: pl.Trainer, *_: Any) -> None:
        self.save(trainer, "batch start")

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        self.save(trainer, "batch end")

    def on_validation_start(self, trainer: pl.Trainer, *_: Any) -> None:
        self.save(trainer, "validation start")

    def on_validation_end(self, trainer: pl.Trainer, *_: Any) -> None:
        self.save(trainer, "validation end")

    def on_train_epoch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        self.save(trainer, "epoch end")

    def on_train_end(self, trainer: pl.Trainer, *_: Any) -> None:
        self.save(trainer, "end")


@dataclass(frozen=True)
class Outcome:
    """All that two runs must have in common."""

    state: dict[str, bytes]
    learning_rate: float
    step: int
    epoch: int
    seen: list[tuple[int, int, list[bytes]]] = field(repr=False)
    rows: dict[tuple[int | None, str], float] = field(repr=False)


def state_of(server: EmbeddedTrainer, module: RemoteModule) -> dict[str, bytes]:
    """The bits of all that training changes: weights, on the server Adam's moments and steps, a gathered gradient."""
    backend: Any = module.lm.backend
    _, adapter = server.registry.model(backend.model_id).ready()
    tensors = {**adapter.weights.tensors, **adapter.training_state()}
    local = {name: parameter for name, parameter in module.named_parameters() if name != "lm.handle"}
    return {name: tensor.detach().numpy().tobytes() for name, tensor in (tensors | local).items()}


class Bench:
    """Makes runs that differ only in what is said."""

    def __init__(self, server: EmbeddedTrainer, service: ServiceClient) -> None:
        self.server = server
        self.service = service

    def module(self, seed: int = 1) -> Mean:
        client = self.service.create_lora_training_client("tiny", rank=2, seed=seed)
        if client.dialect.loads_first:
            client.forward(DATA[:1], "cross_entropy").result()  # after which the server loads nothing into this model
        return Mean(client, learning_rate=1e-2)

    def run(
        self,
        kind: str = "shuffled",
        *callbacks: pl.Callback,
        resume: Path | str | None = None,
        scheduler: str = "step",
        accumulate: dict[int, int] | None = None,
        validate: bool = True,
        **options: Any,
    ) -> Outcome:
        """A fit from a seed, or one that goes on from a file in a module, and with a seed, of its own."""
        pl.seed_everything(1 if resume is None else 99, verbose=False)
        module = self.module(1 if resume is None else 2)
        module.scheduler = scheduler
        rows = Rows()
        checkpoints = any(isinstance(callback, Checkpoint) for callback in callbacks)
        if accumulate is not None:
            callbacks = (*callbacks, GradientAccumulationScheduler(accumulate))
            options["accumulate_grad_batches"] = 1
        trainer = pl.Trainer(
            **{
                "strategy": "tinker",
                "logger": rows,
                "callbacks": list(callbacks),
                "enable_checkpointing": checkpoints,
                "max_epochs": 2,
                "accumulate_grad_batches": 2,
                "log_every_n_steps": 1,
                "enable_progress_bar": False,
                "enable_model_summary": False,
                **options,
            }
        )
        held_out: DataLoader[Any] = DataLoader(DATA[:3], batch_size=2, collate_fn=collate)  # type: ignore[arg-type]
        validation = held_out if validate else None
        trainer.fit(module, loaders(kind), validation, ckpt_path=None if resume is None else str(resume))
        return Outcome(
            state_of(self.server, module),
            trainer.optimizers[0].param_groups[0]["lr"],
            trainer.global_step,
            trainer.current_epoch,
            module.seen,
            rows.rows,
        )


def assert_same(whole: Outcome, resumed: Outcome, file: File) -> None:
    """A run that went on from a file has ended as the one that wrote it, and has trained and logged what was left."""
    assert resumed.seen == whole.seen[file.seen :], f"data, from {file.place}"
    assert {**file.rows, **resumed.rows} == whole.rows, f"rows, from {file.place}"
    assert (resumed.step, resumed.epoch) == (whole.step, whole.epoch), f"counters, from {file.place}"
    assert resumed.learning_rate == whole.learning_rate, f"learning rate, from {file.place}"
    assert resumed.state == whole.state, f"weights or moments, from {file.place}"
