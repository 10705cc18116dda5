"""Imitated servers answer, and go wrong, as the real ones do (PROTOCOL.md §9, §23)."""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING, Any

import httpx
import pytest
import torch

from tests.helpers.imitated import KINDS, PROTOBUF, SUBTRACT, close, datum
from tests.helpers.imitations import Imitation, imitate
from tests.helpers.soaking import mostly_soak
from tinker_lightning import Datum
from tinker_lightning.errors import InvalidInput

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tests.helpers.imitated import Peer
    from tests.helpers.imitations.serving import Kind
    from tinker_lightning.server import EmbeddedTrainer

# Endpoints, encodings and forms of answers


@pytest.mark.parametrize("kind", KINDS)
def test_endpoints_exist_or_not(kind: Kind, peer: Callable[..., Peer]) -> None:
    server = peer(kind)
    assert server.post("forward", {}).status_code == (404 if kind in ("tuft", "open-rl") else 422)
    assert server.post("client/config", {"sdk_version": "0.36.0"}).status_code == (404 if kind == "twinkle" else 200)
    assert server.http.get("/ext/v1/tokenizer").status_code == 404
    assert server.http.get("/api/v1/get_server_capabilities").json() == {"supported_models": [{"model_name": "tiny"}]}
    missing = server.post("no_such_endpoint", {})
    assert (missing.status_code, missing.json()) == (404, {"detail": "Not Found"})
    described = server.http.get("/openapi.json").json()
    assert ("/api/v1/forward" in described["paths"]) == (kind not in ("tuft", "open-rl"))
    content = described["paths"]["/api/v1/forward_backward"]["post"]["requestBody"]["content"]
    assert list(content) == [PROTOBUF if kind == "tuft" else "application/json"]
    assert server.post("session_heartbeat", {"session_id": server.session}).status_code == 200


@pytest.mark.parametrize("kind", KINDS)
def test_a_pass_in_the_wrong_encoding(kind: Kind, peer: Callable[..., Peer]) -> None:
    server = peer(kind)
    model = server.create()
    response = server.send(model, [datum()], encoding="json" if kind == "tuft" else "protobuf")
    if kind == "skyrl":
        assert (response.status_code, response.text) == (500, "Internal Server Error")
        assert response.headers["content-type"].startswith("text/plain")
    elif kind == "tuft":
        assert response.status_code == 415
        assert "expected application/x-protobuf" in response.json()["detail"]
    else:
        assert response.status_code == 422
        assert isinstance(response.json()["detail"], list)


@pytest.mark.parametrize("kind", KINDS)
def test_statuses_of_submissions(kind: Kind, peer: Callable[..., Peer]) -> None:
    server = peer(kind)
    answer = server.post("create_session", {"tags": [], "sdk_version": "0", "user_metadata": None})
    assert answer.status_code == (201 if kind == "tuft" else 200)
    answer = server.send(server.create(), [datum()])
    assert answer.status_code == (202 if kind == "tuft" else 200)
    number = answer.json()["request_id"]
    if kind == "skyrl":
        assert answer.json().items() >= {"future_id": number, "status": "pending"}.items()
        assert number.isdecimal()
    assert "sample_sequence_ids" not in answer.json()


@pytest.mark.parametrize("kind", KINDS)
def test_a_pending_result(kind: Kind, peer: Callable[..., Peer]) -> None:
    server = peer(kind, delay=0.2, hold=0.02)
    body = {"session_id": server.session, "model_seq_id": 0, "base_model": "tiny", "lora_config": {"rank": 4}}
    number = server.submit("create_model", body)
    answer = server.poll(number)
    if kind == "skyrl":
        assert (answer.status_code, answer.json()) == (408, {"detail": "Timeout waiting for result"})
    else:
        pending = {"type": "try_again", "request_id": number, "queue_state": "active"}
        assert (answer.status_code, answer.json()) == (200, pending)


@pytest.mark.parametrize("kind", KINDS)
def test_a_failed_operation(kind: Kind, peer: Callable[..., Peer]) -> None:
    server = peer(kind)
    bad = Datum.from_targets([99_999], [1], weights=[1.0])
    answer = server.poll(server.send(server.create(), [bad]).json()["request_id"])
    status, key = {
        "skyrl": (400, "detail"),
        "tuft": (422, "detail"),
        "twinkle": (200, "error"),
        "open-rl": (400, "error_message"),
        "together": (200, "error"),
    }[kind]
    assert answer.status_code == status
    assert "vocabulary" in answer.json()[key]


