"""What users write themselves around a remote model, and that every row of docs/lightning-features.md has its test."""

from __future__ import annotations

import csv
import itertools
import json
import re
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

import lightning.pytorch as pl
import pytest
import pytorch_lightning as other
import torch
import yaml  # type: ignore[import-untyped]
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.loggers import CSVLogger
from packaging.version import Version
from torch.utils.data import DataLoader

from tests.helpers.soaking import mostly_soak
from tests.helpers.trainers import DATA, LIGHTNING, SMALL, Hybrid, OnServer, Terse, loader, logprobs_of, new, quiet
from tinker_lightning import Datum, RemoteAdamW, RemoteLM, RemoteModule, collate
from tinker_lightning.errors import InvalidInput

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
def test_other_optimizers_are_refused(service: ServiceClient, optimizer: Any) -> None:
    class Wrong(RemoteModule):
        def configure_optimizers(self) -> Any:
            return optimizer(self.parameters(), lr=1e-2)

    with pytest.raises(InvalidInput, match="RemoteAdamW"):
        quiet().fit(new(service, Wrong), loader())


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
@pytest.mark.parametrize("size", [1, 2])
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


class Typed(RemoteModule):
    """As a user would give it to a command line."""

    def __init__(self, model: str, temperature: float = 1.0, rank: int = 8, **kwargs: Any) -> None:
        super().__init__(model, rank=rank, **kwargs)
        self.temperature = temperature

    def loss(self, _: list[Any], logprobs: list[torch.Tensor]) -> torch.Tensor:
        return -torch.cat(logprobs).mean() / self.temperature

    def train_dataloader(self) -> Any:
        return loader()


# jsonargparse's advice to Lightning, and Lightning's that nobody chose a seed.
@pytest.mark.filterwarnings(r"ignore:[\s\S]*(in v5\.0\.0|JsonargparseDeprecationWarning)")
def test_lightning_cli(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:  # R5.3
    from lightning.pytorch.cli import LightningCLI

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["program"])
    model = ["--model.model=tiny", "--model.rank=4", "--model.temperature=2", "--model.base_url=embedded"]
    trainer = ["--trainer.strategy=tinker", "--trainer.max_steps=2", "--trainer.logger=false", "--seed_everything=1"]
    quiet = ["--trainer.enable_progress_bar=false", "--trainer.enable_model_summary=false"]
    cli = LightningCLI(Typed, run=False, args=[*model, *trainer, *quiet], save_config_callback=None)
    cli.trainer.fit(cli.model)
    assert cli.model.lm.handle.remote.steps == 2
    assert cli.model.lm.backend.get_info().lora_rank == 4
    cli.model.close()
    file = cli.trainer.checkpoint_callback.best_model_path  # type: ignore[union-attr]
    with Typed.load_from_checkpoint(file) as loaded:
        assert loaded.temperature == 2
    again = LightningCLI(Typed, args=["fit", *model, *trainer, *quiet, "--trainer.max_steps=3", f"--ckpt_path={file}"])
    assert again.trainer.global_step == again.model.lm.handle.remote.steps == 3
    again.model.close()


class DeclaresKey(Typed):
    """Declares the key as a plain string, and takes it a second time in a dict and in a list."""

    def __init__(self, api_key: str, headers: dict[str, str], keys: list[str], **kwargs: Any) -> None:
        super().__init__(api_key=headers["X-API-Key"], **kwargs)
        assert api_key == keys[0]
        self.save_hyperparameters()


@pytest.mark.filterwarnings(r"ignore:[\s\S]*(in v5\.0\.0|JsonargparseDeprecationWarning)")
@pytest.mark.parametrize(
    ("kind", "by_class"),
    mostly_soak(itertools.product([Typed, DeclaresKey], [False, True]), but=[(Typed, False), (DeclaresKey, True)]),
)
def test_no_file_of_a_command_line_has_the_api_key(
    kind: type[RemoteModule], by_class: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from lightning.pytorch.cli import LightningCLI

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["program"])
    prefix = "--model.init_args" if by_class else "--model"
    key = "tml-very-secret"
    settings: dict[str, Any] = {"model": "tiny", "rank": 4, "base_url": "embedded", "api_key": key}
    if kind is DeclaresKey:
        settings |= {"headers": json.dumps({"X-API-Key": key}), "keys": json.dumps([key])}
    args = [f"--model={__name__}.{kind.__name__}"] if by_class else []
    args += [f"{prefix}.{name}={value}" for name, value in settings.items()]
    args += ["--trainer.strategy=tinker", "--trainer.max_steps=1", "--trainer.logger=CSVLogger", "--seed_everything=1"]
    args += [f"--trainer.logger.save_dir={tmp_path}", "--trainer.enable_progress_bar=false"]
    cli = LightningCLI(RemoteModule if by_class else kind, subclass_mode_model=by_class, args=["fit", *args])
    assert cli.model._session._api_key == "tml-very-secret"
    cli.model.close()
    files = [file for file in tmp_path.rglob("*") if file.is_file()]
    assert {file.suffix for file in files} >= {".yaml", ".ckpt"}
    assert [file for file in files if b"very-secret" in file.read_bytes()] == []
    (config,) = tmp_path.rglob("config.yaml")
    assert "rank: 4" in config.read_text()
    (hparams,) = tmp_path.rglob("hparams.yaml")
    yaml.safe_load(hparams.read_text())


