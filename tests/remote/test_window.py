"""Server-side losses as nodes of the autograd graph: sent at the step, scaled by the gradient that reaches them."""

from __future__ import annotations

import threading
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

import pytest
import torch

from tests.helpers.reference import gathered
from tests.helpers.soaking import mostly_soak
from tinker_lightning import AdamParams, Datum, RemoteAdamW, RemoteLM
from tinker_lightning.client.futures import TinkerFuture
from tinker_lightning.errors import InvalidInput, InvalidLoss, OperationFailed
from tinker_lightning.losses.builtin import scale_loss
from tinker_lightning.server import EmbeddedTrainer
from tinker_lightning.testing import embedded_service

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tinker_lightning.client import ServiceClient, TrainingClient

TOKENS = list(b"All happy families are alike")
LENGTH = len(TOKENS) - 1


def policy_datum(seed: int, **more: Any) -> Datum:
    generator = torch.Generator().manual_seed(seed)
    old = -torch.rand(LENGTH, generator=generator) * 6
    advantages = torch.randn(LENGTH, generator=generator)
    return Datum.from_targets(TOKENS[:-1], TOKENS[1:], logprobs=old, advantages=advantages, **more)


DATA: dict[str, list[Datum]] = {
    "cross_entropy": [Datum.from_tokens(TOKENS, [0.5] * len(TOKENS)), Datum.from_tokens(TOKENS[:9])],
    "importance_sampling": [policy_datum(1), policy_datum(2)],
    "ppo": [policy_datum(3), policy_datum(4)],
    "cispo": [policy_datum(5), policy_datum(6)],
    "dro": [policy_datum(7), policy_datum(8)],
    "gspo": [policy_datum(9, sequence_ratio_mask=torch.ones(LENGTH))],
}


@pytest.fixture
def double(tmp_path: Path) -> Iterator[tuple[EmbeddedTrainer, ServiceClient]]:
    trainer = EmbeddedTrainer(["tiny"], data_dir=tmp_path, dtype=torch.float64)
    with embedded_service(trainer) as service:
        yield trainer, service
    trainer.close()


def gradient(trainer: EmbeddedTrainer, client: TrainingClient) -> torch.Tensor:
    """What waits on the server for a step."""
    client.unread.wait()
    return gathered(trainer, client.model_id)


FACTORS = [(name, factor) for name in DATA for factor in (0.25, 3.0)]
FACTORS += [(name, -2.0) for name in ("cross_entropy", "importance_sampling", "cispo", "dro")]


@pytest.mark.parametrize(("name", "factor"), mostly_soak(FACTORS, but=[each for each in FACTORS if each[1] != 3.0]))
def test_a_scaled_loss_is_the_loss_times_a_number(
    double: tuple[EmbeddedTrainer, ServiceClient], name: str, factor: float
) -> None:
    """On servers that know no factor the loss's own inputs are scaled; DRO's beta with them."""
    trainer, service = double
    plain, times = (service.create_lora_training_client("tiny", rank=4, seed=1) for _ in range(2))
    value = plain.forward_backward(DATA[name], name).result().metrics["loss:sum"]
    datums, config = scale_loss(DATA[name], name, {}, factor)
    scaled_value = times.forward_backward(datums, name, config).result().metrics["loss:sum"]
    assert scaled_value == pytest.approx(factor * value, rel=1e-5, abs=1e-4)
    expected = gradient(trainer, plain) * factor
    assert (gradient(trainer, times) - expected).norm() <= 1e-6 * expected.norm()


@pytest.mark.parametrize("name", DATA)
def test_a_server_side_loss_trains_like_forward_backward(
    double: tuple[EmbeddedTrainer, ServiceClient], name: str
) -> None:  # R3.3, R5.7
    trainer, service = double
    by_hand, client = (service.create_lora_training_client("tiny", rank=4, seed=1) for _ in range(2))
    by_hand.forward_backward(DATA[name], name)
    expected = gradient(trainer, by_hand)
    lm = RemoteLM(client)
    optimizer = RemoteAdamW(lm.parameters(), lr=1e-2)
    for _ in range(2):  # two micro-batches of a window, each divided by two
        (lm.server_loss(DATA[name], name) / 2).backward()
    sent: list[torch.Tensor] = []
    step = client.optim_step
    client.optim_step = lambda params: (sent.append(gradient(trainer, client)), step(params))[1]  # type: ignore[method-assign,assignment,misc,func-returns-value]
    optimizer.step()
    optimizer.sent[0].optim.wait()
    assert (sent[0] - expected).norm() <= 1e-6 * expected.norm()


def test_its_value_is_not_known_here(double: tuple[EmbeddedTrainer, ServiceClient]) -> None:
    lm = RemoteLM(double[1].create_lora_training_client("tiny", rank=4))
    assert torch.isnan(lm.server_loss(DATA["cross_entropy"], "cross_entropy"))


