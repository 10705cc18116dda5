"""Losses that run on the server have names, are listed, and take settings and inputs."""

# ruff: noqa: ARG005  # a loss has parameters that it does not use

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.helpers.server_losses import TEXTS, T, dpo, minimal, texts
from tinker_lightning import LossFnOutput, custom_loss
from tinker_lightning.errors import (
    InvalidInput,
    InvalidLoss,
)
from tinker_lightning.testing import embedded_service

if TYPE_CHECKING:
    from collections.abc import Callable

    from tinker_lightning.client import ServiceClient, TrainingClient
    from tinker_lightning.server import EmbeddedTrainer


def test_losses_are_listed(service: ServiceClient) -> None:  # R3.3, R3.4
    custom_loss(service, name="my_loss")(minimal)
    custom_loss(service)(dpo)
    listed = service.list_loss_functions()
    built_in = ["cross_entropy", "importance_sampling", "ppo", "cispo", "dro", "gspo"]
    assert listed["available_loss_functions"] == [*built_in, "my_loss", "dpo"]
    assert listed["descriptions"]["my_loss"] == "The negative log-likelihood of the targets."
    assert all(listed["descriptions"].values())


def test_a_session_does_not_see_anothers_losses(
    trainer: EmbeddedTrainer, service: ServiceClient, model: TrainingClient
) -> None:
    custom_loss(service, name="mine")(minimal)
    with embedded_service(trainer) as other:
        assert "mine" not in other.list_loss_functions()["available_loss_functions"]
        stranger = other.create_lora_training_client("tiny", rank=4)
        with pytest.raises(InvalidInput, match="loss_fn 'mine' is not registered"):
            stranger.forward_backward(texts(), "mine").result()
        with pytest.raises(InvalidLoss, match="mine was registered with another client"):
            stranger.forward_backward(texts(), service.losses.by_name["mine"])
    model.forward(texts(), "mine").result()


def test_hyperparameters_have_defaults_and_change_with_each_call(  # R3.1
    service: ServiceClient, model: TrainingClient
) -> None:
    @custom_loss(service, name="power")
    def power(outputs: Tensor, inputs: Any, mask: Tensor, factor: float = 2.0, exponent: int = 1) -> LossFnOutput:
        loss = factor * (outputs * mask.unsqueeze(-1)).square().mean() ** exponent
        return LossFnOutput(loss)

    def value(**config: float) -> float:
        return model.forward(texts(), power, config).result().metrics["loss:sum"]

    base = value(factor=1.0)
    assert value() == pytest.approx(2 * base)
    assert value(exponent=3) == pytest.approx(2 * base**3)


def test_a_setting_that_decides_what_is_computed_is_uploaded_at_its_first_use(
    service: ServiceClient, model: TrainingClient
) -> None:
    @custom_loss(service, name="either")
    def either(outputs: Tensor, inputs: Any, mask: Tensor, kind: str = "sum") -> LossFnOutput:
        squares = (outputs * mask.unsqueeze(-1)).square()
        return LossFnOutput(squares.sum() if kind == "sum" else squares.mean())

    total = model.forward(texts(), "either").result().metrics["loss:sum"]
    mean = model.forward(texts(), "either", {"kind": "mean"}).result().metrics["loss:sum"]
    assert mean == pytest.approx(total / (len(TEXTS) * T * 258), rel=1e-2)
    fixed = custom_loss(service, name="fixed", kind="mean")(either)
    assert model.forward(texts(), fixed).result().metrics["loss:sum"] == mean


@pytest.mark.parametrize("trace", [True, False], ids=["traced", "as it is"])
def test_what_the_decorator_fixes_no_call_changes(service: ServiceClient, model: TrainingClient, trace: bool) -> None:
    def power(data: Any, logprobs: Tensor, factor: float = 2.0, offset: float = 0.0) -> Any:
        return -factor * logprobs.sum() + offset, {}

    loss = custom_loss(service, name="power", on="logprobs", trace=trace, factor=0.5)(power)
    base = model.forward(texts(), loss).result().metrics["loss:sum"]
    again = model.forward(texts(), "power", {"factor": 0.5, "offset": 3.0}).result().metrics["loss:sum"]
    assert again == pytest.approx(base + 3.0)
    with pytest.raises(InvalidInput, match=r"factor of power was fixed to 0\.5 by custom_loss and cannot be 9\.0"):
        model.forward_backward(texts(), loss, {"factor": 9.0})
    with pytest.raises(InvalidInput, match=r"factor of power was fixed to 0\.5"):
        loss({}, torch.zeros(1, 2), factor=9.0)


