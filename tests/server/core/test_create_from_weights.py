"""A model that is created with saved weights in one request, as newer releases of the official SDK do."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from tests.helpers.api import Api
from tinker_lightning.server import EmbeddedTrainer

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture(scope="module")
def api(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Api]:
    trainer = EmbeddedTrainer(["tiny"], data_dir=tmp_path_factory.mktemp("created"))
    api = Api(trainer)
    yield api
    api.close()
    trainer.close()


@pytest.fixture(scope="module")
def trained(api: Api) -> tuple[str, str]:
    """A model after two steps, and the path of its state."""
    model = api.model(rank=3, train_mlp=False, seed=2)
    for seq in (1, 3):
        api.run("forward_backward", api.train(model, seq))
        api.run("optim_step", api.step(model, seq + 1))
    return model, str(api.run("save_weights", {"model_id": model, "seq_id": 5, "path": "state"})["path"])


def create(api: Api, path: str, session: str | None = None, **options: Any) -> Any:
    body = {"session_id": session or api.session(), "model_seq_id": 4, "path": path, "optimizer": True}
    return api.run("load_weights", {**body, "type": "load_weights", **options})


def test_it_continues_where_the_saved_model_was(api: Api, trained: tuple[str, str]) -> None:
    """R5.5: bit for bit, with the optimizer state."""
    model, path = trained
    session = api.session()
    first = create(api, path, session)
    assert first == {"path": path, "model_id": f"{session}:train:4", "type": "load_weights"}
    again = create(api, path, session)  # a request that was sent twice
    assert again == first
    created = first["model_id"]
    assert api.post("get_info", {"model_id": created}).json()["lora_rank"] == 3
    assert api.state(created) == api.state(model)
    api.run("forward_backward", api.train(created, 1))
    api.run("optim_step", api.step(created, 2))
    api.run("forward_backward", api.train(model, 6))
    api.run("optim_step", api.step(model, 7))
    assert api.state(created) == api.state(model)


def test_without_the_optimizer_it_starts_with_the_weights_alone(api: Api, trained: tuple[str, str]) -> None:
    created = create(api, trained[1], optimizer=False)["model_id"]
    adapter = api.trainer.registry.model(created).adapter
    assert adapter is not None
    assert adapter.steps == 0
    expected = create(api, trained[1])["model_id"]
    other = api.trainer.registry.model(expected).adapter
    assert other is not None
    assert all(bool((tensor == other.weights.tensors[name]).all()) for name, tensor in adapter.weights.tensors.items())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"path": "tinker://nobody:train:0/weights/none"}, "nobody"),
        ({"base_model": "smollm2-135m"}, "was trained on tiny, not on smollm2-135m"),
        ({"model_seq_id": -1}, "model_seq_id must be at least 0"),
        ({"optimizer_config": {"type": "sgd"}}, "only adamw"),
        ({"session_id": "session-none"}, "session-none"),
    ],
)
def test_mistakes_are_named(api: Api, trained: tuple[str, str], change: dict[str, Any], message: str) -> None:
    body = {"session_id": api.session(), "model_seq_id": 0, "path": trained[1], "optimizer": True}
    response = api.post("load_weights", {**body, **change})
    assert response.status_code in (400, 404)
    assert message in response.text


def test_a_failed_creation_keeps_no_memory(api: Api, trained: tuple[str, str]) -> None:
    """The weights of a sampler have no optimizer state."""
    saved = {"model_id": trained[0], "seq_id": 8, "path": "sampler"}
    path = api.run("save_weights_for_sampler", saved)["path"]
    before = api.trainer.memory.used("weights")
    assert "error" in create(api, path)
    assert api.trainer.memory.used("weights") == before
