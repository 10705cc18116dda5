"""A model that is created with saved weights in one request, as newer releases of the official SDK do."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from tests.helpers.api import Api


@pytest.fixture(scope="module")
def trained(shared_api: Api) -> tuple[str, str]:
    """A model after two steps, and the path of its state."""
    api = shared_api
    model = api.model(rank=3, train_mlp=False, seed=2)
    for seq in (1, 3):
        api.run("forward_backward", api.train(model, seq))
        api.run("optim_step", api.step(model, seq + 1))
    return model, str(api.run("save_weights", {"model_id": model, "seq_id": 5, "path": "state"})["path"])


def create(api: Api, path: str, session: str | None = None, **options: Any) -> Any:
    body = {"session_id": session or api.session(), "model_seq_id": 4, "path": path, "optimizer": True}
    return api.run("load_weights", {**body, "type": "load_weights", **options})


def test_it_continues_where_the_saved_model_was(shared_api: Api, trained: tuple[str, str]) -> None:
    """R5.5: bit for bit, with the optimizer state."""
    model, path = trained
    session = shared_api.session()
    first = create(shared_api, path, session)
    assert first == {"path": path, "model_id": f"{session}:train:4", "type": "load_weights"}
    again = create(shared_api, path, session)  # a request that was sent twice
    assert again == first
    created = first["model_id"]
    assert shared_api.post("get_info", {"model_id": created}).json()["lora_rank"] == 3
    assert shared_api.state(created) == shared_api.state(model)
    shared_api.run("forward_backward", shared_api.train(created, 1))
    shared_api.run("optim_step", shared_api.step(created, 2))
    shared_api.run("forward_backward", shared_api.train(model, 6))
    shared_api.run("optim_step", shared_api.step(model, 7))
    assert shared_api.state(created) == shared_api.state(model)


def test_without_the_optimizer_it_starts_with_the_weights_alone(shared_api: Api, trained: tuple[str, str]) -> None:
    created = create(shared_api, trained[1], optimizer=False)["model_id"]
    adapter = shared_api.trainer.registry.model(created).adapter
    assert adapter is not None
    assert adapter.steps == 0
    expected = create(shared_api, trained[1])["model_id"]
    other = shared_api.trainer.registry.model(expected).adapter
    assert other is not None
    assert all(bool((tensor == other.weights.tensors[name]).all()) for name, tensor in adapter.weights.tensors.items())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"path": "tinker://nobody:train:0/weights/none"}, "nobody"),
        ({"base_model": "smollm2-135m"}, "base_model 'smollm2-135m' is not served"),
        ({"model_seq_id": -1}, "model_seq_id must be at least 0"),
        ({"optimizer_config": {"type": "sgd"}}, "only adamw"),
        ({"session_id": "session-none"}, "session-none"),
        ({"model_id": "session-1:train:0", "seq_id": 1}, "give either model_id and seq_id"),
    ],
)
def test_mistakes_are_named(shared_api: Api, trained: tuple[str, str], change: dict[str, Any], message: str) -> None:
    body = {"session_id": shared_api.session(), "model_seq_id": 0, "path": trained[1], "optimizer": True}
    response = shared_api.post("load_weights", {**body, **change})
    assert response.status_code in (400, 404)
    assert message in response.text


def test_a_failed_creation_keeps_no_memory(shared_api: Api, trained: tuple[str, str]) -> None:
    """The weights of a sampler have no optimizer state."""
    saved = {"model_id": trained[0], "seq_id": 8, "path": "sampler"}
    path = shared_api.run("save_weights_for_sampler", saved)["path"]
    before = shared_api.trainer.memory.used("weights")
    assert "error" in create(shared_api, path)
    assert shared_api.trainer.memory.used("weights") == before


def test_a_number_that_was_used_for_another_creation_is_named(shared_api: Api, trained: tuple[str, str]) -> None:
    """Otherwise the client would train fresh weights in the belief that they were loaded."""
    session = shared_api.session()
    shared_api.model(session, 4, rank=3)
    body = {"session_id": session, "model_seq_id": 4, "path": trained[1], "optimizer": True}
    response = shared_api.post("load_weights", body)
    assert response.status_code == 409
    assert ":4:create: its number was already used for create_model" in response.text
    other = {"session_id": session, "model_seq_id": 4, "base_model": "tiny", "lora_config": {"rank": 5}}
    assert "already used for create_model" in shared_api.post("create_model", other).text
