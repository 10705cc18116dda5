"""A remote model behaves as a module of torch's own: gradients add up, are dropped, and are exact."""

from __future__ import annotations

import copy
import pickle
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import Tensor

from tests.helpers.reference import autograd, gathered
from tinker_lightning import AdamParams, Datum
from tinker_lightning.errors import InvalidInput, LossNotFinite
from tinker_lightning.remote.lm import RemoteLM
from tinker_lightning.remote.optimizers import RemoteAdamW
from tinker_lightning.server import EmbeddedTrainer
from tinker_lightning.testing import RecordingTransport, embedded_service

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    import httpx

    from tinker_lightning.client import ServiceClient

TEXTS = ("hello world, this is a text", "a short one", "and another, of a middling length")
DATA = [Datum.from_tokens(list(text.encode())) for text in TEXTS]


class Stage:
    """A float64 trainer whose gradients can be looked at, and every request that reached it."""

    def __init__(self, trainer: EmbeddedTrainer, service: ServiceClient, transport: RecordingTransport) -> None:
        self.trainer = trainer
        self.service = service
        self.transport = transport

    def model(self) -> RemoteLM:
        return RemoteLM(self.service.create_lora_training_client("tiny", rank=4, seed=1))

    def operations(self) -> list[str]:
        """The requests to models, in the order of their numbers."""
        sent = []
        for request in self.transport.requests:
            name = request.path.rsplit("/", 1)[-1]
            if request.is_pass:
                sent.append((request.message.seq_id, "forward" if request.message.forward_only else "backward"))
            elif name == "optim_step":
                sent.append((request.message["seq_id"], "step"))
        return [name for _, name in sorted(sent)]

    def autograd(self, model: RemoteLM, loss: Callable[[list[Tensor]], Tensor]) -> Tensor:
        """The gradient of a loss by plain autograd."""
        return autograd(self.trainer, _model_id(model), TEXTS, loss)

    def window(self, model: RemoteLM) -> Tensor:
        """The gradient that the model's window makes on the server, seen just before a step would apply it."""
        remote = model.handle.remote
        for call in remote.window:
            gradients = [-gradient for gradient in call.gradients or []]
            datums = [
                Datum.from_targets(d.model_input.tokens(), d.loss_fn_inputs["target_tokens"], weights=w)
                for d, w in zip(call.datums, gradients, strict=True)
            ]
            remote.backend.forward_backward(datums, "cross_entropy").result()
        return gathered(self.trainer, _model_id(model))


def _model_id(model: RemoteLM) -> str:
    return model.backend.model_id  # type: ignore[attr-defined, no-any-return]


@pytest.fixture
def stage(tmp_path: Any) -> Iterator[Stage]:
    trainer = EmbeddedTrainer(["tiny"], data_dir=tmp_path, dtype=torch.float64)
    recorders: list[RecordingTransport] = []

    def record(transport: httpx.AsyncBaseTransport) -> RecordingTransport:
        recorders.append(RecordingTransport(transport))
        return recorders[-1]

    with embedded_service(trainer, wrap=record) as service:
        yield Stage(trainer, service, recorders[0])
    trainer.close()


def close(got: Tensor, expected: Tensor) -> bool:
    return bool((got - expected).norm() <= 1e-6 * expected.norm())


def mean(logprobs: list[Tensor]) -> Tensor:
    return -torch.cat(logprobs).mean()


def contrast(logprobs: list[Tensor]) -> Tensor:
    return torch.nn.functional.softplus(logprobs[0].mean() - logprobs[1].mean()) * logprobs[2].sum()


def test_a_call_gives_one_tensor_per_datum(stage: Stage) -> None:  # R1.1, R1.2, R5.1
    logprobs = stage.model()(DATA)
    assert [tensor.shape for tensor in logprobs] == [(len(text) - 1,) for text in TEXTS]
    assert all(tensor.requires_grad for tensor in logprobs)


