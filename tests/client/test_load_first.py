"""States on a server that loads them only into new models, as hosted Tinker does (R5.3, R5.4)."""

from __future__ import annotations

import asyncio
import contextlib
import time
from typing import TYPE_CHECKING, Any

import pytest
import tinker
import torch

from tests.helpers.backends import SDK_KEY
from tests.helpers.imitations.load_first import (
    HOSTED,
    IN_TWO_REQUESTS,
    LOADINGS,
    LoadFirst,
    load_first_service,
    loading,
)
from tests.helpers.reference import bits
from tinker_lightning import AdamParams, Datum, SamplingParams
from tinker_lightning.client import as_backend
from tinker_lightning.client.dialects import dialect_named
from tinker_lightning.doctor import CHECKS, examine
from tinker_lightning.errors import InvalidInput, NotFound, Unsupported
from tinker_lightning.server import EmbeddedTrainer, create_app

if TYPE_CHECKING:
    from starlette.types import Receive, Scope, Send

    from tests.helpers.backends import Running
    from tests.helpers.imitations.load_first import Loading
    from tinker_lightning.client import ServiceClient
    from tinker_lightning.client.dialects import Dialect

DATA = [Datum.from_tokens(list(text)) for text in (b"All happy families", b"are alike")]
ADAM = AdamParams(learning_rate=1e-2)
BOTH = pytest.mark.parametrize("dialect", [HOSTED, IN_TWO_REQUESTS], ids=["one request", "two requests"])


def squares(_: list[Any], logprobs: list[torch.Tensor]) -> tuple[torch.Tensor, dict[str, float]]:
    return torch.cat(logprobs).square().mean(), {}


def train(model: Any) -> None:
    model.forward_backward_custom(DATA, squares)
    model.optim_step(ADAM).result()


def endpoints(service: Any) -> list[str]:
    return [request.path.rsplit("/", 1)[1] for request in service.transport.requests]


def wait_until_unloaded(trainer: EmbeddedTrainer, model_id: str) -> None:
    deadline = time.monotonic() + 10
    while trainer.registry.model(model_id).adapter is not None:
        assert time.monotonic() < deadline, f"{model_id} is still there"
        time.sleep(0.01)


@pytest.mark.parametrize("optimizer", [True, False], ids=["with optimizer", "weights only"])
@pytest.mark.parametrize("how", LOADINGS)
def test_a_load_in_the_middle_of_training_ends_with_the_same_bits(
    how: Loading, optimizer: bool, trainer: EmbeddedTrainer
) -> None:
    """Also if a window is open, and if nobody waits for the load."""

    def run(service: ServiceClient) -> dict[str, bytes]:
        model = service.create_lora_training_client("tiny", rank=4, seed=1)
        load = model.load_state_with_optimizer if optimizer else model.load_state
        train(model)
        path = model.save_state("one").result().path
        train(model)
        model.forward_backward(DATA, "cross_entropy")
        pending = model.forward_backward_custom(DATA, squares)
        load(path)
        train(model)
        assert pending.result().metrics
        load(model.save_state("two").result().path).result()
        train(model)
        return bits(trainer, model.model_id)

    with loading("in place", trainer) as service:
        expected = run(service)
    with loading(how, trainer) as service:
        assert run(service) == expected


@BOTH
def test_another_model_takes_the_place_of_the_earlier_one(dialect: Dialect, trainer: EmbeddedTrainer) -> None:
    """Its states and samplers are kept, and it is unloaded when the new one is ready."""
    with load_first_service(trainer, dialect=dialect, record=True) as service:
        model = service.create_lora_training_client("tiny", rank=4, seed=1, user_metadata={"a": "b"})
        train(model)
        earlier, path = model.model_id, model.save_state("one").result().path
        sampler = model.save_weights_and_get_sampling_client()
        greedy = SamplingParams(max_tokens=4, temperature=0.0)
        tokens = sampler.sample(DATA[0].model_input, 1, greedy).result().sequences[0].tokens
        loaded = model.load_state_with_optimizer(path).result()
        assert model.model_id == loaded.model_id != earlier
        wait_until_unloaded(trainer, earlier)
        asked = endpoints(service)
        assert asked.count("create_model") == (1 if dialect is HOSTED else 2)
        assert asked.index("load_weights") < asked.index("unload_model")
        creation = "load_weights" if dialect is HOSTED else "create_model"
        created = [each.message for each in service.transport.requests if each.path.endswith(creation)][-1]
        assert created["user_metadata"] == {"a": "b"}
        assert model.get_info().lora_rank == 4
        assert sampler.sample(DATA[0].model_input, 1, greedy).result().sequences[0].tokens == tokens
        second = model.save_state("two").result().path
        assert (second.split("/")[2], path.split("/")[2]) == (model.model_id, earlier)
        model.load_state(path).result()
        model.load_state_with_optimizer(second).result()
        model.optim_step(ADAM).result()


