"""A failure that nobody reads is raised at the client's next use, once, with its name."""

from __future__ import annotations

import asyncio
import gc
from threading import current_thread
from typing import TYPE_CHECKING, Any

import httpx
import pytest

from tests.helpers.client_data import DATA
from tinker_lightning import AdamParams, ModelInput, SamplingParams
from tinker_lightning.client import ServiceClient, TrainingClient
from tinker_lightning.errors import ClientClosed, InvalidInput, LossWithoutGradient, NotFound, TinkerLightningError
from tinker_lightning.server import create_app
from tinker_lightning.testing import embedded_service
from tinker_lightning.types.requests import CreateModelRequest

if TYPE_CHECKING:
    import threading
    from collections.abc import Callable

    from tinker_lightning.client import TinkerFuture
    from tinker_lightning.server import EmbeddedTrainer

FAILING: dict[str, Callable[[TrainingClient], TinkerFuture[Any]]] = {
    "forward": lambda model: model.forward(DATA, "no_such_loss"),
    "forward_backward": lambda model: model.forward_backward(DATA, "no_such_loss"),
    "save_state": lambda model: model.save_state("no/name"),
    "load_state": lambda model: model.load_state("tinker://nobody/weights/nothing"),
    "load_state_with_optimizer": lambda model: model.load_state_with_optimizer("tinker://nobody/weights/nothing"),
    "save_weights_for_sampler": lambda model: model.save_weights_for_sampler("no/name"),
}
NEXT: dict[str, Callable[[TrainingClient], Any]] = {
    "forward": lambda model: model.forward(DATA, "cross_entropy"),
    "forward_backward_custom": lambda model: model.forward_backward_custom(DATA, lambda _, lp: (lp[0].sum(), {})),
    "optim_step": lambda model: model.optim_step(),
    "save_state": lambda model: model.save_state("any"),
    "get_info": lambda model: model.get_info(),
    "sampler": lambda model: model.save_weights_and_get_sampling_client(),
}


@pytest.mark.parametrize("operation", FAILING)
def test_a_failure_that_nobody_reads_is_raised_at_the_next_call(model: TrainingClient, operation: str) -> None:  # R4.5
    future = FAILING[operation](model)
    future.wait()
    with pytest.raises(TinkerLightningError) as caught:
        model.optim_step()
    error = caught.value
    assert future.exception() is error
    assert (error.operation, error.model_id, error.seq_id) == (operation, model.model_id, 1)
    assert str(error).startswith(f"{operation}: ")
    assert f"({operation} 1 of {model.model_id}" in str(error)
    # A request that was rejected at once has no id.
    assert error.request_id in (f"{model.model_id}:1", None)
    assert error.request_id is None or f"request {error.request_id}" in str(error)
    model.optim_step().result()  # it was raised, and is not raised again


@pytest.mark.parametrize("call", NEXT)
def test_every_call_raises_it(model: TrainingClient, call: str) -> None:
    future = model.forward(DATA, "no_such_loss")
    future.wait()
    with pytest.raises(InvalidInput, match="no_such_loss") as caught:
        NEXT[call](model)
    assert caught.value.request_id == f"{model.model_id}:1"
    NEXT[call](model)
    model.optim_step(AdamParams()).result()


def test_a_step_that_fails_unread_is_raised_too(model: TrainingClient, service: ServiceClient) -> None:
    other = TrainingClient(service._channel, service.losses, "nobody", CreateModelRequest("", 0, "tiny"))
    future = other.optim_step()
    future.wait()
    with pytest.raises(NotFound, match=r"optim_step: .*there is no model 'nobody'.*optim_step 1 of nobody") as caught:
        other.forward(DATA, "cross_entropy")
    assert (caught.value.operation, caught.value.model_id, caught.value.seq_id) == ("optim_step", "nobody", 1)


def test_samplers_raise_theirs(service: ServiceClient) -> None:
    sampler = service.create_sampling_client(base_model="tiny")
    unknown = ModelInput.from_ints([99999])
    asked: dict[str, Callable[[], TinkerFuture[Any]]] = {
        "sample": lambda: sampler.sample(unknown, 1, SamplingParams(max_tokens=1)),
        "compute_logprobs": lambda: sampler.compute_logprobs(unknown),
    }
    for operation, ask in asked.items():
        future = ask()
        future.wait()
        with pytest.raises(InvalidInput, match=f"99999.*{operation} [01] of {sampler.sampler_id}") as caught:
            sampler.sample(ModelInput.from_ints([1]), 1, SamplingParams(max_tokens=1))
        assert (caught.value.operation, caught.value.model_id) == (operation, sampler.sampler_id)
        assert caught.value.seq_id == ("sample", "compute_logprobs").index(operation)
        assert future.exception() is caught.value