@pytest.mark.parametrize("kind", KINDS)
def test_an_unknown_model(kind: Kind, peer: Callable[..., Peer]) -> None:
    server = peer(kind)
    answer = server.send("unknown", [datum()])
    if kind in ("tuft", "open-rl"):
        answer = server.poll(answer.json()["request_id"])
    assert answer.status_code == (400 if kind == "open-rl" else 404)
    assert "Model not found" in answer.text


def test_tuft_wants_every_input_of_a_loss(peer: Callable[..., Peer]) -> None:
    server = peer("tuft")
    model = server.create()
    bare = Datum.from_targets([1, 2, 3], [2, 3, 4])
    for loss_fn, name in (("cross_entropy", "weights"), ("importance_sampling", "logprobs")):
        answer = server.poll(server.send(model, [bare], loss_fn).json()["request_id"])
        detail = f"Failed to retrieve future: Missing '{name}' in loss_fn_inputs."
        assert (answer.status_code, answer.json()) == (400, {"detail": detail})


def test_an_unknown_result(peer: Callable[..., Peer]) -> None:
    for kind in ("skyrl", "tuft"):
        assert peer(kind).poll("12345").status_code == 404
    assert peer("twinkle", hold=0.01).poll("12345").json()["type"] == "try_again"


def test_tuft_wants_a_key(peer: Callable[..., Peer]) -> None:
    server = peer("tuft")
    url = f"{server.server.url}/api/v1/client/config"
    assert httpx.post(url, json={}).status_code == 401
    assert httpx.post(url, json={}, headers={"X-API-Key": "tml-wrong"}).status_code == 403
    assert server.post("client/config", {"sdk_version": "0"}).json()["parallel_fwdbwd_chunks"] is False
    assert httpx.get(f"{server.server.url}/api/v1/healthz").status_code == 200


def test_tuft_crashes_on_unknown_ids(peer: Callable[..., Peer]) -> None:
    server = peer("tuft")
    for path, body in (
        ("session_heartbeat", {"session_id": "x"}),
        ("get_info", {"model_id": "x"}),
        ("weights_info", {"tinker_path": "tinker://x/weights/y"}),
    ):
        answer = server.post(path, body)
        assert (answer.status_code, answer.text) == (500, "Internal Server Error")
    missing = {"tinker_path": f"tinker://{server.create()}/weights/y"}
    assert server.post("weights_info", missing).status_code == 200  # it does not look for the checkpoint


@pytest.mark.parametrize(
    ("path", "name", "value", "refusing"),
    [
        ("create_model", "optimizer_config", {"type": "adamw"}, {"tuft", "twinkle"}),
        ("create_session", "display_name", None, {"tuft", "twinkle"}),
        ("save_weights", "overwrite", False, {"twinkle"}),
        ("asample", "topk_sample_logprobs", 0, {"tuft", "twinkle"}),
        ("asample", "prompt_alt_tokens_k", 0, {"tuft", "twinkle"}),
        ("optim_step", "invented", 1, {"tuft", "twinkle"}),
    ],
)
@pytest.mark.parametrize("kind", mostly_soak(KINDS, but=["skyrl", "tuft", "twinkle"]))
def test_unknown_fields(
    kind: Kind, path: str, name: str, value: Any, refusing: set[str], peer: Callable[..., Peer]
) -> None:
    server = peer(kind)
    model = server.create()
    bodies: dict[str, dict[str, Any]] = {
        "create_model": {"session_id": server.session, "model_seq_id": 5, "base_model": "tiny"},
        "create_session": {"tags": [], "sdk_version": "0", "user_metadata": None},
        "save_weights": {"model_id": model, "seq_id": 1, "path": "x"},
        "asample": {"sampling_session_id": "none", "seq_id": 0, "prompt": {"chunks": []}, "sampling_params": {}},
        "optim_step": {"model_id": model, "seq_id": 1, "adam_params": {}},
    }
    bodies["create_model"]["lora_config"] = {"rank": 2}
    answer = server.post(path, {**bodies[path], name: value})
    if kind not in refusing:
        assert answer.status_code != 422, answer.text
        return
    assert answer.status_code == 422
    (fault,) = answer.json()["detail"]
    assert fault["type"] == "extra_forbidden"
    assert fault["loc"] == ["body", name]
    assert fault["input"] == value


def test_fields_within_objects_are_checked(peer: Callable[..., Peer]) -> None:
    server = peer("tuft")
    body = {"model_id": server.create(), "seq_id": 1, "adam_params": {"learning_rate": 1.0, "lr": 2.0}}
    assert server.post("optim_step", body).json()["detail"][0]["loc"] == ["body", "adam_params", "lr"]


