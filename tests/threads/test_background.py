"""Functions and coroutines on background threads see the torch modes of their caller, and never a neighbor's."""

from __future__ import annotations

import asyncio
import contextlib
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

import pytest
import torch

from tinker_lightning.threads import background
from tinker_lightning.threads.background import Modes, run_on_loop, run_on_thread

if TYPE_CHECKING:
    from collections.abc import Callable

LONG = 30.0
MODES: dict[str, Callable[[], contextlib.AbstractContextManager[Any]]] = {
    "none": contextlib.nullcontext,
    "no_grad": torch.no_grad,
    "inference": torch.inference_mode,
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
    "autocast to half": lambda: torch.autocast("cpu", torch.float16, cache_enabled=False),
}


def seen() -> tuple[Modes, torch.dtype, bool]:
    """The modes, and what they do to a product."""
    weight = torch.ones(2, 2, requires_grad=True)
    product = weight @ weight
    return Modes.current(), product.dtype, product.requires_grad


async def seen_later() -> list[tuple[Modes, torch.dtype, bool]]:
    before = seen()
    await asyncio.sleep(0)
    return [before, seen()]


@pytest.mark.parametrize("name", MODES)
def test_the_callers_modes_come_along(name: str) -> None:
    with MODES[name]():
        here = seen()
        assert run_on_thread(seen, "x").result(LONG) == here
        assert run_on_loop(seen_later()).result(LONG) == [here, here]
    assert (here[1] == torch.float32, here[2]) == ("autocast" not in name, name not in ("no_grad", "inference"))


def test_modes_stay_with_their_own_coroutine() -> None:
    inside, looked = asyncio.Event(), asyncio.Event()
    around = contextlib.ExitStack()

    async def blind() -> list[tuple[Modes, torch.dtype, bool]]:
        before = seen()
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
            within = seen()
            inside.set()
            await asyncio.wait_for(looked.wait(), LONG)  # the other one runs meanwhile
            after = seen()
        assert within == after
        return [before, within, seen()]

    async def looker() -> tuple[Modes, torch.dtype, bool]:
        await asyncio.wait_for(inside.wait(), LONG)
        result = seen()
        looked.set()
        return result

    with around:
        plain = seen()
        futures: list[Future[Any]] = [run_on_loop(blind()), run_on_loop(looker())]
        before, within, after = futures[0].result(LONG)
        assert (within[1], within[2]) == (torch.bfloat16, False)
        assert before == after == futures[1].result(LONG) == plain


def test_the_loops_own_thread_is_left_as_it_was() -> None:
    with torch.inference_mode():
        run_on_loop(seen_later()).result(LONG)
    left: Future[bool] = Future()
    background._Loop.shared().loop.call_soon_threadsafe(
        lambda: left.set_result(torch.is_grad_enabled() and not torch.is_inference_mode_enabled())
    )
    assert left.result(LONG)


def test_a_cancelled_coroutine_may_clean_up_in_its_modes() -> None:
    begun: Future[None] = Future()
    cleaned: Future[bool] = Future()

    async def waits() -> None:
        try:
            begun.set_result(None)
            await asyncio.sleep(3600)
        finally:
            await asyncio.sleep(0)
            cleaned.set_result(torch.is_grad_enabled())

    with torch.no_grad():
        future = run_on_loop(waits())
    begun.result(LONG)
    future.cancel()
    assert cleaned.result(LONG) is False


def test_a_fork_gets_a_loop_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    shared = background._Loop.shared()
    monkeypatch.setattr(shared, "pid", -1)  # made by another process, whose threads are not here
    assert background._Loop.shared() is not shared
    assert run_on_loop(seen_later()).result(LONG)
    shared.loop.call_soon_threadsafe(shared.loop.stop)
    shared.thread.join(LONG)
    shared.loop.close()
