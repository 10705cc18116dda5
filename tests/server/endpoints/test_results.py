"""Fetching results: both encodings, errors, waiting, and a server that closes meanwhile."""

from __future__ import annotations

import asyncio
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import httpx
import pytest

from tests.helpers.api import Api
from tinker_lightning.server import EmbeddedTrainer, create_app
from tinker_lightning.server.endpoints import futures
from tinker_lightning.server.trainer.jobs import Job
from tinker_lightning.wire import protobuf

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

PROTOBUF = "application/x-protobuf"
SOON = 10.0


@pytest.fixture
def busy(trainer: EmbeddedTrainer) -> Iterator[Callable[[], None]]:
    """The trainer computes something until the test calls this."""
    go = threading.Event()
    trainer.scheduler.submit(Job("busy", "busy", lambda: go.wait(SOON * 3)))
    yield go.set
    go.set()


@pytest.mark.parametrize(
    ("accept", "pass_type", "sample_type"),
    [
        ("application/json", "application/json", "application/json"),
        ("application/x-protobuf, application/json", PROTOBUF, PROTOBUF),
        ("application/x-protobuf", PROTOBUF, PROTOBUF),
        ("*/*", "application/json", "application/json"),
        ("", "application/json", "application/json"),
    ],
)
def test_results_come_in_protobuf_if_and_only_if_accept_mentions_it(
    api: Api, accept: str, pass_type: str, sample_type: str
) -> None:
    model = api.model()
    place = api.sampler(model.split(":")[0])
    ids = {
        "pass": api.submit("forward_backward", api.train(model, 1)),
        "sample": api.submit("asample", {**api.sample(place, 0), "prompt_logprobs": True}),
        "step": api.submit("optim_step", api.step(model, 2)),
    }

    def fetch(name: str) -> httpx.Response:
        return api.post("retrieve_future", {"request_id": ids[name]}, headers={"accept": accept})

    passed, sampled, stepped = fetch("pass"), fetch("sample"), fetch("step")
    assert passed.headers["content-type"] == pass_type
    assert sampled.headers["content-type"] == sample_type
    assert stepped.headers["content-type"] == "application/json"
    plain = api.result(ids["pass"])
    assert list(plain) == ["loss_fn_outputs", "metrics", "loss_fn_output_type"]
    assert all(key.count(":") == 1 for key in plain["metrics"])
    logprobs = plain["loss_fn_outputs"][0]["logprobs"]
    assert logprobs["shape"] == [10]
    assert plain["metrics"]["loss:sum"] == pytest.approx(-sum(logprobs["data"]), rel=1e-5)
    if pass_type == PROTOBUF:
        decoded = protobuf.decode_output(passed.content)
        assert decoded.metrics["loss:sum"] == plain["metrics"]["loss:sum"]
        assert decoded.loss_fn_outputs[0]["logprobs"].tolist() == pytest.approx(logprobs["data"], rel=1e-7)
        response = protobuf.decode_sample(sampled.content)
        assert len(response.sequences[0].tokens) == 4
        assert response.prompt_logprobs is not None
        assert response.prompt_logprobs[0] is None
    else:
        assert passed.json() == plain
        assert sampled.json()["sequences"][0]["stop_reason"] == "length"
        assert sampled.json()["prompt_logprobs"][0] is None


def test_a_submission_may_be_answered_with_its_result(api: Api) -> None:
    model = api.model()
    extension = "http://embedded/ext/v1/"
    passed = api.post(f"{extension}forward_backward", api.train(model, 1), headers={"accept": PROTOBUF})
    assert passed.headers["content-type"] == PROTOBUF
    # The same number by the protocol's way is the same operation.
    plain = api.run("forward_backward", api.train(model, 1))
    assert protobuf.decode_output(passed.content).metrics["loss:sum"] == plain["metrics"]["loss:sum"]
    bad = api.post(f"{extension}load_weights", {"model_id": model, "seq_id": 2, "path": f"tinker://{model}/weights/x"})
    assert bad.status_code == 200
    assert bad.json()["category"] == "user"
    assert api.post(f"{extension}optim_step", {"model_id": model, "seq_id": 0}).status_code == 400
    assert "metrics" in api.post(f"{extension}optim_step", api.step(model, 3)).json()