def test_skyrl_rejects_unknown_loss_settings(peer: Callable[..., Peer]) -> None:
    server = peer("skyrl")
    model = server.create()
    answer = server.send(model, [datum()], "cross_entropy", temperature=1.0)
    assert answer.status_code == 422
    assert "loss_fn_config" in answer.json()["detail"][0]["msg"]
    known = server.send(model, [server.surrogate(b"hello")], "ppo", clip_low_threshold=0.8, clip_high_threshold=1.2)
    assert known.status_code == 200


def test_skyrl_takes_missing_advantages_for_zeros(peer: Callable[..., Peer]) -> None:
    server = peer("skyrl")
    model = server.create()
    assert not server.applied(model, ([datum(logprobs=[0.0] * 10)], "importance_sampling")).norm()


def test_a_crash_closes_the_connection(peer: Callable[..., Peer]) -> None:
    server = peer("skyrl")
    with httpx.Client(base_url=server.server.url) as http:
        body, headers = b"\xff", {"Content-Type": PROTOBUF}
        assert http.post("/api/v1/forward_backward", content=body, headers=headers).status_code == 500
        with contextlib.suppress(httpx.TransportError):  # the client may have noticed before it sends
            http.get("/api/v1/healthz")
        assert http.get("/api/v1/healthz").status_code == 200


# Order and repeats


def test_tuft_is_strict_about_numbers(peer: Callable[..., Peer]) -> None:
    server = peer("tuft")
    model = server.create()

    def outcome(number: int) -> tuple[int, str]:
        answer = server.send(model, [datum()], number=number)
        assert answer.status_code == 202  # the conflict shows in the result only
        response = server.poll(answer.json()["request_id"])
        return response.status_code, response.text

    assert outcome(2)[0] == 409  # a gap
    assert outcome(1)[0] == 200
    status, text = outcome(1)  # a repeat
    assert status == 409
    assert "Sequence conflict: expected 2, got 1" in text
    # A refused submission does not advance the server: the client has to use its number again.
    assert server.send(model, [datum()], number=2, encoding="json").status_code == 415
    assert outcome(3)[0] == 409
    assert outcome(2)[0] == 200
    # The number of an operation that failed can be skipped or used again.
    incomplete = datum(logprobs=[0.0] * 10)
    for number in (3, 5):
        failed = server.send(model, [incomplete], "importance_sampling", number=number).json()["request_id"]
        assert server.poll(failed).status_code == 400
        assert outcome(number + 2)[0] == 409
        assert outcome(4 if number == 3 else 5)[0] == 200
    # A state that does not exist is noticed before its number counts.
    body = {"model_id": model, "seq_id": 6, "path": f"tinker://{model}/weights/none", "optimizer": False}
    assert server.poll(server.submit("load_weights", body)).status_code == 404
    assert outcome(7)[0] == 409
    assert outcome(6)[0] == 200


@pytest.mark.parametrize("kind", ["skyrl", "twinkle", "open-rl"])
def test_repeats_double_the_gradient(kind: Kind, peer: Callable[..., Peer]) -> None:
    server = peer(kind, window_mean=False)
    model = server.create()
    before, gradient = server.weights(), server.plain(datum())
    for _ in range(2):
        server.train(model, [datum()], number=1)
    server.step(model)
    assert server.server.ran["forward_backward"] == 2
    factor = 1.0 if kind == "open-rl" else 0.1  # a mean over ten tokens
    assert close(before - server.weights(), 2 * factor * gradient)


def test_repeats_are_answered_once_where_they_are_recognised(peer: Callable[..., Peer]) -> None:
    server = peer("together")
    model = server.create()
    before = server.server.ran["forward_backward"]
    first, second = (server.send(model, [datum()], number=1).json() for _ in range(2))
    assert first == second
    server.poll(first["request_id"])
    assert server.server.ran["forward_backward"] == before + 1


@pytest.mark.parametrize("order", ["number", "arrival"])
def test_order(order: str, peer: Callable[..., Peer]) -> None:
    server = peer("together", order=order, hold=0.05 if order == "number" else 10.0)
    model = server.create()
    body = {"model_id": model, "seq_id": 2, "adam_params": SUBTRACT}
    step = server.submit("optim_step", body)
    is_early = server.poll(step).json().get("type") != "try_again"
    assert is_early == (order == "arrival")
    before = server.weights()
    server.train(model, [datum()], number=1)
    server.result(step)
    assert torch.equal(before, server.weights()) == is_early


