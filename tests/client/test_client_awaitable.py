"""Clients as futures of themselves: how code for SDK 0.38 uses what creates them."""

from __future__ import annotations

import asyncio
import concurrent.futures
import gc
import threading
import time
from typing import TYPE_CHECKING, Any

import httpx
import pytest

from tests.helpers.backends import QUICK
from tests.helpers.client_data import DATA
from tinker_lightning import ModelInput, SamplingParams
from tinker_lightning.client import ServiceClient, TrainingClient, as_backend
from tinker_lightning.errors import NotFound, ResultTimeout, Unsupported
from tinker_lightning.server import create_app

if TYPE_CHECKING:
    from tests.helpers.backends import Recorded
    from tinker_lightning.server import EmbeddedTrainer

PROMPT, PARAMS = ModelInput.from_ints([72, 101]), SamplingParams(max_tokens=2, seed=1)


def test_a_client_is_the_future_of_itself(service: ServiceClient, model: TrainingClient) -> None:  # R5.17
    path = model.save_state("state").result().path
    for client in (
        model,
        service.create_training_client_from_state(path),
        service.create_training_client_from_state_with_optimizer(path),
        service.create_sampling_client(base_model="tiny"),
        model.save_weights_and_get_sampling_client(),
        model.save_weights_and_get_sampling_client("named"),
        model.create_sampling_client(str(model.save_weights_for_sampler("named-too").result().path)),
    ):
        assert client.result() is client.result(timeout=0.0) is client.future().result() is client

        async def use(client: Any = client) -> None:
            assert await client is await client.result_async(timeout=1.0) is client
            assert await asyncio.create_task(client.coroutine()) is client

        asyncio.run(use())


class Slow(httpx.ASGITransport):
    """Keeps a server from creating models and samplers until the event is set."""

    def __init__(self, trainer: EmbeddedTrainer) -> None:
        super().__init__(create_app(trainer))
        self.go_on = threading.Event()

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        if request.url.path.endswith(("create_model", "create_sampling_session")):
            await asyncio.to_thread(self.go_on.wait, 10)
        return await super().handle_async_request(request)


def test_creating_clients_does_not_block_an_event_loop(shared: EmbeddedTrainer) -> None:  # R5.17
    slow = Slow(shared)

    async def use(service: ServiceClient) -> None:
        model, sampler = service.create_lora_training_client("tiny", 2), service.create_sampling_client(None, "tiny")
        assert isinstance(model, TrainingClient)
        with pytest.raises(ResultTimeout, match=r"create_lora_training_client: no result within 0\.05 s"):
            await model.result_async(timeout=0.05)
        assert not sampler.future().done()
        slow.go_on.set()
        # The objects themselves can be used, as plain ones, and waited for in any order.
        assert as_backend(model) is await model is model
        assert model.model_id == model.get_info().model_id
        assert await sampler.sample(PROMPT, 1, PARAMS) == sampler.sample(PROMPT, 1, PARAMS).result()
        with pytest.raises(AttributeError, match="'TrainingClient' object has no attribute 'no_such_name'"):
            model.no_such_name  # type: ignore[attr-defined]  # noqa: B018

    with ServiceClient(base_url="http://embedded", transport=slow, retry_policy=QUICK) as service:
        asyncio.run(use(service))


def test_a_save_keeps_its_position_among_the_calls(recorded: Recorded) -> None:  # R5.17
    """The weights are those at the call, although the client is created later."""

    async def use() -> None:
        model = await recorded.service.create_lora_training_client("tiny", 2)
        model.forward_backward(DATA, "cross_entropy")
        model.optim_step()
        sampler = model.save_weights_and_get_sampling_client()
        model.forward_backward(DATA, "cross_entropy")
        step = model.optim_step()
        then = await sampler
        await step
        assert await then.compute_logprobs(PROMPT) != await (
            await model.save_weights_and_get_sampling_client()
        ).compute_logprobs(PROMPT)

    asyncio.run(use())
    expected = ["forward_backward", "optim_step", "save_weights_for_sampler", "forward_backward", "optim_step"]
    paths = recorded.paths()
    assert paths[paths.index("forward_backward") :][:5] == expected


def test_a_creation_that_fails_raises_where_the_client_is_used(recorded: Recorded) -> None:  # R4.5
    async def use(service: ServiceClient) -> None:
        failing = service.create_lora_training_client("no-such-model")
        for _ in range(2):
            with pytest.raises(NotFound, match="no-such-model"):
                await failing
        with pytest.raises(NotFound, match="no-such-model"):
            failing.forward(DATA, "cross_entropy")
        with pytest.raises(NotFound, match="tinker://a/weights/b"):
            await service.create_sampling_client("tinker://a/weights/b")
        assert (await service.create_lora_training_client("tiny", 2)).model_id  # failures that were read

    asyncio.run(use(recorded.service))


def use_until(deadline: float, service: ServiceClient) -> None:
    while time.monotonic() < deadline:
        gc.collect()
        service.create_rest_client()


@pytest.mark.parametrize("kept_as", ["client", "future", "future of a failure"])
def test_a_failed_creation_that_nobody_reads_is_raised_later(shared: EmbeddedTrainer, kept_as: str) -> None:  # R4.5
    kept: list[Any] = []

    async def drop(service: ServiceClient) -> None:
        client = service.create_lora_training_client("no-such-model")
        if kept_as == "future of a failure":
            concurrent.futures.wait([client.future()])
        if kept_as != "client":
            kept.append(client.future())

    with ServiceClient(base_url="http://embedded", transport=httpx.ASGITransport(create_app(shared))) as service:
        asyncio.run(drop(service))
        with pytest.raises(NotFound, match="no-such-model"):
            use_until(time.monotonic() + 30, service)
        asyncio.run(drop(service))
        with pytest.raises(NotFound, match="no-such-model"):
            service.close()


def test_a_failure_that_the_future_of_a_client_has_raised_is_read(shared: EmbeddedTrainer) -> None:  # R4.5
    async def read(service: ServiceClient) -> None:
        with pytest.raises(NotFound, match="no-such-model"):
            await asyncio.wrap_future(service.create_lora_training_client("no-such-model").future())
        client = await asyncio.wrap_future(service.create_lora_training_client("tiny", 2).future())
        assert client.get_info().lora_rank == 2

    with ServiceClient(base_url="http://embedded", transport=httpx.ASGITransport(create_app(shared))) as service:
        asyncio.run(read(service))


def test_weights_that_later_saves_replace_are_refused_by_name(model: TrainingClient) -> None:  # R5.17
    with pytest.raises(Unsupported, match=r"kind='inflight' is not supported.*create another sampling client"):
        model.save_weights_and_get_sampling_client(kind="inflight")  # type: ignore[arg-type]
    assert model.save_weights_and_get_sampling_client(kind="snapshot").sample(PROMPT, 1, PARAMS).result().sequences
