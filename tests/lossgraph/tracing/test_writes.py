"""What a traced function writes in place is what it writes in Python: views show it, and gradients follow it."""

# a loss has parameters that it does not use

from __future__ import annotations

import contextlib
import itertools
import random
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import Tensor

from tests.lossgraph.tracing.test_record import T, assert_same
from tinker_lightning.errors import InvalidLoss
from tinker_lightning.lossgraph.datum_loss import trace_datum_loss
from tinker_lightning.lossgraph.graphs.functions import FUNCTIONS, METHODS
from tinker_lightning.lossgraph.tracing.writes import FRESH

if TYPE_CHECKING:
    from collections.abc import Callable


def targets(fn: Callable[..., Any]) -> list[str]:
    """What the graph of a loss of one datum calls."""
    return [node.target for node in trace_datum_loss(fn, {"logprobs": 1, "weights": 1}).program.graph.calls]


def test_a_write_is_seen_by_what_shares_the_memory() -> None:
    def loss(logprobs: Tensor, weights: Tensor) -> Any:
        scaled = logprobs * weights
        first, rest, same = scaled[0], scaled[1:], scaled
        first *= 5.0
        rest += weights[1:]
        same -= 1.0
        return scaled.sum(), {}

    assert_same(loss)
    assert {"mul_", "add_", "sub_"} <= set(targets(loss))


@pytest.mark.parametrize("name", ["truediv", "floordiv", "mod", "pow"])
def test_operators_without_a_method(name: str) -> None:
    def loss(logprobs: Tensor, weights: Tensor) -> Any:
        scaled = logprobs.exp() + 1
        part = scaled[1:]
        if name == "truediv":
            part /= weights.exp()[1:] * logprobs[:-1].exp()
        elif name == "floordiv":
            weights //= 0.5
            whole = weights[1:]
            whole //= 2.0
        elif name == "mod":
            part %= 1.5
        else:
            part **= 2
        return (scaled * weights).sum(), {}

    assert_same(loss)


def test_masks_in_place() -> None:
    def loss(logprobs: Tensor, weights: Tensor) -> Any:
        kept, lost = weights > 0, weights > 1
        both = kept
        kept &= logprobs > 0
        lost |= ~both
        kept ^= lost
        return (logprobs * both).sum() + (logprobs * kept * lost).sum(), {}

    assert_same(loss)


def test_a_write_that_nobody_else_sees_is_none() -> None:
    """So that logits are not copied for it, and other servers know the operators."""

    def loss(logprobs: Tensor, weights: Tensor) -> Any:
        total = -(logprobs * weights).sum()
        total += logprobs.mean()
        total /= 5
        count = weights.shape[0]
        count += 1
        return total * count, {}

    assert not assert_same(loss).program.writes


def test_writes_under_no_grad_leave_the_gradient() -> None:
    def loss(logprobs: Tensor, weights: Tensor) -> Any:
        scaled = logprobs * 2
        with torch.no_grad():
            scaled *= weights
            scaled[0] = 3.0
            scaled.add_(1.0)
        return scaled.sum(), {}

    assert_same(loss)


def test_what_has_no_gradient_may_be_given_one() -> None:
    def loss(logprobs: Tensor, weights: Tensor) -> Any:
        with torch.no_grad():
            scaled = logprobs * 2
        part = scaled[1:]
        part += logprobs[1:] * weights[1:]
        return (scaled * weights).sum(), {}

    assert_same(loss)


def a_program(seed: int) -> Callable[..., Any]:
    """Views, writes, numbers and `no_grad` in some order."""

    def loss(logprobs: Tensor, weights: Tensor) -> Any:
        draw = random.Random(seed)  # noqa: S311
        values = [logprobs * 1.5, weights.clone(), logprobs + weights]
        total = logprobs.sum()
        for _ in range(8):
            x, y = draw.choice(values), draw.choice(values)
            with torch.no_grad() if draw.random() < 0.2 else contextlib.nullcontext():
                kind = draw.randrange(9)
                if kind == 0:
                    values.append(x.view(-1))
                elif kind == 1:
                    values.append(draw.choice([x.detach(), x.data, x.flip(0), x * 0.5]))
                elif kind == 2:
                    x += y * 0.5
                elif kind == 3:
                    x *= 1.25
                elif kind == 4:
                    x -= y
                elif kind == 5:
                    x /= y.exp() + 1
                elif kind == 6:
                    x[1:3] = y[2]
                elif kind == 7:
                    part = x[::2]
                    part += y[0] * y[1].item()
                else:
                    total = total + x.sum() * y.mean().item()
                values.append(x)
        return total + sum(value.sum() * (i + 1) for i, value in enumerate(values)), {}

    return loss


@pytest.mark.parametrize("seed", [*range(40), 399, 512, 513])
def test_any_order_of_views_and_writes(seed: int) -> None:
    fn = a_program(seed)
    leaf = torch.randn(T, dtype=torch.float64, requires_grad=True)
    try:
        torch.autograd.grad(fn(leaf, torch.randn(T, dtype=torch.float64))[0], leaf)
    except RuntimeError:
        return  # no loss in Python either
    assert_same(fn)


@pytest.mark.filterwarnings("ignore::UserWarning")  # calls that nobody would write
@pytest.mark.parametrize("name", sorted(FRESH))
def test_what_is_said_to_be_fresh_is(name: str) -> None:
    keys = [f"{module}.{name}" for module in ("torch", "operator", "torch.nn.functional")]
    calls = [FUNCTIONS[key].call for key in keys if key in FUNCTIONS]
    calls += [METHODS[name].call] if name in METHODS else []
    assert calls
    tried = 0
    for given in (torch.rand(()), torch.rand(1), torch.rand(3), torch.rand(2, 3), torch.ones(3, dtype=torch.int64)):
        several: list[tuple[Any, ...]] = [(given,), (given, 1), (given, 0), (given, given), (given, given, given)]
        several += [([given],), (given.shape,), (given.shape, 1.0), (given > 0, given, given), (given, 0, given.long())]
        for call, args in itertools.product(calls, several):
            try:
                result = call(*args)
            except (RuntimeError, TypeError, IndexError, ValueError, AttributeError, InvalidLoss):
                continue
            for part in result if isinstance(result, tuple) else [result]:
                if isinstance(part, Tensor):
                    tried += 1
                    assert part.untyped_storage().data_ptr() != given.untyped_storage().data_ptr(), args
    assert tried
