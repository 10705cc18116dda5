"""Waits of a step: once for a custom loss, for any number of micro-batches; never for a server-side loss."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import httpx
import pytest
import torch
from lightning.pytorch.loggers import CSVLogger
from torch.utils.data import DataLoader

from tests.helpers.soaking import mostly_soak
from tests.helpers.trainers import SMALL, OnServer, quiet
from tests.helpers.waits import Distant, Trace
from tinker_lightning import Datum, RemoteModule, collate
from tinker_lightning.client import ServiceClient
from tinker_lightning.server import EmbeddedTrainer, create_app

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from torch import Tensor

pytestmark = SMALL

STEPS = 4


class Mean(RemoteModule):
    def loss(self, _: list[Any], logprobs: list[Tensor]) -> Any:
        nll = -torch.cat(logprobs).mean()
        return nll, {"perplexity": nll.exp()}

    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()
        return [optimizer], [torch.optim.lr_scheduler.LinearLR(optimizer)]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedTrainer]:
    trainer = EmbeddedTrainer(["tiny"], data_dir=tmp_path_factory.mktemp("data"))
    yield trainer
    trainer.close()


def waits(
    server: EmbeddedTrainer,
    folder: Path,
    kind: type[RemoteModule] = Mean,
    *,
    strategy: str = "tinker",
    n: int = 1,
    steps: int = STEPS,
    extended: bool = True,
    **settings: Any,
) -> list[list[str]]:
    """What each step of a fit waits for."""
    transport = Distant(httpx.ASGITransport(create_app(server, extended=extended)))
    data = [Datum.from_tokens([i % 256, 1, 2, 3]) for i in range(n * steps)]
    batches: Any = DataLoader(data, 1, collate_fn=collate)  # type: ignore[arg-type]
    with (
        ServiceClient(base_url="http://embedded", transport=transport) as service,
        pytest.MonkeyPatch.context() as patch,
    ):
        module = kind(service.create_lora_training_client("tiny", rank=2, seed=1), **settings)
        trace = Trace(transport, patch)
        trainer = quiet(
            strategy=strategy,
            accelerator="cpu",
            max_steps=steps,
            accumulate_grad_batches=n,
            gradient_clip_val=1.0,
            logger=CSVLogger(folder),
            callbacks=[trace],
        )
        trainer.fit(module, batches)
    assert len(trace.steps.pop()) == 1  # the end of the epoch, where callbacks see the metrics of all its steps
    return trace.steps


@pytest.mark.parametrize("n", mostly_soak([1, 4, 16], but=[1, 4]))
def test_with_look_ahead_a_step_waits_once(n: int, server: EmbeddedTrainer, tmp_path: Path) -> None:  # R5.6
    assert waits(server, tmp_path, n=n) == [["forward"]] * STEPS


def test_so_it_does_on_servers_without_extensions(server: EmbeddedTrainer, tmp_path: Path) -> None:  # R5.6
    assert waits(server, tmp_path, n=4, extended=False) == [["forward"]] * STEPS


@pytest.mark.parametrize("n", mostly_soak([1, 4], but=[4]))
def test_a_plain_trainer_waits_for_every_forward(n: int, server: EmbeddedTrainer, tmp_path: Path) -> None:
    assert waits(server, tmp_path, n=n, strategy="auto") == [["forward"] * n] * STEPS


@pytest.mark.parametrize(
    ("strategy", "n"),
    mostly_soak([("tinker", 1), ("tinker", 4), ("auto", 1), ("auto", 4)], but=[("tinker", 4), ("auto", 1)]),
)
def test_a_loss_of_the_server_waits_only_to_have_few_steps_in_flight(
    strategy: str, n: int, server: EmbeddedTrainer, tmp_path: Path
) -> None:  # R5.7
    found = waits(server, tmp_path, OnServer, strategy=strategy, n=n, steps=9, max_steps_in_flight=4)
    assert found == [[], [], [], [], ["optim_step"], [], [], [], ["optim_step"]]
