"""Regularizers of a module: trained, logged, composed with any loss, and named when they fail."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import pytest
import torch

from tests.helpers.counting import count_passes
from tests.helpers.loss_fits import DATA, ByFunction, ByName, fit, weights_of
from tinker_lightning import Regularizer, RemoteModule
from tinker_lightning.errors import InvalidInput, InvalidLoss, ResultTimeout
from tinker_lightning.losses import regularizers

if TYPE_CHECKING:
    from pathlib import Path

    from tinker_lightning.client import ServiceClient
    from tinker_lightning.server import EmbeddedTrainer

pytestmark = [
    pytest.mark.filterwarnings("ignore:You defined a `validation_step` but have no `val_dataloader`"),
    pytest.mark.filterwarnings("ignore:.*LeafSpec.* is deprecated"),
    pytest.mark.filterwarnings("ignore:.*smaller than the logging interval"),
]


async def slow_length(data: list[Any], logprobs: list[torch.Tensor]) -> Any:
    await asyncio.sleep(0)
    return regularizers.length(data, logprobs)


class Regularized(ByFunction):
    regularizers = (
        Regularizer(regularizers.entropy, lambda step: 0.1 * (step + 1), "entropy"),
        Regularizer(slow_length, 0.01, "length"),
        {"fn": regularizers.sparsity, "weight": 0.5, "name": "sparsity", "run_in_executor": True},
    )


TELEMETRY = ("value", "weight", "contribution", "grad_norm")


def test_regularizers_train_and_are_logged(
    stage: tuple[EmbeddedTrainer, ServiceClient], tmp_path: Path
) -> None:  # R2.1, R2.3, R2.4
    trainer, service = stage
    module = Regularized(service.create_lora_training_client("tiny", rank=4, seed=1), learning_rate=1e-2)
    rows = fit(module, tmp_path)
    for name in ("entropy", "length", "sparsity"):
        assert rows[1].keys() >= {f"regularizers/{name}/{what}" for what in TELEMETRY}
        contribution, value, weight = (
            float(rows[1][f"regularizers/{name}/{what}"]) for what in ("contribution", "value", "weight")
        )
        assert contribution == pytest.approx(value * weight)
    assert [float(rows[step]["regularizers/entropy/weight"]) for step in (0, 1)] == pytest.approx([0.1, 0.2])
    totals = {name: float(rows[1][name]) for name in ("loss_total", "regularizer_total", "base_loss/value")}
    assert totals["loss_total"] == pytest.approx(totals["base_loss/value"] + totals["regularizer_total"])
    assert float(rows[1]["train_loss"]) == pytest.approx(totals["loss_total"])
    plain = ByFunction(service.create_lora_training_client("tiny", rank=4, seed=1), learning_rate=1e-2)
    fit(plain, tmp_path)
    assert not torch.equal(weights_of(trainer, module), weights_of(trainer, plain))


class Asynchronous(RemoteModule):
    """Terms on other threads, which are done in another order from step to step."""

    def __init__(self, *args: Any, waits: tuple[float, float], **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.regularizers = [
            Regularizer(fn=self.exponential, weight=0.3, name="exponential"),
            Regularizer(fn=self.squares, weight=0.7, name="squares"),
        ]
        self.waits = waits

    async def exponential(self, _: list[Any], logprobs: list[torch.Tensor]) -> Any:
        await asyncio.sleep(self.waits[self.global_step % 2])
        return torch.cat(logprobs).exp().mean(), {}

    async def squares(self, _: list[Any], logprobs: list[torch.Tensor]) -> Any:
        await asyncio.sleep(self.waits[1 - self.global_step % 2])
        return (torch.cat(logprobs) ** 2).mean(), {}


def test_two_fits_with_async_regularizers_give_the_same_bits(
    stage: tuple[EmbeddedTrainer, ServiceClient], tmp_path: Path
) -> None:
    _, service = stage
    results: list[torch.Tensor] = []
    for waits in ((0.0, 0.0), (0.0, 0.02), (0.02, 0.0)):
        client = service.create_lora_training_client("tiny", rank=4, seed=1)
        module = Asynchronous(client, learning_rate=1e-2, waits=waits)
        fit(module, tmp_path / str(len(results)))
        with torch.no_grad():
            results.append(torch.cat(module.lm(DATA)))
    assert all(torch.equal(result, results[0]) for result in results)


def test_gradient_norms_of_regularizers_can_be_left_out(
    stage: tuple[EmbeddedTrainer, ServiceClient], tmp_path: Path
) -> None:
    class Without(Regularized):
        grad_norms = False

    rows = fit(Without(stage[1].create_lora_training_client("tiny", rank=4)), tmp_path)
    assert "regularizers/entropy/value" in rows[1]
    assert not [name for name in rows[1] if name.startswith("regularizers") and name.endswith("/grad_norm")]


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ([Regularizer(slow_length, 1.0, "a")] * 2, "are both named 'a'"),
        ([{"fn": slow_length, "weight": 1.0}], "the dict has no name"),
        ([slow_length], "write Regularizer"),
    ],
    ids=["twice", "no name", "a function"],
)
def test_regularizers_that_are_none_raise_before_anything_is_sent(
    stage: tuple[EmbeddedTrainer, ServiceClient], tmp_path: Path, wrong: Any, message: str
) -> None:
    module = ByFunction(stage[1].create_lora_training_client("tiny", rank=4, seed=1))
    module.regularizers = wrong
    counts = count_passes(module.lm.backend)
    with pytest.raises(InvalidLoss, match=message):
        fit(module, tmp_path)
    assert not counts


def test_a_regularizer_that_takes_too_long_is_named(
    stage: tuple[EmbeddedTrainer, ServiceClient], tmp_path: Path
) -> None:
    async def stuck(*_: Any) -> Any:
        await asyncio.sleep(60)

    class Stuck(RemoteModule):
        regularizers = (Regularizer(stuck, 1.0, "judge"),)
        regularizer_timeout = 0.05

    module = Stuck(stage[1].create_lora_training_client("tiny", rank=4))
    with pytest.raises(ResultTimeout, match="judge"):
        fit(module, tmp_path)
    assert module.lm.handle.remote.steps == 0


def test_a_timeout_that_nothing_can_keep_raises_before_anything_is_sent(
    stage: tuple[EmbeddedTrainer, ServiceClient], tmp_path: Path
) -> None:
    class Hasty(Regularized):
        regularizer_timeout = 0

    module = Hasty(stage[1].create_lora_training_client("tiny", rank=4))
    calls = count_passes(module.lm.backend)
    with pytest.raises(InvalidInput, match="regularizer_timeout must be a number of seconds above 0, or None, got 0"):
        fit(module, tmp_path)
    assert not calls


def test_without_a_loss_only_regularizers_count(stage: tuple[EmbeddedTrainer, ServiceClient], tmp_path: Path) -> None:
    class Only(RemoteModule):  # R2.1
        loss = None  # type: ignore[assignment]
        regularizers = (Regularizer(regularizers.sparsity, 0.5, "sparsity"),)

    rows = fit(Only(stage[1].create_lora_training_client("tiny", rank=4, seed=1)), tmp_path)
    assert float(rows[1]["train_loss"]) == pytest.approx(float(rows[1]["regularizers/sparsity/contribution"]))


def test_regularizers_are_added_to_a_server_side_loss(
    stage: tuple[EmbeddedTrainer, ServiceClient], tmp_path: Path
) -> None:
    class Both(ByName):
        route = "builtin"
        regularizers = (Regularizer(regularizers.sparsity, 0.5, "sparsity"),)

    class Here(ByFunction):
        regularizers = Both.regularizers

    trainer, service = stage
    pair = [
        kind(service.create_lora_training_client("tiny", rank=4, seed=1), learning_rate=1e-2, eps=1e-3)
        for kind in (Both, Here)
    ]
    for module in pair:
        fit(module, tmp_path)
    both, here = (weights_of(trainer, module) for module in pair)
    assert (both - here).norm() <= 1e-5 * here.norm()  # backwards of float32 numbers, through Adam
