"""Datums of the official SDK in every stage, precision and kind of module."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any

import lightning.pytorch as pl
import pytest
import torch
from torch.utils.data import DataLoader

from tests.helpers.soaking import mostly_soak
from tests.helpers.trainers import DATA, SMALL, Terse, loader, logprobs_of, new, quiet
from tinker_lightning import Datum, RemoteAdamW, RemoteLM, RemoteModule

if TYPE_CHECKING:
    from tinker_lightning.client import ServiceClient

pytestmark = SMALL


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
        but=[("tinker", in_a_dict)],
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
        but=[("auto", "64-true"), ("tinker", "bf16-true")],
    ),
)
@pytest.mark.filterwarnings("ignore:.*but AMP with fp16 is not supported on CPU")
def test_datums_of_the_official_sdk_in_every_precision(strategy: str, precision: Any, service: ServiceClient) -> None:
    module = new(service, Terse)
    trainer = quiet(precision=precision, strategy=strategy, accelerator="cpu", devices=1)
    trainer.fit(module, official_loader(), official_loader())
    trainer.predict(module, official_loader())
    assert module.lm.handle.remote.steps == 3


def beside_a_factor(batch: Any) -> Any:
    return batch, torch.ones(())


@pytest.mark.parametrize(
    ("shape", "precision"),
    mostly_soak(
        itertools.product([None, beside_a_factor], ["32-true", "64-true", "bf16-mixed"]),
        but=[(None, "32-true"), (beside_a_factor, "bf16-mixed")],
    ),
)
def test_datums_of_the_official_sdk_in_a_plain_module(shape: Any, precision: Any, service: ServiceClient) -> None:
    module = Plain(service.create_lora_training_client("tiny", rank=4, seed=1))
    quiet(precision=precision).fit(module, official_loader(shape))
    assert module.lm.handle.remote.steps == 3
    data, factor = module.transferred[0] if shape else (module.transferred[0], None)
    assert type(data[0]) is type(official(DATA[0]))
    if factor is not None:
        assert factor.dtype == (torch.float64 if precision == "64-true" else torch.float32)
