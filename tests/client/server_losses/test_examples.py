"""The worked examples of the guide to losses that run on the server."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812

from tests.helpers.server_losses import (
    PREFERENCES,
    dpo,
    kl_regularized,
    minimal,
    padded,
    picked,
    reference,
    texts,
    tokens,
    trains,
)
from tinker_lightning import LossFnOutput, custom_loss

if TYPE_CHECKING:
    from tinker_lightning.client import ServiceClient, TrainingClient


def contrastive(
    outputs: Tensor, loss_fn_inputs: Any, attention_mask: Tensor, temperature: float = 0.07
) -> LossFnOutput:
    """One text against another, as a choice between two."""
    count = attention_mask.sum().clamp(min=1)
    names = ("positive_tokens", "negative_tokens")
    scores = [picked(outputs, loss_fn_inputs[name], attention_mask).sum() / count for name in names]
    logits = torch.stack(scores) / temperature
    loss = F.cross_entropy(logits.unsqueeze(0), torch.tensor([0], device=logits.device))
    return LossFnOutput(loss, None, {"score_gap": (scores[0] - scores[1]).item()})


def test_the_minimal_example(service: ServiceClient, model: TrainingClient) -> None:  # R3.1, R3.2
    custom_loss(service, name="my_loss")(minimal)
    metrics = trains(model, texts(), "my_loss")
    assert metrics[0]["loss"] == metrics[0]["loss:sum"]
    result = model.forward(texts(), "my_loss").result()
    plain = model.forward(texts(weights=lambda _, n: np.ones(n, np.float32)), "cross_entropy").result()
    assert result.metrics["loss:sum"] == pytest.approx(plain.metrics["loss:sum"], rel=1e-5)
    for got, right in zip(result.loss_fn_outputs, plain.loss_fn_outputs, strict=True):
        assert got["logprobs"].to_numpy() == pytest.approx(right["logprobs"].to_numpy(), rel=1e-4)


def test_dpo_with_inputs_given_once(service: ServiceClient, model: TrainingClient) -> None:  # R3.4, R3.5
    custom_loss(service, name="dpo")(dpo)
    once = {name: padded(make) for name, make in PREFERENCES.items()}
    metrics = trains(model, texts(), "dpo", loss_fn_config={"beta": 0.5}, loss_fn_inputs=once)
    assert metrics[-1]["reward_accuracy"] == 1.0
    assert metrics[-1]["mean_gap"] > metrics[0]["mean_gap"]


def test_inputs_given_once_or_by_datum_are_the_same(service: ServiceClient, model: TrainingClient) -> None:  # R3.4
    loss = custom_loss(service, name="dpo")(dpo)
    once = {name: padded(make) for name, make in PREFERENCES.items()}
    first = model.forward(texts(), loss, loss_fn_inputs=once).result()
    second = model.forward(texts(**PREFERENCES), loss).result()
    third = model.forward(texts(), loss, loss_fn_inputs={name: torch.tensor(each) for name, each in once.items()})
    assert first == second == third.result()


def test_the_contrastive_example(service: ServiceClient, model: TrainingClient) -> None:  # R3.5
    custom_loss(service, name="contrastive")(contrastive)
    data = texts(positive_tokens=tokens, negative_tokens=lambda i, n: tokens(i + 7, n))
    metrics = trains(model, data, "contrastive", loss_fn_config={"temperature": 0.5})
    assert metrics[-1]["score_gap"] > metrics[0]["score_gap"]
    assert model.forward(data, "contrastive").result().loss_fn_outputs == [{}, {}, {}]


def test_the_kl_regularized_example(service: ServiceClient, model: TrainingClient) -> None:  # R3.5
    loss = custom_loss(service, name="kl_regularized")(kl_regularized)
    metrics = trains(model, texts(reference_logprobs=reference), loss)
    assert metrics[0]["kl"] != 0
    assert model.forward(texts(), loss).result().metrics["kl"] == 0
    halves = texts(weights=lambda _, n: np.full(n, 0.5, np.float32))
    half, whole = (model.forward(data, loss).result().metrics["loss:sum"] for data in (halves, texts()))
    assert half == pytest.approx(whole / 2, rel=1e-5)


def test_tokens_that_stand_for_none(service: ServiceClient, model: TrainingClient) -> None:
    """As transformers writes them; the function says what they mean."""

    @custom_loss(service, name="masked")
    def masked(model_outputs: Tensor, loss_fn_inputs: Any, attention_mask: Tensor) -> LossFnOutput:
        labels = loss_fn_inputs["labels"]
        logprobs = picked(model_outputs, labels, attention_mask)
        loss = -torch.where(labels == -100, 0.0, logprobs).sum()
        return LossFnOutput(loss, logprobs)

    def labels(_: int, length: int) -> Any:
        return np.where(np.arange(length) % 2, -100, 65)

    trains(model, texts(labels=labels), "masked")
