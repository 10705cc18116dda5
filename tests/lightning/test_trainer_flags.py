"""Flags of a Trainer with a remote model. The rows of docs/lightning-features.md name these tests."""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING, Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.plugins import MixedPrecision
from torch.utils.data import DataLoader

from tests.helpers.soaking import first_only
from tests.helpers.trainers import SMALL, Hybrid, OnServer, loader, logprobs_of, new, quiet
from tinker_lightning import RemoteModule
from tinker_lightning.errors import InvalidInput
from tinker_lightning.testing import RecordingTransport, embedded_service

if TYPE_CHECKING:
    from collections.abc import Iterator

    import httpx

    from tinker_lightning.client import ServiceClient

pytestmark = SMALL


class Seen(Callback):
    """Counts batches, and the steps after which the model was validated."""

    def __init__(self) -> None:
        self.batches: dict[str, int] = {}
        self.validated: list[int] = []

    def on_train_batch_end(self, *_: Any) -> None:
        self.batches["train"] = self.batches.get("train", 0) + 1

    def on_validation_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        if not trainer.sanity_checking:
            self.batches["val"] = self.batches.get("val", 0) + 1

    def on_test_batch_end(self, *_: Any) -> None:
        self.batches["test"] = self.batches.get("test", 0) + 1

    def on_predict_batch_end(self, *_: Any) -> None:
        self.batches["predict"] = self.batches.get("predict", 0) + 1

    def on_validation_end(self, trainer: pl.Trainer, *_: Any) -> None:
        if not trainer.sanity_checking:
            self.validated.append(trainer.global_step)


@pytest.fixture(scope="module")
def recorded() -> Iterator[tuple[ServiceClient, RecordingTransport]]:
    transports: list[RecordingTransport] = []

    def wrap(inner: httpx.AsyncBaseTransport) -> RecordingTransport:
        transports.append(RecordingTransport(inner))
        return transports[-1]

    with embedded_service(wrap=wrap) as service:
        yield service, transports[0]


@pytest.fixture(scope="module")
def service(recorded: tuple[ServiceClient, RecordingTransport]) -> ServiceClient:
    return recorded[0]


def prompts() -> Any:
    return DataLoader(["text 0", "text 1", "text 2"], batch_size=1, collate_fn=list)  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", first_only([RemoteModule, OnServer]))
def test_fast_dev_run(service: ServiceClient, kind: type[RemoteModule]) -> None:  # R5.3
    seen = Seen()
    module = new(service, kind)
    trainer = quiet(fast_dev_run=2, callbacks=[seen])
    trainer.fit(module, loader(), loader())
    trainer.test(module, loader(), verbose=False)
    trainer.predict(module, prompts())
    assert seen.batches == {"train": 2, "val": 2, "test": 2, "predict": 2}
    assert module.lm.handle.remote.steps == 2


def test_limits_of_batches(recorded: tuple[ServiceClient, RecordingTransport]) -> None:
    service, transport = recorded
    transport.requests.clear()
    seen = Seen()
    module = new(service, RemoteModule)
    limits = {"limit_train_batches": 3, "limit_val_batches": 0.5, "limit_test_batches": 1, "limit_predict_batches": 2}
    trainer = quiet(max_epochs=1, callbacks=[seen], accumulate_grad_batches=4, num_sanity_val_steps=0, **limits)
    trainer.fit(module, loader(), loader())
    trainer.test(module, loader(), verbose=False)
    trainer.predict(module, prompts())
    assert seen.batches == {"train": 3, "val": 2, "test": 1, "predict": 2}
    passes = [request.message for request in transport.requests if request.is_pass]
    assert [message.forward_only for message in passes].count(True) == 2 + 1
    assert [message.forward_only for message in passes].count(False) == 3  # the default loss takes one pass
    assert module.lm.handle.remote.steps == 1


def test_overfit_batches(service: ServiceClient) -> None:
    class Keeps(RemoteModule):
        seen: tuple[Any, ...] = ()

        def loss(self, data: list[Any], logprobs: list[torch.Tensor]) -> Any:
            self.seen += (data[0],)
            return super().loss(data, logprobs)

    module = new(service, Keeps)
    quiet(overfit_batches=1, max_epochs=3).fit(module, loader())
    assert len(module.seen) == 3
    assert len({id(datum) for datum in module.seen}) == 1


def test_val_check_interval(service: ServiceClient) -> None:
    for settings, steps in (
        ({"val_check_interval": 2}, [2, 4, 6, 8]),
        ({"val_check_interval": 3, "check_val_every_n_epoch": None}, [3, 6]),
        ({"check_val_every_n_epoch": 2}, [8]),
    ):
        seen = Seen()
        quiet(max_epochs=2, callbacks=[seen], **settings).fit(new(service, RemoteModule), loader(), loader(2, 2))
        assert seen.validated == steps, settings


def test_max_time(service: ServiceClient) -> None:
    trainer = quiet(max_time=timedelta(seconds=0.3))
    trainer.fit(new(service, RemoteModule), loader())
    assert trainer.global_step > 0


def test_accumulate_grad_batches(service: ServiceClient) -> None:  # R0.4
    module, whole = (new(service, RemoteModule) for _ in range(2))
    quiet(max_epochs=1, accumulate_grad_batches=3).fit(module, loader())
    assert module.lm.handle.remote.steps == 2  # three batches, and the one that is left
    quiet(max_epochs=1, accumulate_grad_batches=4).fit(whole, loader())
    single = new(service, RemoteModule)
    quiet(max_epochs=1).fit(single, loader(8))
    torch.testing.assert_close(logprobs_of(whole), logprobs_of(single), rtol=1e-3, atol=1e-3)


