"""What is charged is released with what it was charged for, and not before."""  # R5.11

from __future__ import annotations

import asyncio
import gc
import json
import time
import weakref
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import pytest
from starlette.requests import ClientDisconnect

from tinker_lightning.errors import MemoryLimitExceeded
from tinker_lightning.server import EmbeddedTrainer, create_app
from tinker_lightning.server.endpoints import futures
from tinker_lightning.server.trainer.jobs import JOB_BYTES
from tinker_lightning.types import LoraConfig
from tinker_lightning.types import requests as rq

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.helpers.api import Api


@pytest.fixture
def small(tmp_path: Path) -> Iterator[EmbeddedTrainer]:
    """A trainer whose sessions have a few megabytes each for their messages."""
    trainer = EmbeddedTrainer(["tiny"], data_dir=tmp_path, memory_limit=64 << 20)
    yield trainer
    trainer.close()


def test_a_session_without_memory_can_be_finished(small: EmbeddedTrainer) -> None:
    session = small.open_session()
    request = rq.CreateModelRequest(session.session_id, 0, "tiny")
    model_id = small.training.create_model(request).future.result(60).model_id

    def wait_for_number_1() -> None:
        for number in range(2, 10_000):
            small.training.optim_step(rq.OptimStepRequest(model_id, number))

    with pytest.raises(MemoryLimitExceeded, match="Fetch the results of earlier requests"):
        wait_for_number_1()
    assert small.memory.used("messages") > 1000 * JOB_BYTES
    small.training.unload_model(rq.UnloadModelRequest(model_id)).future.result(60)
    assert small.memory.used("weights") == 0
    small.finish_session(session.session_id)
    small.scheduler.find(f"{session.session_id}:finish").future.result(60)
    assert small.scheduler.find(f"{model_id}:2").future.exception(60) is not None


@pytest.mark.parametrize("fails", [False, True])
def test_metadata_of_models_is_charged_as_long_as_it_is_kept(small: EmbeddedTrainer, fails: bool) -> None:
    session = small.open_session()
    metadata = {"values": list(range(10_000))}
    model_ids = []
    for number in range(40):
        config = LoraConfig(10_000 if fails else 4)
        creation = small.training.create_model(
            rq.CreateModelRequest(session.session_id, number, "tiny", lora_config=config, user_metadata=metadata)
        )
        assert (creation.future.exception(60) is not None) == fails
        small.scheduler.mark_fetched(creation)
        model_ids.append(creation.request_id.removesuffix(":create"))
    kept = [model_id for model_id in model_ids if small.registry.model(model_id).metadata["user_metadata"] is not None]
    assert kept == model_ids[-len(kept) :]  # the oldest was dropped
    assert 1 <= len(kept) < 40
    assert small.memory.used("messages") > len(kept) * 10_000 * 8
    small.finish_session(session.session_id)
    small.scheduler.find(f"{session.session_id}:finish").future.result(60)
    assert small.memory.used("messages") <= 40 * (JOB_BYTES + 100)
    assert small.memory.used("weights") == 0


