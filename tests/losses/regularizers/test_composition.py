"""A base loss and its regularizers are one loss: its total, its gradient, its telemetry."""

from __future__ import annotations

import asyncio
import math
from typing import TYPE_CHECKING, Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from tests.helpers.regularizer_terms import THREE, Returned, base, evaluate, logprobs, square
from tinker_lightning.errors import (
    InvalidLoss,
)
from tinker_lightning.losses.regularizers import composition
from tinker_lightning.losses.regularizers.composition import Regularizer

if TYPE_CHECKING:
    from collections.abc import Callable


def test_the_telemetry_of_a_sync_an_async_and_an_executor_term() -> None:  # R2.1, R2.4, R2.7
    lp = logprobs()
    total, telemetry = composition.evaluate([], lp, base, THREE, step=2)
    assert telemetry == {
        "loss_total": 6.0 + 7.0 - 3.0 + 3.0,
        "regularizer_total": 7.0 - 3.0 + 3.0,
        "base_loss": {"value": 6.0, "nll": -2.0, "7": 1.0},
        "regularizers": {
            "square": {
                "value": 14.0,
                "weight": 0.5,
                "contribution": 7.0,
                "grad_norm": pytest.approx(2 * math.sqrt(14)),
                "custom": {"largest": 3.0},
            },
            "last": {"value": -6.0, "weight": 0.5, "contribution": -3.0, "grad_norm": 2.0, "custom": {"count": 1.0}},
            "first": {
                "value": -3.0,
                "weight": -1.0,
                "contribution": 3.0,
                "grad_norm": pytest.approx(math.sqrt(2)),
                "custom": {},
            },
        },
    }
    assert list(telemetry["regularizers"]) == ["square", "last", "first"]
    total.backward()
    assert [each.grad.tolist() for each in lp if each.grad is not None] == [[-1 - 1 - 1, -1 - 2 - 1], [-1 - 3 + 1]]


def test_telemetry_for_loggers_is_flat() -> None:
    flat = composition.flatten(evaluate(*THREE)[1])
    assert flat["regularizers/last/contribution"] == -3.0
    assert set(flat) == {
        "loss_total",
        "regularizer_total",
        *(f"base_loss/{name}" for name in ("value", "nll", "7")),
        *(f"regularizers/square/{name}" for name in ("value", "weight", "contribution", "grad_norm", "custom/largest")),
        *(f"regularizers/last/{name}" for name in ("value", "weight", "contribution", "grad_norm", "custom/count")),
        *(f"regularizers/first/{name}" for name in ("value", "weight", "contribution", "grad_norm")),
    }
    assert all(type(value) is float for value in flat.values())


def test_no_metric_name_is_taken_and_none_is_lost() -> None:  # R2.4
    names = ["value", "weight", "contribution", "grad_norm", "custom", "custom/value", "base_loss", "loss_total"]
    metrics = {name: float(i) for i, name in enumerate(names)}
    bases = Regularizer(lambda _, lp: (lp[0].sum(), metrics), 1.0, "term")
    _, telemetry = evaluate(bases, base=lambda _, lp: (lp[0].sum(), metrics))
    assert telemetry["regularizers"]["term"]["custom"] == metrics
    flat = composition.flatten(telemetry)
    for name, value in metrics.items():
        assert flat[f"regularizers/term/custom/{name}"] == value
        escaped = f"custom/{name}" if name in ("value", "custom/value") else name
        assert flat[f"base_loss/{escaped}"] == value
    assert flat["base_loss/value"] == flat["regularizers/term/value"] == -3.0
    assert len(flat) == 2 + 1 + len(metrics) + 4 + len(metrics)


def test_without_a_base_only_the_regularizers_count() -> None:  # R2.1
    total, telemetry = evaluate(*THREE, base=None)
    assert total.item() == telemetry["loss_total"] == telemetry["regularizer_total"] == 7.0
    assert "base_loss" not in telemetry


@pytest.mark.parametrize("none", [None, []])
def test_without_regularizers_it_is_the_single_callback(none: Any) -> None:  # R2.5
    total, metrics = composition.evaluate([], logprobs(), base, none, step=0)
    assert total.item() == 6.0
    assert metrics == {"nll": -2.0, "7": 1.0}
    assert composition.flatten(metrics) == metrics


def test_without_anything_there_is_nothing_to_train_on() -> None:
    with pytest.raises(InvalidLoss, match="pass a loss function, a regularizer, or both"):
        evaluate(base=None)