@pytest.mark.parametrize("loss", [mean, contrast])
def test_the_gradient_of_any_loss_is_plain_autograds(stage: Stage, loss: Callable[..., Tensor]) -> None:  # R1.3
    model = stage.model()
    loss(model(DATA)).backward()
    assert close(stage.window(model), stage.autograd(model, loss))


def test_backward_sends_nothing_and_the_step_sends_everything(stage: Stage) -> None:
    model = stage.model()
    optimizer = RemoteAdamW(model.parameters())
    for datum in DATA:
        mean(model([datum])).backward()
    assert stage.operations() == ["forward"] * 3
    optimizer.step()
    optimizer.sent[0].optim.result()
    assert stage.operations() == ["forward"] * 3 + ["backward"] * 3 + ["step"]


def test_several_losses_on_one_call_add_up_in_one_backward(stage: Stage) -> None:
    model = stage.model()
    logprobs = model(DATA)
    mean(logprobs).backward(retain_graph=True)
    contrast(logprobs).backward()
    assert len(model.handle.remote.window) == 1
    assert close(stage.window(model), stage.autograd(model, lambda p: mean(p) + contrast(p)))


def test_several_calls_in_one_step_add_up(stage: Stage) -> None:  # R4.4
    model = stage.model()
    (mean(model(DATA)) + contrast(model(DATA))).backward()
    assert len(model.handle.remote.window) == 2
    assert close(stage.window(model), stage.autograd(model, lambda p: mean(p) + contrast(p)))


def test_datums_that_the_loss_does_not_use_get_no_gradient(stage: Stage) -> None:
    model = stage.model()
    model(DATA)[1].sum().backward()
    assert close(stage.window(model), stage.autograd(model, lambda p: p[1].sum()))


def test_a_call_that_no_loss_uses_is_not_sent(stage: Stage) -> None:
    model = stage.model()
    model(DATA)
    mean(model(DATA)).backward()
    assert len(model.handle.remote.window) == 1


def test_no_grad_is_a_plain_forward(stage: Stage) -> None:
    model = stage.model()
    with torch.no_grad():
        logprobs = model(DATA)
    assert not any(tensor.requires_grad for tensor in logprobs)
    assert model.handle.grad is None


def test_autograd_grad_on_logprobs_leaves_the_window_alone(stage: Stage) -> None:
    model = stage.model()
    logprobs = model(DATA)
    (gradient, *_) = torch.autograd.grad(mean(logprobs), logprobs)
    assert gradient.shape == logprobs[0].shape
    assert model.handle.grad is None


def test_autograd_grad_with_respect_to_the_parameters_raises_and_accumulates_nothing(stage: Stage) -> None:
    model = stage.model()
    scale = torch.nn.Parameter(torch.ones(()))
    loss = scale * mean(model(DATA))
    for inputs in ([*model.parameters()], [scale, *model.parameters()]):
        with pytest.raises(InvalidInput, match="that gradient is on the server and cannot be returned"):
            torch.autograd.grad(loss, inputs, retain_graph=True, allow_unused=True)
    assert model.handle.grad is None
    (by_scale,) = torch.autograd.grad(loss, [scale], retain_graph=True)
    assert torch.equal(by_scale, loss.detach())
    loss.backward(inputs=[scale], retain_graph=True)
    assert model.handle.grad is None
    loss.backward(inputs=[*model.parameters()])
    assert len(model.handle.remote.window) == 1


def test_anomaly_mode_works(stage: Stage) -> None:
    model = stage.model()
    with pytest.warns(UserWarning, match="Anomaly Detection"), torch.autograd.detect_anomaly():
        mean(model(DATA)).backward()
    assert model.handle.grad is not None


@pytest.mark.parametrize("zero", [lambda _, optimizer: optimizer.zero_grad(), lambda model, _: model.zero_grad()])
def test_zero_grad_drops_the_window_and_a_step_then_sends_nothing(stage: Stage, zero: Any) -> None:
    model = stage.model()
    optimizer = RemoteAdamW(model.parameters())
    mean(model(DATA)).backward()
    zero(model, optimizer)
    optimizer.step()
    assert stage.operations() == ["forward"]
    assert optimizer.sent == []


