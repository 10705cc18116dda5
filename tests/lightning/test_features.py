"""Features of Lightning around a remote model. Every row of docs/lightning-features.md has its test."""

from __future__ import annotations

import csv
import itertools
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import lightning.pytorch as pl
import pytest
import pytorch_lightning as other
import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.loggers import CSVLogger
from packaging.version import Version
from torch.utils.data import DataLoader

from tests.helpers.soaking import first_only, mostly_soak
from tests.helpers.trainers import DATA, LIGHTNING, SMALL, Hybrid, OnServer, loader, logprobs_of, new, quiet
from tinker_lightning import Datum, RemoteAdamW, RemoteModule, collate
from tinker_lightning.errors import InvalidInput
from tinker_lightning.lightning import checks

if TYPE_CHECKING:
    from tinker_lightning.client import ServiceClient

pytestmark = SMALL

ROOT = Path(__file__).parents[2]

FILES = (
    "lightning/test_callbacks",
    "lightning/test_tuning",
    "lightning/test_trainer_flags",
    "lightning/test_loggers",
    "lightning/test_accelerators",
    "lightning/test_features",
    "lightning/test_lightning_cli",
    "lightning/test_official_datums",
    "lightning/test_several_trainers",
)


class Manual(RemoteModule):
    """Does by hand what Lightning does by itself with `accumulate_grad_batches=2`."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:  # type: ignore[override]
        optimizer: Any = self.optimizers()
        data = self.datums(batch)
        loss: Any = self.loss(data, self.lm(data))
        self.manual_backward(loss[0] / 2)
        if batch_idx % 2 == 1:
            optimizer.step()
            optimizer.zero_grad()


def test_manual_optimization(service: ServiceClient) -> None:
    manual, automatic = new(service, Manual), new(service, RemoteModule)
    trainer = quiet(max_epochs=2)
    trainer.fit(manual, loader())
    quiet(max_epochs=2, accumulate_grad_batches=2).fit(automatic, loader())
    assert trainer.global_step == manual.lm.handle.remote.steps == 4
    assert torch.equal(logprobs_of(manual), logprobs_of(automatic))


class Measures(RemoteModule):
    """Logs the size of each batch, in the ways that Lightning means over an epoch."""

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        self.log_dict({"size": float(len(self.datums(batch)))}, on_epoch=True)
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        del batch_idx, dataloader_idx
        self.log("val_size", float(len(self.datums(batch))))


class InPairs(Measures):
    def datums(self, batch: Any) -> list[Datum]:
        return [datum for pair in batch["pairs"] for datum in pair]


class OfTensors(Measures):
    def datums(self, batch: Any) -> list[Datum]:
        return [Datum.from_tokens(row) for row in batch]


@pytest.mark.parametrize(
    ("kind", "collate_fn"),
    [
        (Measures, collate),
        (InPairs, lambda data: {"pairs": [(datum, datum) for datum in data], "name": "a batch"}),
        (OfTensors, lambda data: torch.arange(4).repeat(len(data), 1)),
    ],
    ids=["datums", "pairs in a dict", "tensors, which Lightning counts"],
)
def test_custom_values_are_weighted_by_datums(
    service: ServiceClient, kind: type[RemoteModule], collate_fn: Any
) -> None:
    batches: DataLoader[Any] = DataLoader(DATA, batch_size=3, collate_fn=collate_fn)  # type: ignore[arg-type]
    trainer = quiet(max_epochs=1)
    trainer.fit(new(service, kind), batches, batches)
    expected = (3 * 3 + 3 * 3 + 2 * 2) / 8 * (2 if kind is InPairs else 1)
    assert trainer.callback_metrics["val_size"] == pytest.approx(expected)
    assert trainer.callback_metrics["size_epoch"] == pytest.approx(expected)


def test_a_custom_batch_size_counts(service: ServiceClient) -> None:
    class ByBatch(Measures):
        def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
            del batch_idx, dataloader_idx
            self.log("val_size", float(len(batch)), batch_size=1)

    trainer = quiet(max_epochs=1)
    trainer.fit(new(service, ByBatch), loader(3), loader(3))
    assert trainer.callback_metrics["val_size"] == pytest.approx((3 + 3 + 2) / 3)


def test_several_optimizers(service: ServiceClient) -> None:
    class Two(Hybrid):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self.automatic_optimization = False

        def training_step(self, batch: Any, batch_idx: int) -> None:  # type: ignore[override]
            optimizers: Any = self.optimizers()
            remote, local = optimizers
            data = self.datums(batch)
            self.manual_backward(self.loss(data, self.lm(data)))
            for optimizer in (remote, local)[: 1 + batch_idx % 2]:
                optimizer.step()
            remote.zero_grad()
            local.zero_grad()

        def configure_optimizers(self) -> Any:
            return [RemoteAdamW(self.lm.parameters(), lr=1e-2), torch.optim.SGD(self.head.parameters(), lr=1e-2)]

    module = new(service, Two)
    before = module.head.weight.clone()
    trainer = quiet(max_epochs=1)
    trainer.fit(module, loader())
    assert module.lm.handle.remote.steps == 4
    assert trainer.global_step == 6
    assert not torch.equal(module.head.weight, before)


@pytest.mark.parametrize("optimizer", [torch.optim.AdamW, torch.optim.SGD])
def test_other_optimizers_raise(service: ServiceClient, optimizer: Any) -> None:
    class Wrong(RemoteModule):
        def configure_optimizers(self) -> Any:
            return optimizer(self.parameters(), lr=1e-2)

    class ByHand(Wrong):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self.automatic_optimization = False

    class Plain(pl.LightningModule):
        def __init__(self, module: RemoteModule) -> None:
            super().__init__()
            self.lm = module.lm

        def training_step(self, batch: Any, _: int) -> torch.Tensor:
            return -torch.cat(self.lm(batch)).mean()

        def configure_optimizers(self) -> Any:
            return optimizer(self.parameters(), lr=1e-2)

    plain = Plain(new(service, RemoteModule))
    modules: list[tuple[Any, str]] = [
        *itertools.product([new(service, Wrong), new(service, ByHand)], ["tinker", "auto"]),
        (plain, "tinker"),
    ]
    for module, strategy in modules:
        trainer = quiet(strategy=strategy, accelerator="cpu", devices=1)
        with pytest.raises(InvalidInput, match=rf"^{optimizer.__name__} cannot train a remote model.*RemoteAdamW"):
            trainer.fit(module, loader(), loader() if isinstance(module, RemoteModule) else None)
        assert module.lm.handle.remote.tokens.prefilled == 0  # not even a validation has run


def test_a_module_that_is_only_connected_is_saved(service: ServiceClient, tmp_path: Path) -> None:
    module, file = new(service, RemoteModule), tmp_path / "connected.ckpt"
    quiet().fit(module, loader())
    expected = logprobs_of(module)
    module.trainer = None  # type: ignore[assignment]
    trainer = quiet()
    trainer.strategy.connect(module)
    for _ in range(2):  # the second save replaces the first one
        trainer.save_checkpoint(file)
    resumed = new(service, RemoteModule)
    again = quiet(max_steps=0)
    again.fit(resumed, loader(), ckpt_path=file)
    assert torch.equal(logprobs_of(resumed), expected)
    trainer.strategy.remove_checkpoint(file)
    assert not file.exists()


def test_other_optimizers_of_a_frozen_model(service: ServiceClient) -> None:
    class Local(Hybrid):
        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=1e-2)

    module = new(service, Local)
    module.lm.requires_grad_(False)
    before = module.head.weight.clone()
    quiet().fit(module, loader())
    assert not torch.equal(module.head.weight, before)


@pytest.mark.parametrize(("kind", "monitor"), [(RemoteModule, "val_loss"), (OnServer, "train_loss")])
def test_reduce_lr_on_plateau(service: ServiceClient, kind: type[RemoteModule], monitor: str) -> None:
    class Plateau(kind):  # type: ignore[valid-type,misc]
        def configure_optimizers(self) -> Any:
            optimizer = super().configure_optimizers()
            schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, threshold=1e9)
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "monitor": monitor}}

    trainer = quiet(max_epochs=3)
    # Epochs of one step, whose metrics are still on their way when they end.
    trainer.fit(new(service, Plateau), loader(2, 2), loader(2, 2) if monitor == "val_loss" else None)
    assert trainer.optimizers[0].param_groups[0]["lr"] == pytest.approx(1e-2 * 0.1**3)


@pytest.mark.parametrize(
    ("monitor", "strict", "strategy"),
    mostly_soak(
        itertools.product(["train_loss", "grad_norm"], [True, False], ["tinker", "auto"]),
        but=[("train_loss", True, "auto"), ("grad_norm", False, "tinker")],
    ),
)
def test_reduce_lr_on_plateau_of_steps(
    service: ServiceClient, tmp_path: Path, monitor: str, strict: bool, strategy: str
) -> None:
    seen: list[float] = []

    class Watching(torch.optim.lr_scheduler.ReduceLROnPlateau):
        def step(self, metrics: Any, epoch: Any = None) -> None:  # type: ignore[override]
            seen.append(float(metrics))
            super().step(metrics, epoch)

    class Plateau(OnServer):
        def configure_optimizers(self) -> Any:
            optimizer = super().configure_optimizers()
            schedule = Watching(optimizer, patience=0, threshold=1e9)
            settings = {"scheduler": schedule, "monitor": monitor, "interval": "step", "frequency": 2, "strict": strict}
            return {"optimizer": optimizer, "lr_scheduler": settings}

    logger = CSVLogger(tmp_path)
    trainer = quiet(max_epochs=2, logger=logger, strategy=strategy, accelerator="cpu", devices=1)
    trainer.fit(new(service, Plateau), loader())
    with open(f"{logger.log_dir}/metrics.csv") as file:
        logged = [float(row[monitor]) for row in csv.DictReader(file)]
    assert seen == pytest.approx(logged[1::2])
    assert len(logged) == 8


def test_several_training_loaders(service: ServiceClient) -> None:
    class Joined(RemoteModule):
        def datums(self, batch: Any) -> list[Any]:
            return [datum for part in batch.values() for datum in part]

    module = new(service, Joined)
    quiet(max_epochs=1, accumulate_grad_batches=2).fit(module, {"many": loader(), "few": loader(1, 2)})
    assert module.lm.handle.remote.steps == 2  # as many batches as the longer one has


class TakesItsBatches(RemoteModule):
    """A step that draws from the loader itself, and reads datums from whatever iterable it is given."""

    def datums(self, batch: Any) -> list[Any]:
        return list(batch)

    def training_step(self, dataloader_iter: Any) -> torch.Tensor:  # type: ignore[override]
        data, *_ = next(dataloader_iter)
        return -torch.cat(self.lm(self.datums(data))).mean()


@pytest.mark.filterwarnings("ignore:.*`dataloader_iter`")
@pytest.mark.parametrize("size", first_only([2, 1]))
def test_a_step_that_takes_its_batches_itself(service: ServiceClient, size: int) -> None:
    module, plain = new(service, TakesItsBatches), new(service, TakesItsBatches)
    quiet(max_epochs=2, accumulate_grad_batches=size).fit(module, loader())
    alone = {"strategy": "auto", "accelerator": "cpu", "devices": 1}
    quiet(max_epochs=2, accumulate_grad_batches=size, **alone).fit(plain, loader())
    assert module.lm.handle.remote.steps == 8 // size
    assert torch.equal(logprobs_of(module), logprobs_of(plain))


def test_several_validation_loaders(service: ServiceClient) -> None:
    module = new(service, RemoteModule)
    trainer = quiet(max_epochs=1)
    trainer.fit(module, loader(), [loader(), loader(2, 2)])
    together = {i: trainer.callback_metrics[f"val_loss/dataloader_idx_{i}"] for i in range(2)}
    alone = {i: trainer.validate(module, data, verbose=False)[0] for i, data in enumerate([loader(), loader(2, 2)])}
    assert together == pytest.approx({i: scores["val_loss"] for i, scores in alone.items()})
    assert together[0] != together[1]


@pytest.mark.parametrize("strategy", ["tinker", "auto"])
def test_callbacks_see_deferred_metrics_at_the_end_of_an_epoch(strategy: str, service: ServiceClient) -> None:
    seen: dict[str, set[str]] = {}

    class Looks(Callback):
        def on_train_epoch_end(self, trainer: pl.Trainer, *_: Any) -> None:
            seen["epoch"] = set(trainer.callback_metrics)

        def on_train_end(self, trainer: pl.Trainer, *_: Any) -> None:
            seen["end"] = set(trainer.callback_metrics)

    plain = {"strategy": strategy, "accelerator": "cpu", "devices": 1, "callbacks": [Looks()]}
    quiet(max_epochs=1, **plain).fit(new(service, OnServer), loader(8))
    assert seen["epoch"] >= {"train_loss", "grad_norm"}
    assert seen["end"] >= {"train_loss", "grad_norm"}


class ForeignCallback(other.Callback):
    pass


class ForeignData(other.LightningDataModule):
    def train_dataloader(self) -> Any:
        return loader()


def test_objects_of_pytorch_lightning_raise(service: ServiceClient, tmp_path: Path) -> None:
    cases: list[tuple[dict[str, Any], Any, str]] = [
        ({"callbacks": [other.callbacks.EarlyStopping("val_loss")]}, None, "EarlyStopping"),
        ({"callbacks": [ForeignCallback()]}, None, "ForeignCallback"),
        ({"logger": other.loggers.CSVLogger(tmp_path)}, None, "CSVLogger"),
        ({"profiler": other.profilers.SimpleProfiler()}, None, "SimpleProfiler"),
        ({}, ForeignData(), "ForeignData"),
    ]
    for settings, data, name in cases:
        refused: Any = InvalidInput
        reason = rf"{name} is from the package pytorch_lightning.*lightning\.pytorch"
        if Version("2.6") > LIGHTNING:  # the trainer itself would not be made
            refused, reason = (TypeError, ValueError), "."
        with pytest.raises(refused, match=reason):
            quiet(**settings).fit(new(service, RemoteModule), None if data else loader(), datamodule=data)


def test_a_trainer_of_pytorch_lightning_raises() -> None:
    checks.register_elsewhere("tinker")  # as importing this library does if that package was imported before
    with pytest.raises(InvalidInput, match="Create it with lightning: import "):
        other.Trainer(strategy="tinker")
    trainer: Any = other.Trainer(accelerator="cpu", max_steps=1, logger=False, enable_checkpointing=False)
    with pytest.raises(TypeError, match="must be a `LightningModule`"):
        trainer.fit(RemoteModule("tiny"), loader())


def table() -> dict[str, list[str]]:
    """The features of the table, and the tests that they name."""
    rows: dict[str, list[str]] = {}
    for line in (ROOT / "docs" / "lightning-features.md").read_text().splitlines():
        if line.startswith("| ") and not line.startswith("| feature"):
            feature, *_, tests = line.strip("|").split(" | ")
            rows[feature.strip()] = re.findall(r"`(test_\w+)`", tests)
    return rows


def _tests_in(*files: str) -> set[str]:
    return {
        name
        for file in files
        for name in re.findall(r"^def (test_\w+)", (ROOT / "tests" / f"{file}.py").read_text(), re.MULTILINE)
    }


def test_every_row_of_the_table_has_a_test() -> None:
    written = _tests_in(*FILES)
    others = ("wandb_runs", "progress", "metric_names", "reports")
    known = written | _tests_in(
        "remote/test_group", "client/test_client_regularizers", *(f"lightning/test_{each}" for each in others)
    )
    rows = table()
    assert len(rows) > 40
    for feature, tests in rows.items():
        assert tests, f"{feature} names no test"
        assert set(tests) <= known, f"{feature} names {set(tests) - known}, which is not there"
    named = {name for tests in rows.values() for name in tests}
    assert written - named == {"test_every_row_of_the_table_has_a_test"}
