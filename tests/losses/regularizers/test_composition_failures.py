"""A term that fails is named, keeps its cause, and keeps nobody waiting."""

from __future__ import annotations

import asyncio
import concurrent.futures
import gc
import math
import threading
import time
import traceback
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import Tensor

from tests.helpers.regularizer_terms import LONG, THREE, Returned, base, evaluate, first, last
from tinker_lightning.errors import (
    InvalidInput,
    InvalidLoss,
    LossNotFinite,
    LossNotScalar,
    LossNotTensor,
    LossWithoutGradient,
    NotFound,
    ResultTimeout,
)
from tinker_lightning.losses.regularizers import composition
from tinker_lightning.losses.regularizers.composition import Regularizer
from tinker_lightning.threads import background

if TYPE_CHECKING:
    from collections.abc import Callable


def _nan_gradient(_: list[Any], lp: list[Tensor]) -> Tensor:
    return (lp[0] - lp[0].detach()).sqrt().sum()


BAD: dict[str, tuple[Callable[[list[Any], list[Tensor]], Any], type[InvalidLoss], str]] = {
    "a number": (lambda _, lp: lp[0].sum().item(), LossNotTensor, r"the loss function returned float .* \.item\(\)"),
    "nothing": (lambda *_: None, LossNotTensor, r"returned NoneType .* Return \(loss, metrics\)"),
    "many values": (
        lambda _, lp: (lp[0], {}),
        LossNotScalar,
        r"the loss has the shape \[2\] .* \.sum\(\) or \.mean\(\)",
    ),
    "NaN": (
        lambda _, lp: (lp[0].sum() * math.nan, {}),
        LossNotFinite,
        "the loss is nan. .* no gradient was acc",
    ),
    "infinity": (lambda _, lp: ((-1000 * lp[0]).exp().sum(), {}), LossNotFinite, "the loss is inf. .* overflows"),
    "a NaN gradient": (_nan_gradient, LossNotFinite, r"the loss is 0\.0, but its gradient has NaN .* square root"),
    "metrics that are no dict": (
        lambda _, lp: (lp[0].sum(), [1]),
        InvalidLoss,
        "returned list as its metrics, not a d",
    ),
    "a metric that is a text": (
        lambda _, lp: (lp[0].sum(), {"a": "3.0"}),
        InvalidLoss,
        r"metric 'a' is not a single number, but str\. Reduce it",
    ),
    "a metric of many values": (
        lambda _, lp: (lp[0].sum(), {"a": lp[0]}),
        InvalidLoss,
        "metric 'a' is not a single number",
    ),
}


@pytest.mark.parametrize("run_in_executor", [False, True])
@pytest.mark.parametrize("what", BAD)
def test_an_invalid_term_raises_with_its_name(what: str, run_in_executor: bool) -> None:  # R1.9
    fn, kind, message = BAD[what]
    with pytest.raises(InvalidLoss, match=f"^regularizer 'bad': .*{message}") as caught:
        evaluate(Regularizer(first, 1.0, "good"), Regularizer(fn, 0.0, "bad", run_in_executor=run_in_executor))
    assert type(caught.value) is kind


@pytest.mark.parametrize(
    ("fn", "kind", "message"),
    [
        (lambda _, lp: lp[0], LossNotScalar, r"^the loss has the shape \[2\]"),
        (lambda _, lp: lp[0].sum().detach(), LossWithoutGradient, "^the loss does not depend on the log-probabilities"),
    ],
)
def test_a_base_is_held_to_what_a_single_callback_is(fn: Any, kind: type[InvalidLoss], message: str) -> None:  # R1.9
    with pytest.raises(kind, match=message):
        evaluate(Regularizer(first, 1.0, "good"), base=fn)


def test_a_total_without_a_gradient_raises() -> None:  # R1.9, R4.5
    constants = [Regularizer(lambda *_: torch.tensor(1.0), 1.0, name) for name in "ab"]
    with pytest.raises(LossWithoutGradient, match=r"none of the regularizers \(a, b\) depends .* without \.detach\(\)"):
        evaluate(*constants, base=None)


