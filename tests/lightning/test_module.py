"""`Trainer.fit` on a remote model is `Trainer.fit` on the same model here: numbers, hooks, files."""

from __future__ import annotations

import csv
from typing import TYPE_CHECKING, Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import EarlyStopping, GradientAccumulationScheduler, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from torch.utils.data import DataLoader

from tests.helpers.checkpoints import records_in
from tests.helpers.reference import lora_model
from tests.helpers.soaking import mostly_soak
from tinker_lightning import Datum, RemoteModule, collate
from tinker_lightning.errors import InvalidDatum, InvalidInput, LossNotFinite, LossNotScalar, LossWithoutGradient
from tinker_lightning.remote.saved_state import SavedState
from tinker_lightning.server import EmbeddedTrainer
from tinker_lightning.testing import embedded_service

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tinker_lightning.client import ServiceClient

TEXTS = [f"text {i}: {'hello world, ' * (i % 3 + 1)}" for i in range(10)]
DATA = [Datum.from_tokens(list(text.encode())) for text in TEXTS]
ADAM: dict[str, Any] = {"betas": (0.9, 0.95), "eps": 1e-3, "weight_decay": 0.01}

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*does not have many workers"),
    pytest.mark.filterwarnings("ignore:You defined a `validation_step` but have no `val_dataloader`"),
    pytest.mark.filterwarnings("ignore:.*LeafSpec.* is deprecated"),
    pytest.mark.filterwarnings("ignore:.*smaller than the logging interval"),
    pytest.mark.filterwarnings("ignore:.*exists and is not empty"),
]


class Mean(RemoteModule):
    def loss(self, _: list[Any], logprobs: list[torch.Tensor]) -> Any:
        nll = -torch.cat(logprobs).mean()
        return nll, {"perplexity": nll.exp()}

    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


class Local(pl.LightningModule):
    """The same model, loss and optimizer without a server."""

    def __init__(self, trainer: EmbeddedTrainer, model_id: str) -> None:
        super().__init__()
        self.base, adapter = lora_model(trainer, model_id)
        self.config = adapter.weights.config
        self.names = list(adapter.weights.tensors)
        self.weights = torch.nn.ParameterList(tensor.clone() for tensor in adapter.weights.tensors.values())

    def training_step(self, batch: list[Datum]) -> torch.Tensor:
        logprobs = []
        for datum in batch:
            ids = torch.from_numpy(datum.model_input.tokens().astype("int64"))
            targets = datum.loss_fn_inputs["target_tokens"].to_torch()
            logits = self._logits(ids[None])[0]
            logprobs.append(logits.log_softmax(-1).gather(-1, targets[:, None])[:, 0])
        return -torch.cat(logprobs).mean()

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2, **ADAM)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

    def _logits(self, ids: torch.Tensor) -> torch.Tensor:
        """Plain functional LoRA: each adapted matrix is W + 32/rank·B·A."""
        model = self.base.model
        pairs = dict(zip(self.names, self.weights, strict=True))
        replaced = {}
        for name, a in pairs.items():
            if name.endswith(".lora_A.weight"):
                layer = name.removeprefix("base_model.model.").removesuffix(".lora_A.weight")
                weight = model.get_submodule(layer).base_layer.weight
                b = pairs[name.replace("lora_A", "lora_B")]
                replaced[f"{layer}.base_layer.weight"] = weight + 32 / self.config.rank * b @ a
        with self.base.lora.use(None):
            logits: torch.Tensor = torch.func.functional_call(
                model, replaced, args=(), kwargs={"input_ids": ids}
            ).logits
        return logits


@pytest.fixture
def double(tmp_path: Path) -> Iterator[tuple[EmbeddedTrainer, ServiceClient]]:
    trainer = EmbeddedTrainer(["tiny"], data_dir=tmp_path / "data", dtype=torch.float64)
    with embedded_service(trainer) as service:
        yield trainer, service
    trainer.close()


@pytest.fixture
def service() -> Iterator[ServiceClient]:
    with embedded_service() as service:
        yield service


def loader(batch_size: int = 2, count: int = len(DATA), **kwargs: Any) -> DataLoader[Datum]:
    return DataLoader(DATA[:count], batch_size=batch_size, collate_fn=collate, **kwargs)  # type: ignore[arg-type]


def quiet(**kwargs: Any) -> pl.Trainer:
    defaults: dict[str, Any] = {
        "accelerator": "cpu",
        "devices": 1,
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }
    return pl.Trainer(**{**defaults, **kwargs})


