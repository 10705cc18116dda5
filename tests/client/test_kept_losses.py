"""A server keeps a limited number of losses per session. One that was evicted or rejected is uploaded again."""

# ruff: noqa: ARG005  # a loss has parameters that it does not use

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from tinker_lightning import Datum, LossFnOutput, custom_loss
from tinker_lightning.client import server_losses as client_losses
from tinker_lightning.errors import InvalidInput
from tinker_lightning.lossgraph import server_loss
from tinker_lightning.server import EmbeddedTrainer
from tinker_lightning.server.trainer import loss_registry
from tinker_lightning.testing import embedded_service

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch import Tensor

    from tinker_lightning.client import ServiceClient, TrainingClient

RANKS = {"logprobs": 1}


@pytest.fixture(scope="module")
def trainer(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedTrainer]:
    trainer = EmbeddedTrainer(["tiny"], data_dir=tmp_path_factory.mktemp("kept"))
    yield trainer
    trainer.close()


@pytest.fixture
def service(trainer: EmbeddedTrainer) -> Iterator[ServiceClient]:
    with embedded_service(trainer) as service:
        yield service


@pytest.fixture
def model(service: ServiceClient) -> TrainingClient:
    return service.create_lora_training_client("tiny", rank=4, seed=1)


def data(**inputs: Any) -> list[Datum]:
    return [Datum.from_targets([1, 2, 3], [2, 3, 4], **inputs)]


def value(model: TrainingClient, loss: Any, *config: dict[str, Any]) -> float:
    return model.forward(data(), loss, *config).result().metrics["loss:sum"]


def of_datum(factor: float) -> Callable[..., Any]:
    return lambda logprobs: (-factor * logprobs.sum(), {})


def of_batch(factor: float) -> Callable[..., LossFnOutput]:
    return lambda outputs, inputs, mask: LossFnOutput(factor * (outputs * mask.unsqueeze(-1)).square().mean())


def kept(trainer: EmbeddedTrainer, service: ServiceClient) -> int:
    return len(trainer.losses._sessions[service.session.session_id].entries)


@pytest.mark.parametrize("extended", [True, False], ids=["our server", "without our extensions"])
def test_a_handle_whose_loss_was_evicted_can_be_used_again(
    trainer: EmbeddedTrainer, monkeypatch: pytest.MonkeyPatch, extended: bool
) -> None:  # R3.6
    with embedded_service(trainer, extended=extended) as service:
        model = service.create_lora_training_client("tiny", rank=4, seed=1)
        handle = service.create_custom_loss(of_datum(1.0), RANKS).result()
        before = value(model, handle)
        monkeypatch.setattr(loss_registry, "MAX_VALUES", 40)
        others = [service.create_custom_loss(of_datum(factor), RANKS).result() for factor in (2.0, 3.0, 4.0)]
        with pytest.raises(InvalidInput, match=r"this session has no loss .*, or it was evicted"):
            model.forward_backward(data(), handle).result()
        assert value(model, handle) == before
        assert service.create_custom_loss(of_datum(1.0), RANKS).result() is handle
        assert value(model, others[-1]) == pytest.approx(4 * before)


@pytest.mark.parametrize("trace", [True, False], ids=["traced", "as it is"])
def test_a_batch_loss_that_was_evicted_can_be_used_again(
    service: ServiceClient, model: TrainingClient, monkeypatch: pytest.MonkeyPatch, trace: bool
) -> None:  # R3.6
    loss = custom_loss(service, name="mine", trace=trace)(of_batch(1.0))
    before = value(model, loss)
    monkeypatch.setattr(loss_registry, "MAX_VALUES", 60 if trace else 1)
    for i in range(4):
        custom_loss(service, name=f"other_{i}", trace=trace)(of_batch(float(i)))
    for again in (loss, "mine"):
        evicted = r"loss_fn 'mine@.*' is not registered, or was evicted; available losses:"
        with pytest.raises(InvalidInput, match=evicted):
            value(model, again)
        assert value(model, again) == before
        custom_loss(service, name="last", trace=trace)(of_batch(9.0))
        custom_loss(service, name="very_last", trace=trace)(of_batch(8.0))