def test_a_total_that_overflows_raises() -> None:
    with pytest.raises(LossNotFinite, match=r"the total of the loss and its regularizers is -inf\. Each of them"):
        evaluate(Regularizer(first, 1e39, "huge"))


def _raises(_: list[Any], lp: list[Tensor]) -> Tensor:
    return lp["first"].sum()  # type: ignore[call-overload, no-any-return]


async def _raises_later(data: list[Any], lp: list[Tensor]) -> Tensor:
    await asyncio.sleep(0)
    return _raises(data, lp)


@pytest.mark.parametrize(
    "term",
    [
        Regularizer(_raises, 1.0, "bad"),
        Regularizer(_raises, 1.0, "bad", run_in_executor=True),
        Regularizer(_raises_later, 1.0, "bad"),
    ],
    ids=["sync", "executor", "async"],
)
def test_what_a_term_raises_is_the_cause_and_shows_the_users_line(term: Regularizer) -> None:
    with pytest.raises(InvalidLoss, match=r"^regularizer 'bad' failed: TypeError: list indices must be") as caught:
        evaluate(Regularizer(first, 1.0, "good"), term)
    assert type(caught.value.__cause__) is TypeError
    assert 'lp["first"].sum()' in "".join(traceback.format_exception(caught.value))


def test_an_error_of_this_library_keeps_its_kind_and_what_it_was_about() -> None:
    async def term(_: list[Any], lp: list[Tensor]) -> Tensor:
        error = NotFound("no such sampler")
        error.operation, error.request_id = "sample", "r1"
        raise error

    with pytest.raises(NotFound, match=r"^regularizer 'judge': no such sampler") as caught:
        evaluate(Regularizer(term, 1.0, "judge"))
    assert (caught.value.operation, caught.value.request_id) == ("sample", "r1")


def test_a_timeout_of_its_own_stays_a_timeout() -> None:
    def term(_: list[Any], lp: list[Tensor]) -> Tensor:
        raise TimeoutError("the judge did not answer")

    with pytest.raises(ResultTimeout, match=r"^regularizer 'judge' failed: TimeoutError: the judge did not answer"):
        evaluate(Regularizer(term, 1.0, "judge", run_in_executor=True))


def test_a_term_that_takes_too_long_is_named_and_cancelled() -> None:
    cancelled = threading.Event()

    async def never(_: list[Any], lp: list[Tensor]) -> Tensor:
        try:
            await asyncio.sleep(3600)
        except asyncio.CancelledError:
            cancelled.set()
            raise
        return lp[0].sum()

    with pytest.raises(
        ResultTimeout, match=r"^regularizer 'never': no value within 0\.05 s\. Raise the timeout"
    ) as caught:
        evaluate(Regularizer(last, 1.0, "quick"), Regularizer(never, 1.0, "never"), timeout=0.05)
    assert isinstance(caught.value.__cause__, TimeoutError)
    assert cancelled.wait(LONG)
    assert evaluate(*THREE, timeout=LONG)[1]["loss_total"] == 13.0  # the loop still runs


def test_what_blocks_the_loop_is_named_and_not_who_waits_for_it() -> None:
    go_on = threading.Event()

    async def sleeps(_: list[Any], lp: list[Tensor]) -> Tensor:
        go_on.wait(LONG)  # in place of an await
        return lp[0].sum()

    innocent = Regularizer(last, 1.0, "innocent")
    blocks = r"no value within 0\.3 s, because 'sleeps' blocks the event loop that all async regularizers share"
    try:
        with pytest.raises(ResultTimeout, match=rf"^regularizer 'sleeps': {blocks}"):
            evaluate(Regularizer(sleeps, 1.0, "sleeps"), innocent, timeout=0.3)
        with pytest.raises(ResultTimeout, match=rf"^regularizer 'innocent': {blocks}"):  # at the next step
            evaluate(innocent, timeout=0.3)
    finally:
        go_on.set()
    assert evaluate(*THREE, timeout=LONG)[1]["loss_total"] == 13.0