def test_a_decorated_function_is_still_a_function(service: ServiceClient) -> None:
    loss = custom_loss(service, name="mine")(minimal)
    assert (getattr(loss, "__name__", None), loss.__doc__) == ("minimal", "The negative log-likelihood of the targets.")
    output = loss(torch.zeros(1, 2, 4), {"target_tokens": torch.tensor([[1, 2]])}, torch.ones(1, 2))
    assert output.loss.item() == pytest.approx(2 * np.log(4))


def test_a_name_can_be_reused(service: ServiceClient, model: TrainingClient) -> None:
    """A pass has the loss that had the name when it was called, whenever it is computed."""

    def scaled(factor: float) -> Callable[..., LossFnOutput]:
        return lambda outputs, inputs, mask: LossFnOutput(factor * (outputs * mask.unsqueeze(-1)).square().mean())

    custom_loss(service, name="mine")(scaled(1.0))
    first = model.forward(texts(), "mine")
    custom_loss(service, name="mine")(scaled(3.0))
    second = model.forward(texts(), "mine")
    assert second.result().metrics["loss:sum"] == pytest.approx(3 * first.result().metrics["loss:sum"])


@pytest.mark.parametrize(
    ("make", "shape"),
    [
        (lambda i, n: np.zeros(n, np.float32), [3, T]),
        (lambda i, n: np.zeros((n, 2), np.float32), [3, T, 2]),
        (lambda i, n: np.float32(i), [3]),
        (lambda i, n: np.zeros(5, np.float32), [3, 5]),
        (lambda i, n: np.zeros((5, 2), np.float32), [3, 5, 2]),
    ],
)
def test_how_inputs_of_datums_are_stacked(
    service: ServiceClient, model: TrainingClient, make: Any, shape: list[int]
) -> None:
    seen: list[list[int]] = []

    @custom_loss(service, name="looks", trace=False)
    def looks(outputs: Tensor, inputs: Any, mask: Tensor) -> LossFnOutput:
        seen.append(list(inputs["extra"].shape))
        return LossFnOutput(outputs.sum())

    model.forward(texts(extra=make), "looks").result()
    assert seen == [shape]


@pytest.mark.parametrize("trace", [True, False])
def test_a_loss_with_kwargs_gets_the_settings_of_the_call(  # R3.1
    service: ServiceClient, model: TrainingClient, trace: bool
) -> None:
    def scaled(data: Any, logprobs: Any, base: float = 1.0, **others: float) -> Any:
        total = logprobs.sum() * base
        for name in sorted(others):
            total = total * others[name]
        return total, {"grad_norm": logprobs.mean(), **{name: logprobs.sum() * value for name, value in others.items()}}

    loss = custom_loss(service, name="scaled", on="logprobs", trace=trace)(scaled)
    plain = model.forward(texts(), loss).result().metrics
    assert "grad_norm" in plain  # a diagnostic may have any name
    for settings in ({"factor": 3.0}, {"factor": 0.5}, {"base": 2.0, "factor": 4.0, "other": 0.25}):
        metrics = model.forward(texts(), loss, settings).result().metrics
        assert metrics["loss:sum"] == pytest.approx(plain["loss:sum"] * math.prod(settings.values()), rel=1e-5)
        assert metrics["factor"] == pytest.approx(plain["loss:sum"] * settings["factor"], rel=1e-5)
    assert model.forward(texts(), loss).result().metrics == pytest.approx(plain)
    fixed = custom_loss(service, name="fixed", on="logprobs", trace=trace, factor=2.0)(scaled)
    assert model.forward(texts(), fixed).result().metrics["factor"] == pytest.approx(plain["loss:sum"] * 2, rel=1e-5)


def test_a_number_that_changes_with_each_call_uploads_nothing(  # R3.1, R5.6
    service: ServiceClient, model: TrainingClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    def tempered(data: Any, logprobs: Any, beta: float = 1.0, kind: str = "sum") -> Any:
        weighted = logprobs * data.get("weights", 1.0) * beta
        return weighted.sum() if kind == "sum" else weighted.mean()

    loss = custom_loss(service, name="tempered", on="logprobs")(tempered)
    uploads: list[str] = []
    register = service.losses.register

    def counted(each: Any) -> str:
        uploads.append(each.name)
        return register(each)

    monkeypatch.setattr(service.losses, "register", counted)
    weighted = texts(weights=lambda _, n: np.ones(n))
    for beta in (0.1, 0.2, 0.3):
        model.forward(weighted, loss, {"beta": beta}).result()
    assert uploads == []
    for kind in ("mean", "sum", "mean"):
        model.forward(weighted, loss, {"kind": kind}).result()
    assert uploads == ["tempered"]  # once for the other kind
