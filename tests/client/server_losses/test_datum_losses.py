"""A loss of one datum runs on the server by a handle."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

from tests.helpers.reference import gathered
from tests.helpers.server_losses import RANKS, T, clipped, minimal, padded, policy, reference, texts, trains
from tinker_lightning import custom_loss
from tinker_lightning.client import LossHandle, ServiceClient, TrainingClient
from tinker_lightning.errors import (
    InvalidDatum,
    InvalidInput,
    InvalidLoss,
)
from tinker_lightning.server import EmbeddedTrainer, create_app
from tinker_lightning.server.endpoints import handshake

if TYPE_CHECKING:
    from collections.abc import Iterator


def test_a_loss_of_one_datum_costs_one_pass(
    trainer: EmbeddedTrainer, service: ServiceClient, model: TrainingClient
) -> None:  # R5.7
    handle = service.create_custom_loss(clipped, RANKS).result()
    trains(model, policy(), handle, 2e-3)
    kinds = [trainer.scheduler.find(f"{model.model_id}:{n}").kind for n in range(1, 13)]
    assert kinds == ["forward_backward", "optim_step"] * 6
    one, two = model.forward_backward(policy(), handle), model.forward_backward_custom(policy(), handle)
    for name in ("loss:sum", "custom/ratio:mean", "custom/tokens:sum"):
        assert one.result().metrics[name] == pytest.approx(two.result().metrics[name], rel=1e-5)
    assert service.create_custom_loss(clipped, RANKS).result() is handle


def test_a_handle_takes_inputs_given_once(service: ServiceClient, model: TrainingClient) -> None:  # R3.4
    handle = service.create_custom_loss(clipped, RANKS).result()
    data = policy()
    rows = {name: [datum.loss_fn_inputs[name].to_numpy() for datum in data] for name in ("advantages", "old")}
    assert model.forward(texts(), handle, loss_fn_inputs=rows).result() == model.forward(data, handle).result()


def test_built_in_losses_take_inputs_given_once(service: ServiceClient, model: TrainingClient) -> None:  # R3.3, R3.4
    data = texts(advantages=lambda i, n: np.random.default_rng(i).normal(size=n).astype(np.float32), logprobs=reference)
    once = {
        name: torch.tensor(padded(lambda i, _, name=name: data[i].loss_fn_inputs[name].to_numpy()))  # type: ignore[misc]
        for name in ("advantages", "logprobs")
    }
    given = model.forward(texts(), "ppo", loss_fn_inputs=once).result()
    assert given == model.forward(data, "ppo").result()
    with pytest.raises(InvalidInput, match="advantages is passed for the batch, but datum 0 has it too"):
        model.forward(data, "ppo", loss_fn_inputs=once)
    with pytest.raises(InvalidInput, match="advantages must have one row for each of the 3 datums"):
        model.forward(texts(), "ppo", loss_fn_inputs={"advantages": torch.zeros(2, T)})


@contextlib.contextmanager
def without(
    trainer: EmbeddedTrainer, running: Any, monkeypatch: pytest.MonkeyPatch, *, server_side: bool
) -> Iterator[ServiceClient]:
    """A server that has no extensions, and runs losses of one datum or not."""
    config = {**handshake.CLIENT_CONFIG, "custom_loss_server_side": server_side}
    monkeypatch.setattr(handshake, "CLIENT_CONFIG", config)
    with running(create_app(trainer, extended=False)) as url, ServiceClient(base_url=url) as service:
        yield service


@pytest.mark.parametrize("server_side", [True, False], ids=["server side", "client side"])
def test_a_handle_on_any_server(
    trainer: EmbeddedTrainer, running: Any, monkeypatch: pytest.MonkeyPatch, server_side: bool
) -> None:  # R5.4, R5.7
    """Without our extensions a scale goes as an input of each datum; without the feature, losses are computed here."""
    with without(trainer, running, monkeypatch, server_side=server_side) as service:
        handle = service.create_custom_loss(clipped, RANKS).result()
        assert isinstance(handle, LossHandle)
        assert (handle.loss_id is not None) == server_side
        gradients, results = [], []
        for scale in (1.0, 1 / 3):
            model = service.create_lora_training_client("tiny", rank=4, seed=1)
            results.append(model.forward_backward(policy(), handle, scale=scale).result())
            gradients.append(gathered(trainer, model.model_id))
            forward = model.forward(policy(), handle).result()
        assert (gradients[1] - gradients[0] / 3).norm() < 1e-5 * gradients[1].norm()
        with pytest.raises(InvalidInput, match="without settings; pass beta with each datum"):
            model.forward_backward(policy(), handle, {"beta": 1.0})
        with pytest.raises(InvalidDatum, match="datum 0: advantages: missing; clipped reads it"):
            model.forward(texts(), handle)
        for result in (results[1], forward):
            for name in ("loss:sum", "custom/ratio:mean", "custom/tokens:sum"):
                assert result.metrics[name] == pytest.approx(results[0].metrics[name], rel=1e-5)


@pytest.mark.parametrize("loss", ["cross_entropy", "ppo", "dro"])
def test_a_scale_on_a_server_without_extensions(
    trainer: EmbeddedTrainer, running: Any, monkeypatch: pytest.MonkeyPatch, loss: str
) -> None:
    data = texts(
        weights=lambda _, n: np.ones(n, np.float32),
        logprobs=reference,
        advantages=lambda i, n: np.random.default_rng(i).normal(size=n).astype(np.float32),
    )
    with without(trainer, running, monkeypatch, server_side=True) as service:
        gradients = []
        for scale in (1.0, 0.25):
            model = service.create_lora_training_client("tiny", rank=4, seed=1)
            model.forward_backward(data, loss, scale=scale).result()
            gradients.append(gathered(trainer, model.model_id))
        assert (gradients[1] - gradients[0] / 4).norm() < 1e-6 * gradients[1].norm()
        with pytest.raises(InvalidLoss, match="does not accept whole-batch losses, so mine cannot run there"):
            custom_loss(service, name="mine")(minimal)
        assert "gspo" in service.list_loss_functions()["available_loss_functions"]