@BOTH
def test_a_state_is_created_in_few_requests(dialect: Dialect, trainer: EmbeddedTrainer) -> None:
    with load_first_service(trainer, dialect=dialect, record=True) as service:
        path = service.create_lora_training_client("tiny", rank=4, seed=1).save_state("one").result().path
        service.transport.requests.clear()
        for name in ("load_state", "load_state_with_optimizer"):
            model = getattr(service, name.replace("load", "create_training_client_from"))(path)
            train(model)
        assert endpoints(service).count("load_weights") == 2
        assert endpoints(service).count("create_model") == (0 if dialect is HOSTED else 2)
        assert "unload_model" not in endpoints(service)
        new = service.create_lora_training_client("tiny", rank=4)
        new.load_state(path).result()  # its first request, which the server permits
        assert trainer.registry.model(new.model_id).adapter is not None
        assert len(trainer.registry.models()) == 4


@BOTH
def test_a_state_whose_save_has_not_ended_is_loaded(dialect: Dialect, trainer: EmbeddedTrainer) -> None:
    """Requests of a model run in their order, also if the last one creates another model."""
    with load_first_service(trainer, dialect=dialect) as service:
        model = service.create_lora_training_client("tiny", rank=4, seed=1)
        train(model)
        model.save_state("late")
        model.load_state(f"tinker://{model.model_id}/weights/late").result()


@BOTH
def test_a_load_that_fails_leaves_the_model(dialect: Dialect, trainer: EmbeddedTrainer) -> None:
    with load_first_service(trainer, dialect=dialect) as service:
        model = service.create_lora_training_client("tiny", rank=4, seed=1)
        wide = service.create_lora_training_client("tiny", rank=8, train_mlp=False).save_state("wide").result().path
        train(model)
        earlier, before = model.model_id, bits(trainer, model.model_id)
        with pytest.raises(InvalidInput, match=r"load_state.*has rank=8.*Create a model from the state instead"):
            model.load_state(wide).result()
        missing = model.load_state_with_optimizer(f"tinker://{earlier}/weights/missing")
        missing.wait()
        with pytest.raises(NotFound, match="there is no such checkpoint"):
            model.forward(DATA, "cross_entropy")  # which raises what nobody has read
        assert model.model_id == earlier
        assert bits(trainer, earlier) == before
        train(model)


def test_a_model_that_cannot_be_unloaded_stays(trainer: EmbeddedTrainer, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: Any) -> Any:
        raise InvalidInput("unload_model is not offered here")

    monkeypatch.setattr(type(trainer.training), "unload_model", fails)
    for dialect in (HOSTED, HOSTED.but(unloads_models=False)):
        with load_first_service(trainer, dialect=dialect, record=True) as service:
            model = service.create_lora_training_client("tiny", rank=4, seed=1)
            earlier, path = model.model_id, model.save_state("one").result().path
            model.load_state_with_optimizer(path).result()
            train(model)
            assert trainer.registry.model(earlier).adapter is not None
        assert ("unload_model" in endpoints(service)) == dialect.unloads_models


def test_async_code_loads_too(trainer: EmbeddedTrainer) -> None:
    async def run(service: ServiceClient) -> None:
        model = await service.create_lora_training_client_async("tiny", rank=4, seed=1)
        await (await model.forward_backward_async(DATA, "cross_entropy"))
        path = (await (await model.save_state_async("one"))).path
        earlier = model.model_id
        load = await model.load_state_async(path)
        await (await model.optim_step_async(ADAM))
        assert load.done()
        assert model.model_id != earlier

    with load_first_service(trainer) as service:
        asyncio.run(run(service))


def test_an_unknown_server_that_forbids_loads_is_named_and_measured(trainer: EmbeddedTrainer) -> None:
    unknown = HOSTED.but(name="unknown", loads_first=False, surrogate=None)
    assert not unknown.from_dict(unknown.to_dict()).loads_first
    assert HOSTED.from_dict(HOSTED.to_dict()).loads_first
    with load_first_service(trainer, dialect=unknown) as service:
        model = service.create_lora_training_client("tiny", rank=4)
        path = model.save_state("one").result().path
        with pytest.raises(InvalidInput, match=r"not permitted with seq_id 2.*'unknown'.*but\(loads_first=True\)"):
            model.load_state(path).result()
        with pytest.raises(Unsupported, match=r"could not be measured.*loads_first=True"):
            service.create_lora_training_client("tiny", rank=4).forward_backward_custom(DATA, squares).result()
        report = examine(service, "tiny", [check for check in CHECKS if check.name in ("calls", "optimizer state")])
        assert report.is_healthy, report.table()
        assert report.dialect.loads_first


def official(url: str, stack: contextlib.ExitStack, base_model: str = "tiny", rank: int = 4) -> Any:
    service = stack.enter_context(tinker.ServiceClient(base_url=url, api_key=SDK_KEY))
    return service.create_lora_training_client(base_model, rank, 1, user_metadata={"a": "b"}).result()


class Mine(tinker.TrainingClient):
    """A client of the user's own."""


