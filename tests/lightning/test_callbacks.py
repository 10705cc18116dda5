"""Lightning's callbacks with a remote model: each works, or is refused by name before anything is trained.

The rows of docs/lightning-features.md name these tests.
"""

from __future__ import annotations

import csv
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.fabric.utilities.spike import TrainingSpikeException
from lightning.pytorch.callbacks import (
    BackboneFinetuning,
    BaseFinetuning,
    BasePredictionWriter,
    DeviceStatsMonitor,
    EarlyStopping,
    GradientAccumulationScheduler,
    LearningRateMonitor,
    ModelCheckpoint,
    ModelPruning,
    ModelSummary,
    OnExceptionCheckpoint,
    RichModelSummary,
    RichProgressBar,
    ThroughputMonitor,
    Timer,
    TQDMProgressBar,
)
from lightning.pytorch.callbacks.spike import SpikeDetection
from lightning.pytorch.loggers import CSVLogger
from packaging.version import Version
from torch.utils.data import DataLoader

from tests.helpers.checkpoints import state_in
from tests.helpers.soaking import mostly_soak
from tests.helpers.trainers import LIGHTNING, SMALL, Hybrid, OnServer, loader, logprobs_of, new, quiet
from tinker_lightning import RemoteModule
from tinker_lightning.errors import InvalidInput

if TYPE_CHECKING:
    from pathlib import Path

    from tinker_lightning.client import ServiceClient

pytestmark = SMALL

OLD = "this Lightning does not know the rich of today"


def rows_of(logger: CSVLogger) -> list[dict[str, str]]:
    with open(f"{logger.log_dir}/metrics.csv") as file:
        return list(csv.DictReader(file))


@pytest.mark.parametrize("monitor", mostly_soak(["val_loss", "train_loss", "grad_norm"], but=["val_loss"]))
@pytest.mark.parametrize("kind", [RemoteModule, OnServer])
def test_early_stopping(service: ServiceClient, kind: type[RemoteModule], monitor: str) -> None:
    stopping = EarlyStopping(monitor, patience=1, min_delta=1e9, check_on_train_epoch_end=monitor != "val_loss")
    trainer = quiet(max_epochs=5, callbacks=[stopping])
    # Epochs of one step, whose metrics are still on their way when they end.
    trainer.fit(new(service, kind), loader(2, 2), loader(2, 2) if monitor == "val_loss" else None)
    assert trainer.current_epoch == 2  # the second epoch was no better
    assert stopping.best_score > 0


def test_model_checkpoint(service: ServiceClient, tmp_path: Path) -> None:
    files = ModelCheckpoint(tmp_path, "{step}", monitor="val_loss", save_top_k=2)
    module = new(service, RemoteModule)
    trainer = quiet(max_epochs=2, val_check_interval=2, enable_checkpointing=True, callbacks=[files])
    trainer.fit(module, loader(), loader(2, 2))
    kept = sorted(files.best_k_models.items(), key=lambda item: item[1])
    assert kept[0][0] == files.best_model_path
    for path, score in kept:
        assert service.checkpoint_exists(state_in(path))
        (again,) = trainer.validate(module, loader(2, 2), ckpt_path=path, verbose=False)
        assert again["val_loss"] == score
    assert len(kept) == 2


def test_model_checkpoint_by_a_metric_that_comes_late(service: ServiceClient, tmp_path: Path) -> None:
    logger = CSVLogger(tmp_path)
    files = ModelCheckpoint(tmp_path, "{step}", monitor="train_loss", save_top_k=-1, every_n_train_steps=2)
    quiet(max_steps=6, enable_checkpointing=True, callbacks=[files], logger=logger).fit(
        new(service, OnServer), loader()
    )
    losses = {int(row["step"]) + 1: float(row["train_loss"]) for row in rows_of(logger)}
    scores = {int(path.split("step=")[1].split(".")[0]): float(score) for path, score in files.best_k_models.items()}
    assert scores == pytest.approx({step: losses[step] for step in (2, 4, 6)})


def test_model_checkpoint_by_the_clock_and_a_metric_that_comes_late(service: ServiceClient, tmp_path: Path) -> None:
    logger = CSVLogger(tmp_path)
    often = timedelta(microseconds=1)
    files = ModelCheckpoint(tmp_path, "{step}", monitor="train_loss", save_top_k=-1, train_time_interval=often)
    quiet(enable_checkpointing=True, callbacks=[files], logger=logger).fit(new(service, OnServer), loader())
    losses = {int(row["step"]) + 1: float(row["train_loss"]) for row in rows_of(logger)}
    scores = {int(path.split("step=")[1].split(".")[0]): float(score) for path, score in files.best_k_models.items()}
    assert scores == pytest.approx({step: losses[step] for step in (1, 2, 3)})