def test_a_rejected_number_is_free_where_numbers_give_the_order(peer: Callable[..., Peer]) -> None:
    server = peer("together", hold=5.0)
    model = server.create()
    assert server.send(model, [datum()], number=1, encoding="protobuf").status_code == 422
    assert server.post("optim_step", {"model_id": model, "seq_id": 1, "adam_params": {"beta1": 2}}).status_code == 422
    server.train(model, [datum()], number=2)


def test_skyrl_does_not_wait_for_a_model(peer: Callable[..., Peer]) -> None:
    server = peer("skyrl", delay=0.5)
    body = {"session_id": server.session, "base_model": "tiny", "lora_config": {"rank": 4}}
    created = server.post("create_model", body).json()
    assert created["status"] == "created"
    answer = server.poll(server.send(created["model_id"], [datum()]).json()["request_id"])
    assert (answer.status_code, answer.json()) == (400, {"detail": f"Model {created['model_id']} not loaded"})


# Lost answers, defects and in-process use


@pytest.mark.parametrize("kind", ["skyrl", "tuft"])
def test_answers_are_lost_after_the_request_ran(kind: Kind, peer: Callable[..., Peer]) -> None:
    server = peer(kind, drops_answers={"forward_backward": [2]})
    model = server.create()
    server.train(model, [datum()])
    with pytest.raises(httpx.RemoteProtocolError):
        server.send(model, [datum()])
    server.train(model, [datum()])
    assert server.server.ran["forward_backward"] == 3


def test_answers_are_lost_in_process(trainer: EmbeddedTrainer) -> None:
    async def use(server: Imitation) -> None:
        async with httpx.AsyncClient(transport=server.transport, base_url="http://imitation") as http:
            assert (await http.get("/api/v1/healthz")).json() == {"status": "ok"}
            with pytest.raises(httpx.ReadError):
                await http.get("/api/v1/healthz")
            assert (await http.get("/api/v1/healthz")).status_code == 200

    with imitate("skyrl", trainer=trainer, drops_answers={"healthz": [2]}) as server:
        asyncio.run(use(server))


def test_planted_defects_of_gradients(peer: Callable[..., Peer]) -> None:
    server = peer("tuft", cross_entropy="mean")
    model = server.create()
    expected = server.plain(datum()) / 10
    assert close(server.applied(model, ([datum()], "cross_entropy")), expected)
    server = peer("tuft", doubles_repeats=True)
    model = server.create()
    expected = 2 * server.plain(datum())
    before = server.weights()
    for _ in range(2):
        server.train(model, [datum()], number=1)
    next(server.numbers)
    server.step(model)
    assert close(before - server.weights(), expected)


def test_planted_defects_of_steps(peer: Callable[..., Peer]) -> None:
    for changes, moves in (({}, False), ({"lr_zero_moves": True}, True)):
        server = peer("tuft", **changes)
        model = server.create()
        moved = server.applied(model, ([datum()], "cross_entropy"), learning_rate=0.0, eps=1e-8)
        assert bool(moved.norm()) == moves
    server = peer("tuft", ignores_grad_clip=True)
    moved = server.applied(server.create(), ([datum()], "cross_entropy"), grad_clip_norm=1e-6)
    assert moved.norm() > 1e-3
    server = peer("together", seed_ignored=True)
    server.create()
    first = server.weights()
    server.create()
    assert not torch.equal(first, server.weights())


def test_planted_defects_of_loading(peer: Callable[..., Peer]) -> None:
    server = peer("tuft", ignores_optimizer_on_load=True)
    model = server.create()
    adam = {"learning_rate": 1e-3, "beta1": 0.9, "beta2": 0.95, "eps": 1e-8}
    results = []
    server.train(model, [datum()])
    server.step(model, **adam)
    state = server.save(model)
    for _ in range(2):
        server.train(model, [datum(b"another")])
        server.step(model, **adam)
        results.append(server.weights())
        server.load(model, state)
    assert torch.allclose(results[0], results[1], rtol=0, atol=1e-9)


def test_an_imitation_has_a_trainer_of_its_own_by_default(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with imitate("skyrl") as server:
        url = server.url
        assert httpx.get(f"{url}/api/v1/healthz").status_code == 200
        assert server.url == url
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"{url}/api/v1/healthz")
    assert not list(tmp_path.iterdir())


def test_mistakes() -> None:
    with pytest.raises(InvalidInput, match="no server 'sky' to imitate; there are skyrl, tuft"):
        imitate("sky")  # type: ignore[arg-type]
    with pytest.raises(InvalidInput, match="no field cross_entrpy"):
        imitate("skyrl", cross_entrpy="sum")