def test_what_was_read_is_not_raised_again(model: TrainingClient) -> None:
    first = model.forward(DATA, "no_such_loss")
    with pytest.raises(InvalidInput):
        first.result()
    second = model.forward(DATA, "no_such_loss")
    assert isinstance(second.exception(), InvalidInput)
    third = model.forward(DATA, "no_such_loss")
    with pytest.raises(InvalidInput):
        asyncio.run(_awaited(third))
    model.optim_step().result()


async def _awaited(future: Any) -> Any:
    return await future


def test_several_failures_are_raised_as_one(model: TrainingClient, held: threading.Event) -> None:
    futures = [model.forward(DATA, "ppo", {f"setting_{i}": 1.0}) for i in range(2)]
    held.set()  # not before: the first failure would be raised by the second call
    for future in futures:
        future.wait()
    with pytest.raises(InvalidInput, match="setting_0") as caught:
        model.optim_step()
    (note,) = caught.value.__notes__
    assert "setting_1" in note
    model.optim_step().result()


def test_close_raises_what_nobody_has_read(shared: EmbeddedTrainer, held: threading.Event) -> None:
    service = ServiceClient(base_url="http://embedded", transport=httpx.ASGITransport(create_app(shared)))
    model = service.create_lora_training_client("tiny", rank=4)
    for i in range(2):
        model.forward(DATA, "ppo", {f"setting_{i}": 1.0})
    held.set()
    with pytest.raises(InvalidInput, match=f"setting_0.*forward 1 of {model.model_id}") as caught:
        service.close()
    assert any("setting_1" in note for note in caught.value.__notes__)
    service.close()
    with pytest.raises(ClientClosed, match=r"Create a new one with connect\(\)"):
        model.optim_step()


def test_failures_of_a_collected_client_are_not_lost(shared: EmbeddedTrainer) -> None:
    service = ServiceClient(base_url="http://embedded", transport=httpx.ASGITransport(create_app(shared)))

    def work() -> None:
        model = service.create_lora_training_client("tiny", rank=4)
        model.forward(DATA, "cross_entropy").result()
        model.forward(DATA, "no_such_loss").wait()

    work()
    gc.collect()
    with pytest.raises(InvalidInput, match="no_such_loss"):
        service.create_sampling_client(base_model="tiny")
    work()
    gc.collect()
    with pytest.raises(InvalidInput, match="no_such_loss"):
        service.close()


def test_an_error_of_the_users_is_not_hidden_by_a_failure(shared: EmbeddedTrainer) -> None:
    def work() -> None:
        with embedded_service(shared) as service:
            service.create_lora_training_client("tiny", rank=4).forward(DATA, "no_such_loss").wait()
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        work()


def test_close_evaluates_a_custom_loss_that_nobody_has_read(shared: EmbeddedTrainer) -> None:
    evaluated = []

    def loss(_: list[Any], logprobs: list[Any]) -> Any:
        evaluated.append(len(logprobs))
        return logprobs[0].sum()

    client = ServiceClient(base_url="http://embedded", transport=httpx.ASGITransport(create_app(shared)))
    client.create_lora_training_client("tiny", rank=4).forward_backward_custom(DATA, loss)
    client.close()
    assert evaluated == [len(DATA)]


def test_close_raises_the_failure_of_a_custom_loss_that_nobody_has_read(shared: EmbeddedTrainer) -> None:
    client = ServiceClient(base_url="http://embedded", transport=httpx.ASGITransport(create_app(shared)))
    model = client.create_lora_training_client("tiny", rank=4)
    model.forward_backward_custom(DATA, lambda _, lp: lp[0].detach().sum())
    with pytest.raises(LossWithoutGradient, match="does not depend on the log-probabilities"):
        client.close()
    with pytest.raises(ClientClosed):
        model.get_info()


def test_failures_of_a_rest_client_are_raised_later(shared: EmbeddedTrainer) -> None:  # R4.5
    missing = "tinker://nobody/weights/nothing"
    service = ServiceClient(base_url="http://embedded", transport=httpx.ASGITransport(create_app(shared)))
    rest = service.create_rest_client()
    rest.delete_checkpoint_from_tinker_path(missing).wait()
    with pytest.raises(NotFound, match="nobody"):
        rest.list_sessions()
    assert rest.list_sessions().result()
    rest.delete_checkpoint_from_tinker_path(missing)
    with pytest.raises(NotFound, match="nobody"):
        service.close()


def test_an_external_save_of_async_code_evaluates_losses_where_the_others_do(shared: EmbeddedTrainer) -> None:
    threads = []

    def loss(_: list[Any], logprobs: list[Any]) -> Any:
        threads.append(current_thread())
        return logprobs[0].sum(), {}

    async def save(service: ServiceClient) -> None:
        model = await service.create_lora_training_client_async("tiny", rank=4)
        await model.forward_backward_custom_async(DATA, loss)
        saving = await model.save_weights_external_async("early")
        info = await model.save_weights_for_sampler_async("late")
        assert (await saving).path.endswith("/early")
        assert ((await info).path or "").endswith("/late")
        assert threads == [current_thread()]

    with embedded_service(shared) as service:
        asyncio.run(save(service))
