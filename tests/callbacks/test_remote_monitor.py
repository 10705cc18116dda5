"""`RemoteMonitor` measures what a transport with a known delay and known bytes does, and draws it."""

from __future__ import annotations

import asyncio
import contextlib
import csv
import importlib.util
import json
import logging
from collections import Counter
from typing import TYPE_CHECKING, Any

import httpx
import pytest
from lightning.pytorch.loggers import CSVLogger

from tests.helpers.soaking import first_only
from tests.helpers.trainers import DATA, SMALL, OnServer, loader, new, quiet
from tinker_lightning import RemoteModule, SamplingParams
from tinker_lightning.callbacks import RemoteMonitor, SampleTable
from tinker_lightning.callbacks.timeline import StepRecord, queue_times
from tinker_lightning.client.transport import recording
from tinker_lightning.client.transport.recording import OperationRecord
from tinker_lightning.errors import InvalidInput
from tinker_lightning.testing import RecordingTransport, embedded_service
from tinker_lightning.threads import background

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tinker_lightning.client import ServiceClient

pytestmark = SMALL

DELAY = 0.05  # of each request, in seconds
PER_STEP = 2 * sum(datum.model_input.length for datum in DATA[:2])  # all datums have the same length
STEPS = 4


class Delayed(httpx.AsyncBaseTransport):
    """A server that every request takes `DELAY` seconds to reach and to return from."""

    def __init__(self, inner: httpx.AsyncBaseTransport) -> None:
        self._inner = inner

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        await asyncio.sleep(DELAY / 2)
        response = await self._inner.handle_async_request(request)
        await asyncio.sleep(DELAY / 2)
        return response

    async def aclose(self) -> None:
        await self._inner.aclose()


@contextlib.contextmanager
def far(*, extended: bool) -> Iterator[tuple[ServiceClient, RecordingTransport]]:
    sent: list[RecordingTransport] = []

    def wrap(inner: httpx.AsyncBaseTransport) -> httpx.AsyncBaseTransport:
        sent.append(RecordingTransport(inner))
        return Delayed(sent[0])

    with embedded_service(wrap=wrap, extended=extended) as service:
        yield service, sent[0]


class Retained(RemoteModule):
    """A module whose steps wait for a forward."""

    route = "retained"


@pytest.mark.parametrize(("kind", "extended"), first_only([(Retained, True), (OnServer, False)]))
def test_every_step_is_measured(kind: type[RemoteModule], extended: bool, tmp_path: Path) -> None:
    logger = CSVLogger(tmp_path)
    with far(extended=extended) as (service, _):
        trainer = quiet(max_steps=STEPS, accumulate_grad_batches=2, logger=logger, callbacks=[RemoteMonitor()])
        trainer.fit(new(service, kind), loader(), loader(2, 2))
        assert not background._wait_observers  # nothing is measured afterwards
        assert service.session.recording is None
    with open(f"{logger.log_dir}/metrics.csv") as file:
        rows = [row for row in csv.DictReader(file) if row["remote/step_s"]]
    assert [int(row["step"]) for row in rows] == list(range(STEPS))  # each once, also those that ended after their step
    for row in rows:
        got = {name.removeprefix("remote/"): float(value) for name, value in row.items() if "remote" in name and value}
        least = DELAY if extended else 2 * DELAY  # one round trip or two
        assert got["backward_s"] >= least
        assert got["optim_s"] >= least
        assert ("forward_s" in got) == (kind is Retained)
        assert 0 <= got["network_share"] <= got["wait_share"] <= 1
        assert got["tokens_per_s"] * got["step_s"] == pytest.approx(PER_STEP)
        assert got["in_flight"] > 0
        assert got["queue_s"] > 0
        assert got["bytes_sent"] > 100
        assert got["bytes_received"] > 100
        if kind is Retained:
            assert got["step_s"] >= got["forward_s"] >= least
            assert got["network_share"] > 0
    assert trainer.callback_metrics["remote/step_s"] > 0


@pytest.mark.parametrize("extended", first_only([True, False]))
def test_the_network_is_what_neither_queues_nor_runs(extended: bool) -> None:
    with far(extended=extended) as (service, transport):
        client = service.create_lora_training_client("tiny", rank=4, seed=1)
        record = recording.Recording()
        client.record(record)
        before = len(transport.requests)
        with record.record_waits():
            client.forward(DATA[:2], "cross_entropy")
            client.optim_step().result()
        sent = transport.requests[before:]
        client.record(None)
        client.forward(DATA[:2], "cross_entropy").result()
    operations, waits = record.take()
    assert [each.name for each in operations] == ["forward", "optim_step"]
    for each in operations:
        assert each.ended is not None
        assert each.ran
        assert each.requests == (1 if extended else 2)
        # The clock of a sleep may be a little coarser.
        assert each.ended - each.begun - queue_times([each])[id(each)] - each.ran >= 0.9 * DELAY
    assert sum(each.bytes_sent for each in operations) == sum(len(each.body) for each in sent)
    assert sum(end - start for start, end in waits) >= 0.9 * DELAY
    assert waits[0][0] >= operations[0].begun