@given(
    values=st.lists(st.floats(-10, 0, width=32), min_size=1, max_size=5),
    weights=st.lists(st.floats(-2, 2), min_size=1, max_size=4),
    with_base=st.booleans(),
)
def test_the_total_and_its_gradient_are_those_of_the_sum(
    values: list[float], weights: list[float], with_base: bool
) -> None:
    def power(k: int) -> Callable[[list[Any], list[Tensor]], Tensor]:
        return lambda _, lp: (lp[0] ** k).sum()

    lp, plain = (torch.tensor(values, dtype=torch.float64, requires_grad=True) for _ in range(2))
    terms = [Regularizer(power(k), weight, f"{k}") for k, weight in enumerate(weights, 1)]
    total, telemetry = composition.evaluate([], [lp], power(5) if with_base else None, terms, step=0)
    expected = sum((weight * (plain**k).sum() for k, weight in enumerate(weights, 1)), torch.zeros(()))
    if with_base:
        expected = expected + (plain**5).sum()
    total.backward()
    expected.backward()
    assert lp.grad is not None
    assert plain.grad is not None
    torch.testing.assert_close(total, expected)
    torch.testing.assert_close(lp.grad, plain.grad)
    for k, weight in enumerate(weights, 1):
        shown = telemetry["regularizers"][str(k)]
        (gradient,) = torch.autograd.grad((plain**k).sum(), plain)
        assert shown["contribution"] == pytest.approx(weight * shown["value"])
        assert shown["grad_norm"] == pytest.approx(gradient.norm().item())


def test_the_bits_of_a_gradient_do_not_depend_on_which_term_is_first() -> None:
    """Autograd orders nodes by counters of their threads, and the bits of a sum depend on its order."""

    def gradient(waits: tuple[float, float], nodes: int) -> Tensor:
        async def exponential(_: list[Any], lp: list[Tensor]) -> Returned:
            await asyncio.sleep(waits[0])
            return 1.7 * torch.cat(lp).exp().mean(), {}

        async def squares(_: list[Any], lp: list[Tensor]) -> Returned:
            await asyncio.sleep(waits[1])
            return 0.3 * (torch.cat(lp) ** 2).mean(), {}

        def sines(_: list[Any], lp: list[Tensor]) -> Returned:
            return torch.cat(lp).sin().mean() - 0.37 * torch.cat(lp).mean(), {}

        leaves = [each.requires_grad_() for each in torch.randn(3, 50, generator=torch.Generator().manual_seed(0))]
        for _ in range(nodes):  # moves the counter of this thread
            torch.ones((), requires_grad=True) * 2
        terms = [
            Regularizer(fn=exponential, weight=0.3, name="exponential"),
            Regularizer(fn=squares, weight=0.7, name="squares"),
            Regularizer(fn=square, weight=0.1, name="in an executor", run_in_executor=True),
        ]
        total, _ = composition.evaluate([None] * 3, leaves, sines, terms, step=0)
        total.backward()
        return torch.cat([leaf.grad for leaf in leaves if leaf.grad is not None])

    expected = gradient((0.0, 0.02), nodes=0)
    for waits in ((0.0, 0.02), (0.02, 0.0)):
        for nodes in (0, 1000):
            assert torch.equal(gradient(waits, nodes), expected)


def test_gradient_norms_leave_no_gradient_behind() -> None:
    lp, scale = logprobs(), torch.nn.Parameter(torch.tensor(2.0))
    term = Regularizer(lambda _, lp: scale * lp[0].sum(), 3.0, "scaled")
    total, telemetry = composition.evaluate([], lp, base, [term], step=0)
    assert telemetry["regularizers"]["scaled"]["grad_norm"] == pytest.approx(2 * math.sqrt(2))
    assert all(each.grad is None for each in (*lp, scale))
    total.backward()
    assert scale.grad is not None
    assert scale.grad.item() == 3.0 * -3.0  # once, by the backward


def test_gradient_norms_can_be_switched_off() -> None:
    _, telemetry = evaluate(*THREE, grad_norms=False)
    assert not [name for name in composition.flatten(telemetry) if "grad_norm" in name]


def test_gradient_norms_off_cost_no_backward() -> None:
    backwards: list[int] = []

    def watched(_: list[Any], lp: list[Tensor]) -> Tensor:
        value = lp[0].sum()
        value.register_hook(lambda _: backwards.append(1))
        return value

    evaluate(Regularizer(watched, 1.0, "x"), grad_norms=False)
    assert backwards == []
    evaluate(Regularizer(watched, 1.0, "x"))
    assert backwards == [1]


@pytest.mark.parametrize(
    "constant",
    [lambda *_: torch.tensor(3.0), lambda *_: torch.tensor(3), lambda *_: torch.tensor(3.0, requires_grad=True) * 1],
)
def test_a_term_may_be_constant(constant: Any) -> None:
    total, telemetry = evaluate(Regularizer(constant, 2.0, "constant"))
    assert telemetry["regularizers"]["constant"] == {
        "value": 3.0,
        "weight": 2.0,
        "contribution": 6.0,
        "grad_norm": 0.0,
        "custom": {},
    }
    assert total.item() == 12.0


def test_without_gradients_there_are_no_norms() -> None:
    with torch.no_grad():
        total, telemetry = evaluate(*THREE)
    assert not total.requires_grad
    assert telemetry["loss_total"] == 13.0
    assert not [name for name in composition.flatten(telemetry) if "grad_norm" in name]
