"""A server with limits: what does not fit fails with a clear error, and everybody else goes on."""  # R5.11

from __future__ import annotations

import json
import threading
import time
from typing import TYPE_CHECKING, Any

import httpx
import pytest
import zstandard

from tests.helpers.graph_messages import graph, node, ref
from tests.helpers.limited_server import JSON, ZSTD, LimitedServer, idle_connections, limited_server, training

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

LIMIT = 1 << 30
WITHIN = "within the memory limit of 1 GiB"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LimitedServer]:
    """Twice the limit is all that the kernel gives: a server that ignores its own would die."""
    folder = tmp_path_factory.mktemp("server")
    with limited_server(folder, "--memory-limit", "1G", data=2 * LIMIT, descriptors=256) as server:
        yield server


@pytest.fixture(autouse=True)
def bystander(server: LimitedServer) -> Iterator[None]:
    """Another client, which trains all the time and must never notice; and the limit, which must hold."""
    model = server.model(server.session())
    stop = threading.Event()
    outcomes: list[Any] = []

    def train() -> None:
        with httpx.Client(base_url=server.http.base_url, timeout=120) as http:
            number = 0
            while not stop.wait(0.05):
                number += 1
                receipt = http.post("forward_backward", json=training(model, number, [1, 2, 3, 4])).json()
                body = {"request_id": receipt.get("request_id", "")}
                while (response := http.post("retrieve_future", json=body)).status_code == 408:
                    pass
                outcomes.append(response.json())

    def wait_for(count: int) -> None:
        deadline = time.monotonic() + 60
        while len(outcomes) < count and time.monotonic() < deadline:
            time.sleep(0.01)

    thread = threading.Thread(target=train)
    thread.start()
    wait_for(1)
    yield
    before = len(outcomes)
    wait_for(before + 2)
    stop.set()
    thread.join(120)
    assert len(outcomes) >= before + 2
    assert [outcome for outcome in outcomes if "metrics" not in outcome] == []
    assert server.peak < 1.1 * LIMIT