def test_queue_times_of_servers_that_do_not_report_them() -> None:
    def record(subject: str, begun: float, ended: float, posted: float | None = None) -> OperationRecord:
        return OperationRecord("forward", subject, begun, posted, ended)

    first, second, other = record("a", 0, 4), record("a", 1, 7, posted=2), record("b", 1, 3)
    assert list(queue_times([first, second, other]).values()) == [0, 3, 0]  # 1 here, 2 behind the first
    step = StepRecord(5, 0.0, 5.0, [first, second, other], [(1.0, 3.0), (4.0, 4.5)], [(4.0, 5.0)], tokens=8)
    assert step.metrics() == {
        "remote/step_s": 4.0,
        "remote/tokens_per_s": 2.0,
        "remote/forward_s": 4.0,
        "remote/queue_s": 1.0,
        "remote/wait_share": 0.5,
        "remote/in_flight": 2.5,
        "remote/bytes_sent": 0.0,
        "remote/bytes_received": 0.0,
    }
    assert step.left_in_flight == [second]


def test_the_trace_and_the_picture(service: ServiceClient, tmp_path: Path) -> None:
    monitor = RemoteMonitor(range(1, 3))
    table = SampleTable([[5, 6, 7]], every_n_steps=2, sampling_params=SamplingParams(max_tokens=2), console=False)
    trainer = quiet(
        max_steps=STEPS,
        accumulate_grad_batches=2,
        callbacks=[table, monitor],
        default_root_dir=tmp_path,
    )
    trainer.fit(new(service, Retained), loader(), loader(2, 2))
    assert monitor.files == [tmp_path / "timeline-1-2.json", tmp_path / "timeline-1-2.png"]
    trace = json.loads(monitor.files[0].read_text())
    assert trace["displayTimeUnit"] == "ms"
    events: list[dict[str, Any]] = trace["traceEvents"]
    assert {event["ph"] for event in events} == {"M", "X", "C"}
    spans = [event for event in events if event["ph"] == "X"]
    assert all(event["ts"] >= 0 and event["dur"] >= 0 for event in spans)
    names = Counter(event["name"] for event in spans)
    assert [name for name in names if name.startswith("step")] == ["step 1", "step 2"]
    assert names["sample"] == 1
    assert names["optim_step"] >= 2
    assert names["forward"] == 2 * 2 + names["validation"]
    assert names["running"] == sum("requests" in event["args"] for event in spans)
    tracks = {(event["pid"], event["tid"]) for event in events if event["name"] == "thread_name"}
    for track in tracks:  # spans of one track are nested or disjoint, as viewers require
        open_until: list[float] = []
        own = [event for event in spans if (event["pid"], event["tid"]) == track]
        for event in sorted(own, key=lambda one: (one["ts"], -one["dur"])):
            while open_until and open_until[-1] <= event["ts"] + 0.2:
                open_until.pop()
            assert not open_until or event["ts"] + event["dur"] <= open_until[-1] + 0.3, event
            open_until.append(event["ts"] + event["dur"])
    assert [event["args"]["operations"] for event in events if event["ph"] == "C"][-1] == 0
    assert monitor.files[1].read_bytes().startswith(b"\x89PNG")


def test_without_matplotlib_the_trace_is_saved(
    service: ServiceClient, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "matplotlib" else find(name))
    monitor = RemoteMonitor([0, 9], tmp_path / "some" / "trace.json")
    with caplog.at_level(logging.WARNING):
        quiet(max_steps=1, callbacks=[monitor]).fit(new(service, RemoteModule), loader())
    assert "matplotlib is not installed. Install it with: python -m pip install" in caplog.text
    assert monitor.files == [tmp_path / "some" / "trace.json"]  # of the steps there were


def test_mistakes_have_clear_errors() -> None:
    with pytest.raises(InvalidInput, match=r"steps from 0 on, got range\(0, 0\)"):
        RemoteMonitor(range(0))
    with pytest.raises(InvalidInput, match=r"path must end in \.json, got 'trace\.png'"):
        RemoteMonitor(range(3), "trace.png")
