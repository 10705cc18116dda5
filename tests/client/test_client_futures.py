"""Futures: waiting, giving up waiting, and the promise that no failure is lost."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import threading
import time
from typing import TYPE_CHECKING, Any

import httpx
import pytest

from tests.helpers.backends import QUICK, recording
from tests.helpers.client_data import DATA
from tinker_lightning.client import ServiceClient
from tinker_lightning.errors import ClientClosed, InvalidInput, InvalidLoss, ResultTimeout
from tinker_lightning.server import create_app
from tinker_lightning.testing import embedded_service
from tinker_lightning.threads.background import BackgroundLoop

if TYPE_CHECKING:
    from tinker_lightning.client import TrainingClient
    from tinker_lightning.server import EmbeddedTrainer


def test_what_was_submitted_before_close_is_carried_out(shared: EmbeddedTrainer) -> None:
    for _ in range(5):
        with recording(create_app(shared)) as recorded:
            model = recorded.service.create_lora_training_client("tiny", rank=4)
            model.forward_backward(DATA, "cross_entropy")
            model.optim_step()
        assert recorded.paths()[-3:] == ["forward_backward", "optim_step", "finish"]
        assert recorded.record.requests[-1].message == {"reason": {"type": "success"}}


def test_the_server_learns_how_it_ended(shared: EmbeddedTrainer) -> None:
    for error, reason in ((ZeroDivisionError(), "errored"), (KeyboardInterrupt(), "interrupted")):
        with contextlib.suppress(ZeroDivisionError, KeyboardInterrupt), recording(create_app(shared)) as recorded:
            recorded.service.create_sampling_client(base_model="tiny")
            raise error
        assert recorded.record.requests[-1].message == {"reason": {"type": reason}}


async def _awaited(future: Any) -> Any:
    return await future


def test_a_result_that_does_not_come_in_time_can_be_fetched_later(model: TrainingClient, held: threading.Event) -> None:
    plain, custom = model.forward(DATA, "cross_entropy"), model.forward_backward_custom(DATA, lambda _, lp: lp[0].sum())
    for future in (plain, custom):
        started = time.monotonic()
        with pytest.raises(ResultTimeout, match=r"no result within 0\.05 s\. It is still running") as caught:
            future.result(timeout=0.05)
        assert isinstance(caught.value, TimeoutError)
        assert time.monotonic() - started < 10
        assert not future.done()
    held.set()
    assert custom.result(timeout=30).metrics["loss:sum"] < 0
    assert len(plain.result(timeout=30).loss_fn_outputs) == 3
    assert plain.done()


def test_cancelling_an_await_cancels_nothing_else(model: TrainingClient, held: threading.Event) -> None:
    future = model.forward_backward(DATA, "cross_entropy")

    async def give_up() -> None:
        await asyncio.wait_for(_awaited(future), 0.05)

    with pytest.raises(TimeoutError):
        asyncio.run(give_up())
    assert not future.done()
    held.set()
    assert future.result(30).metrics["loss:sum"] > 0
    assert model.optim_step().result().metrics["grad_norm"] > 0  # type: ignore[index]


def test_futures_of_the_standard_library(model: TrainingClient, held: threading.Event) -> None:  # R5.17
    """For code that waits for several at once; giving one up cancels nothing on the server."""
    passed = model.forward_backward(DATA, "cross_entropy")
    custom = model.forward_backward_custom(DATA, lambda _, logprobs: logprobs[0].sum())
    given_up = passed.future()
    assert given_up.cancel()
    held.set()
    done, left = concurrent.futures.wait([passed.future(), custom.future()], 30)
    assert not left
    assert {each.result().metrics["loss:sum"] for each in done} == {
        each.result().metrics["loss:sum"] for each in (passed, custom)
    }
    assert given_up.cancelled()
    assert model.optim_step().future().result(30).metrics["grad_norm"] > 0  # type: ignore[index]
    failing = model.forward(DATA, "no_such_loss")
    with pytest.raises(InvalidInput, match="no_such_loss"):
        failing.future().result(30)
    assert model.get_info()  # the failure was read
    assert asyncio.run(passed.coroutine()) == passed.result()


@pytest.mark.parametrize("cancelled", [True, False])
def test_a_failure_that_nobody_reads_from_a_future_is_not_lost(
    model: TrainingClient, held: threading.Event, cancelled: bool
) -> None:  # R4.5
    failing = model.forward_backward_custom(DATA, lambda _, logprobs: logprobs[0].sum() / 0 * float("inf"))
    future = failing.future()
    if cancelled:
        assert future.cancel()
    held.set()
    concurrent.futures.wait([future], 30)
    failing.wait(30)
    with pytest.raises(InvalidLoss):
        model.optim_step()


def test_closing_with_an_error_does_not_wait(
    trainer: EmbeddedTrainer, held: threading.Event, reached: threading.Event
) -> None:
    """Requests that are still in flight then raise."""
    # A separate trainer, so that requests of other tests do not delay those of this one.
    service = ServiceClient(base_url="http://embedded", transport=httpx.ASGITransport(create_app(trainer)))
    model = service.create_lora_training_client("tiny", rank=4)
    futures = [
        model.forward(DATA, "cross_entropy"),
        model.forward_backward_custom(DATA, lambda _, lp: lp[0].sum()),
        model.forward_backward(DATA, "cross_entropy"),
    ]
    assert reached.wait(10)
    started = time.monotonic()
    service.close("errored")
    assert time.monotonic() - started < 15
    held.set()
    for future in futures:
        with pytest.raises(ClientClosed, match="the client was closed before the result arrived"):
            future.result(5)
        with pytest.raises(ClientClosed):
            asyncio.run(_awaited(future))


def test_a_request_in_a_retry_ends_when_the_client_closes(shared: EmbeddedTrainer) -> None:
    class Failing(httpx.ASGITransport):
        async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
            if request.url.path.endswith("optim_step"):
                return httpx.Response(503, json={})
            return await super().handle_async_request(request)

        async def aclose(self) -> None:
            await asyncio.sleep(0.2)

    service = ServiceClient(base_url="http://embedded", transport=Failing(create_app(shared)), retry_policy=QUICK)
    future = service.create_lora_training_client("tiny", rank=4).optim_step()
    service.close("errored")
    with pytest.raises(ClientClosed, match="the client was closed before the result arrived"):
        future.result(5)


def test_what_fails_while_it_is_cancelled_is_not_printed(caplog: pytest.LogCaptureFixture) -> None:
    begun = threading.Event()

    async def failing() -> None:
        try:
            begun.set()
            await asyncio.Event().wait()
        finally:
            raise ZeroDivisionError

    async def nothing() -> None: ...

    loop = BackgroundLoop(nothing)
    future = loop.run(failing())
    assert begun.wait(10)
    loop.close()
    assert isinstance(future.exception(), ZeroDivisionError)
    assert caplog.records == []


def test_a_client_is_closed_inside_a_coroutine(shared: EmbeddedTrainer) -> None:
    async def main() -> float:
        with embedded_service(shared) as service:
            model = service.create_lora_training_client("tiny", rank=4)
            return (await model.forward(DATA, "cross_entropy")).metrics["loss:sum"]

    assert asyncio.run(main()) > 0