@pytest.mark.filterwarnings("ignore:.*`?.fit.ckpt_path=")  # Lightning looks for a file to go on from
def test_on_exception_checkpoint(service: ServiceClient, tmp_path: Path) -> None:
    class Fails(RemoteModule):
        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            if batch_idx == 2:
                raise ValueError("a fault in user code")
            return super().training_step(batch, batch_idx)

    logger = CSVLogger(tmp_path)
    kept = OnExceptionCheckpoint(tmp_path)
    with pytest.raises(ValueError, match="a fault in user code"):
        quiet(enable_checkpointing=True, callbacks=[kept], logger=logger).fit(new(service, Fails), loader())
    assert torch.load(kept.ckpt_path, weights_only=True)["global_step"] == 2
    assert [int(row["step"]) for row in rows_of(logger) if row["grad_norm"]] == [0, 1]
    resumed, whole = (new(service, RemoteModule) for _ in range(2))
    quiet().fit(resumed, loader(), ckpt_path=kept.ckpt_path)
    quiet().fit(whole, loader())
    assert torch.equal(logprobs_of(resumed), logprobs_of(whole))


def test_learning_rate_monitor(service: ServiceClient, tmp_path: Path) -> None:
    class Scheduled(RemoteModule):
        def configure_optimizers(self) -> Any:
            optimizer = super().configure_optimizers()
            schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    logger = CSVLogger(tmp_path)
    quiet(callbacks=[LearningRateMonitor("step")], logger=logger).fit(new(service, Scheduled), loader())
    rows = rows_of(logger)
    seen = {int(row["step"]): float(row["lr-RemoteAdamW"]) for row in rows if row["lr-RemoteAdamW"]}
    assert seen == pytest.approx({0: 1e-2, 1: 1e-2 / 2, 2: 1e-2 / 3})
    assert {int(row["step"]): float(row["learning_rate"]) for row in rows if row["learning_rate"]} == pytest.approx(
        seen
    )


def test_gradient_accumulation_scheduler(service: ServiceClient) -> None:
    module = new(service, RemoteModule)
    trainer = quiet(max_epochs=3, callbacks=[GradientAccumulationScheduler({0: 1, 1: 2, 2: 3})])
    trainer.fit(module, loader())
    assert trainer.global_step == module.lm.handle.remote.steps == 4 + 2 + 2  # the last window is a short one


@pytest.mark.parametrize("kind", [RemoteModule, OnServer])
@pytest.mark.parametrize(
    "bar",
    [
        pytest.param(RichProgressBar, marks=pytest.mark.skipif(Version("2.5.3") > LIGHTNING, reason=OLD)),
        TQDMProgressBar,
    ],
)
def test_progress_bars(
    service: ServiceClient, bar: type[Any], kind: type[RemoteModule], capsys: pytest.CaptureFixture[str]
) -> None:
    trainer = quiet(callbacks=[bar()], enable_progress_bar=True)
    trainer.fit(new(service, kind, max_steps_in_flight=1), loader(), loader(2, 2))
    output = "".join(capsys.readouterr())
    assert "3/" in output
    assert "train_loss" in output


