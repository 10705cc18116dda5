"""The parts of a regularizer, and invalid ones that raise before anything runs."""

from __future__ import annotations

import asyncio
import functools
from fractions import Fraction
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from torch import Tensor

import tinker_lightning
from tinker_lightning.errors import InvalidLoss
from tinker_lightning.losses.regularizers.composition import Regularizer, as_regularizers

if TYPE_CHECKING:
    from collections.abc import Callable


def term(_: list[Any], logprobs: list[Tensor]) -> tuple[Tensor, dict[str, Any]]:
    return logprobs[0].sum(), {}


async def slow(data: list[Any], logprobs: list[Tensor]) -> tuple[Tensor, dict[str, Any]]:
    return term(data, logprobs)


class Slow:
    async def __call__(self, data: list[Any], logprobs: list[Tensor]) -> tuple[Tensor, dict[str, Any]]:
        return term(data, logprobs)


def test_it_is_one_of_the_public_names() -> None:
    assert tinker_lightning.Regularizer is Regularizer


@pytest.mark.parametrize("weight", [0.5, np.float32(0.5), Fraction(1, 2), lambda _: 0.5, lambda _: np.float64(0.5)])
def test_a_weight_is_a_number_or_a_function_of_the_step(weight: Any) -> None:
    got = Regularizer(term, weight, "x").weight_at(7)
    assert (got, type(got)) == (0.5, float)


def test_a_weight_follows_the_step() -> None:
    warm = Regularizer(term, lambda step: min(1.0, step / 4), "warm")
    assert [warm.weight_at(step) for step in (0, 2, 4, 100)] == [0.0, 0.5, 1.0, 1.0]


@pytest.mark.parametrize("fn", [slow, functools.partial(slow), Slow()])
def test_async_functions_are_known_without_a_call(fn: Any) -> None:  # R2.2
    assert Regularizer(fn, 1.0, "x").is_async
    assert not Regularizer(term, 1.0, "x").is_async


def test_a_dict_stands_for_one() -> None:
    given: list[Any] = [
        {"fn": term, "weight": 0.1, "name": "a"},
        {"fn": slow, "weight": 1, "name": "b", "async": True},
        {"fn": term, "weight": abs, "name": "c", "run_in_executor": True, "async": False},
        Regularizer(term, 0.5, "d"),
    ]
    assert as_regularizers(given) == (
        Regularizer(term, 0.1, "a"),
        Regularizer(slow, 1, "b"),
        Regularizer(term, abs, "c", run_in_executor=True),
        Regularizer(term, 0.5, "d"),
    )
    assert as_regularizers(None) == as_regularizers([]) == ()


def _weight_that_fails(step: int) -> float:
    raise KeyError("schedule")


def _alone() -> Any:
    return {"fn": term, "weight": 1.0, "name": "x"}


BAD: dict[str, tuple[Callable[[], Any], str]] = {
    "no name": (
        lambda: Regularizer(term, 1.0, ""),
        "name of a regularizer must be a non-empty string without '/', got ''",
    ),
    "a blank name": (lambda: Regularizer(term, 1.0, " "), "got ' '"),
    "a name with a slash": (
        lambda: Regularizer(term, 1.0, "a/b"),
        "without '/', got 'a/b'; its telemetry is logged as regularizers/<name>/value",
    ),
    "a name that is no text": (lambda: Regularizer(term, 1.0, 3), "got 3"),  # type: ignore[arg-type]
    "no function": (
        lambda: Regularizer("sparsity", 1.0, "x"),  # type: ignore[arg-type]
        r"regularizer 'x': fn must be a function of \(data, logprobs\), got str",
    ),
    "a weight that is NaN": (
        lambda: Regularizer(term, float("nan"), "x"),
        "regularizer 'x': weight is nan; it must be f",
    ),
    "a weight that is infinite": (
        lambda: Regularizer(term, float("-inf"), "x"),
        "'x': weight is -inf; it must be finite",
    ),
    "a weight that is a text": (
        lambda: Regularizer(term, "0.1", "x"),  # type: ignore[arg-type]
        "regularizer 'x': weight must be a number or a function of the step, got str",
    ),
    "no weight": (lambda: Regularizer(term, None, "x"), "'x': weight must be a number .*, got NoneType"),  # type: ignore[arg-type]
    "a weight that could learn": (
        lambda: Regularizer(term, torch.tensor(0.1), "x"),  # type: ignore[arg-type]
        "'x': weight must be a number .*, got Tensor",
    ),
    "a function that gives NaN": (
        lambda: Regularizer(term, lambda _: float("nan"), "x").weight_at(5),
        "regularizer 'x': its weight at step 5 is nan; it must be finite",
    ),
    "a function that gives nothing": (
        lambda: Regularizer(term, lambda _: None, "x").weight_at(5),  # type: ignore[arg-type, return-value]
        "'x': its weight at step 5 must be a number .*, got NoneType",
    ),
    "a function that fails": (
        lambda: Regularizer(term, _weight_that_fails, "x").weight_at(5),
        "regularizer 'x': its weight at step 5 failed: KeyError: 'schedule'",
    ),
    "an executor that is none": (
        lambda: Regularizer(term, 1.0, "x", run_in_executor="no"),  # type: ignore[arg-type]
        "regularizer 'x': run_in_executor must be True or False, got 'no'",
    ),
    "the same name twice": (
        lambda: as_regularizers([Regularizer(term, 1.0, n) for n in "aba"]),
        "regularizers 0 and 2 are both named 'a'; give each a different name",
    ),
    "one that stands alone": (
        lambda: as_regularizers(Regularizer(term, 1.0, "x")),  # type: ignore[arg-type]
        r"must be a list of Regularizer, got one Regularizer; write \[regularizer\]",
    ),
    "a dict that stands alone": (
        lambda: as_regularizers(_alone()),
        r"got one dict; write \[regularizer\]",
    ),
    "a number": (lambda: as_regularizers(3), "got one int"),  # type: ignore[arg-type]
    "a function in the list": (
        lambda: as_regularizers([Regularizer(term, 1.0, "x"), term]),  # type: ignore[list-item]
        r"regularizer 1: got function; write Regularizer\(fn, weight, name\)",
    ),
    "a dict without a name": (lambda: as_regularizers([{"fn": term}]), "regularizer 0: the dict has no weight, name"),
    "a dict with more": (
        lambda: as_regularizers([{"fn": term, "weight": 1.0, "name": "x", "wieght": 2.0}]),
        "regularizer 0: unknown wieght; a dict may have fn, weight, name, run_in_executor, async",
    ),
    "a dict that is wrong about async": (
        lambda: as_regularizers([{"fn": slow, "weight": 1.0, "name": "x", "async": False}]),
        "regularizer 'x': async is False, but its function is async",
    ),
}


@pytest.mark.parametrize("what", BAD)
def test_invalid_regularizers_raise_with_the_fix(what: str) -> None:  # R1.9
    make, message = BAD[what]
    with pytest.raises(InvalidLoss, match=message) as caught:
        make()
    assert type(caught.value) is InvalidLoss


def test_what_a_weight_raised_is_the_cause() -> None:
    with pytest.raises(InvalidLoss) as caught:
        Regularizer(term, _weight_that_fails, "x").weight_at(0)
    assert isinstance(caught.value.__cause__, KeyError)


def test_nothing_was_called_to_look_at_it() -> None:
    assert asyncio.iscoroutinefunction(slow)
    as_regularizers([Regularizer(slow, 1.0, "x")])  # a coroutine that was made and not awaited would warn
