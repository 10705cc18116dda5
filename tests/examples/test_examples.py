"""The examples train, and to the same bits whatever runs their loop. As scripts they are run by `test_docs.py`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from examples import accelerate_loop, fabric, hybrid, plain_torch
from tinker_lightning import AdamParams, Datum
from tinker_lightning.server import EmbeddedTrainer
from tinker_lightning.testing import embedded_service

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from tinker_lightning.client import ServiceClient, TrainingClient


@pytest.fixture(scope="module")
def trainer(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedTrainer]:
    trainer = EmbeddedTrainer(["tiny"], data_dir=tmp_path_factory.mktemp("examples"))
    yield trainer
    trainer.close()


@pytest.fixture(scope="module")
def service(trainer: EmbeddedTrainer) -> Iterator[ServiceClient]:
    with embedded_service(trainer) as service:
        yield service


@pytest.fixture
def new(service: ServiceClient) -> Callable[[], TrainingClient]:
    """Makes models that begin alike."""
    return lambda: service.create_lora_training_client("tiny", rank=8, seed=0)


def state(trainer: EmbeddedTrainer, client: TrainingClient) -> dict[str, bytes]:
    """All that training changes in a model, to the bit."""
    client.forward(SOME, "cross_entropy").result()  # behind what was sent before
    _, adapter = trainer.registry.model(client.model_id).ready()
    tensors = {**adapter.weights.tensors, **adapter.training_state()}
    return {name: tensor.detach().numpy().tobytes() for name, tensor in tensors.items()}


SOME = [Datum.from_tokens(list(b"anything"))]


class Loops(NamedTuple):
    """What each loop has trained, and what it says of it."""

    clients: dict[str, TrainingClient]
    losses: dict[str, list[float]]
    checkpoint: Path


@pytest.fixture(scope="module")
def loops(service: ServiceClient, tmp_path_factory: pytest.TempPathFactory) -> Loops:
    """The three loops, each over a model that begins like the others."""
    checkpoint = tmp_path_factory.mktemp("fabric") / "fabric.ckpt"
    runs: dict[str, Callable[[Any], list[float]]] = {
        "plain torch": plain_torch.train,
        "Fabric": lambda client: fabric.train(client, str(checkpoint)),
        "Accelerate": accelerate_loop.train,
    }
    clients = {name: service.create_lora_training_client("tiny", rank=8, seed=0) for name in runs}
    return Loops(clients, {name: run(clients[name]) for name, run in runs.items()}, checkpoint)


@pytest.mark.parametrize("name", ["plain torch", "Fabric", "Accelerate"])
def test_every_loop_trains_the_same_model_to_the_same_bits(
    trainer: EmbeddedTrainer, new: Callable[[], TrainingClient], loops: Loops, name: str
) -> None:  # R5.1
    assert loops.losses[name][-1] < 0.75 * loops.losses[name][0]
    assert loops.losses[name] == loops.losses["plain torch"]
    assert state(trainer, loops.clients[name]) == state(trainer, loops.clients["plain torch"])
    assert state(trainer, loops.clients[name]) != state(trainer, new())


def test_the_same_steps_as_with_the_client_alone(new: Callable[[], TrainingClient], loops: Loops) -> None:  # R4.4, R5.1
    """Five micro-batches in windows of two, the last one short, and a rate that falls at each step."""
    by_hand = new()
    data = [Datum.from_tokens(list(text)) for text in plain_torch.SENTENCES]
    rates = iter(torch.linspace(1e-2, 1e-3, 19, dtype=torch.float64).tolist())
    for _ in range(plain_torch.EPOCHS):
        for window in (data[:2], data[2:4], data[4:]):
            for datum in window:
                by_hand.forward_backward_custom([datum], lambda _, logprobs: (plain_torch.focal(logprobs) / 2, {}))
            by_hand.optim_step(AdamParams(learning_rate=next(rates)))
    outputs = [
        client.forward(data, "cross_entropy").result().loss_fn_outputs
        for client in (loops.clients["plain torch"], by_hand)
    ]
    for ours, theirs in zip(*outputs, strict=True):
        assert ours["logprobs"].tolist() == pytest.approx(theirs["logprobs"].tolist(), abs=1e-5)


def test_what_fabric_has_saved_goes_on_where_it_stopped(
    trainer: EmbeddedTrainer, service: ServiceClient, loops: Loops
) -> None:
    saved = torch.load(loops.checkpoint, weights_only=True)
    resumed = service.create_training_client_from_state_with_optimizer(saved["remote"])
    assert state(trainer, resumed) == state(trainer, loops.clients["Fabric"])
    assert saved["optimizer"]["param_groups"][0]["lr"] == pytest.approx(1e-3)


class Leaves(nn.Module):
    """Log-probabilities fetched with the client alone."""

    def __init__(self, client: TrainingClient) -> None:
        super().__init__()
        self.client = client

    def forward(self, data: list[Datum]) -> list[Tensor]:
        outputs = self.client.forward(data, "cross_entropy").result().loss_fn_outputs
        self.data = data
        self.leaves = [output["logprobs"].to_torch().clone().requires_grad_() for output in outputs]
        return self.leaves

    def step(self, params: AdamParams) -> None:
        data = [
            Datum(datum.model_input, {**datum.loss_fn_inputs, "weights": -leaf.grad})
            for datum, leaf in zip(self.data, self.leaves, strict=True)
            if leaf.grad is not None
        ]
        self.client.forward_backward(data, "cross_entropy")
        self.client.optim_step(params)


def test_the_hybrid_learns_and_so_does_its_local_parameter(
    trainer: EmbeddedTrainer, new: Callable[[], TrainingClient], capsys: pytest.CaptureFixture[str]
) -> None:  # R5.2
    client = new()
    model, losses = hybrid.train(client, steps=25)
    assert losses[-1] < losses[0] / 2
    assert "4 of 4 right" in capsys.readouterr().out.splitlines()[-1]
    assert model.log_scale.item() != 0.0
    assert model.lm.handle.remote.steps == 25


def test_the_hybrid_is_torchs_adamw_here_and_the_servers_there(
    trainer: EmbeddedTrainer, new: Callable[[], TrainingClient]
) -> None:  # R5.2
    clients = new(), new()
    model, _ = hybrid.train(clients[0], steps=6)
    reference: Any = hybrid.Matcher(clients[1])
    reference.lm = Leaves(clients[1])
    optimizer = torch.optim.AdamW([reference.log_scale], lr=3e-3, betas=(0.9, 0.95), eps=1e-12, weight_decay=0.0)
    right = torch.arange(len(hybrid.PAIRS))
    for _ in range(6):
        scores = reference(hybrid.PAIRS)
        ((cross_entropy(scores, right) + cross_entropy(scores.T, right)) / 2).backward()
        reference.lm.step(AdamParams(learning_rate=3e-3))
        optimizer.step()
        optimizer.zero_grad()
    assert model.log_scale.item() == reference.log_scale.item() != 0.0
    assert state(trainer, clients[0]) == state(trainer, clients[1])