@pytest.mark.parametrize("summary", [ModelSummary, RichModelSummary])
def test_model_summaries(
    service: ServiceClient, summary: type[Any], capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level("INFO"):
        trainer = quiet(callbacks=[summary(max_depth=2)], enable_model_summary=True, max_steps=1)
        trainer.fit(new(service, RemoteModule), loader())
    assert "RemoteLM" in "".join(capsys.readouterr()) + caplog.text


def test_timer(service: ServiceClient) -> None:
    timer = Timer(timedelta(seconds=0.3))
    trainer = quiet(max_epochs=-1, callbacks=[timer])
    trainer.fit(new(service, RemoteModule), loader())
    assert trainer.global_step > 0
    assert timer.time_elapsed() >= 0.3


@pytest.mark.filterwarnings("ignore:.*define a `flops_per_batch` attribute")
@pytest.mark.parametrize(
    ("callback", "metric"),
    [
        (DeviceStatsMonitor(cpu_stats=True), "DeviceStatsMonitor.on_train_batch_start/cpu_percent"),
        (ThroughputMonitor(len), "train/samples"),
    ],
    ids=["DeviceStatsMonitor", "ThroughputMonitor"],
)
def test_monitors_of_speed_and_devices(service: ServiceClient, tmp_path: Path, callback: Any, metric: str) -> None:
    logger = CSVLogger(tmp_path)
    quiet(callbacks=[callback], logger=logger, max_steps=4).fit(new(service, RemoteModule), loader())
    assert any(row[metric] for row in rows_of(logger))


@pytest.mark.parametrize("strategy", ["tinker", "auto"])
def test_spike_detection(service: ServiceClient, tmp_path: Path, strategy: str) -> None:
    class Spiking(RemoteModule):
        def loss(self, _: list[Any], logprobs: list[torch.Tensor]) -> torch.Tensor:
            return -torch.cat(logprobs).mean() * (100 if self.global_step == 2 else 1)

    settings: dict[str, Any] = {"strategy": strategy, "accelerator": "cpu", "devices": 1, "default_root_dir": tmp_path}
    healthy = quiet(callbacks=[SpikeDetection()], **settings)
    healthy.fit(new(service, RemoteModule), loader())
    assert healthy.global_step == 3
    with pytest.raises(TrainingSpikeException, match="batch 2"):
        quiet(callbacks=[SpikeDetection()], **settings).fit(new(service, Spiking), loader())


def test_spike_detection_without_a_loss_here_raises(service: ServiceClient) -> None:
    with pytest.raises(InvalidInput, match="SpikeDetection needs the loss immediately"):
        quiet(callbacks=[SpikeDetection()]).fit(new(service, OnServer), loader())


def test_prediction_writer(service: ServiceClient) -> None:
    class Writer(BasePredictionWriter):
        written: Any = None

        def write_on_epoch_end(self, *args: Any) -> None:
            self.written = args[2]

    writer = Writer("epoch")
    prompts: Any = DataLoader(["text 0", "text 1", "text 2"], batch_size=2, collate_fn=list)  # type: ignore[arg-type]
    quiet(callbacks=[writer]).predict(new(service, RemoteModule), prompts, return_predictions=False)
    texts = [answer["text"] for batch in writer.written for answer in batch]
    assert len(texts) == 3
    assert all(isinstance(text, str) for text in texts)


class Freezing(BaseFinetuning):
    """Trains local layers first, and the remote model with them from the second epoch on."""

    def freeze_before_training(self, pl_module: Any) -> None:
        self.freeze(pl_module.lm)

    def finetune_function(self, pl_module: Any, epoch: int, optimizer: Any) -> None:
        if epoch == 1:
            self.unfreeze_and_add_param_group(pl_module.lm, optimizer, lr=1e-2)


def test_finetuning_and_pruning_of_local_layers(service: ServiceClient) -> None:
    module = new(service, Hybrid)
    before = module.backbone.weight.clone()
    quiet(max_epochs=1, callbacks=[BackboneFinetuning(unfreeze_backbone_at_epoch=1)]).fit(module, loader())
    assert torch.equal(module.backbone.weight, before)
    frozen = new(service, Hybrid)
    quiet(max_epochs=2, callbacks=[Freezing()]).fit(frozen, loader())
    assert frozen.lm.handle.remote.steps == 4  # those of the second epoch
    pruned = new(service, Hybrid)
    quiet(max_epochs=1, callbacks=[ModelPruning("l1_unstructured", amount=3)]).fit(pruned, loader())
    assert (
        sum(int((layer.weight == 0).sum() + (layer.bias == 0).sum()) for layer in (pruned.backbone, pruned.head)) >= 3
    )


# Lightning has the last two since 2.6.
AVERAGING = [
    getattr(pl.callbacks, name)
    for name in ("StochasticWeightAveraging", "WeightAveraging", "EMAWeightAveraging")
    if hasattr(pl.callbacks, name)
]


@pytest.mark.parametrize("kind", AVERAGING)
def test_averages_of_weights_raise(service: ServiceClient, kind: Any) -> None:
    module = new(service, RemoteModule)
    with pytest.raises(InvalidInput, match="a copy would share the weights"):
        quiet(callbacks=[kind(1e-2) if kind is AVERAGING[0] else kind()]).fit(module, loader())
    assert module.lm.handle.remote.steps == 0


@pytest.mark.parametrize(
    "callback", [BackboneFinetuning(), ModelPruning("l1_unstructured")], ids=lambda value: type(value).__name__
)
def test_changes_of_layers_that_are_not_here_raise(service: ServiceClient, callback: Any) -> None:
    module = new(service, RemoteModule)
    with pytest.raises(InvalidInput, match=f"{type(callback).__name__} changes local parameters"):
        quiet(callbacks=[callback]).fit(module, loader())
    assert module.lm.handle.remote.steps == 0
