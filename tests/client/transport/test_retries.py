"""Which requests are retried, how often, with which number, and what is logged."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import time
from dataclasses import replace
from typing import TYPE_CHECKING

import httpx
import pytest

from tests.helpers.backends import QUICK
from tests.helpers.client_data import DATA
from tests.helpers.soaking import mostly_soak
from tinker_lightning import AdamParams
from tinker_lightning.client import ServiceClient
from tinker_lightning.client.transport import retries
from tinker_lightning.client.transport import session as sessions
from tinker_lightning.client.transport.retries import Pause, RetryPolicy, Waits
from tinker_lightning.errors import (
    InvalidInput,
    NotFound,
    OperationFailed,
    RequestConflict,
    ServerUnreachable,
    SessionLost,
    TinkerLightningError,
)
from tinker_lightning.server import EmbeddedTrainer, create_app
from tinker_lightning.testing import RecordingTransport

if TYPE_CHECKING:
    import threading
    from collections.abc import Callable, Iterator


FAST = AdamParams(learning_rate=1e-2)


class Script(httpx.AsyncBaseTransport):
    """Answers an endpoint with the given responses in turn, and then forwards requests."""

    def __init__(self, inner: httpx.AsyncBaseTransport) -> None:
        self.answers: dict[str, list[httpx.Response | Exception]] = {}
        self.arrivals: list[tuple[float, str]] = []
        self._inner = inner

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        endpoint = request.url.path.rsplit("/", 1)[1]
        self.arrivals.append((time.monotonic(), endpoint))
        if self.answers.get(endpoint):
            answer = self.answers[endpoint].pop(0)
            if isinstance(answer, Exception):
                raise answer
            return answer
        return await self._inner.handle_async_request(request)

    def gaps(self, endpoint: str) -> list[float]:
        """The seconds between the arrivals at an endpoint."""
        times = [time for time, name in self.arrivals if name == endpoint]
        return [later - earlier for earlier, later in itertools.pairwise(times)]


class Scripted:
    def __init__(self, service: ServiceClient, script: Script, record: RecordingTransport) -> None:
        self.service, self.script, self.record = service, script, record
        self.model = service.create_lora_training_client("tiny", rank=4, seed=1)

    def numbers(self, endpoint: str) -> list[int]:
        requests = [each for each in self.record.requests if each.path.endswith(f"/{endpoint}")]
        return [each.message["seq_id"] if isinstance(each.message, dict) else each.message.seq_id for each in requests]


@pytest.fixture(params=["extended", "plain"])
def scripted(shared: EmbeddedTrainer, request: pytest.FixtureRequest) -> Iterator[Scripted]:
    script = Script(httpx.ASGITransport(create_app(shared, extended=request.param == "extended")))
    record = RecordingTransport(script)
    with ServiceClient(base_url="http://embedded", transport=record, retry_policy=QUICK) as service:
        yield Scripted(service, script, record)


def again(status: int, error_class: str = "", **headers: str) -> httpx.Response:
    return httpx.Response(status, json={"detail": "not now", "error_class": error_class}, headers=headers)


RETRIED: dict[str, Callable[[], httpx.Response | Exception]] = {
    "408": lambda: again(408),
    "409": lambda: again(409),
    "429": lambda: again(429),
    "402": lambda: again(402),
    "500": lambda: again(500),
    "503": lambda: again(503),
    "html 502": lambda: httpx.Response(502, html="<html>Bad Gateway</html>"),
    "html 408": lambda: httpx.Response(408, html="<html>Request Time-out</html>"),
    "empty 400": lambda: httpx.Response(400),
    "x-should-retry": lambda: again(422, **{"x-should-retry": "true"}),
    "reset": lambda: httpx.ReadError("reset"),
    "refused": lambda: httpx.ConnectError("refused"),
    "timeout": lambda: httpx.ReadTimeout("slow"),
}


@pytest.mark.parametrize(
    "fault", mostly_soak(RETRIED, but=["429", "500", "html 502", "x-should-retry", "reset", "timeout"])
)
def test_retries_keep_their_number(scripted: Scripted, fault: str) -> None:
    for endpoint in ("forward_backward", "optim_step"):
        scripted.script.answers[endpoint] = [RETRIED[fault](), RETRIED[fault]()]
    scripted.model.forward_backward(DATA, "cross_entropy").result()
    assert scripted.model.optim_step(FAST).result().metrics["grad_norm"] > 0  # type: ignore[index]
    assert scripted.numbers("forward_backward") == [1, 1, 1]
    assert scripted.numbers("optim_step") == [2, 2, 2]


@pytest.mark.parametrize(
    ("response", "kind"),
    [
        (lambda: again(400), InvalidInput),
        (lambda: again(404), NotFound),
        (lambda: again(422), InvalidInput),
        (lambda: again(413), InvalidInput),
        (lambda: again(500, **{"x-should-retry": "false"}), OperationFailed),
        (lambda: again(409, "RequestConflict", **{"x-should-retry": "false"}), RequestConflict),
    ],
)
def test_errors_that_a_retry_cannot_fix_are_not_retried(
    scripted: Scripted, response: Callable[[], httpx.Response], kind: type[TinkerLightningError]
) -> None:
    scripted.script.answers["forward_backward"] = [response()]
    with pytest.raises(kind, match="not now"):
        scripted.model.forward(DATA, "cross_entropy").result()
    assert scripted.numbers("forward_backward") == [1]


@pytest.mark.parametrize(
    ("headers", "least"),
    [({"retry-after-ms": "300"}, 0.3), ({"retry-after": "0.3"}, 0.3), ({"retry-after": "100"}, 0.0), ({}, 0.0)],
)
def test_the_server_says_when(scripted: Scripted, headers: dict[str, str], least: float) -> None:
    scripted.script.answers["optim_step"] = [again(429, **headers)]
    scripted.model.optim_step(FAST).result()
    (gap,) = scripted.script.gaps("optim_step")
    assert least <= gap < least + 10


def test_delays_grow_up_to_a_limit() -> None:
    retry_policy = RetryPolicy(300.0, first_delay=1.0, longest_delay=10.0)
    delays = [retry_policy.delay(attempt, None) for attempt in (0, 1, 2, 3, 4, 5000)]
    for delay, longest in zip(delays, (1, 2, 4, 8, 10, 10), strict=True):
        assert 0.75 * longest <= delay <= longest
    assert retry_policy.delay(7, again(402)) == 5.0


def test_retries_end_after_the_limit(trainer: EmbeddedTrainer) -> None:
    trainer.scheduler.gap_timeout = 0.1  # for what is never sent leaves a gap
    script = Script(httpx.ASGITransport(create_app(trainer)))
    retry_policy = replace(QUICK, seconds=0.3)
    with ServiceClient(base_url="http://embedded", transport=script, retry_policy=retry_policy) as service:
        model = service.create_lora_training_client("tiny", rank=4)
        script.answers["optim_step"] = [again(503)] * 1000
        started = time.monotonic()
        with pytest.raises(OperationFailed, match=r"not now \(HTTP 503\).*optim_step 1 of"):
            model.optim_step().result()
        assert 0.2 < time.monotonic() - started < 10
        script.answers["optim_step"] = [httpx.ReadTimeout("slow")] * 1000
        with pytest.raises(ServerUnreachable, match="no response within 60 s"):
            model.optim_step().result()
        script.answers.clear()
        model.optim_step().result()


@pytest.fixture
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Waits are shown and logged within tenths of a second."""
    times = {"_SHOWN_SECONDS": 0.05, "_UPDATE_SECONDS": 0.02, "_LOG_SECONDS": (0.1, 60.0)}
    for name, value in times.items():
        monkeypatch.setattr(retries, name, value)