def test_hyperparameters_are_read_by_a_safe_loader(service: ServiceClient, tmp_path: Path) -> None:
    trainer = quiet(max_steps=1, logger=CSVLogger(tmp_path))
    trainer.fit(new(service, RemoteModule, betas=(0.8, 0.9)), loader())
    (file,) = tmp_path.rglob("hparams.yaml")
    assert yaml.safe_load(file.read_text())["betas"] == [0.8, 0.9]


def official(datum: Datum) -> Any:
    import tinker

    return tinker.Datum(
        model_input=tinker.ModelInput.from_ints(datum.model_input.to_ints()),
        loss_fn_inputs={
            name: tinker.TensorData.from_torch(tensor.to_torch()) for name, tensor in datum.loss_fn_inputs.items()
        },
    )


def official_loader(shape: Any = None) -> Any:
    return DataLoader([official(datum) for datum in DATA], 2, collate_fn=shape)  # type: ignore[arg-type]


def in_a_dict(batch: Any) -> Any:
    return {"pairs": batch}


@pytest.mark.parametrize(
    ("strategy", "shape"),
    mostly_soak(
        itertools.product(["tinker", "auto"], [None, list, tuple, in_a_dict]),
        but=[("tinker", None), ("auto", list), ("auto", tuple), ("tinker", in_a_dict)],
    ),
)
def test_datums_of_the_official_sdk(strategy: str, shape: Any, service: ServiceClient) -> None:  # R5.4
    class Unpacks(RemoteModule):
        def datums(self, batch: Any) -> list[Any]:
            return list(batch["pairs"] if isinstance(batch, dict) else batch)

    plain = {"strategy": strategy, "accelerator": "cpu", "devices": 1, "accumulate_grad_batches": 2, "max_epochs": 1}
    modules = [new(service, Unpacks), new(service, Unpacks)]
    scores = []
    for module, data in zip(modules, (loader(), official_loader(shape)), strict=True):
        trainer = quiet(**plain)
        trainer.fit(module, data, data)
        scores.append([*trainer.validate(module, data, verbose=False), *trainer.test(module, data, verbose=False)])
    assert scores[0] == scores[1]
    assert torch.equal(*map(logprobs_of, modules))


class Plain(pl.LightningModule):
    """A module of the user's own that holds a remote model."""

    def __init__(self, client: Any) -> None:
        super().__init__()
        self.lm = RemoteLM(client)
        self.transferred: list[Any] = []

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        del dataloader_idx
        self.transferred.append(batch)
        return batch

    def training_step(self, batch: Any, _: int) -> torch.Tensor:
        data, factor = batch if isinstance(batch, tuple) else (batch, 1.0)
        loss: torch.Tensor = -torch.cat(self.lm(data)).mean() * factor
        return loss

    def configure_optimizers(self) -> Any:
        return RemoteAdamW(self.parameters(), lr=1e-2)


PRECISIONS = ["32-true", "64-true", "bf16-true", "16-true", "bf16-mixed", "16-mixed"]


@pytest.mark.parametrize(
    ("strategy", "precision"),
    mostly_soak(
        itertools.product(["tinker", "auto"], PRECISIONS),
        but=[(("tinker", "auto")[i % 2], precision) for i, precision in enumerate(PRECISIONS)],
    ),
)
@pytest.mark.filterwarnings("ignore:.*but AMP with fp16 is not supported on CPU")
def test_datums_of_the_official_sdk_in_every_precision(strategy: str, precision: Any, service: ServiceClient) -> None:
    module = new(service, Terse)
    trainer = quiet(precision=precision, strategy=strategy, accelerator="cpu", devices=1)
    trainer.fit(module, official_loader(), official_loader())
    trainer.predict(module, official_loader())
    assert module.lm.handle.remote.steps == 3


