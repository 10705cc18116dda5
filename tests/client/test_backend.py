"""What the layers above a training client rely on: one interface, and one conversion of each batch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import lightning.pytorch as pl
import numpy as np
import pytest
import tinker
import torch
from torch.utils.data import DataLoader

from tests.helpers.client_data import DATA
from tests.helpers.counting import count_conversions
from tests.helpers.soaking import diagonal
from tests.helpers.trainers import SMALL
from tinker_lightning import Datum, ModelInput, RemoteAdamW, RemoteLM, RemoteModule, collate
from tinker_lightning.client import as_backend
from tinker_lightning.client.sdk import adapters
from tinker_lightning.errors import InvalidDatum, InvalidInput
from tinker_lightning.losses import custom
from tinker_lightning.server.engine.datum_losses import BoundLoss

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.helpers.backends import Backend, BackendName
    from tinker_lightning.client import ServiceClient

pytestmark = SMALL

OFFICIAL = [
    tinker.Datum(
        model_input=tinker.ModelInput.from_ints(datum.model_input.to_ints()),
        loss_fn_inputs={
            name: tinker.TensorData.from_numpy(tensor.to_numpy()) for name, tensor in datum.loss_fn_inputs.items()
        },
    )
    for datum in DATA
]


def mean_nll(_: list[Any], logprobs: list[torch.Tensor]) -> tuple[torch.Tensor, dict[str, Any]]:
    return -torch.cat(logprobs).mean(), {}


def test_a_backend_without_all_methods_raises_and_names_them() -> None:
    class Half:
        unread = losses = None

        def forward(self) -> None: ...

    with pytest.raises(
        InvalidInput,
        match=r"^Half cannot be trained: it has no server, storage, dialect, pause, optimizer_kind, retains, "
        r"can_expire, prepare, .*",
    ):
        as_backend(Half())


@pytest.mark.parametrize("data", [DATA, OFFICIAL], ids=["ours", "the SDK's"])
def test_a_batch_is_converted_once(backend: Backend, data: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    model = backend.model()
    calls = count_conversions(monkeypatch)

    def conversions() -> int:
        count = len(calls)
        calls.clear()
        return count

    model.forward(data, "cross_entropy").result()
    assert conversions() == 1
    model.forward_backward(data, "cross_entropy", scale=0.5).result()
    assert conversions() == 1
    model.forward_backward_custom(data, mean_nll).result()
    assert conversions() == 1

    remote = RemoteLM(model)
    optimizer = RemoteAdamW(remote.parameters())
    mean_nll(data, remote(data))[0].backward()  # two passes
    remote.server_loss(data, "cross_entropy").backward()  # one
    optimizer.step()
    optimizer.sent[0].optim.wait()
    assert conversions() == 2


class Local(RemoteModule):
    def loss(self, data: list[Any], logprobs: list[torch.Tensor]) -> Any:
        return mean_nll(data, logprobs)


class ByName(RemoteModule):
    loss = "cross_entropy"  # type: ignore[assignment]


@pytest.mark.parametrize(("kind", "strategy"), diagonal([Local, ByName], ["tinker", "auto"]))
def test_a_fit_converts_each_micro_batch_once(
    service: ServiceClient, kind: type[RemoteModule], strategy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = kind(service.create_lora_training_client("tiny", rank=4))
    calls = count_conversions(monkeypatch)
    trainer = pl.Trainer(
        strategy=strategy,
        accelerator="cpu",
        max_epochs=2,
        accumulate_grad_batches=2,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, DataLoader([*DATA, DATA[0]], batch_size=1, collate_fn=collate))  # type: ignore[arg-type]
    assert calls == [1] * 8


def test_cross_entropy_takes_ones_where_a_datum_has_no_weights(backend: Backend) -> None:
    bare = [datum.with_only_inputs({"target_tokens": datum.loss_fn_inputs["target_tokens"]}) for datum in DATA]
    full = [datum.with_inputs(weights=np.ones(datum.model_input.length)) for datum in bare]
    for scale in (1.0, 0.5):
        first, second = backend.model(), backend.model()
        results = [
            model.forward_backward(data, "cross_entropy", scale=scale).result()
            for model, data in ((first, bare), (second, full))
        ]
        assert results[0].metrics["loss:sum"] == results[1].metrics["loss:sum"]
        assert backend.bits(first) == backend.bits(second)


def test_the_server_takes_ones_too() -> None:
    datum = Datum(ModelInput.from_ints([1, 2]), {"target_tokens": [2, 3]})
    (weights,) = BoundLoss("cross_entropy", {}).read(datum, dtype=torch.float32)
    assert weights.tolist() == [1.0, 1.0]


def test_base_loss_fn_is_another_name_of_loss_fn(backend: Backend) -> None:
    first, second = backend.model(), backend.model()
    first.forward_backward_custom(DATA, mean_nll).result()
    second.forward_backward_custom(DATA, base_loss_fn=mean_nll).result()
    assert backend.bits(first) == backend.bits(second)
    with pytest.raises(InvalidInput, match="loss_fn and base_loss_fn are two names of one argument"):
        first.forward_backward_custom(DATA, mean_nll, base_loss_fn=mean_nll)


class Rounding(RemoteModule):
    def loss(self, _: list[Any], logprobs: list[torch.Tensor]) -> Any:
        return torch.cat(logprobs).round().sum()


def test_a_zero_gradient_warns_with_the_name_of_the_loss(
    service: ServiceClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(custom, "_WARNED_OF_ZERO", set())  # it warns once in a process
    module = Rounding(service.create_lora_training_client("tiny", rank=4))
    module.chosen_route()
    optimizer = RemoteAdamW(module.lm.parameters())
    module.loss(DATA, module.lm(DATA)).backward()
    with pytest.warns(UserWarning, match=r"the gradient of the loss Rounding\.loss is zero for every token"):
        optimizer.step()


def test_a_datum_that_datasets_map_has_turned_into_dicts_is_named(service: ServiceClient) -> None:
    # What pandas' ujson_dumps makes of a Datum; `datasets` 5.2 falls back to it for values that Arrow rejects.
    nested: Any = {
        "model_input": {"chunks": [{"tokens": [1, 2]}]},
        "loss_fn_inputs": {"target_tokens": {"data": [2, 3]}},
    }
    model = service.create_lora_training_client("tiny", rank=4)
    with pytest.raises(InvalidDatum, match=r"datum 0: got a dict .* datasets\.map .* build the datums in"):
        model.forward([nested], "cross_entropy")
    with pytest.raises(InvalidDatum, match=r"datasets\.map"):
        RemoteModule(model).datums([nested])


def test_an_official_sdk_newer_than_tested_is_logged_once(
    ways: Callable[[BackendName], Backend], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:  # R5.17
    monkeypatch.setattr(tinker, "__version__", "0.99rc1")
    adapters._check_release.cache_clear()
    for _ in range(2):
        ways("official SDK").model()
    messages = [record.getMessage() for record in caplog.records if "newer" in record.getMessage()]
    assert messages == ["the official SDK 0.99rc1 is newer than 0.38.0, the last release that was tested"]
