"""Threads of the terms of a loss: in the caller's thread, on the shared loop, or in an executor."""

from __future__ import annotations

import asyncio
import contextvars
import threading
from typing import TYPE_CHECKING, Any

import pytest

from tests.helpers.regularizer_terms import LONG, THREE, evaluate, last
from tinker_lightning.losses.regularizers.composition import Regularizer

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor


def test_async_terms_run_concurrently() -> None:
    events = [asyncio.Event(), asyncio.Event()]

    def meets(mine: int) -> Callable[[list[Any], list[Tensor]], Any]:
        async def term(_: list[Any], lp: list[Tensor]) -> Tensor:
            events[mine].set()
            await asyncio.wait_for(events[1 - mine].wait(), LONG)
            return lp[0].sum()

        return term

    evaluate(Regularizer(meets(0), 1.0, "a"), Regularizer(meets(1), 1.0, "b"))


def test_executor_terms_run_concurrently_with_async_terms_and_the_base() -> None:  # R2.3
    everyone = threading.Barrier(5)

    def meets(_: list[Any], lp: list[Tensor]) -> Tensor:
        everyone.wait(LONG)
        return lp[0].sum()

    async def meets_too(data: list[Any], lp: list[Tensor]) -> Tensor:
        return await asyncio.to_thread(meets, data, lp)

    evaluate(
        *(Regularizer(meets, 1.0, name, run_in_executor=True) for name in "ab"),
        *(Regularizer(meets_too, 1.0, name) for name in "cd"),
        base=meets,
    )


def test_only_async_and_executor_terms_leave_the_callers_thread() -> None:
    threads: dict[str, threading.Thread] = {}

    def at(name: str) -> Callable[[list[Any], list[Tensor]], Tensor]:
        def term(_: list[Any], lp: list[Tensor]) -> Tensor:
            threads[name] = threading.current_thread()
            return lp[0].sum()

        return term

    async def term(data: list[Any], lp: list[Tensor]) -> Tensor:
        return at("async")(data, lp)

    evaluate(
        Regularizer(term, 1.0, "async"),
        Regularizer(at("executor"), 1.0, "executor", run_in_executor=True),
        Regularizer(at("sync"), 1.0, "sync"),
        base=at("base"),
    )
    here = threading.current_thread()
    assert threads["base"] is threads["sync"] is here
    assert len({here, threads["async"], threads["executor"]}) == 3
    assert threads["async"].name == "tinker-lightning-background"
    assert threads["executor"].name == "tinker-lightning-background: executor"


@pytest.mark.parametrize("run_in_executor", [False, True])
def test_a_function_may_return_something_to_await(run_in_executor: bool) -> None:
    class Lazy:
        def __init__(self, value: Tensor) -> None:
            self.value = value

        def __await__(self) -> Any:
            yield from asyncio.sleep(0).__await__()
            return self.value

    for fn in (lambda data, lp: last(data, lp), lambda _, lp: Lazy(2 * lp[1].sum()), last):
        _, telemetry = evaluate(Regularizer(fn, 1.0, "x", run_in_executor=run_in_executor))
        assert telemetry["regularizers"]["x"]["value"] == -6.0


def test_it_works_inside_a_running_event_loop() -> None:  # as in Jupyter
    async def cell() -> dict[str, Any]:
        return evaluate(*THREE)[1]

    assert asyncio.run(cell())["loss_total"] == 13.0


def test_async_terms_of_all_steps_share_a_loop() -> None:
    # A client that an async term keeps belongs to the loop it was made on.
    loops = []

    async def term(_: list[Any], lp: list[Tensor]) -> Tensor:
        loops.append(asyncio.get_running_loop())
        return lp[0].sum()

    for _ in range(2):
        evaluate(Regularizer(term, 1.0, "a"), Regularizer(term, 1.0, "b"))
    assert len(set(loops)) == 1


def test_context_variables_come_along() -> None:
    run: contextvars.ContextVar[str] = contextvars.ContextVar("run", default="none")
    seen = []

    def sync(_: list[Any], lp: list[Tensor]) -> Tensor:
        seen.append(run.get())
        return lp[0].sum()

    async def term(data: list[Any], lp: list[Tensor]) -> Tensor:
        return sync(data, lp)

    token = run.set("mine")
    evaluate(Regularizer(term, 1.0, "a"), Regularizer(sync, 1.0, "b", run_in_executor=True))
    run.reset(token)
    assert seen == ["mine", "mine"]
