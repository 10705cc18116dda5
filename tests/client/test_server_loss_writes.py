"""A loss may change what it is given in place, traced or not: it trains as one that first copies it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch

from tinker_lightning import AdamParams, Datum, LossFnOutput, custom_loss
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


TRACEABLE = (sets_items, fills, divides, writes_to_a_view)
ALL = (*TRACEABLE, writes_without_a_gradient)  # of the last a graph has no form: tests/lossgraph/tracing/test_writes.py


@pytest.mark.parametrize(("write", "trace"), [*((each, True) for each in TRACEABLE), *((each, False) for each in ALL)])
def test_logits_can_be_written_to(service: ServiceClient, write: Callable[..., Tensor], trace: bool) -> None:
    def loss(model_outputs: Tensor, loss_fn_inputs: Any, attention_mask: Tensor) -> LossFnOutput:
        logprobs = write(model_outputs, attention_mask.unsqueeze(-1)).log_softmax(-1)
        picked = logprobs.gather(-1, loss_fn_inputs["target_tokens"].unsqueeze(-1)).squeeze(-1)
        return LossFnOutput(-(picked * attention_mask).sum(), picked)

    def copies(model_outputs: Tensor, loss_fn_inputs: Any, attention_mask: Tensor) -> LossFnOutput:
        return loss(model_outputs.clone(), loss_fn_inputs, attention_mask)

    writing, copying = (custom_loss(service, name=each.__name__, trace=trace)(each) for each in (loss, copies))
    assert trained(service, writing) == trained(service, copying)


@pytest.mark.parametrize(("write", "trace"), [*((each, True) for each in TRACEABLE), *((each, False) for each in ALL)])
def test_log_probabilities_can_be_written_to(service: ServiceClient, write: Callable[..., Tensor], trace: bool) -> None:
    def loss(data: Any, logprobs: Tensor) -> Any:
        return -(write(logprobs, data["weights"]) * data["weights"]).square().sum(), {}

    def copies(data: Any, logprobs: Tensor) -> Any:
        return loss(data, logprobs.clone())

    decorators = (custom_loss(service, name=each, on="logprobs", trace=trace) for each in ("loss", "copies"))
    writing, copying = (decorate(each) for decorate, each in zip(decorators, (loss, copies), strict=True))
    assert trained(service, writing) == trained(service, copying)


@pytest.mark.parametrize("write", TRACEABLE)
def test_log_probabilities_of_one_datum_can_be_written_to(service: ServiceClient, write: Callable[..., Tensor]) -> None:
    def loss(logprobs: Tensor, weights: Tensor) -> Any:
        return -(write(logprobs, weights) * weights).square().sum(), {}

    def copies(logprobs: Tensor, weights: Tensor) -> Any:
        return loss(logprobs.clone(), weights)

    ranks = {"logprobs": 1, "weights": 1}
    writing, copying = (service.create_custom_loss(each, ranks).result() for each in (loss, copies))
    assert trained(service, writing) == trained(service, copying)
    model = service.create_lora_training_client("tiny", rank=4, seed=1)
    here = [model.forward_backward_custom(DATA, each).result().metrics["loss:sum"] for each in (writing, copying)]
    assert here[0] == here[1]