def together(count: int, call: Callable[[], httpx.Response]) -> list[httpx.Response]:
    answers: list[httpx.Response] = []
    threads = [threading.Thread(target=lambda: answers.append(call())) for _ in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return answers


def test_metadata_is_small_and_never_compressed(server: LimitedServer) -> None:
    bomb = zstandard.compress(b'{"user_metadata":{"a":[' + b"{}," * 20_000_000 + b"{}]}}")
    assert len(bomb) < 8000
    response = server.http.post("create_session", content=bomb, headers=ZSTD)
    assert response.status_code == 415
    for body in ({"user_metadata": {"a": "x" * 70_000}}, {"display_name": "x" * 70_000}):
        response = server.post("create_session", body)
        assert response.status_code == 400
        assert "as JSON, but at most 65536 are kept" in response.json()["detail"]


@pytest.mark.parametrize(
    "content",
    [b"{},", pytest.param(b" ", marks=pytest.mark.soak), pytest.param(b"1.5,", marks=pytest.mark.soak)],
    ids=["objects", "blanks", "numbers"],
)
def test_small_bodies_that_become_large_ones_at_the_same_time(server: LimitedServer, content: bytes) -> None:
    whole = b'{"forward_backward_input":{"data":[' + content * ((60 << 20) // len(content)) + b"{}]}}"
    bomb = zstandard.compress(whole)
    assert len(bomb) < 10_000
    url = f"{server.url}/api/v1/forward_backward"
    answers = together(8, lambda: httpx.post(url, content=bomb, headers=ZSTD, timeout=120))
    assert {answer.status_code for answer in answers} <= {413, 429}
    for answer in answers:
        assert WITHIN in answer.json()["detail"]
        assert ("retry-after" in answer.headers) == (answer.status_code == 429)


def test_results_that_nobody_reads_are_bounded_and_freed_with_the_session(server: LimitedServer) -> None:
    session = server.session()
    sampler = server.sampler(session)

    def sample(number: int) -> httpx.Response:
        prompt = {"chunks": [{"type": "encoded_text", "tokens": [1] * 1000}]}
        body = {"sampling_session_id": sampler, "seq_id": number, "prompt": prompt, "topk_prompt_logprobs": 100}
        return server.post("asample", {**body, "sampling_params": {"max_tokens": 1}})

    answers = [sample(number) for number in range(12)]
    assert [answer.status_code for answer in answers[:4]] == [200] * 4
    assert answers[-1].status_code == 429
    assert "Fetch the results of earlier requests" in answers[-1].json()["detail"]
    # Reading them makes room.
    for number, answer in enumerate(answers):
        if answer.status_code == 200:
            assert "sequences" in server.result(f"{sampler}:{number}")
    assert sample(100).status_code == 200


def test_requests_behind_a_missing_number_are_bounded_and_end_with_the_session(server: LimitedServer) -> None:
    session = server.session()
    model = server.model(session)
    passes = training(model, 12345, [1] * 2000)
    passes["forward_backward_input"]["data"] *= 30
    content = json.dumps(passes)
    answers = []
    for number in range(2, 100):
        body = content.replace("12345", str(number))
        answers.append(server.http.post("forward_backward", content=body, headers=JSON))
        if answers[-1].status_code != 200:
            break
    assert answers[-1].status_code == 429
    assert WITHIN in answers[-1].json()["detail"]
    waiting = answers[0].json()["request_id"]
    server.post(f"sessions/{session}/finish", {})
    assert "its session was finished" in server.result(waiting)["error"]


def test_a_loss_that_grows_behind_a_mask(server: LimitedServer) -> None:
    session = server.session()
    model = server.model(session)
    calls = [
        node("mask", "operator.lt", ref("logprobs"), 0.0),
        node("picked", "operator.getitem", ref("logprobs"), ref("mask")),
        node("sum", "sum", ref("picked"), op="call_method"),
        node("one", "double", ref("sum"), op="call_method"),
        *(
            each
            for i in range(40)
            for each in (
                node(f"wide{i}", "expand", ref("one"), 1 << 22, op="call_method"),
                node(f"copy{i}", "contiguous", ref(f"wide{i}"), op="call_method"),
                node(f"sum{i}", "exp", ref(f"copy{i}"), op="call_method"),
            )
        ),
        node("loss", "sum", ref("sum39"), op="call_method"),
    ]
    body = {
        "session_id": session,
        "custom_loss_seq_id": 0,
        "name": "grows",
        "inputs": [{"name": "logprobs", "rank": 1}],
        "graph": graph(*calls, output={"tuple": [ref("loss"), {"dict": {}}]}),
        "type": "create_custom_loss",
    }
    loss_id = server.run("create_custom_loss", body)["loss_id"]
    passes = training(model, 1, [1, 2, 3])
    passes["forward_backward_input"] |= {"loss_fn": "custom", "loss_fn_config": {"loss_id": loss_id}}
    outcome = server.run("forward_backward", passes)
    assert WITHIN in outcome["error"]
    assert "metrics" in server.run("forward_backward", training(model, 2, [1, 2, 3]))


def test_a_large_result_is_encoded_while_others_are_answered(server: LimitedServer) -> None:
    session = server.session()
    sampler = server.sampler(session)
    prompt = {"chunks": [{"type": "encoded_text", "tokens": [1] * 1000}]}
    body = {"sampling_session_id": sampler, "seq_id": 0, "prompt": prompt, "topk_prompt_logprobs": 100}
    request_id = server.post("asample", {**body, "sampling_params": {"max_tokens": 1}}).json()["request_id"]
    result = server.result(request_id)
    assert [len(row) for row in result["topk_prompt_logprobs"][1:]] == [100] * 999


def test_sampling_runs_in_waves_that_fit(server: LimitedServer) -> None:
    sampler = server.sampler(server.session())
    prompt = {"chunks": [{"type": "encoded_text", "tokens": [1] * 1500}]}
    parameters = {"max_tokens": 2, "seed": 7, "stop": []}
    body = {"sampling_session_id": sampler, "prompt": prompt, "sampling_params": parameters}
    many = server.run("asample", {**body, "seq_id": 0, "num_samples": 256})["sequences"]
    few = server.run("asample", {**body, "seq_id": 1, "num_samples": 3})["sequences"]
    assert len(many) == 256
    assert [each["tokens"] for each in many[:3]] == [each["tokens"] for each in few]


def test_more_connections_than_descriptors_leave_room_for_a_client(server: LimitedServer) -> None:
    size = server.log.stat().st_size
    model = server.model(server.session())
    with idle_connections(server.url, 300):
        fresh = httpx.post(f"{server.url}/api/v1/create_session", json={}, timeout=60)
        assert fresh.status_code == 200
        assert "metrics" in server.run("forward_backward", training(model, 1, [1, 2, 3]))
        log = server.log.read_text()[size:]
    assert log.count("connections; the last one because") == 1
    # Without bounds, asyncio logs each connection that it cannot accept, and tries again at once.
    assert "Too many open files" not in log