@pytest.mark.parametrize("precision", ["32-true", "64-true", "bf16-mixed"])
@pytest.mark.parametrize("shape", [None, lambda batch: (batch, torch.ones(()))])
def test_datums_of_the_official_sdk_in_a_plain_module(shape: Any, precision: Any, service: ServiceClient) -> None:
    module = Plain(service.create_lora_training_client("tiny", rank=4, seed=1))
    quiet(precision=precision).fit(module, official_loader(shape))
    assert module.lm.handle.remote.steps == 3
    data, factor = module.transferred[0] if shape else (module.transferred[0], None)
    assert type(data[0]) is type(official(DATA[0]))
    if factor is not None:
        assert factor.dtype == (torch.float64 if precision == "64-true" else torch.float32)


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


def test_objects_of_pytorch_lightning_are_refused(service: ServiceClient, tmp_path: Path) -> None:
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


def test_one_module_in_two_trainers(service: ServiceClient) -> None:
    class Inner(Callback):
        def __init__(self, method: str) -> None:
            self.method = method

        def on_train_batch_start(self, _: Any, pl_module: pl.LightningModule, *__: Any) -> None:
            getattr(quiet(), self.method)(pl_module, loader())

    module = new(service, RemoteModule)
    quiet().fit(module, loader())
    quiet(max_steps=2).fit(module, loader())
    assert module.lm.handle.remote.steps == 5
    for method in ("fit", "validate"):
        with pytest.raises(InvalidInput, match="being run by another trainer"):
            quiet(callbacks=[Inner(method)]).fit(new(service, RemoteModule), loader())
    with pytest.raises(InvalidInput, match="being run by another trainer"):
        quiet(callbacks=[Inner("fit")]).fit(module, loader())
    quiet(max_steps=1).fit(module, loader())  # nothing is left of the trainer that failed
    assert module.lm.handle.remote.steps == 6

    class Catches(Inner):
        def on_train_batch_start(self, *args: Any) -> None:
            with pytest.raises(InvalidInput, match="being run by another trainer"):
                super().on_train_batch_start(*args)

    quiet(max_steps=2, callbacks=[Catches("validate")]).fit(module, loader())  # the first trainer's work goes on
    assert module.lm.handle.remote.steps == 8


class Lingers(Callback):
    """Is long at the end of a trainer that fails."""

    def __init__(self) -> None:
        self.is_there, self.may_go = threading.Event(), threading.Event()
        self.module: Any = self

    def on_exception(self, _: Any, pl_module: pl.LightningModule, *__: Any) -> None:
        self.module = pl_module
        self.is_there.set()
        assert self.may_go.wait(60)


@pytest.mark.parametrize("method", ["fit", "validate"])
@pytest.mark.parametrize("strategy", ["tinker", "auto"])
def test_a_trainer_that_comes_second_on_another_thread(service: ServiceClient, method: str, strategy: str) -> None:
    lingers = Lingers()
    refused: list[str] = []

    def second() -> None:
        plain = {"accelerator": "cpu", "devices": 1} if strategy == "auto" else {}
        try:
            getattr(quiet(strategy=strategy, callbacks=[lingers], **plain), method)(module, loader())
        except InvalidInput as error:
            refused.append(str(error))

    class Logs(RemoteModule):
        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            if batch_idx == 1:
                thread.start()
                assert lingers.is_there.wait(60)
                self.log("meanwhile", 1.0)
                assert self.trainer is first
            return super().training_step(batch, batch_idx)

        def on_train_batch_end(self, *_: Any) -> None:
            lingers.may_go.set()

    thread = threading.Thread(target=second)
    module, first = new(service, Logs), quiet()
    first.fit(module, loader())
    thread.join(60)
    assert "being run by another trainer" in refused[0]
    assert lingers.module is None
    assert module.lm.handle.remote.steps == 3
    quiet(max_steps=1).fit(module, loader())
    assert module.lm.handle.remote.steps == 4


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
    known = written | _tests_in("remote/test_group")
    rows = table()
    assert len(rows) > 40
    for feature, tests in rows.items():
        assert tests, f"{feature} names no test"
        assert set(tests) <= known, f"{feature} names {set(tests) - known}, which is not there"
    named = {name for tests in rows.values() for name in tests}
    assert written - named == {"test_every_row_of_the_table_has_a_test"}