def weights_of(trainer: EmbeddedTrainer, module: RemoteModule) -> torch.Tensor:
    _, adapter = trainer.registry.model(module.lm.backend.model_id).ready()  # type: ignore[attr-defined]
    return torch.cat([tensor.flatten() for tensor in adapter.weights.tensors.values()])


@pytest.mark.parametrize(
    ("accumulate", "clip"),
    mostly_soak(
        [(1, None), (3, None), (4, 0.5), ({0: 1, 1: 3}, None), (2, 0.1)],
        but=[(4, 0.5), ({0: 1, 1: 3}, None)],
    ),
    ids=["1", "3, short last window", "4, clipped", "scheduled", "2, clipped hard"],
)
def test_a_fit_equals_the_same_fit_here(
    double: tuple[EmbeddedTrainer, ServiceClient], accumulate: int | dict[int, int], clip: float | None
) -> None:  # R0.1, R0.2, R0.4, R1.11
    trainer, service = double
    module = Mean(service.create_lora_training_client("tiny", rank=4, seed=1), learning_rate=1e-2, **ADAM)
    local = Local(trainer, module.lm.backend.model_id)  # type: ignore[attr-defined]
    for one in (module, local):
        callbacks = [GradientAccumulationScheduler(accumulate)] if isinstance(accumulate, dict) else []
        fit = quiet(
            max_epochs=2,
            accumulate_grad_batches=1 if isinstance(accumulate, dict) else accumulate,
            gradient_clip_val=clip,
            callbacks=callbacks,
        )
        fit.fit(one, loader())
    got, expected = weights_of(trainer, module), torch.cat([weight.detach().flatten() for weight in local.weights])
    assert (got - expected).norm() <= 1e-6 * expected.norm()


def test_metrics_are_logged_under_their_own_steps(service: ServiceClient, tmp_path: Path) -> None:
    module = Mean(service.create_lora_training_client("tiny", rank=4, seed=1), learning_rate=1e-2)
    logger = CSVLogger(tmp_path)
    quiet(max_epochs=2, accumulate_grad_batches=2, logger=logger, log_every_n_steps=1).fit(
        module, loader(), loader(2, 4)
    )
    with open(f"{logger.log_dir}/metrics.csv") as file:
        rows = list(csv.DictReader(file))
    rates = {int(row["step"]): float(row["learning_rate"]) for row in rows if row["learning_rate"]}
    assert rates == pytest.approx({step: 1e-2 / (1 + step) for step in range(6)})
    assert all(float(row["grad_norm"]) > 0 for row in rows if row["grad_norm"])
    assert {int(row["step"]) for row in rows if row["perplexity"]} <= set(range(6))
    losses = [float(row["val_loss"]) for row in rows if row["val_loss"]]
    assert losses[-1] < losses[0]


def test_validation_is_weighted_by_token(service: ServiceClient) -> None:
    module = RemoteModule(service.create_lora_training_client("tiny", rank=4, seed=1))
    (result,) = quiet().validate(module, loader(3), verbose=False)
    with torch.no_grad():
        expected = -torch.cat(module.lm(DATA)).mean()
    assert result["val_nll"] == pytest.approx(expected.item(), rel=1e-5)
    assert result["val_perplexity"] == pytest.approx(expected.exp().item(), rel=1e-5)


def test_one_model_through_all_stages(service: ServiceClient) -> None:
    module = Mean(service.create_lora_training_client("tiny", rank=4, seed=1), learning_rate=1e-2)
    trainer = quiet(max_epochs=3)
    (before,) = trainer.validate(module, loader(), verbose=False)
    trainer.fit(module, loader())
    (after,) = trainer.validate(module, loader(), verbose=False)
    (tested,) = trainer.test(module, loader(), verbose=False)
    prompts: Any = DataLoader(["text 0: hello"], batch_size=1, collate_fn=list)  # type: ignore[arg-type]
    ((prediction,),) = trainer.predict(module, prompts)  # type: ignore[misc]
    assert after["val_loss"] < before["val_loss"]
    assert tested["test_loss"] == pytest.approx(after["val_loss"])
    assert len(prediction["tokens"]) == len(prediction["logprobs"])
    assert isinstance(prediction["text"], str)


