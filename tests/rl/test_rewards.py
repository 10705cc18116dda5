"""Rewards: plain functions, sync and async, that run concurrently; failures name the prompt and the completion."""

from __future__ import annotations

import asyncio
import math
import threading
import time
from asyncio import CancelledError
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

from tinker_lightning.errors import InvalidInput, RewardFailed
from tinker_lightning.rl import Rewards

if TYPE_CHECKING:
    from collections.abc import Callable


def score(rewards: Rewards, completion: str = "four", **columns: Any) -> tuple[float, dict[str, float]]:
    return asyncio.run(rewards.score("2 + 2?", completion, columns))


def length(prompt: str, completion: str) -> int:
    return len(completion)


async def exact(prompt: str, completion: str, *, answer: str) -> bool:
    await asyncio.sleep(0)
    return completion == answer


def columns_of(prompt: str, completion: str, **columns: Any) -> dict[str, float]:
    return dict.fromkeys(columns, 0.5)


def test_rewards_are_weighted_and_returned_by_name() -> None:
    total, by_name = score(Rewards([length, exact, columns_of], [0.25, 2, -1]), answer="four", id=7)
    assert total == 0.25 * 4 + 2 * 1 - 1 * (0.5 + 0.5)
    assert by_name == {
        "length": 4.0,
        "exact": 1.0,
        "columns_of": 1.0,
        "columns_of/answer": 0.5,
        "columns_of/id": 0.5,
    }
    assert score(Rewards({"first": length, "second": length}, {"second": 0})) == (4.0, {"first": 4.0, "second": 4.0})


@pytest.mark.parametrize("value", [1, 1.0, True, np.float32(1), np.array([1.0]), torch.tensor(1.0), torch.ones(1)])
def test_numbers_of_any_kind_are_rewards(value: Any) -> None:
    assert score(Rewards({"it": returning(value)})) == (1.0, {"it": 1.0})


def test_functions_run_concurrently() -> None:
    both = threading.Barrier(2)
    waiting, arrived = asyncio.Event(), asyncio.Event()

    def first(prompt: str, completion: str) -> float:
        return both.wait(10)

    def second(prompt: str, completion: str) -> float:
        return both.wait(10)

    async def third(prompt: str, completion: str) -> float:
        waiting.set()
        await arrived.wait()
        return 0.0

    async def fourth(prompt: str, completion: str) -> float:
        await waiting.wait()
        arrived.set()
        return 0.0

    assert score(Rewards([first, second, third, fourth]))[0] == 1.0  # the barrier returns 0 and 1


def returning(value: Any) -> Callable[..., Any]:
    def reward(prompt: str, completion: str) -> Any:
        return value

    return reward


def fail(prompt: str, completion: str) -> float:
    raise ZeroDivisionError("no answer")


def slow(prompt: str, completion: str) -> float:
    time.sleep(0.3)
    return 1.0


async def slow_async(prompt: str, completion: str) -> float:
    await asyncio.sleep(30)
    return 1.0


def impatient(prompt: str, completion: str) -> float:
    raise TimeoutError("the judge is busy")


def answered(prompt: str, completion: str, answer: str) -> float:
    return float(answer in completion)


FAULTS: dict[str, Callable[..., Any]] = {
    "raised ZeroDivisionError: no answer": fail,
    "took longer than 0.05 s": slow,
    "took longer than 0.05 s. ": slow_async,
    "raised TimeoutError: the judge is busy": impatient,
    "returned nan; return a finite number": returning(float("nan")),
    "returned the string '0.5'; return a number": returning("0.5"),
    "returned None; return a number": returning(None),
    "returned an array of shape [2]; return one number": returning([1.0, 2.0]),
    "returned inf; return a finite number": returning({"part": math.inf}),
    "the row has no 'answer', only a prompt": answered,
}


class Odd(BaseException):
    """An exception that `except Exception` does not catch."""


@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize("error", [SystemExit(3), KeyboardInterrupt(), StopIteration(), Odd("odd"), CancelledError()])
def test_any_exception_is_named(error: BaseException, is_async: bool) -> None:
    def reward(prompt: str, completion: str) -> float:
        raise error

    async def async_reward(prompt: str, completion: str) -> float:
        raise error

    # Python turns a StopIteration of a coroutine into a RuntimeError.
    with pytest.raises(RewardFailed, match=f"^reward 'mine' raised .*{type(error).__name__}"):
        score(Rewards({"mine": async_reward if is_async else reward}))


def test_a_cancelled_score_stays_cancelled() -> None:
    async def cancel() -> None:
        task = asyncio.create_task(Rewards(slow_async).score("2 + 2?", "four"))
        await asyncio.sleep(0.01)
        task.cancel()
        await task

    with pytest.raises(CancelledError):
        asyncio.run(cancel())


@pytest.mark.parametrize("fault", FAULTS)
def test_a_failure_names_the_reward_the_prompt_and_the_completion(fault: str) -> None:
    with pytest.raises(RewardFailed) as failed:
        score(Rewards({"mine": FAULTS[fault]}, timeout=0.05))
    message = str(failed.value)
    assert message.startswith("reward 'mine' ")
    assert fault in message
    assert message.endswith("Prompt: '2 + 2?'. Completion: 'four'")


def test_failures_can_be_skipped_and_are_counted(caplog: pytest.LogCaptureFixture) -> None:
    rewards = Rewards([length, fail], on_error="skip")
    for _ in range(3):
        total, by_name = score(rewards)
        assert math.isnan(total)
        assert by_name == {"length": 4.0}
    assert rewards.failures == {"fail": 3}
    assert len(caplog.records) == 1
    assert "reward 'fail' raised ZeroDivisionError" in caplog.text


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (([],), "there is no reward"),
        (([length, length],), "two rewards are named 'length'"),
        (([length, 1],), "reward 'int' must be a function"),
        ((len,), "must take \\(prompt, completion, \\*\\*columns\\), but takes 1"),
        (([length], [1, 2]), "2 weights for 1 rewards"),
        (([length], {"lenght": 1}), "weights names 'lenght', but the rewards are length"),
        (([length], [math.nan]), "the weight of reward 'length' is nan"),
        (([length], None, 0), "timeout must be a positive number"),
        (([length], None, None, "ignore"), "on_error must be one of raise, skip"),
    ],
)
def test_mistakes(arguments: tuple[Any, ...], message: str) -> None:
    with pytest.raises(InvalidInput, match=message):
        Rewards(*arguments)