def test_an_upload_that_found_no_room_can_be_tried_again(
    service: ServiceClient, monkeypatch: pytest.MonkeyPatch
) -> None:  # R3.6
    monkeypatch.setattr(loss_registry, "MAX_VALUES", 3)
    for _ in range(2):
        with pytest.raises(InvalidInput, match="a session may store at most 3"):
            service.create_custom_loss(of_datum(1.0), RANKS).result()
    monkeypatch.undo()
    handle = service.create_custom_loss(of_datum(1.0), RANKS).result()
    assert service.create_custom_loss(of_datum(1.0), RANKS).result() is handle


def test_a_pass_that_fails_for_its_own_reasons_makes_no_second_loss(
    trainer: EmbeddedTrainer, service: ServiceClient, model: TrainingClient
) -> None:
    handle = service.create_custom_loss(lambda logprobs, w: (-(w * logprobs).sum(), {}), {"logprobs": 1, "w": 1})
    loss = custom_loss(service, name="mine", on="logprobs")(lambda data, logprobs: (-(data["w"] * logprobs).sum(), {}))
    for each in (handle.result(), loss):
        for _ in range(3):
            with pytest.raises(InvalidInput):
                model.forward(data(w=np.zeros(2, np.float32)), each).result()
            model.forward(data(w=np.ones(3, np.float32)), each).result()
    assert kept(trainer, service) == 2


def test_a_setting_that_decides_and_changes_with_each_step_fills_no_memory(
    service: ServiceClient, model: TrainingClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server_loss, "_KEPT_UPLOADS", 4)

    @custom_loss(service, name="annealed")
    def annealed(outputs: Tensor, inputs: Any, mask: Tensor, strength: float = 1.0) -> LossFnOutput:
        total = (outputs * mask.unsqueeze(-1)).square().mean()
        return LossFnOutput(total * strength if strength > 0 else -total)

    once = value(model, annealed)
    for strength in (*range(2, 12), 2, 1):
        assert value(model, annealed, {"strength": float(strength)}) == pytest.approx(strength * once)
        assert len(annealed._uploads) <= 4
    assert value(model, annealed) == once
    with pytest.raises(InvalidInput, match="annealed has no setting 'weakness'; it takes strength"):
        value(model, annealed, {"weakness": 1.0})


def test_a_setting_that_decides_only_with_another_is_taken(
    trainer: EmbeddedTrainer, service: ServiceClient, model: TrainingClient
) -> None:
    @custom_loss(service, name="clipped")
    def clipped(outputs: Tensor, inputs: Any, mask: Tensor, mode: str = "plain", beta: float = 0.25) -> LossFnOutput:
        total = (outputs * mask.unsqueeze(-1)).square().mean()
        if mode == "clip" and beta > 0.5:
            total = total * 2
        return LossFnOutput(total * beta)

    once = value(model, clipped, {"beta": 1.0})
    assert value(model, clipped, {"mode": "clip", "beta": 0.75}) == pytest.approx(1.5 * once)
    assert value(model, clipped, {"beta": 0.5, "mode": "clip"}) == pytest.approx(0.5 * once)
    assert value(model, clipped, {"beta": 0.75}) == pytest.approx(0.75 * once)
    assert kept(trainer, service) == 3  # what only showed that more is decided is not uploaded


def test_handles_of_functions_made_for_each_step_fill_no_memory(
    service: ServiceClient, model: TrainingClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client_losses, "_KEPT_HANDLES", 3)
    handles = [service.create_custom_loss(of_datum(float(i)), RANKS).result() for i in range(1, 7)]
    assert len(service.losses._handles) == 3
    values = [value(model, handle) for handle in handles]
    assert values == pytest.approx([(i + 1) * values[0] for i in range(6)])


def test_true_is_another_setting_than_one(service: ServiceClient, model: TrainingClient) -> None:
    @custom_loss(service, name="either")
    def either(outputs: Tensor, inputs: Any, mask: Tensor, how: float = 0) -> LossFnOutput:
        total = (outputs * mask.unsqueeze(-1)).square().mean()
        return LossFnOutput(total if how is True else 2 * total if how == 1 else 3 * total)

    third = value(model, either) / 3
    assert value(model, either, {"how": True}) == pytest.approx(third)
    assert value(model, either, {"how": 1}) == pytest.approx(2 * third)