def test_a_checkpoint_names_the_state_and_a_run_goes_on_from_it(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    whole, stopped, resumed = (Mean("tiny", rank=4, seed=1, learning_rate=1e-2, base_url="embedded") for _ in range(3))
    quiet(max_epochs=4).fit(whole, loader())
    files = ModelCheckpoint(tmp_path / "files", save_last=True)
    quiet(max_epochs=2, enable_checkpointing=True, callbacks=[files]).fit(stopped, loader())
    stopped.close()
    content = torch.load(files.last_model_path, weights_only=True)
    assert records_in(content)["lm"]["path"].startswith("tinker://")
    assert content["hyper_parameters"]["model"] == "tiny"
    again = ModelCheckpoint(tmp_path / "files", save_last=True)
    go_on = quiet(max_epochs=4, enable_checkpointing=True, callbacks=[again])
    go_on.fit(resumed, loader(), ckpt_path=files.last_model_path)
    with torch.no_grad():
        assert all(torch.equal(a, b) for a, b in zip(whole.lm(DATA), resumed.lm(DATA), strict=True))
    loaded = Mean.load_from_checkpoint(files.last_model_path)
    assert loaded.hparams["rank"] == 4
    (score,) = quiet().validate(loaded, loader(), verbose=False)
    assert score["val_loss"] > 0
    for module in (whole, resumed, loaded):
        module.close()


def test_a_window_that_waits_is_part_of_a_checkpoint(service: ServiceClient) -> None:
    first, second = (Mean(service.create_lora_training_client("tiny", rank=4, seed=1)) for _ in range(2))
    for module in (first, second):
        (-torch.cat(module.lm(DATA[:2])).mean()).backward()
    checkpoint: dict[str, Any] = {"state_dict": first.state_dict()}
    first.on_save_checkpoint(checkpoint)
    third = Mean(service.create_lora_training_client("tiny", rank=4, seed=9))
    third.on_load_checkpoint(checkpoint)
    for module in (second, third):
        optimizer = module.configure_optimizers()["optimizer"]
        optimizer.step()
        optimizer.sent[0].optim.result()
    with torch.no_grad():
        assert all(torch.equal(a, b) for a, b in zip(second.lm(DATA), third.lm(DATA), strict=True))


def test_callbacks_see_late_metrics(service: ServiceClient) -> None:
    module = Mean(service.create_lora_training_client("tiny", rank=4, seed=1), learning_rate=1e-2)
    stopping = EarlyStopping("val_loss", patience=0, min_delta=1e9)
    trainer = quiet(max_epochs=9, callbacks=[stopping])
    trainer.fit(module, loader(), loader(2, 2))
    assert trainer.current_epoch < 9
    assert trainer.callback_metrics["grad_norm"] > 0


class Faulty(RemoteModule):
    def __init__(self, *args: Any, fault: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.fault = fault

    def loss(self, _: list[Any], logprobs: list[torch.Tensor]) -> Any:
        return self.fault(logprobs)


@pytest.mark.parametrize(
    ("fault", "error"),
    [
        (lambda logprobs: logprobs[0].sum() * float("nan"), LossNotFinite),
        (lambda logprobs: logprobs[0], LossNotScalar),
        (lambda _: torch.zeros(()), LossWithoutGradient),
        (lambda _: torch.zeros((), requires_grad=True) * 2, LossWithoutGradient),
    ],
)
def test_a_loss_that_cannot_be_trained_on_raises_and_changes_nothing(
    double: tuple[EmbeddedTrainer, ServiceClient], fault: Any, error: type[Exception]
) -> None:  # R1.9
    trainer, service = double
    module = Faulty(service.create_lora_training_client("tiny", rank=4, seed=1), fault=fault)
    before = weights_of(trainer, module).clone()
    with pytest.raises(error):
        quiet(max_epochs=1).fit(module, loader())
    assert torch.equal(weights_of(trainer, module), before)
    assert "fault" not in module.hparams


class Own(Faulty):
    """The same in a custom step."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.fault(self.lm(batch))
        return -torch.cat(self.lm(batch)).mean() if batch_idx < 2 else loss


@pytest.mark.parametrize(
    ("fault", "error"),
    [
        (lambda logprobs: logprobs[0].sum() + float("nan"), LossNotFinite),  # of which every gradient is finite
        (lambda logprobs: logprobs[0], LossNotScalar),
        (lambda logprobs: logprobs[0].detach().sum(), LossWithoutGradient),
    ],
)
@pytest.mark.parametrize("manual", [False, True])
def test_a_custom_step_is_checked_and_its_window_is_dropped(
    service: ServiceClient, fault: Any, error: type[Exception], manual: bool
) -> None:  # R1.9
    class ByHand(Own):
        automatic_optimization = False

        def training_step(self, batch: Any, batch_idx: int) -> None:  # type: ignore[override]
            self.manual_backward(super().training_step(batch, batch_idx))

    module = (ByHand if manual else Own)(service.create_lora_training_client("tiny", rank=4), fault=fault)
    remote = module.lm.handle.remote
    with pytest.raises(error):
        quiet(max_epochs=1, accumulate_grad_batches=1 if manual else 4).fit(module, loader())
    assert (remote.window, remote.steps) == ([], 0)


def test_a_loss_that_is_nan_names_its_datums_and_takes_the_window_with_it(service: ServiceClient) -> None:  # R1.9
    class Logs(Mean):
        def loss(self, data: list[Any], logprobs: list[torch.Tensor]) -> Any:
            if self.trainer.fit_loop.batch_idx < 2:
                return super().loss(data, logprobs)
            return torch.stack([(p.sum() if i != 1 else p.sum().sqrt()) for i, p in enumerate(logprobs)]).mean(), {}

    module = Logs(service.create_lora_training_client("tiny", rank=4))
    with pytest.raises(LossNotFinite, match=r"the loss is nan; datum 1 of 2: a gradient that is not finite\. Look for"):
        quiet(max_epochs=1, accumulate_grad_batches=4).fit(module, loader())
    assert module.lm.handle.remote.window == []


def test_what_is_no_batch_of_datums_raises(service: ServiceClient) -> None:
    module = Mean(service.create_lora_training_client("tiny", rank=4))
    numbers: Any = DataLoader([1, 2, 3])  # type: ignore[arg-type]
    with pytest.raises(InvalidDatum, match=r"collate_fn=tinker_lightning\.collate"):
        quiet(max_epochs=1).fit(module, numbers)


def test_several_processes_raise(service: ServiceClient) -> None:
    module = Mean(service.create_lora_training_client("tiny", rank=4))
    trainer = quiet(max_epochs=1)
    trainer.strategy.world_size = 2  # type: ignore[attr-defined]
    with pytest.raises(InvalidInput, match="devices=1"):
        trainer.fit(module, loader())


def test_what_is_no_model_raises() -> None:
    with pytest.raises(InvalidInput, match=r"int cannot be trained: it has no .*forward"):
        RemoteModule(42).lm(DATA)


def test_the_environment_names_no_model_for_a_client_that_was_given(
    service: ServiceClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TINKER_BASE_MODEL", "another")
    module = Mean(service.create_lora_training_client("tiny", rank=4, seed=1))
    module.lm(DATA)
    checkpoint: dict[str, Any] = {"state_dict": module.state_dict()}
    module.on_save_checkpoint(checkpoint)
    module.on_load_checkpoint(checkpoint)
    assert module.lm.backend.get_info().model_name == "tiny"


def test_clipping_by_value_raises(service: ServiceClient) -> None:
    module = Mean(service.create_lora_training_client("tiny", rank=4))
    with pytest.raises(InvalidInput, match="gradient_clip_algorithm='norm'"):
        quiet(max_epochs=1, gradient_clip_val=1.0, gradient_clip_algorithm="value").fit(module, loader())


def test_files_of_other_models_are_rejected() -> None:
    module = Mean("tiny", rank=4)

    def load(base_model: str, rank: int) -> None:
        record = SavedState("tinker://x/weights/y", base_model, rank, 3).to_tensor()
        section = {"version": 1, "windows": {}, "local_gradients": {}, "window_metrics": []}
        module.on_load_checkpoint({"tinker": section, "state_dict": {"lm._extra_state": record}})

    with pytest.raises(InvalidInput, match="base model smollm2-135m, but this module has base model tiny"):
        load("smollm2-135m", 4)
    with pytest.raises(InvalidInput, match="has rank 8, but this module has rank 4"):
        load("tiny", 8)
    with pytest.raises(InvalidInput, match="in its state_dict: it was not written by a RemoteModule"):
        module.on_load_checkpoint({})
    load("tiny", 4)


def test_a_module_without_a_model_says_how_to_name_one(monkeypatch: Any) -> None:  # R1.10
    monkeypatch.delenv("TINKER_BASE_MODEL", raising=False)
    with pytest.raises(InvalidInput, match="TINKER_BASE_MODEL"):
        RemoteModule(base_url="embedded").lm(DATA)
