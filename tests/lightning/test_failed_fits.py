"""A fit that fails raises one error that tells of all its failures, and leaves none for the next."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

import lightning.pytorch as pl
import pytest
import torch
from torch.utils.data import DataLoader

from tests.helpers.soaking import diagonal
from tests.helpers.trainers import SMALL, loader, logprobs_of, new, quiet
from tinker_lightning import Datum, RemoteAdamW, RemoteLM, RemoteModule, collate
from tinker_lightning.errors import InvalidDatum, LossNotFinite
from tinker_lightning.server.engine.causal_lm import CausalLM
from tinker_lightning.server.engine.datum_pass import start_pass

if TYPE_CHECKING:
    from tinker_lightning.client import ServiceClient

pytestmark = SMALL

N = 4


class Policy(RemoteModule):
    loss = "importance_sampling"  # type: ignore[assignment]


def sampled(count: int, logprob: float = -1.0) -> DataLoader[Datum]:
    """Batches of one datum; the ratio of a log-probability that is far too low overflows."""
    data = [Datum.from_targets([5, 6], [6, 7], advantages=[1.0, 1.0], logprobs=[logprob] * 2) for _ in range(count)]
    return DataLoader(data, batch_size=1, collate_fn=collate)  # type: ignore[arg-type]


def trainer(strategy: str = "tinker") -> pl.Trainer:
    return quiet(max_epochs=1, accumulate_grad_batches=N, strategy=strategy, accelerator="cpu", devices=1)


def assert_trains(module: RemoteModule, data: DataLoader[Datum], strategy: str = "tinker") -> None:
    before = logprobs_of(module)
    trainer(strategy).fit(module, data)
    assert not torch.equal(logprobs_of(module), before)


@pytest.mark.parametrize(("strategy", "windows"), diagonal(["tinker", "auto"], [1, 6]))
def test_the_failures_of_a_fit_are_one_error(service: ServiceClient, windows: int, strategy: str) -> None:
    module = new(service, Policy)
    with pytest.raises(LossNotFinite, match="forward_backward 1 of") as caught:
        trainer(strategy).fit(module, sampled(windows * N, -1e6))
    sent = module.lm.handle.remote.steps * N
    assert sent >= N
    assert len(caught.value.__notes__) == sent - 1
    assert all("LossNotFinite: forward_backward" in note for note in caught.value.__notes__)
    assert_trains(module, sampled(N), strategy)


def test_failed_look_ahead_passes_are_reported_too(service: ServiceClient, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = threading.Event()

    def held(*args: Any, **options: Any) -> Any:
        asked.wait(30)
        return start_pass(*args, **options)

    class Ahead(RemoteModule):
        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            asked.set()  # not before: the first failure would end the look-ahead
            return super().training_step(batch, batch_idx)

    monkeypatch.setattr(CausalLM, "start_pass", held)
    module = new(service, Ahead)
    unknown: Any = [Datum.from_tokens([5, 6, 99999])] * N
    with pytest.raises(InvalidDatum, match=r"99999.*forward 1 of") as caught:
        trainer().fit(module, DataLoader(unknown, batch_size=1, collate_fn=collate))
    assert len(caught.value.__notes__) == N - 1
    assert_trains(module, loader())


class FailsItself(Policy):
    """Raises an error of its own while a window that fails is under way."""

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        if batch_idx == N and batch[0].loss_fn_inputs["logprobs"].tolist()[0] < -2:
            raise ZeroDivisionError
        return super().training_step(batch, batch_idx)


def test_a_user_error_reports_what_failed_with_it(service: ServiceClient) -> None:
    module = new(service, FailsItself)
    with pytest.raises(ZeroDivisionError) as caught:
        trainer().fit(module, sampled(2 * N, -1e6))
    assert len(caught.value.__notes__) == N
    assert_trains(module, sampled(N))


class Plain(pl.LightningModule):
    """A module of another kind around a remote model."""

    def __init__(self, client: Any) -> None:
        super().__init__()
        self.lm = RemoteLM(client)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        if batch_idx == N:
            raise ZeroDivisionError
        return self.lm.server_loss(batch, "importance_sampling")

    def configure_optimizers(self) -> Any:
        return RemoteAdamW(self.parameters(), lr=1e-2)


def test_a_module_of_another_kind_leaves_no_failure_either(service: ServiceClient) -> None:
    module = Plain(service.create_lora_training_client("tiny", rank=4))
    with pytest.raises(ZeroDivisionError) as caught:
        trainer().fit(module, sampled(2 * N, -1e6))
    assert len(caught.value.__notes__) == N
    trainer().fit(module, sampled(N))
