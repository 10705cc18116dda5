"""A loss may change what it is given in place, or a copy of it if it is traced: both train the same."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch

from tinker_lightning import AdamParams, Datum, LossFnOutput, custom_loss
from tinker_lightning.errors import LossNotTraceable
from tinker_lightning.testing import embedded_service

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch import Tensor

    from tinker_lightning.client import ServiceClient

TOKENS = [list(b"All happy families"), list(b"Call me Ishmael.")]
DATA = [Datum.from_targets(ids[:-1], ids[1:], weights=[1.0] * (len(ids) - 1)) for ids in TOKENS]


@pytest.fixture(scope="module")
def service() -> Iterator[ServiceClient]:
    with embedded_service() as service:
        yield service


def trained(service: ServiceClient, loss: Any) -> tuple[float, float, float]:
    """The loss, the gradient's norm, and the loss after a step by it."""
    model = service.create_lora_training_client("tiny", rank=4, seed=1)
    before = model.forward_backward(DATA, loss).result().metrics["loss:sum"]
    stepped = model.optim_step(AdamParams(learning_rate=1e-2)).result()
    return before, (stepped.metrics or {})["grad_norm"], model.forward(DATA, loss).result().metrics["loss:sum"]


def sets_items(x: Tensor, mask: Tensor) -> Tensor:
    x[..., 3] = -1e4
    return x


def fills(x: Tensor, mask: Tensor) -> Tensor:
    x.masked_fill_(mask == 0, 0.5)
    return x


def divides(x: Tensor, mask: Tensor) -> Tensor:
    x /= 0.7
    return x


def writes_to_a_view(x: Tensor, mask: Tensor) -> Tensor:
    x[0] *= 2
    return x


def writes_without_a_gradient(x: Tensor, mask: Tensor) -> Tensor:
    with torch.no_grad():
        x.clamp_(-0.1, 0.1)
    return x


TRACEABLE = (sets_items, fills, divides)
ALL = (*TRACEABLE, writes_to_a_view, writes_without_a_gradient)  # the last two: tests/lossgraph/test_writes.py
OF_INPUT = r"modifies an input.*x = x\.clone\(\)"


def logits_loss(write: Callable[..., Tensor]) -> tuple[Callable[..., LossFnOutput], Callable[..., LossFnOutput]]:
    """A loss that writes to its logits, and one that writes to a copy."""

    def loss(model_outputs: Tensor, loss_fn_inputs: Any, attention_mask: Tensor) -> LossFnOutput:
        logprobs = write(model_outputs, attention_mask.unsqueeze(-1)).log_softmax(-1)
        picked = logprobs.gather(-1, loss_fn_inputs["target_tokens"].unsqueeze(-1)).squeeze(-1)
        return LossFnOutput(-(picked * attention_mask).sum(), picked)

    def copies(model_outputs: Tensor, loss_fn_inputs: Any, attention_mask: Tensor) -> LossFnOutput:
        return loss(model_outputs.clone(), loss_fn_inputs, attention_mask)

    return loss, copies


def logprobs_loss(write: Callable[..., Tensor]) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """A loss that writes to its log-probabilities, and one that writes to a copy."""

    def loss(data: Any, logprobs: Tensor) -> Any:
        return -(write(logprobs, data["weights"]) * data["weights"]).square().sum(), {}

    def copies(data: Any, logprobs: Tensor) -> Any:
        return loss(data, logprobs.clone())

    return loss, copies


@pytest.mark.parametrize("write", ALL)
@pytest.mark.parametrize(("losses", "on"), [(logits_loss, "logits"), (logprobs_loss, "logprobs")])
def test_what_a_loss_gets_can_be_written_to(service: ServiceClient, write: Any, losses: Any, on: Any) -> None:
    names = f"{on}_writing", f"{on}_copying"
    writing, copying = (
        custom_loss(service, name=name, on=on, trace=False)(each)
        for name, each in zip(names, losses(write), strict=True)
    )
    assert trained(service, writing) == trained(service, copying)


@pytest.mark.parametrize("write", TRACEABLE)
@pytest.mark.parametrize(("losses", "on"), [(logits_loss, "logits"), (logprobs_loss, "logprobs")])
def test_a_traced_loss_writes_to_a_copy(service: ServiceClient, write: Any, losses: Any, on: Any) -> None:
    loss, copies = losses(write)
    with pytest.raises(LossNotTraceable, match=OF_INPUT):
        custom_loss(service, name=f"{on}_traced", on=on)(loss)
    traced = custom_loss(service, name=f"{on}_traced", on=on)(copies)
    plain = custom_loss(service, name=f"{on}_plain", on=on, trace=False)(loss)
    assert trained(service, traced) == pytest.approx(trained(service, plain), rel=1e-6)


@pytest.mark.parametrize("write", TRACEABLE)
def test_a_traced_loss_of_one_datum_writes_to_a_copy(service: ServiceClient, write: Callable[..., Tensor]) -> None:
    def loss(logprobs: Tensor, weights: Tensor) -> Any:
        return -(write(logprobs, weights) * weights).square().sum(), {}

    def copies(logprobs: Tensor, weights: Tensor) -> Any:
        return loss(logprobs.clone(), weights)

    def of_batch(data: list[Any], logprobs: list[Tensor]) -> Any:
        weights = [datum.loss_fn_inputs["weights"].to_torch() for datum in data]
        return sum(copies(*each)[0] for each in zip(logprobs, weights, strict=True)), {}

    ranks = {"logprobs": 1, "weights": 1}
    with pytest.raises(LossNotTraceable, match=OF_INPUT):
        service.create_custom_loss(loss, ranks)
    copying = service.create_custom_loss(copies, ranks).result()
    model = service.create_lora_training_client("tiny", rank=4, seed=1)
    expected = model.forward_backward_custom(DATA, of_batch).result().metrics["loss:sum"]
    assert model.forward_backward_custom(DATA, copying).result().metrics["loss:sum"] == pytest.approx(expected)
    assert trained(service, copying)[0] == pytest.approx(expected, rel=1e-5)
