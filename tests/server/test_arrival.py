"""Bodies that arrive slowly: they are rejected, or make room for others."""  # R5.11

from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING, Any

import pytest

from tinker_lightning.errors import MemoryLimitExceeded
from tinker_lightning.server import EmbeddedTrainer, bodies, create_app

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

MIB = 1 << 20


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Measures every 20 ms, and rejects bodies with fewer than 1000 bytes in 100 ms."""
    monkeypatch.setattr(bodies, "BODY_SECONDS", 0.1)
    monkeypatch.setattr(bodies, "_LEAST_BYTES", 1000)
    monkeypatch.setattr(bodies, "_LOOK_SECONDS", 0.02)
    monkeypatch.setattr(bodies, "_FAST_BYTES", 100_000)


@pytest.fixture
def trainer(tmp_path: Path) -> Iterator[EmbeddedTrainer]:
    """A trainer with 16 MiB for messages, half of it for bodies."""
    trainer = EmbeddedTrainer(["tiny"], data_dir=tmp_path, memory_limit=64 * MIB)
    yield trainer
    trainer.close()


class Upload:
    """A request whose body is sent part by part."""

    def __init__(self, trainer: EmbeddedTrainer) -> None:
        self._parts: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        self._sent: list[Any] = []
        headers = [(b"content-type", b"application/json"), (b"host", b"localhost")]
        scope: dict[str, Any] = {"type": "http", "method": "POST", "path": "/api/v1/create_session"}
        scope |= {"headers": headers, "query_string": b""}

        async def send(message: Any) -> None:
            self._sent.append(message)

        app: Any = create_app(trainer)
        self._task = asyncio.create_task(app(scope, self._parts.get, send))

    async def send(self, part: bytes, *, more: bool = True) -> None:
        self._parts.put_nowait({"type": "http.request", "body": part, "more_body": more})
        await asyncio.sleep(0)

    @property
    def is_answered(self) -> bool:
        return self._task.done()

    async def answer(self) -> tuple[int, str]:
        await asyncio.wait_for(self._task, 60)
        return self._sent[0]["status"], str(json.loads(self._sent[1]["body"]).get("detail"))


def test_a_trickled_body_is_rejected_and_a_slow_one_is_not(trainer: EmbeddedTrainer) -> None:
    async def upload() -> None:
        trickled, slow = Upload(trainer), Upload(trainer)
        for part in (trickled, slow):
            await part.send(b" " * 2000)
        while not trickled.is_answered:
            await trickled.send(b" ")
            await slow.send(b" " * 500)
            await asyncio.sleep(0.01)
        status, detail = await trickled.answer()
        assert status == 408
        assert "bytes of the body arrived in 0.1 s; at least 1000 bytes are required. Check the network" in detail
        await slow.send(b"{}", more=False)
        assert (await slow.answer())[0] == 200

    asyncio.run(upload())
    assert trainer.memory.used("messages") < 10_000


def test_slow_bodies_make_room_for_others_but_not_for_each_other(trainer: EmbeddedTrainer) -> None:
    async def upload() -> None:
        slow = [Upload(trainer) for _ in range(2)]
        for each in slow:
            await each.send(b" " * (19 * MIB // 10))
        await asyncio.sleep(0.05)
        await slow[1].send(b" " * MIB)  # more than is left
        status, detail = await slow[1].answer()
        assert status == 429
        assert "of 8 MiB are free at the moment" in detail
        assert not slow[0].is_answered
        # One that arrives at once gets the memory of the slow one.
        large = Upload(trainer)
        await large.send(b" " * (5 * MIB // 2))
        status, detail = await slow[0].answer()
        assert status == 429
        assert "arrived at less than 4.77 MiB per second, and other requests needed the 3.8 MiB" in detail
        assert "within the memory limit of 64 MiB. Send it again later" in detail
        await large.send(b"{}", more=False)
        assert (await large.answer())[0] == 200

    asyncio.run(upload())
    assert trainer.memory.used("messages") < 10_000


def test_a_slow_body_evicts_results_that_were_fetched(trainer: EmbeddedTrainer) -> None:
    """A client with a slow uplink would otherwise be rejected for as long as nobody else needs memory."""
    evicted: list[str] = []
    for owner in "abc":
        trainer.memory.charge(
            "a result", 5 * MIB, "messages", owner=owner, evict=lambda: evicted.append("result"), expendable=True
        )

    async def upload() -> None:
        slow = Upload(trainer)
        await slow.send(b" " * 2000)
        await asyncio.sleep(0.05)
        await slow.send(b" " * MIB)
        await slow.send(b"{}", more=False)
        assert (await slow.answer())[0] == 200

    asyncio.run(upload())
    assert evicted == ["result"]


def test_a_body_that_was_received_is_not_slow_any_more(trainer: EmbeddedTrainer) -> None:
    """Decompressing it may evict those that are still arriving."""

    async def upload() -> None:
        slow = Upload(trainer)
        await slow.send(b" " * (3 * MIB))
        with trainer.memory.charge("a body", 0, "messages") as charge:
            received = bodies.Arrival(charge)
            async with received:
                received.grow(2000)
                await asyncio.sleep(0.05)
                with pytest.raises(MemoryLimitExceeded):
                    received.charge(3 * MIB)
            received.charge(3 * MIB)
        assert (await slow.answer())[0] == 429

    asyncio.run(upload())


def test_bodies_that_arrive_fast_keep_their_memory(trainer: EmbeddedTrainer) -> None:
    async def upload() -> None:
        first, second = Upload(trainer), Upload(trainer)
        await first.send(b" " * (5 * MIB // 2))
        await second.send(b" " * (2 * MIB))
        assert (await second.answer())[0] == 429
        await first.send(b"{}", more=False)
        assert (await first.answer())[0] == 200

    asyncio.run(upload())


def test_closing_after_the_loop_has_ended_does_nothing() -> None:
    async def begin() -> bodies.Arrival:
        return bodies.Arrival()

    asyncio.run(begin()).close()


def test_half_of_a_body_does_not_delay_the_shutdown(trainer: EmbeddedTrainer) -> None:
    async def upload() -> None:
        half = Upload(trainer)
        await half.send(b"{")
        trainer.closing.announce()
        status, detail = await half.answer()
        assert status == 503
        assert "the server is shutting down" in detail

    asyncio.run(upload())