def test_a_window_that_was_aborted_leaves_nothing_behind(stage: Stage) -> None:
    aborted, untouched = stage.model(), stage.model()
    mean(aborted([DATA[0]])).backward()
    with pytest.raises(RuntimeError, match="the user's own"):
        raise RuntimeError("the user's own")
    for model in (aborted, untouched):
        optimizer = RemoteAdamW(model.parameters(), lr=1e-2)
        optimizer.zero_grad()
        mean(model(DATA)).backward()
        optimizer.step()
    with torch.no_grad():
        assert all(torch.equal(a, b) for a, b in zip(aborted(DATA), untouched(DATA), strict=True))


def test_a_gradient_that_is_not_finite_raises_before_anything_is_sent(stage: Stage) -> None:  # R1.9
    model = stage.model()
    mean(model(DATA)).backward()
    logprobs = model(DATA)
    with pytest.raises(LossNotFinite, match=r"datum 1: .* dropped"):
        (logprobs[1] * float("nan")).sum().backward()
    assert model.handle.grad is None
    assert stage.operations() == ["forward"] * 2


def test_passes_can_be_sent_ahead(stage: Stage) -> None:  # R5.6
    model = stage.model()
    sent = [model.send([datum]) for datum in DATA]
    for one in sent:
        (mean(model(one)) / 3).backward()
    expected = stage.autograd(model, lambda p: sum((mean([q]) for q in p), torch.zeros(())) / 3)
    assert close(stage.window(model), expected)


def test_a_gradient_for_logprobs_of_earlier_weights_raises(stage: Stage) -> None:
    model = stage.model()
    optimizer = RemoteAdamW(model.parameters(), lr=1e-2)
    sent, kept = model.send(DATA), model(DATA)
    mean(model(DATA)).backward()
    optimizer.step()
    with pytest.raises(InvalidInput, match=r"weights have changed.*Call the model again"):
        mean(kept).backward()
    with pytest.raises(InvalidInput, match=r"weights have changed.*Call the model again"):
        model(sent)
    with torch.no_grad():
        assert all(torch.equal(a, b) for a, b in zip(model(sent), kept, strict=True))  # as numbers they are of use
    assert model.handle.grad is None


@pytest.mark.parametrize(
    "clip",
    [
        lambda model: torch.nn.utils.clip_grad_value_(model.parameters(), 1.0),
        lambda model: model.handle.grad.norm(),
    ],
)
def test_clipping_by_hand_raises(stage: Stage, clip: Any) -> None:
    model = stage.model()
    mean(model(DATA)).backward()
    with pytest.raises(InvalidInput, match=r"grad_clip_norm"):
        clip(model)


def test_copies_raise_with_the_reason(stage: Stage) -> None:
    model = stage.model()
    with pytest.raises(InvalidInput, match="cannot be copied"):
        copy.deepcopy(model)
    with pytest.raises(InvalidInput, match="cannot be pickled"):
        pickle.dumps(model.handle)


def test_moving_it_leaves_the_window_alone(stage: Stage) -> None:
    model = torch.nn.Sequential(stage.model())
    mean(model(DATA)).backward()
    model.to(torch.float64).cpu()
    (only,) = model.parameters()
    assert only.grad is not None


def test_a_model_can_be_pointed_elsewhere(stage: Stage) -> None:
    model = stage.model()
    optimizer = RemoteAdamW(model.parameters(), lr=1e-2)
    mean(model(DATA)).backward()
    other = stage.service.create_lora_training_client("tiny", rank=4, seed=1)
    model.backend = other
    optimizer.step()  # what waited was for the old one
    assert "step" not in stage.operations()
    mean(model(DATA)).backward()
    optimizer.step()
    assert other.optim_step(AdamParams()).result().metrics is not None