def test_an_encoded_result_is_charged_until_it_was_sent(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(futures, "_SENT_BYTES", 32)
    memory = api.trainer.memory
    request_id = api.submit("forward_backward", api.train(api.model(), 1))
    api.result(request_id)
    before = memory.used("messages")
    charged: list[int] = []
    sent: list[dict[str, Any]] = []

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": json.dumps({"request_id": request_id}).encode()}

    async def send(message: Any) -> None:
        sent.append(message)
        charged.append(memory.used("messages") - before)
        if len(sent) == 4:
            raise ConnectionError("closed")

    headers = [(b"content-type", b"application/json"), (b"accept", b"application/x-protobuf"), (b"host", b"localhost")]
    scope: dict[str, Any] = {"type": "http", "method": "POST", "path": "/api/v1/retrieve_future", "headers": headers}
    scope["query_string"] = b""
    with pytest.raises(ConnectionError):
        asyncio.run(create_app(api.trainer)(scope, receive, send))
    length = int(dict(sent[0]["headers"])[b"content-length"])
    assert charged == [length] * 4
    assert [len(message["body"]) for message in sent[1:]] == [32] * 3
    assert memory.used("messages") == before


@pytest.mark.parametrize("accept", ["application/json", "application/x-protobuf"])
def test_a_result_counts_as_fetched_once_all_of_it_was_sent(
    api: Api, monkeypatch: pytest.MonkeyPatch, accept: str
) -> None:
    """Fetched results are evicted first, and a client that got a part or HTTP 429 asks again."""
    monkeypatch.setattr(futures, "_SENT_BYTES", 32)
    monkeypatch.setattr(futures, "_LARGE_RESULT", 1)
    request_id = api.submit("forward_backward", api.train(api.model(), 1))
    job = api.trainer.scheduler.find(request_id)
    job.future.result(60)
    headers = [(b"content-type", b"application/json"), (b"accept", accept.encode()), (b"host", b"localhost")]
    scope: dict[str, Any] = {"type": "http", "method": "POST", "path": "/api/v1/retrieve_future", "headers": headers}
    scope |= {"query_string": b"", "asgi": {"spec_version": "2.4"}}

    def fetch(parts: int) -> list[Any]:
        sent: list[Any] = []

        async def receive() -> dict[str, Any]:
            return {"type": "http.request", "body": json.dumps({"request_id": request_id}).encode()}

        async def send(message: Any) -> None:
            sent.append(message)
            if len(sent) == parts:
                raise ConnectionError("closed")

        with suppress(ConnectionError, ClientDisconnect):
            asyncio.run(create_app(api.trainer)(dict(scope), receive, send))
        return sent

    with monkeypatch.context() as full:
        full.setattr(api.trainer.memory, "_fair_growth", lambda _: 0)
        assert fetch(1000)[0]["status"] == 429
    assert len(fetch(4)) == 4
    assert job._charge is not None
    states = [(job.fetched, job._charge.expendable)]
    assert not fetch(1000)[-1]["more_body"]
    states.append((job.fetched, job._charge.expendable))
    assert states == [(False, False), (True, True)]


def test_a_result_that_is_being_sent_stays_charged_when_it_is_forgotten(
    api: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A client that asks for many results and reads none of them must not take memory that nobody counts."""
    monkeypatch.setattr(futures, "_LARGE_RESULT", 1)
    scheduler, memory = api.trainer.scheduler, api.trainer.memory
    request_id = api.submit("forward_backward", api.train(api.model(), 1))
    api.result(request_id)
    job = scheduler.find(request_id)
    before = memory.used("messages")
    charged: list[int] = []

    received: list[bytes] = []

    async def receive() -> dict[str, Any]:
        if received:
            await asyncio.sleep(60)  # until the response is complete
        received.append(json.dumps({"request_id": request_id}).encode())
        return {"type": "http.request", "body": received[0]}

    async def send(_: Any) -> None:
        scheduler._forget(job)
        charged.append(memory.used("messages"))

    headers = [(b"content-type", b"application/json"), (b"host", b"localhost")]
    scope: dict[str, Any] = {"type": "http", "method": "POST", "path": "/api/v1/retrieve_future", "headers": headers}
    scope["query_string"] = b""
    asyncio.run(create_app(api.trainer)(scope, receive, send))
    assert charged[0] == charged[-1] == before
    assert memory.used("messages") <= before - JOB_BYTES
    # It was evicted after it was found: it is charged again, or there is no memory for it.
    with job.sending():
        assert memory.used("messages") == before


def test_weights_are_charged_while_they_are_loaded_for_a_sampler(
    small: EmbeddedTrainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    session = small.open_session()
    model = small.training.create_model(rq.CreateModelRequest(session.session_id, 0, "tiny")).future.result(60)
    save = rq.SaveWeightsForSamplerRequest(model.model_id, 1, path="saved")
    path = small.training.save_weights_for_sampler(save).future.result(60).path
    charged: list[int] = []
    load = small.store.load

    def watched(*args: Any, **options: Any) -> Any:
        charged.append(small.memory.used("work"))
        return load(*args, **options)

    monkeypatch.setattr(small.store, "load", watched)
    sampler = small.sampling.create_sampling_session(
        rq.CreateSamplingSessionRequest(session.session_id, 0, model_path=path)
    )
    assert charged[0] >= sampler.size > 0
    assert small.memory.used("work") == 0
    monkeypatch.setattr(small.memory, "limit", 1 << 10)
    with pytest.raises(MemoryLimitExceeded, match="Create fewer samplers at once, or save weights of a lower rank"):
        small.sampling.create_sampling_session(rq.CreateSamplingSessionRequest(session.session_id, 1, model_path=path))


def test_an_evicted_result_is_freed_at_once(api: Api) -> None:
    """The garbage collector would free it later: it runs rarely in a process with many objects."""
    sampler = api.sampler()
    ids = [
        api.submit("forward_backward", api.train(api.model(), 1)),
        api.submit("asample", api.sample(sampler, 0)),
    ]
    gc.disable()
    try:
        for request_id in ids:
            api.result(request_id)
            job = api.trainer.scheduler.find(request_id)
            with job.sending():
                result = weakref.ref(job)
            api.trainer.scheduler._forget(job)
            del job
            deadline = time.monotonic() + 10
            while result() is not None and time.monotonic() < deadline:
                time.sleep(0.01)  # the worker may still be at its last statement
            assert result() is None
    finally:
        gc.enable()
