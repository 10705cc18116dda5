"""Imitated servers save, load and sample as the real ones do (PROTOCOL.md §23)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch

from tests.helpers.imitated import KINDS, datum

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.helpers.imitated import Peer
    from tests.helpers.imitations.serving import Kind

# Checkpoints


@pytest.mark.parametrize(
    ("kind", "with_optimizer", "without"), [("skyrl", True, True), ("tuft", True, False), ("open-rl", False, False)]
)
def test_whether_loading_restores_the_optimizer(
    kind: Kind, with_optimizer: bool, without: bool, peer: Callable[..., Peer]
) -> None:
    server = peer(kind)
    model = server.create()
    adam = {"learning_rate": 1e-3, "beta1": 0.9, "beta2": 0.95, "eps": 1e-8}

    def go_on() -> torch.Tensor:
        server.train(model, [datum(b"another text")])
        server.step(model, **adam)
        return server.weights()

    server.train(model, [datum()])
    server.step(model, **adam)
    state = server.save(model)
    expected = go_on()
    server.load(model, state, optimizer=True)
    assert torch.allclose(go_on(), expected, rtol=0, atol=1e-9) == with_optimizer
    server.load(model, state)
    assert torch.allclose(go_on(), expected, rtol=0, atol=1e-9) == without


@pytest.mark.parametrize(("kind", "kept"), [("skyrl", True), ("tuft", True), ("open-rl", False)])
def test_a_save_keeps_the_gradient_and_a_state_does_not_contain_it(
    kind: Kind, kept: bool, peer: Callable[..., Peer]
) -> None:
    server = peer(kind)
    model = server.create()
    expected = server.applied(model, ([datum()], "cross_entropy"))
    server.load(model, server.save(model, "start"))
    server.train(model, [datum()])
    state = server.save(model, "within")
    before = server.weights()
    server.step(model)
    assert (before - server.weights()).norm() > 0.1 * expected.norm()
    server.load(model, state)
    before = server.weights()
    server.step(model)
    assert torch.equal(before, server.weights())
    server.train(model, [datum()])
    server.load(model, state)
    before = server.weights()
    server.step(model)
    assert torch.equal(before, server.weights()) != kept


@pytest.mark.parametrize(
    ("kind", "state", "sampler"),
    [
        ("skyrl", "tinker://{}/weights/one", "tinker://{}/two"),
        ("tuft", "tinker://{}/weights/one", "tinker://{}/sampler_weights/two"),
        ("twinkle", "twinkle://{}/weights/one", "twinkle://{}/sampler_weights/two"),
        ("open-rl", "/tmp/open-rl/checkpoints/one", "tinker://{}-samp-two"),  # noqa: S108
    ],
)
def test_paths(kind: Kind, state: str, sampler: str, peer: Callable[..., Peer]) -> None:
    server = peer(kind)
    model = server.create()
    assert ":" not in model
    assert server.save(model, "one") == state.format(model)
    path, sampler_id = server.sampler(model, "two")
    assert path == sampler.format(model)
    assert ":" not in sampler_id
    if kind != "open-rl":
        listed = server.http.get(f"/api/v1/training_runs/{model}/checkpoints").json()["checkpoints"]
        names = {"one", "two"} if kind in ("skyrl", "tuft") else {"weights/one", "sampler_weights/two"}
        assert {each["checkpoint_id"] for each in listed} == names
        info = server.post("weights_info", {"tinker_path": state.format(model)}).json()
        assert info == {"base_model": "tiny", "is_lora": True, "lora_rank": 4}


@pytest.mark.parametrize(("kind", "status"), [("skyrl", 404), ("tuft", 204), ("twinkle", 200), ("open-rl", 404)])
def test_deletion(kind: Kind, status: int, peer: Callable[..., Peer]) -> None:
    server = peer(kind)
    model = server.create()
    path = server.save(model, "one")
    url = f"/api/v1/training_runs/{model}/checkpoints/weights/one"
    assert server.http.delete(url).status_code == status
    if status != 404:
        assert server.http.delete(url).status_code == (500 if kind == "tuft" else 404)
        body = {"model_id": model, "seq_id": next(server.numbers), "path": path, "optimizer": False}
        failed = server.poll(server.submit("load_weights", body))
        assert failed.status_code == (404 if kind == "tuft" else 200)
        assert "not found" in failed.text


def test_skyrl_checks_checkpoints_at_submission(peer: Callable[..., Peer]) -> None:
    server = peer("skyrl", delay=0.3)
    model = server.create()
    assert server.post("save_weights", {"model_id": model}).status_code == 422  # it needs a name
    assert server.post("save_weights", {"model_id": model, "path": "a.b"}).status_code == 422
    number = server.submit("save_weights", {"model_id": model, "path": "one"})
    body = {"model_id": model, "path": f"tinker://{model}/weights/one"}
    assert server.post("load_weights", body).status_code == 425
    again = server.post("save_weights", {"model_id": model, "path": "one", "overwrite": True})
    assert (again.status_code, again.json()["detail"]) == (409, f"Checkpoint 'one' already exists for model '{model}'")
    server.poll(number)
    assert server.post("load_weights", {**body, "path": f"tinker://{model}/weights/two"}).status_code == 404
    assert server.run("load_weights", body)["type"] == "load_weights"


def test_tuft_overwrites(peer: Callable[..., Peer]) -> None:
    server = peer("tuft")
    model = server.create()
    server.save(model, "one")
    server.applied(model, ([datum()], "cross_entropy"))
    moved = server.weights()
    path = server.save(model, "one")  # overwrite is false
    server.applied(model, ([datum()], "cross_entropy"))
    server.load(model, path)
    assert torch.equal(server.weights(), moved)


# Sampling


@pytest.mark.parametrize("kind", KINDS)
def test_sampling(kind: Kind, peer: Callable[..., Peer]) -> None:
    server = peer(kind)
    model = server.create()
    _, sampler = server.sampler(model, "one")
    result = server.sample(sampler)
    assert len(result["prompt_logprobs"]) == (3 if kind == "skyrl" else 4)
    assert (result["prompt_logprobs"][0] is None) == (kind != "skyrl")
    assert len(result["sequences"][0]["tokens"]) == 3
    body = {"model_id": model, "seq_id": next(server.numbers), "sampling_session_seq_id": 9}
    saved = server.run("save_weights_for_sampler", body)
    assert saved["path"] is None
    assert server.sample(saved["sampling_session_id"])["sequences"] == result["sequences"]
    body = {"session_id": server.session, "sampling_session_seq_id": 1, "base_model": "tiny"}
    base = server.post("create_sampling_session", body).json()["sampling_session_id"]
    assert server.sample(base)["prompt_logprobs"] == pytest.approx(result["prompt_logprobs"])  # the adapter is new


def test_skyrl_rejects_what_it_does_not_sample(peer: Callable[..., Peer]) -> None:
    server = peer("skyrl")
    _, sampler = server.sampler(server.create(), "one")
    prompt = {"chunks": [{"tokens": [1, 2]}]}
    body = {"sampling_session_id": sampler, "seq_id": 0, "prompt": prompt, "sampling_params": {}}
    answer = server.post("asample", body)
    assert (answer.status_code, answer.json()) == (400, {"detail": "max_tokens is currently required"})
    answer = server.post("asample", {**body, "sampling_session_id": "a:b"})
    assert answer.status_code == 400
    assert "':'" in answer.json()["detail"]


@pytest.mark.parametrize(
    ("kind", "changes", "moves"),
    [
        ("skyrl", {}, True),
        ("tuft", {}, False),
        ("tuft", {"sampling_moves_weights": True}, True),
        ("open-rl", {}, False),
    ],
)
def test_sampling_from_an_older_checkpoint(
    kind: Kind, changes: dict[str, Any], moves: bool, peer: Callable[..., Peer]
) -> None:
    server = peer(kind, **changes)
    model = server.create()
    old = server.weights()
    _, sampler = server.sampler(model, "old")
    first = server.sample(sampler)["prompt_logprobs"]
    if moves:
        _, sampler = server.sampler(model, "older")  # the first one is already in the model
    server.applied(model, ([datum()], "cross_entropy"), learning_rate=1e10)
    trained = server.weights()
    again = server.sample(sampler)["prompt_logprobs"]
    assert (again == pytest.approx(first)) == (kind != "open-rl")  # which samples from the live weights
    assert torch.equal(server.weights(), old if moves else trained)