def test_an_error_is_json_with_status_200_whatever_was_accepted(api: Api) -> None:
    model = api.model()
    bad = api.train(model, 1)
    bad["forward_backward_input"]["loss_fn"] = "nonsense"
    request_id = api.submit("forward_backward", bad)
    for accept in ("application/json", PROTOBUF):
        response = api.post("retrieve_future", {"request_id": request_id}, headers={"accept": accept})
        assert response.status_code == 200
        assert response.headers["content-type"] == "application/json"
        assert response.json()["category"] == "user"
        assert "loss_fn 'nonsense' is not registered" in response.json()["error"]


def test_a_defect_is_reported_as_the_servers_with_its_class(api: Api) -> None:
    def crash() -> None:
        raise KeyError("lost")

    api.trainer.scheduler.submit(Job("crash", "crash", crash))
    assert api.result("crash") == {"error": "internal error: KeyError: 'lost'", "category": "server"}


def test_a_pending_result_is_408_after_the_long_poll(
    api: Api, busy: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(futures, "LONG_POLL_SECONDS", 0.05)
    body = {"session_id": api.session(), "model_seq_id": 0, "base_model": "tiny"}
    request_id = api.submit("create_model", body)
    started = time.monotonic()
    response = api.post("retrieve_future", {"request_id": request_id, "allow_metadata_only": True})
    assert time.monotonic() - started >= 0.05
    assert response.status_code == 408
    assert response.json() == {"type": "try_again", "request_id": request_id, "queue_state": "active"}
    # What a model is cannot be said before it is made.
    model = request_id.removesuffix(":create")
    assert api.post("get_info", {"model_id": model}).status_code == 408
    monkeypatch.undo()
    busy()
    assert api.result(request_id)["model_id"] == model
    assert api.post("get_info", {"model_id": model}).json()["lora_rank"] == 32


def test_a_result_that_comes_during_the_poll_is_answered_at_once(api: Api, busy: Callable[[], None]) -> None:
    body = {"session_id": api.session(), "model_seq_id": 0, "base_model": "tiny"}
    request_id = api.submit("create_model", body)
    timer = threading.Timer(0.05, busy)
    timer.start()
    started = time.monotonic()
    assert "model_id" in api.result(request_id)
    assert time.monotonic() - started < futures.LONG_POLL_SECONDS / 2
    timer.join()


def test_an_unknown_result_is_404(api: Api) -> None:
    response = api.post("retrieve_future", {"request_id": "nothing"})
    assert response.status_code == 404
    assert "'nothing' is unknown" in response.json()["detail"]


def test_closing_answers_waiting_pollers_at_once_and_refuses_new_work(
    trainer: EmbeddedTrainer, busy: Callable[[], None]
) -> None:
    async def main() -> None:
        transport = httpx.ASGITransport(create_app(trainer))
        async with httpx.AsyncClient(transport=transport, base_url="http://embedded/api/v1/") as http:
            session = (await http.post("create_session", json={})).json()["session_id"]
            body = {"session_id": session, "model_seq_id": 0, "base_model": "tiny"}
            request_id = (await http.post("create_model", json=body)).json()["request_id"]
            polls = [
                asyncio.create_task(http.post("retrieve_future", json={"request_id": request_id})) for _ in range(5)
            ]
            async with asyncio.timeout(SOON):
                while len(trainer.closing.waiters) < 5:
                    await asyncio.sleep(0)
            trainer.closing.announce()
            for response in await asyncio.wait_for(asyncio.gather(*polls), SOON):
                assert response.status_code == 408
            closing = asyncio.create_task(asyncio.to_thread(trainer.close))
            failed = await asyncio.wait_for(http.post("retrieve_future", json={"request_id": request_id}), SOON)
            while failed.status_code == 408:
                failed = await asyncio.wait_for(http.post("retrieve_future", json={"request_id": request_id}), SOON)
            assert failed.json()["category"] == "server"
            assert "closed before this job could finish" in failed.json()["error"]
            refused = await http.post("create_model", json={**body, "model_seq_id": 1})
            assert refused.status_code == 503
            busy()
            await asyncio.wait_for(closing, SOON)
            assert not trainer.closing.waiters

    asyncio.run(main())


def test_polls_leave_nothing_behind(api: Api, busy: Callable[[], None], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(futures, "LONG_POLL_SECONDS", 0.001)
    request_id = api.submit("create_model", {"session_id": api.session(), "model_seq_id": 0, "base_model": "tiny"})
    for _ in range(20):
        assert api.post("retrieve_future", {"request_id": request_id}).status_code == 408
    assert not api.trainer.closing.waiters


def test_a_poll_names_the_missing_number_and_goes_on_within_seconds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(futures, "_BLOCKED_POLL_SECONDS", 0.02)
    trainer = EmbeddedTrainer(["tiny"], data_dir=tmp_path)
    monkeypatch.setattr(trainer.scheduler, "polled_gap_timeout", 0.1)
    api = Api(trainer)
    model = api.model()
    request_id = api.submit("optim_step", api.step(model, 2))
    reasons = []
    while (response := api.post("retrieve_future", {"request_id": request_id})).status_code == 408:
        assert response.json()["queue_state"] == "paused_capacity"
        reasons.append(response.json()["queue_state_reason"])
    assert response.json()["metrics"]["grad_norm"] == 0
    assert set(reasons) == {f"waiting for request 1 of {model}, which has not arrived"}
    late = api.post("optim_step", api.step(model, 1))
    assert (late.status_code, "arrived too late" in late.text) == (400, True)
    api.close()
    trainer.close()


def test_a_poll_does_not_report_a_number_that_arrived_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(futures, "_BLOCKED_POLL_SECONDS", 0.2)
    trainer = EmbeddedTrainer(["tiny"], data_dir=tmp_path)
    api = Api(trainer)
    model = api.model()
    request_id = api.submit("optim_step", api.step(model, 2))
    release = threading.Event()
    trainer.scheduler.submit(Job("busy", "busy", release.wait))  # keeps the worker from running what has arrived
    with ThreadPoolExecutor(1) as pool:
        polled = pool.submit(api.post, "retrieve_future", {"request_id": request_id})
        while not trainer.closing.waiters:  # the poll has not seen the gap yet
            time.sleep(0.001)
        api.submit("optim_step", api.step(model, 1))
        response = polled.result()
    release.set()
    assert (response.status_code, response.json()["queue_state"]) == (408, "active")
    assert "queue_state_reason" not in response.json()
    api.close()
    trainer.close()


def test_our_client_polls_past_a_missing_number_for_as_long_as_it_may_still_arrive(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(futures, "_BLOCKED_POLL_SECONDS", 0.02)
    trainer = EmbeddedTrainer(["tiny"], data_dir=tmp_path)
    monkeypatch.setattr(trainer.scheduler, "polled_gap_timeout", 0.0)
    api = Api(trainer)
    model = api.model()
    request_id = api.submit("optim_step", api.step(model, 2))
    for _ in range(3):
        ours = {"user-agent": "tinker-lightning"}
        assert api.post("retrieve_future", {"request_id": request_id}, headers=ours).status_code == 408
    assert "metrics" in api.run("forward_backward", api.train(model, 1))
    assert api.result(request_id)["metrics"]["grad_norm"] > 0
    api.close()
    trainer.close()


@pytest.mark.parametrize(
    ("agent", "shown"), [("AsyncTinker/Python 0.27.9", False), ("AsyncTinker/Python 0.28.0", True)]
)
def test_old_releases_of_the_sdk_see_no_external_checkpoints(api: Api, agent: str, shown: bool) -> None:
    model = api.model()
    path = api.run("save_weights_external", {"model_id": model, "seq_id": 1, "path": "a"})["path"]
    for url in ("checkpoints", f"training_runs/{model}/checkpoints"):
        listed = api.request("GET", url, headers={"user-agent": agent}).json()["checkpoints"]
        assert (path in {each["tinker_path"] for each in listed}) == shown


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("POST", "training_runs/r/checkpoints/weights/a/publish"),
        ("DELETE", "training_runs/r/checkpoints/weights/a/publish"),
        ("GET", "billing/usage/events"),
        ("GET", "audit"),
        ("POST", "sessions/search"),
        ("GET", "auth/apikey/me"),
    ],
)
def test_features_of_hosted_services_are_named_as_not_offered(shared_api: Api, method: str, path: str) -> None:
    response = shared_api.request(method, path)
    assert response.status_code == 404
    assert "is not offered by this trainer" in response.json()["detail"]
    assert response.json()["error_class"] == "Unsupported"
