"""A base loss and regularizers make one loss, with telemetry for each; where terms run changes nothing of that."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextvars
import gc
import math
import threading
import time
import traceback
from typing import TYPE_CHECKING, Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

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
from tinker_lightning.losses.regularizers import background, composition
from tinker_lightning.losses.regularizers.regularizer import Regularizer

if TYPE_CHECKING:
    from collections.abc import Callable

Returned = tuple[Tensor, dict[Any, Any]]
LONG = 30.0  # seconds after which a test that hangs fails


def logprobs() -> list[Tensor]:
    return [torch.tensor([-1.0, -2.0]).requires_grad_(), torch.tensor([-3.0]).requires_grad_()]


def base(_: list[Any], lp: list[Tensor]) -> Returned:
    return -torch.cat(lp).sum(), {"nll": torch.cat(lp).mean(), 7: 1}


def square(_: list[Any], lp: list[Tensor]) -> Returned:
    return (torch.cat(lp) ** 2).sum(), {"largest": torch.cat(lp).abs().max()}


def first(_: list[Any], lp: list[Tensor]) -> Returned:
    return lp[0].sum(), {}


async def last(_: list[Any], lp: list[Tensor]) -> Returned:
    await asyncio.sleep(0)
    return 2 * lp[1].sum(), {"count": torch.tensor([1])}


THREE = (
    Regularizer(square, 0.5, "square", run_in_executor=True),
    Regularizer(last, lambda step: 0.25 * step, "last"),
    Regularizer(first, -1, "first"),
)


def evaluate(*terms: Regularizer, base: Any = base, **settings: Any) -> tuple[Tensor, dict[str, Any]]:
    return composition.evaluate([], logprobs(), base, terms, step=2, **settings)


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


# Gradient norms.


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


# Where terms run.


def test_async_terms_run_beside_each_other() -> None:
    events = [asyncio.Event(), asyncio.Event()]

    def meets(mine: int) -> Callable[[list[Any], list[Tensor]], Any]:
        async def term(_: list[Any], lp: list[Tensor]) -> Tensor:
            events[mine].set()
            await asyncio.wait_for(events[1 - mine].wait(), LONG)
            return lp[0].sum()

        return term

    evaluate(Regularizer(meets(0), 1.0, "a"), Regularizer(meets(1), 1.0, "b"))


def test_executor_terms_run_beside_each_other_the_async_ones_and_the_base() -> None:  # R2.3
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
    assert threads["async"].name == "tinker-lightning-regularizers"
    assert threads["executor"].name == "tinker-lightning-regularizers: executor"


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


# What goes wrong.


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
def test_a_term_that_is_none_is_refused_by_name(what: str, run_in_executor: bool) -> None:  # R1.9
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


def test_a_total_without_a_gradient_is_refused() -> None:  # R1.9, R4.5
    constants = [Regularizer(lambda *_: torch.tensor(1.0), 1.0, name) for name in "ab"]
    with pytest.raises(LossWithoutGradient, match=r"none of the regularizers \(a, b\) depends .* without \.detach\(\)"):
        evaluate(*constants, base=None)


def test_a_total_that_overflows_is_refused() -> None:
    with pytest.raises(LossNotFinite, match="the total of the loss and its regularizers is -inf, although each"):
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
    assert evaluate(*THREE, timeout=LONG)[1]["loss_total"] == 13.0  # the loop goes on


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


def test_a_term_that_had_not_begun_is_dropped_without_a_word() -> None:
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


def test_an_async_term_that_would_wait_for_its_own_loop_is_refused() -> None:
    async def nested(_: list[Any], lp: list[Tensor]) -> Tensor:
        return evaluate(Regularizer(last, 1.0, "inner"))[0]

    with pytest.raises(
        InvalidLoss, match=r"regularizer 'nested'.*regularizer 'inner'.*on the event loop that it needs"
    ):
        evaluate(Regularizer(nested, 1.0, "nested"), timeout=LONG)


@pytest.mark.parametrize("timeout", [0, -1.0, math.nan])
def test_a_timeout_must_be_above_0(timeout: float) -> None:
    with pytest.raises(InvalidInput, match="timeout must be a number of seconds above 0, or None, got"):
        evaluate(*THREE, timeout=timeout)