MISUSES: dict[str, Any] = {
    "exp": torch.exp,
    "square": torch.square,
    "a branch": lambda loss: torch.relu(loss - 1000),
    "a bound": lambda loss: loss.clamp(0, 1),
    "the greater": lambda loss: torch.maximum(loss, torch.tensor(1.0)),
    "the greatest": lambda loss: torch.stack([loss, torch.tensor(1.0)]).max(),
    "one or the other": lambda loss: torch.where(loss > 1, 2 * loss, loss),
    "an if": lambda loss: loss if loss else 5 * loss,
    "an if of a comparison": lambda loss: loss if loss < 1000 else 5 * loss,
    "a divisor": lambda loss: 1 / loss,
    "a divisor by its name": lambda loss: torch.div(torch.tensor(1.0), other=loss),
    "a loss of torch's": lambda loss: torch.nn.functional.huber_loss(loss + 1, torch.tensor(0.0)),
    "a number in place of NaN": torch.nan_to_num,
    "the greater of two": lambda loss: torch.stack([loss, 3 * loss]).max(),
    "an absolute value": lambda loss: (loss - 2).abs(),
    "a rounded quotient": lambda loss: torch.div(loss, 2, rounding_mode="floor"),
    "a comparison with itself": lambda loss: loss == loss,
    "an order": lambda loss: torch.stack([loss, 2 * loss]).argsort(),
}


@pytest.mark.parametrize("misuse", MISUSES.values(), ids=MISUSES)
def test_other_functions_of_it_raise(double: tuple[EmbeddedTrainer, ServiceClient], misuse: Any) -> None:
    lm = RemoteLM(double[1].create_lora_training_client("tiny", rank=4))
    with pytest.raises(InvalidLoss, match="is not a linear function of a loss that runs on the server"):
        misuse(lm.server_loss(DATA["cross_entropy"], "cross_entropy"))


def test_a_product_with_itself_raises(double: tuple[EmbeddedTrainer, ServiceClient]) -> None:
    lm = RemoteLM(double[1].create_lora_training_client("tiny", rank=4))
    loss = lm.server_loss(DATA["cross_entropy"], "cross_entropy")
    with pytest.raises(InvalidLoss, match="is not a linear function"):
        loss * loss
    assert lm.handle.grad is None


def test_a_factor_of_zero_raises_at_the_step(double: tuple[EmbeddedTrainer, ServiceClient]) -> None:
    lm = RemoteLM(double[1].create_lora_training_client("tiny", rank=4))
    (0 * lm.server_loss(DATA["ppo"], "ppo")).backward()
    with pytest.raises(InvalidLoss, match=r"a gradient of 0\.0 reached the server-side loss 'ppo'"):
        RemoteAdamW(lm.parameters()).step()
    assert lm.handle.grad is None
    assert lm.handle.remote.steps == 0


LINEAR: dict[str, tuple[Any, float]] = {
    "a mean": (lambda loss: torch.stack([loss, 3 * loss]).mean(), 2.0),
    "a sum": (lambda loss: sum([loss, loss / 4, -loss / 2]), 0.75),
    "in place": (lambda loss: torch.zeros(()).add_(loss).mul_(3.0), 3.0),
    "a difference": (lambda loss: 1 - (2 - loss * 0.5).reshape(1)[0].double(), 0.5),
    "weighed": (lambda loss: (loss.unsqueeze(0) * torch.tensor([0.25, 0.5])).sum(), 0.75),
    "weighed by a product": (lambda loss: loss.expand(2) @ torch.tensor([0.25, 0.5]), 0.75),
    "one of two": (lambda loss: torch.where(torch.tensor([True, False]), 2 * loss, 1.0).sum(), 2.0),
    "a quotient by name": (lambda loss: torch.div(input=loss, other=4), 0.25),
}


@pytest.mark.parametrize(("function", "factor"), LINEAR.values(), ids=LINEAR)
def test_linear_functions_of_it_scale_its_gradient(
    double: tuple[EmbeddedTrainer, ServiceClient], function: Any, factor: float
) -> None:
    lm = RemoteLM(double[1].create_lora_training_client("tiny", rank=4))
    loss = lm.server_loss(DATA["cross_entropy"], "cross_entropy")
    assert "nan" in f"{loss} {loss:.2f} {loss.item()}"
    function(loss).backward()
    (call,) = lm.handle.remote.window
    assert call.prepare(lm.backend).scale == factor