def logged(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [f"{each.levelname} {each.getMessage()}" for each in caplog.records if each.name == retries.logger.name]


@pytest.mark.usefixtures("soon")
def test_every_outage_is_shown_also_after_one_that_failed(
    shared: EmbeddedTrainer, caplog: pytest.LogCaptureFixture
) -> None:
    script = Script(httpx.ASGITransport(create_app(shared)))
    with ServiceClient(
        base_url="http://embedded", transport=script, retry_policy=replace(QUICK, seconds=0.5)
    ) as service:
        for _ in range(2):
            script.answers["create_model"] = [again(500)] * 1000
            with pytest.raises(OperationFailed, match="HTTP 500"):
                service.create_lora_training_client("tiny", rank=4)
            script.answers.clear()
            service.create_lora_training_client("tiny", rank=4)
    shown = [line for line in logged(caplog) if "the server answers HTTP 500 (not now), gives up at" in line]
    assert len(shown) == 2
    assert all(line.startswith("WARNING http://embedded: waiting for 0 s: ") for line in shown)


def test_an_account_without_credit_has_its_own_retry_limit(shared: EmbeddedTrainer) -> None:
    script = Script(httpx.ASGITransport(create_app(shared)))
    retry_policy = replace(QUICK, seconds=0.1, billing_delay=0.05)
    config = {"billing_exception_max_pause_duration_sec": 2.0, "parallel_fwdbwd_chunks": True}
    script.answers["config"] = [httpx.Response(200, json=config)]
    with ServiceClient(base_url="http://embedded", transport=script, retry_policy=retry_policy) as service:
        model = service.create_lora_training_client("tiny", rank=4)
        script.answers["optim_step"] = [again(402)] * 6
        model.optim_step().result()
        assert all(gap >= 0.05 for gap in script.gaps("optim_step"))
        script.answers["optim_step"] = [again(402)] * 1000
        with pytest.raises(OperationFailed, match="HTTP 402"):
            model.optim_step().result()
        script.answers.clear()


@pytest.mark.usefixtures("soon")
def test_a_pause_is_logged_once_however_many_requests_meet_it(
    scripted: Scripted, caplog: pytest.LogCaptureFixture
) -> None:
    scripted.script.answers["forward_backward"] = [again(429, **{"retry-after-ms": "150"}) for _ in range(12)]
    futures = [scripted.model.forward(DATA, "cross_entropy") for _ in range(4)]
    for future in futures:
        future.result()
    waiting, continuing = logged(caplog)
    assert "WARNING http://embedded: waiting for 0 s: the server answers HTTP 429 (not now), gives up" in waiting
    assert continuing.startswith("WARNING http://embedded: continuing after ")


def test_a_refusal_that_a_retry_overcomes_within_seconds_is_not_logged(
    scripted: Scripted, caplog: pytest.LogCaptureFixture
) -> None:
    scripted.script.answers["forward_backward"] = [again(429)]
    scripted.model.forward(DATA, "cross_entropy").result()
    assert logged(caplog) == []


class Clock:
    """The time of the module of waits, without the one of the event loop."""

    strftime, localtime = staticmethod(time.strftime), staticmethod(time.localtime)

    def __init__(self) -> None:
        self.now = 0.0

    def monotonic(self) -> float:
        return self.now

    time = monotonic


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(retries, "time", clock)
    return clock


# What holds a request up, whether pings are answered, and the level and the text of the log.
HELD: dict[str, tuple[str, bool, bool, str, str]] = {
    "work": ("", False, True, "INFO", "forward is queued or running"),
    "capacity": ("the server's queue is full", False, True, "INFO", "the server's queue is full"),
    "refusal": ("the server answers HTTP 503", True, True, "WARNING", "the server answers HTTP 503, gives up at"),
    "silence": ("", False, False, "WARNING", "the server is silent, gives up at"),
}


@pytest.mark.parametrize("kind", HELD)
def test_a_pause_is_logged_at_growing_intervals_and_when_it_ends(
    kind: str, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    reason, is_fault, hears, level, text = HELD[kind]
    caplog.set_level("INFO", retries.logger.name)
    shown: list[int] = []

    async def wait() -> None:
        waits = Waits("http://far", 300.0)
        waits.ping = asyncio.Event()
        with waits.waiting("forward") as each:
            if reason:
                each.hold(reason, 300.0, is_fault=is_fault) if is_fault else each.hold(reason)
            for second in range(200):
                clock.now = float(second)
                waits.pinged()
                if hears:
                    waits.heard()
                before = len(caplog.records)
                waits._measure()
                shown.extend([second] * (len(caplog.records) - before))
                assert (waits.pause is None) == (second < 2)
        assert waits.pause is None

    asyncio.run(wait())
    assert shown == [10, 30, 60, 120]
    *lines, last = logged(caplog)
    assert all(line.startswith(f"{level} http://far: waiting for ") and text in line for line in lines)
    assert last == f"{level} http://far: continuing after 199 s"


def test_other_requests_that_end_are_progress_but_not_for_one_that_is_refused(clock: Clock) -> None:
    async def wait() -> None:
        waits = Waits("http://far", 300.0)
        waits.ping = asyncio.Event()
        with waits.waiting("forward"), waits.waiting("sample") as sample:
            clock.now = 5.0
            waits._measure()
            assert waits.pause is not None
            assert waits.pause.seconds == 5
            with waits.waiting("optim_step"):
                pass
            assert not waits.pause
            sample.hold("HTTP 429\x1b[2J", 300.0, is_fault=True)
            with waits.waiting("optim_step"):
                clock.now = 25.0
            waits._measure()
            assert str(waits.pause).startswith(r"waiting for 20 s: HTTP 429\x1b[2J, gives up at ")

    asyncio.run(wait())


def test_a_fault_is_measured_by_itself_and_its_end_does_not_hide_that_nothing_has_a_result(
    clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    async def wait() -> None:
        waits = Waits("http://far", 300.0)
        waits.ping = asyncio.Event()

        def measured(second: float) -> Pause:
            clock.now = second
            waits._measure()
            assert waits.pause is not None
            assert waits.pause.waited == second
            return waits.pause

        with waits.waiting("forward") as forward:
            assert not measured(600.0).is_fault
            for start in (700.0, 1000.0):
                clock.now = start
                waits.heard()
                forward.hold("HTTP 502", start + 300.0, is_fault=True)
                assert not measured(start + 1.0).is_fault
                assert str(measured(start + 20.0)).startswith("waiting for 20 s: HTTP 502, gives up at ")
                forward.resume()
                assert str(measured(start + 30.0)) == f"waiting for {start + 30:.0f} s: forward is queued or running"
            with waits.waiting("GET /token", is_quick=True):
                clock.now = 1100.0
            assert measured(1100.0).seconds == 1100.0  # that was no result

    caplog.set_level("WARNING", retries.logger.name)
    asyncio.run(wait())
    texts = ["waiting for 20 s: HTTP 502", "continuing after 20 s"] * 2
    assert [each.split(",")[0] for each in logged(caplog)] == [f"WARNING http://far: {text}" for text in texts]


@pytest.mark.parametrize("is_fault", [False, True])
def test_requests_that_fail_together_after_a_pause_log_nothing_more(
    is_fault: bool, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    async def wait() -> None:
        waits = Waits("http://far", 300.0)
        waits.pinged()
        with contextlib.ExitStack() as stack:
            for _ in range(8):
                each = stack.enter_context(waits.waiting("forward"))
                if is_fault:
                    each.hold("nothing answers", 300.0, is_fault=True)
            clock.now = 299.0
            waits._measure()
            assert len(logged(caplog)) == 1
            raise ServerUnreachable("nothing answers")

    with pytest.raises(ServerUnreachable):
        asyncio.run(wait())
    assert len(logged(caplog)) == 1


def pending(status: int, state: str = "active", reason: str | None = None) -> httpx.Response:
    body = {"type": "try_again", "request_id": "r", "queue_state": state, "queue_state_reason": reason}
    return httpx.Response(status, json=body)


@pytest.fixture
def plain(shared: EmbeddedTrainer) -> Iterator[Scripted]:
    """Where results are fetched."""
    script = Script(httpx.ASGITransport(create_app(shared, extended=False)))
    record = RecordingTransport(script)
    with ServiceClient(base_url="http://embedded", transport=record, retry_policy=QUICK) as service:
        yield Scripted(service, script, record)


@pytest.mark.usefixtures("soon")
@pytest.mark.parametrize("status", [200, 408])
def test_the_state_of_a_queue_is_logged(plain: Scripted, status: int, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", retries.logger.name)
    plain.script.answers["retrieve_future"] = [pending(status, "paused_capacity", "no machine is free")] * 6
    assert plain.model.forward(DATA, "cross_entropy").result().metrics["loss:sum"] > 0
    waiting, continuing = (line for line in logged(caplog) if "waiting" in line or "continuing" in line)
    assert (
        "INFO http://embedded: waiting for 0 s: the server's queue is paused_capacity (no machine is free)" in waiting
    )
    assert continuing.startswith("INFO http://embedded: continuing after ")


@pytest.mark.parametrize("reading", [httpx.ReadTimeout("slow"), httpx.Response(408), httpx.Response(408, html="<p>")])
def test_a_poll_that_times_out_is_repeated(
    plain: Scripted,
    reading: httpx.Response | Exception,
    caplog: pytest.LogCaptureFixture,
) -> None:
    plain.script.answers["retrieve_future"] = [reading] * 3
    assert plain.model.forward(DATA, "cross_entropy").result().metrics["loss:sum"] > 0
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


def test_a_poll_held_longer_than_the_read_timeout_is_repeated(shared: EmbeddedTrainer) -> None:
    script = Script(httpx.ASGITransport(create_app(shared, extended=False)))
    retry_policy = replace(QUICK, seconds=0.05)
    with ServiceClient(base_url="http://embedded", transport=script, retry_policy=retry_policy) as service:
        model = service.create_lora_training_client("tiny", rank=4)
        script.answers["retrieve_future"] = [httpx.ReadTimeout("slow")] * 20
        model.optim_step().result()
        assert script.answers["retrieve_future"] == []


def test_a_server_that_does_not_hold_polls_is_not_flooded(plain: Scripted) -> None:
    plain.script.answers["retrieve_future"] = [pending(200)] * 6
    plain.model.optim_step(FAST).result()
    assert sum(plain.script.gaps("retrieve_future")[-6:]) >= 0.01 * (2**6 - 1)


def test_a_submission_that_outlasts_the_long_poll_is_fetched(
    shared: EmbeddedTrainer, held: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tinker_lightning.server.endpoints.futures.LONG_POLL_SECONDS", 0.05)
    record = RecordingTransport(httpx.ASGITransport(create_app(shared)))
    with ServiceClient(base_url="http://embedded", transport=record) as service:
        model = service.create_lora_training_client("tiny", rank=4)
        future = model.forward(DATA, "cross_entropy")
        while record.requests[-1].path != "/api/v1/retrieve_future":
            time.sleep(0.01)
        held.set()
        assert future.result().metrics["loss:sum"] > 0
    assert [each.path for each in record.requests].count("/ext/v1/forward_backward") == 1


def missing(detail: str) -> httpx.Response:
    return httpx.Response(404, json={"message": detail})


def test_a_session_is_lost_only_if_it_is_missing_several_times_in_a_row(
    plain: Scripted, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A gateway that reloads its routes answers 404 too."""
    monkeypatch.setattr(sessions, "_HEARTBEAT_SECONDS", 0.02)
    monkeypatch.setattr(sessions, "_MISSED_SECONDS", 0.001, raising=False)
    session, script = plain.service.session, plain.script
    ping = session.connection.waits.ping
    assert ping is not None
    for replies in (2, 1, 2):
        script.answers["session_heartbeat"] = [missing("no Route matched with those values")] * replies
        before = len(script.arrivals)
        session._heart.get_loop().call_soon_threadsafe(ping.set)
        while len(script.arrivals) - before < replies + 2 and session.lost is None:  # also after them
            time.sleep(0.001)
    assert session.lost is None
    assert plain.model.forward(DATA, "cross_entropy").result().metrics["loss:sum"] > 0
    script.answers["session_heartbeat"] = [missing("no Route matched with those values")] * 3
    while not session._heart.done():
        time.sleep(0.001)
    with pytest.raises(SessionLost, match=r"http://embedded was restarted, and no longer has session-"):
        plain.model.forward(DATA, "cross_entropy").result()


def test_a_session_that_the_server_misses_by_name_is_lost_at_once_if_its_model_is_missing_too(
    plain: Scripted, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sessions, "_MISSED_SECONDS", 1e9)
    name = plain.service.session.session_id
    plain.script.answers |= {
        "optim_step": [missing("there is no model")],
        "session_heartbeat": [missing(f"there is no session {name!r}")],
    }
    with pytest.raises(SessionLost, match=f"{name}: it was restarted, or several servers share this URL"):
        plain.model.optim_step(FAST).result()
