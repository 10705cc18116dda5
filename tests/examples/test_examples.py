"""The examples without a trainer: plain torch, and local parameters. As scripts they are run by `test_docs.py`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from examples import hybrid, plain_torch
from tinker_lightning import AdamParams, Datum
from tinker_lightning.server import EmbeddedTrainer
from tinker_lightning.testing import embedded_service

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

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


def test_plain_torch_takes_the_same_steps_as_the_client_alone(new: Callable[[], TrainingClient]) -> None:  # R4.4, R5.1
    """Five micro-batches in windows of two, the last one short, and a rate that falls at each step."""
    by_torch, by_hand = new(), new()
    losses = plain_torch.train(by_torch)
    assert losses[-1] < 0.75 * losses[0]
    data = [Datum.from_tokens(list(text)) for text in plain_torch.SENTENCES]
    rates = iter(torch.linspace(1e-2, 1e-3, 19, dtype=torch.float64).tolist())
    for _ in range(plain_torch.EPOCHS):
        for window in (data[:2], data[2:4], data[4:]):
            for datum in window:
                by_hand.forward_backward_custom([datum], lambda _, logprobs: (plain_torch.focal(logprobs) / 2, {}))
            by_hand.optim_step(AdamParams(learning_rate=next(rates)))
    outputs = [client.forward(data, "cross_entropy").result().loss_fn_outputs for client in (by_torch, by_hand)]
    for ours, theirs in zip(*outputs, strict=True):
        assert ours["logprobs"].tolist() == pytest.approx(theirs["logprobs"].tolist(), abs=1e-5)


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