def test_the_time_that_the_base_takes_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[float] = []

    def waiting(futures: Any, timeout: float, until: str) -> Any:
        waits.append(timeout)
        return concurrent.futures.wait(futures, timeout, until)

    def slow(data: list[Any], lp: list[Tensor]) -> Returned:
        time.sleep(0.1)
        return base(data, lp)

    monkeypatch.setattr(composition, "wait", waiting)
    evaluate(*THREE, base=slow, timeout=LONG)
    assert 0 < waits[0] <= LONG - 0.1


def test_an_executor_term_that_takes_too_long_is_named_and_keeps_nobody_waiting() -> None:
    go_on = threading.Event()

    def never(_: list[Any], lp: list[Tensor]) -> Tensor:
        go_on.wait()
        return lp[0].sum()

    try:
        with pytest.raises(ResultTimeout, match=r"^regularizer 'never': no value within 0\.05 s"):
            evaluate(Regularizer(never, 1.0, "never", run_in_executor=True), timeout=0.05)
        assert evaluate(*THREE)[1]["loss_total"] == 13.0
    finally:
        go_on.set()


def test_a_failure_does_not_wait_for_the_others() -> None:
    cancelled = threading.Event()

    async def never(_: list[Any], lp: list[Tensor]) -> Tensor:
        try:
            await asyncio.sleep(3600)
        finally:
            cancelled.set()
        return lp[0].sum()

    started = time.monotonic()
    with pytest.raises(InvalidLoss, match="regularizer 'bad' failed"):
        evaluate(Regularizer(never, 1.0, "never"), Regularizer(_raises_later, 1.0, "bad"), timeout=LONG)
    assert time.monotonic() - started < LONG / 2
    assert cancelled.wait(LONG)


@pytest.mark.parametrize("what", [KeyboardInterrupt, ZeroDivisionError])
def test_what_the_base_raises_is_raised_as_it_is_and_cancels_the_rest(what: type[BaseException]) -> None:
    begun, cancelled = threading.Event(), threading.Event()

    async def never(_: list[Any], lp: list[Tensor]) -> Tensor:
        begun.set()
        try:
            await asyncio.sleep(3600)
        finally:
            cancelled.set()
        return lp[0].sum()

    def interrupted(_: list[Any], lp: list[Tensor]) -> Tensor:
        assert begun.wait(LONG)
        raise what

    with pytest.raises(what):
        evaluate(Regularizer(never, 1.0, "never"), base=interrupted)
    assert cancelled.wait(LONG)


def test_a_term_that_had_not_started_is_dropped_silently() -> None:
    go_on = threading.Event()

    def broken(_: list[Any], lp: list[Tensor]) -> Tensor:
        raise ZeroDivisionError

    background._Loop.shared().loop.call_soon_threadsafe(go_on.wait, LONG)
    try:
        with pytest.raises(ZeroDivisionError):
            evaluate(Regularizer(last, 1.0, "last"), base=broken)
    finally:
        go_on.set()
    evaluate(*THREE, timeout=LONG)
    gc.collect()  # a coroutine that was never awaited would warn here


@pytest.mark.parametrize("what", [KeyboardInterrupt, SystemExit, asyncio.CancelledError])
def test_what_would_end_the_loop_is_the_terms_failure(what: type[BaseException]) -> None:
    async def ends(_: list[Any], lp: list[Tensor]) -> Tensor:
        raise what

    with pytest.raises(InvalidLoss, match=rf"^regularizer 'ends' failed: .*{what.__name__}"):
        evaluate(Regularizer(ends, 1.0, "ends"))
    assert evaluate(*THREE, timeout=LONG)[1]["loss_total"] == 13.0


def test_an_async_term_that_waits_for_its_own_loop_raises() -> None:
    async def nested(_: list[Any], lp: list[Tensor]) -> Tensor:
        return evaluate(Regularizer(last, 1.0, "inner"))[0]

    with pytest.raises(
        InvalidLoss, match=r"regularizer 'nested'.*regularizer 'inner'.*on the event loop that it would wait for"
    ):
        evaluate(Regularizer(nested, 1.0, "nested"), timeout=LONG)


@pytest.mark.parametrize("timeout", [0, -1.0, math.nan])
def test_a_timeout_must_be_above_0(timeout: float) -> None:
    with pytest.raises(InvalidInput, match="timeout must be a number of seconds above 0, or None, got"):
        evaluate(*THREE, timeout=timeout)