def test_it_adds_to_custom_losses(double: tuple[EmbeddedTrainer, ServiceClient]) -> None:
    trainer, service = double
    both, apart = (service.create_lora_training_client("tiny", rank=4, seed=1) for _ in range(2))
    data = DATA["ppo"]
    lm = RemoteLM(both)
    (lm.server_loss(data, "ppo") + 0.1 * torch.cat(lm(data)).square().mean()).backward()
    apart.forward_backward(data, "ppo")
    apart.forward_backward_custom(data, lambda _, logprobs: (0.1 * torch.cat(logprobs).square().mean(), {})).result()
    expected = gradient(trainer, apart)
    for call in lm.handle.remote.window:
        both.send(call.prepare(both))
    assert (gradient(trainer, both) - expected).norm() <= 1e-6 * expected.norm()


def test_no_more_steps_are_in_flight_than_allowed(double: tuple[EmbeddedTrainer, ServiceClient]) -> None:
    client = double[1].create_lora_training_client("tiny", rank=4)
    lm = RemoteLM(client)
    lm.handle.remote.max_steps_in_flight = 2
    optimizer = RemoteAdamW(lm.parameters(), lr=1e-3)
    steps: list[Any] = []
    for _ in range(6):
        lm.server_loss(DATA["cross_entropy"], "cross_entropy").backward()
        optimizer.step()
        optimizer.zero_grad()
        steps += optimizer.sent
        assert sum(not step.optim.done() for step in steps) <= 2
    assert len(steps) == 6
    assert client.optim_step(AdamParams()).result() is not None


@pytest.mark.parametrize("name", ["ppo", "gspo"])
def test_losses_that_clip_have_no_negative(name: str) -> None:
    with pytest.raises(InvalidLoss, match="its negative is another loss"):
        scale_loss(DATA[name], name, {}, -1.0)


def test_an_unknown_loss_cannot_be_scaled_by_its_inputs() -> None:
    with pytest.raises(InvalidLoss, match=r"'mine' cannot be scaled by 0\.5"):
        scale_loss(DATA["ppo"], "mine", {}, 0.5)


class Failing:
    """A client whose first step fails after a while."""

    def __init__(self, client: TrainingClient) -> None:
        self._client = client
        self._failure: Future[Any] = Future()
        self._steps = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._client, name)

    def optim_step(self, params: AdamParams) -> Any:
        self._steps += 1
        if self._steps > 1:
            return self._client.optim_step(params)
        threading.Timer(0.3, self._failure.set_exception, [OperationFailed("the machine is gone")]).start()
        return TinkerFuture(self._failure, "optim_step")


@pytest.mark.parametrize("in_flight", [1, 2, 8])
def test_a_failed_step_is_raised_by_a_later_one_however_few_are_in_flight(
    double: tuple[EmbeddedTrainer, ServiceClient], in_flight: int
) -> None:  # R4.5
    _, service = double
    model = RemoteLM(Failing(service.create_lora_training_client("tiny", rank=4)))
    remote = model.handle.remote
    remote.max_steps_in_flight = in_flight
    optimizer = RemoteAdamW(model.parameters())

    def train() -> None:
        for _ in range(4):
            model.server_loss(DATA["cross_entropy"], "cross_entropy").backward()
            optimizer.step()
        remote.unread.wait()
        remote.unread.raise_first()

    with pytest.raises(OperationFailed, match="the machine is gone"):
        train()


def test_a_failure_while_a_window_is_sent_does_not_split_it(
    double: tuple[EmbeddedTrainer, ServiceClient], monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer, service = double
    client = service.create_lora_training_client("tiny", rank=4)
    model = RemoteLM(client)
    optimizer = RemoteAdamW(model.parameters())
    for loss in ("cross_entropy", "no_such_loss", "cross_entropy"):
        model.server_loss(DATA["cross_entropy"], loss).backward()
    send = client.send

    def send_slowly(request: Any) -> Any:
        future = send(request)
        future.wait()  # so that its failure is there before the next one is sent
        return future

    monkeypatch.setattr(client, "send", send_slowly)
    optimizer.step()
    assert model.handle.remote.window == []
    optimizer.sent[0].optim.wait()
    assert trainer.registry.model(client.model_id).ready()[1].gradient == {}  # all of it went into the step
    with pytest.raises(InvalidInput, match="no_such_loss"):
        optimizer.step()


def test_what_stops_a_window_halfway_reports_what_is_left_on_the_server(
    double: tuple[EmbeddedTrainer, ServiceClient], monkeypatch: pytest.MonkeyPatch
) -> None:
    _, service = double
    model = RemoteLM(service.create_lora_training_client("tiny", rank=4))
    for _ in range(2):
        model.server_loss(DATA["cross_entropy"], "cross_entropy").backward()
    monkeypatch.setattr(type(model.backend), "optim_step", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError) as raised:
        RemoteAdamW(model.parameters()).step()
    assert "The gradient of 4 sequences was sent before this error" in raised.value.__notes__[0]
    assert model.handle.remote.window == []