class Wrapper:
    """An object around the official client, which it calls for everything."""

    def __init__(self, client: Any) -> None:
        self.wrapped = client
        self.forward_backward_custom = client.forward_backward_custom

    def __getattr__(self, name: str) -> Any:
        return getattr(self.wrapped, name)


def as_mine(client: Any) -> Any:
    client.__class__ = Mine
    return client


WAYS: dict[str, Any] = {"client": lambda client: client, "subclass": as_mine, "wrapper": Wrapper}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("how", ["load first", "in place"])
def test_the_official_client_continues_with_a_new_model(
    trainer: EmbeddedTrainer, running: Running, how: str, way: str
) -> None:
    """Whatever the server permits, nothing is called that SDK 0.38 warns about; the user's object goes along."""
    app = create_app(trainer)
    dialect = HOSTED if how == "load first" else None
    with running(LoadFirst(app) if dialect else app) as url, contextlib.ExitStack() as stack:
        sdk = official(url, stack)
        theirs = WAYS[way](sdk)
        model: Any = as_backend(theirs, dialect)
        reference = stack.enter_context(loading("in place", trainer)).create_lora_training_client("tiny", 4, seed=1)
        for each in (reference, model):
            train(each)
            path = each.save_state("one").result().path
            train(each)
            each.forward_backward(DATA, "cross_entropy")  # dropped by the load
            each.load_state_with_optimizer(path)
            train(each)
        assert bits(trainer, model.model_id) == bits(trainer, reference.model_id)
        earlier = path.split("/")[2]
        assert model.client is theirs
        assert model.model_id == sdk.model_id != earlier
        assert trainer.registry.model(earlier).adapter is None  # unloaded
        run = tinker.RestClient(base_url=url, api_key=SDK_KEY).get_training_run(model.model_id).result()
        assert run.user_metadata == {"a": "b"}
        assert sdk.save_state("by-the-user").result().path.split("/")[2] == sdk.model_id
        for each in (reference, model):
            each.load_state(path).result()
            train(each)
        assert bits(trainer, model.model_id) == bits(trainer, reference.model_id)


def test_a_state_whose_save_by_the_official_client_has_not_ended_is_loaded(
    trainer: EmbeddedTrainer, running: Running
) -> None:
    app = LoadFirst(create_app(trainer))

    async def slow(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"].endswith("/save_weights"):
            await asyncio.sleep(0.3)  # requests that were sent later arrive earlier
        await app(scope, receive, send)

    with running(slow) as url, contextlib.ExitStack() as stack:
        model: Any = as_backend(official(url, stack), HOSTED)
        train(model)
        earlier = model.model_id
        model.save_state("late")
        model.load_state(f"tinker://{earlier}/weights/late").result()
        assert model.model_id != earlier


def test_a_load_by_the_official_client_that_fails_leaves_its_model(trainer: EmbeddedTrainer, running: Running) -> None:
    with running(LoadFirst(create_app(trainer))) as url, contextlib.ExitStack() as stack:
        wide = official(url, stack, rank=8).save_state("wide").result().path
        capabilities = tinker.RestClient(base_url=url, api_key=SDK_KEY).get_server_capabilities().result()
        sdk = official(url, stack, str(capabilities.supported_models[1].model_name))  # its folder
        model: Any = as_backend(sdk, HOSTED)
        train(model)
        earlier, before = model.model_id, bits(trainer, model.model_id)
        with pytest.raises(InvalidInput, match="has lora_rank=8, but this model has 4"):
            model.load_state(wide).result()
        with pytest.raises(NotFound, match="missing"):
            model.load_state_with_optimizer(f"tinker://{earlier}/weights/missing").result()
        assert model.model_id == sdk.model_id == earlier
        assert bits(trainer, earlier) == before
        ready = [each for each in trainer.registry.models() if each.adapter is not None]
        assert len(ready) == 2  # what was created from the other state is unloaded again
        train(model)


def test_a_client_that_cannot_continue_with_another_model_is_named(trainer: EmbeddedTrainer, running: Running) -> None:
    """Such as one that only has the methods and the connection of the official one."""
    with running(create_app(trainer)) as url, contextlib.ExitStack() as stack:
        sdk = official(url, stack)

        class Similar:
            def __getattr__(self, name: str) -> Any:
                return getattr(sdk, name)

        model: Any = as_backend(Similar(), HOSTED)
        with pytest.raises(Unsupported, match=r"a Similar of tinker .* cannot continue with another model"):
            model.load_state(f"tinker://{sdk.model_id}/weights/one")


def test_an_unknown_server_that_forbids_loads_is_named_to_users_of_the_official_client(
    trainer: EmbeddedTrainer, running: Running
) -> None:
    with running(LoadFirst(create_app(trainer))) as url, contextlib.ExitStack() as stack:
        model: Any = as_backend(official(url, stack), dialect_named("protobuf"))
        path = model.save_state("one").result().path
        with pytest.raises(InvalidInput, match=r"not permitted with seq_id 2.*'protobuf'.*but\(loads_first=True\)"):
            model.load_state(path).result()