def test_gradient_clipping(recorded: tuple[ServiceClient, RecordingTransport]) -> None:
    service, transport = recorded
    transport.requests.clear()
    module = new(service, RemoteModule)
    quiet(gradient_clip_val=0.5, max_steps=2).fit(module, loader())
    sent = [request.message["adam_params"] for request in transport.requests if request.path.endswith("optim_step")]
    assert [params["grad_clip_norm"] for params in sent] == [0.5, 0.5]
    with pytest.raises(InvalidInput, match="gradient_clip_algorithm='norm'"):
        quiet(gradient_clip_val=0.5, gradient_clip_algorithm="value").fit(module, loader())


@pytest.mark.parametrize("kind", first_only([RemoteModule, OnServer]))
def test_detect_anomaly(service: ServiceClient, kind: type[RemoteModule]) -> None:
    module = new(service, kind)
    quiet(detect_anomaly=True).fit(module, loader())
    assert module.lm.handle.remote.steps == 3


def test_deterministic(service: ServiceClient) -> None:
    once, again = (new(service, RemoteModule) for _ in range(2))
    try:
        for module in (once, again):
            pl.seed_everything(1, verbose=False)
            quiet(deterministic=True).fit(module, loader(shuffle=True))
    finally:
        torch.use_deterministic_algorithms(False)
    assert torch.equal(logprobs_of(once), logprobs_of(again))


@pytest.mark.parametrize("inference_mode", [True, False])
def test_inference_mode(service: ServiceClient, inference_mode: bool) -> None:
    module = new(service, RemoteModule)
    trainer = quiet(inference_mode=inference_mode)
    trainer.fit(module, loader(), loader(2, 2))
    trainer.validate(module, loader(2, 2), verbose=False)
    trainer.fit_loop.epoch_loop.max_steps = 4
    trainer.fit(module, loader())
    assert module.lm.handle.remote.steps == 4  # what evaluation has left behind can still be trained


def test_precisions(service: ServiceClient) -> None:
    scores = {}
    for precision in ("32-true", "64-true", "bf16-true", "16-true", "bf16-mixed"):
        module = new(service, RemoteModule)
        trainer = quiet(precision=precision)
        trainer.fit(module, loader(), loader(2, 2))
        (score,) = trainer.validate(module, loader(2, 2), verbose=False)
        scores[precision] = score["val_loss"]
        assert module.lm.handle.remote.steps == 3
    assert scores == pytest.approx(dict.fromkeys(scores, scores["32-true"]), rel=1e-5)


def test_precisions_of_local_layers(service: ServiceClient) -> None:
    module = new(service, Hybrid)
    quiet(precision="64-true").fit(module, loader())
    assert module.head.weight.dtype == torch.float64
    assert module.lm.handle.remote.steps == 3


def test_a_scaled_loss_raises(service: ServiceClient) -> None:
    scaled = MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu"))
    with pytest.raises(InvalidInput, match="MixedPrecision scales the loss"):
        quiet(plugins=[scaled]).fit(new(service, RemoteModule), loader())


def test_profiler(service: ServiceClient) -> None:
    trainer = quiet(profiler="simple")
    trainer.fit(new(service, RemoteModule), loader())
    summary: Any = trainer.profiler  # type: ignore[attr-defined]  # set by a connector
    assert "[Strategy]TinkerStrategy.training_step" in summary.summary()


@pytest.mark.filterwarnings("ignore:You are trying to `self.log..`")
def test_barebones(service: ServiceClient) -> None:
    module = new(service, RemoteModule)
    pl.Trainer(strategy="tinker", barebones=True, max_steps=3).fit(module, loader())
    assert module.lm.handle.remote.steps == 3


class Data(pl.LightningDataModule):
    def __init__(self) -> None:
        super().__init__()
        self.made = 0
        self.loaded: Any = None

    def train_dataloader(self) -> Any:
        self.made += 1
        return loader(shuffle=True)

    def val_dataloader(self) -> Any:
        return loader(2, 2)

    def predict_dataloader(self) -> Any:
        return prompts()

    def state_dict(self) -> dict[str, Any]:
        return {"made": self.made}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.loaded = state_dict


def test_reload_dataloaders(service: ServiceClient) -> None:
    data = Data()
    module = new(service, RemoteModule)
    trainer = quiet(max_epochs=3, reload_dataloaders_every_n_epochs=1, accumulate_grad_batches=2)
    trainer.fit(module, datamodule=data)
    assert data.made == 3
    assert module.lm.handle.remote.steps == 6


def test_data_module(service: ServiceClient, tmp_path: Any) -> None:
    data = Data()
    module = new(service, RemoteModule)
    trainer = quiet()
    trainer.fit(module, datamodule=data)
    predictions: Any = trainer.predict(module, datamodule=data)
    assert len(predictions) == 3
    trainer.save_checkpoint(tmp_path / "file.ckpt")
    again = Data()
    quiet(max_steps=5).fit(new(service, RemoteModule), datamodule=again, ckpt_path=tmp_path / "file.ckpt")
    assert again.loaded == {"made": 1}


def test_a_compiled_module_raises(service: ServiceClient) -> None:
    compiled = torch.compile(new(service, RemoteModule), backend="eager")  # loads less than the default backend
    with pytest.raises(InvalidInput, match="nothing to compile"):
        quiet().fit(compiled, loader())  # type: ignore[arg-type]  # it is a module for Lightning
