"""Requests of a fit and their order, equal to the client's own calls for any data and trainer."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import lightning.pytorch as pl
import pytest
import torch
from torch.utils.data import DataLoader

from tests.helpers.backends import recording
from tests.helpers.random_fits import QUIET, WARNINGS, check, draw
from tests.helpers.soaking import first_only, mostly_soak
from tinker_lightning import AdamParams, Datum, Regularizer, RemoteModule, collate
from tinker_lightning.server import EmbeddedTrainer, create_app

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from torch import Tensor

    from tests.helpers.backends import Recorded

pytestmark = [pytest.mark.filterwarnings(each) for each in WARNINGS]

DATA = [Datum.from_tokens(list(f"text {i}: {'hello, ' * (i % 3 + 1)}".encode())) for i in range(16)]
RATES = [1e-2, 5e-3]


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Recorded]:
    trainer = EmbeddedTrainer(["tiny"], data_dir=tmp_path_factory.mktemp("data"))
    with recording(create_app(trainer)) as recorded:
        yield recorded
    trainer.close()


def squares(_: list[Any], logprobs: list[Tensor]) -> tuple[Tensor, dict[str, Any]]:
    loss = torch.cat(logprobs).square().mean()
    return loss, {"squares": loss}


class Squares(RemoteModule):
    def loss(self, data: list[Any], logprobs: list[Tensor]) -> Any:
        return squares(data, logprobs)

    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: RATES[min(step, 1)] / RATES[0])
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


class Regularized(Squares):
    regularizers = (Regularizer(lambda _, logprobs: -torch.cat(logprobs).mean(), 0.3, "nll"),)


def messages(recorded: Recorded) -> list[tuple[str, Any]]:
    """What was asked of the model, by number, without its name."""
    found = {}
    for request in recorded.record.requests:
        endpoint, message = request.path.rsplit("/", 1)[1], request.message
        if request.is_pass:
            found[message.seq_id] = (endpoint, replace(message, model_id=""))
        elif endpoint == "optim_step":
            found[message["seq_id"]] = (endpoint, {**message, "model_id": ""})
    return [found[number] for number in range(1, len(found) + 1)]


@pytest.mark.parametrize(
    ("n", "kind", "strategy"),
    mostly_soak(
        itertools.product([1, 4], [Squares, Regularized], ["tinker", "auto"]),
        but=[(1, Squares, "auto"), (4, Squares, "tinker"), (4, Regularized, "auto")],
    ),
)
def test_a_step_is_what_the_client_sends(
    n: int, kind: type[Squares], strategy: str, recorded: Recorded
) -> None:  # R0.1, R0.4, R1.8, R4.4
    model = recorded.service.create_lora_training_client("tiny", rank=2, seed=1)
    recorded.record.requests.clear()
    module = kind(model, learning_rate=RATES[0], weight_decay=0.01)
    trainer = pl.Trainer(
        strategy=strategy,
        max_steps=2,
        accumulate_grad_batches=n,
        gradient_clip_val=0.5,
        enable_checkpointing=False,
        **QUIET,
    )
    batches: Any = DataLoader(DATA, 2, collate_fn=collate)  # type: ignore[arg-type]
    trainer.fit(module, batches)
    by_fit = messages(recorded)

    def scaled(data: list[Any], logprobs: list[Tensor]) -> Any:
        return squares(data, logprobs)[0] / n

    model = recorded.service.create_lora_training_client("tiny", rank=2, seed=1)
    recorded.record.requests.clear()
    for step, rate in enumerate(RATES):
        for i in range(step * n, step * n + n):
            regularizers = [replace(each, weight=each.weight / n) for each in kind.regularizers]  # type: ignore
            model.forward_backward_custom(DATA[2 * i : 2 * i + 2], scaled, regularizers=regularizers)
        model.optim_step(AdamParams(rate, 0.9, 0.95, 1e-12, weight_decay=0.01, grad_clip_norm=0.5)).result()
    by_client = messages(recorded)
    assert len(by_fit) == 2 * (2 * n + 1)
    assert by_fit == by_client


@pytest.mark.parametrize("seed", first_only(range(2)))  # three hundred in tox -e soak
def test_every_fit_keeps_the_order(seed: int, recorded: Recorded, tmp_path: Path) -> None:  # R0.4, R1.8, R5.6
    check(seed, recorded, tmp_path)


def test_the_random_fits_are_many_different_ones() -> None:
    plans = [draw(seed) for seed in range(1000)]
    assert {plan.kind for plan in plans} >= {"sized", "stream", "endless", "dict", "list", "max_size"}
    assert {plan.strategy for plan in plans} == {"tinker", "auto"}
    assert all(any(name in plan.trainer for plan in plans) for name in ("max_steps", "val_check_interval"))
    assert any(plan.workers for plan in plans)
    assert any(isinstance(plan.accumulate, dict) for plan in plans)
    assert plans == [draw(seed) for seed in range(1000)]
