"""Older weights of a model in training are not sampled where that would replace the weights in training (R5.4)."""

from __future__ import annotations

import asyncio
import contextlib
import pickle
from typing import TYPE_CHECKING, Any

import httpx
import pytest
import tinker

from tests.helpers.imitated_clients import BATCH, STEP, connected, model_on, preference
from tests.helpers.imitations import imitate
from tinker_lightning import ServiceClient
from tinker_lightning.client import as_backend
from tinker_lightning.errors import Unsupported

if TYPE_CHECKING:
    from collections.abc import Callable

    from tinker_lightning.client import TrainingClient
    from tinker_lightning.server import EmbeddedTrainer

PROMPT = BATCH[0].model_input


def test_sampling_from_older_weights_does_not_replace_the_model(trainer: EmbeddedTrainer) -> None:
    with imitate("skyrl", trainer=trainer) as server, connected(server) as service:
        client = model_on(service)
        old = client.save_weights_and_get_sampling_client()
        assert len(old.compute_logprobs(PROMPT).result()) == 6  # the first one is added
        client.forward_backward_custom(BATCH, preference)
        client.optim_step(STEP).result()
        with pytest.raises(Unsupported, match="would replace the weights"):
            old.compute_logprobs(PROMPT)
        client.save_weights_and_get_sampling_client().compute_logprobs(PROMPT).result()


class Overtaking(httpx.AsyncBaseTransport):
    """Holds samples back until the weights have changed or may be waiting for them, and loses the first result."""

    def __init__(self, inner: httpx.AsyncBaseTransport) -> None:
        self.inner = inner
        self.ran: list[str] = []
        self.changed = asyncio.Event()

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        name = request.url.path.rsplit("/", 1)[1]
        if name == "asample":
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self.changed.wait(), 0.05)
        if name in ("asample", "forward_backward", "optim_step", "load_weights"):
            self.ran.append(name)
        if name == "retrieve_future" and self.ran == ["asample"]:
            return httpx.Response(410)
        response = await self.inner.handle_async_request(request)
        if self.ran and self.ran[-1] != "asample":
            self.changed.set()
        return response


CHANGES: dict[str, Callable[[TrainingClient, str], Any]] = {
    "optim_step": lambda client, _: client.optim_step(STEP),
    "optim_step_async": lambda client, _: asyncio.run(client.optim_step_async(STEP)),
    "load_state": lambda client, path: client.load_state(path),
}


@pytest.mark.parametrize("change", CHANGES)
def test_weights_change_after_the_samples_in_flight(change: str, trainer: EmbeddedTrainer) -> None:
    """A sample that the server ran after the step would put the weights before it back into the model."""
    with imitate("skyrl", trainer=trainer) as server:
        transport = Overtaking(server.transport)
        with ServiceClient(base_url="http://imitated", transport=transport, dialect="skyrl") as service:
            client = model_on(service)
            path = client.save_state("state").result().path
            sampled = client.save_weights_and_get_sampling_client().compute_logprobs(PROMPT)
            CHANGES[change](client, path).result()
            assert len(sampled.result()) == 6
        assert transport.ran[:2] == ["asample", "asample"]  # again, since the first result was lost
        assert transport.ran[2] in ("optim_step", "load_weights")


def test_an_async_step_keeps_its_place_while_a_sample_is_in_flight(trainer: EmbeddedTrainer) -> None:
    """A pass that another task submits meanwhile belongs to the next step."""
    with imitate("skyrl", trainer=trainer) as server:
        transport = Overtaking(server.transport)
        with ServiceClient(base_url="http://imitated", transport=transport, dialect="skyrl") as service:
            client = model_on(service)
            sampled = client.save_weights_and_get_sampling_client().compute_logprobs(PROMPT)

            async def train() -> None:
                steps: list[Any] = [
                    client.forward_backward_async(BATCH, "cross_entropy"),
                    client.optim_step_async(STEP),
                ]
                steps += [client.forward_backward_async(BATCH, "cross_entropy"), client.optim_step_async(STEP)]
                for future in await asyncio.gather(*steps):
                    await future

            asyncio.run(train())
            assert len(sampled.result()) == 6
        assert [name for name in transport.ran if name != "asample"] == ["forward_backward", "optim_step"] * 2
        assert transport.ran.index("asample") < transport.ran.index("optim_step")


def test_other_clients_of_the_process_protect_the_model_too(trainer: EmbeddedTrainer) -> None:
    """The server sees one model, whichever client trains it or samples from it."""
    with imitate("skyrl", trainer=trainer, hold=1.0, encoding="protobuf") as server:  # as this SDK needs it
        official = tinker.ServiceClient(base_url=server.url, api_key="tml-any")
        wrapped: Any = as_backend(official.create_lora_training_client(base_model="tiny", rank=4).result())
        named, unnamed = wrapped.save_weights_for_sampler("named"), wrapped.save_weights_and_get_sampling_client()
        path = named.result().path
        by_path = wrapped.create_sampling_client(path)
        with ServiceClient(base_url=server.url) as other:
            ours = other.create_sampling_client(path)
            for sampler in (unnamed, by_path, ours):
                sampler.compute_logprobs(PROMPT).exception()  # this SDK does not read the results of such servers
            assert server.ran["asample"] == 3
            wrapped.forward_backward_custom(BATCH, preference)
            wrapped.optim_step(STEP).result()
            for sampler in (unnamed, by_path, ours):
                with pytest.raises(Unsupported, match=f"replace the weights of {wrapped.model_id} on {server.url}"):
                    sampler.compute_logprobs(PROMPT)
            wrapped.save_weights_and_get_sampling_client("new").compute_logprobs(PROMPT).exception()
            assert server.ran["asample"] == 4
        official.holder.close()


def test_a_sampler_of_a_model_in_training_stays_in_its_process(trainer: EmbeddedTrainer) -> None:
    """A copy on SkyRL would not know that its weights are no longer the present ones, and replace those."""
    with imitate("skyrl", trainer=trainer) as server, ServiceClient(base_url=server.url) as service:
        client = model_on(service)
        sampler = client.save_weights_and_get_sampling_client()
        for copy in (pickle.dumps, type(sampler).get_sampler_handle):
            with pytest.raises(Unsupported, match=f"because {client.model_id} is trained in this one"):
                copy(sampler)
        pickle.dumps(service.create_sampling_client(base_model="tiny"))  # nobody trains these weights
