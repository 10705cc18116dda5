"""Numbered operations over HTTP: in order, exactly once, and a failed one changes nothing."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any

import pytest

from tinker_lightning.server import EmbeddedTrainer
from tinker_lightning.server.trainer import registry, scheduler
from tinker_lightning.server.trainer import trainer as trainer_module
from tinker_lightning.types import Datum, ModelInput
from tinker_lightning.types.requests import ForwardBackwardRequest
from tinker_lightning.wire import json as wire_json
from tinker_lightning.wire import protobuf, tinker_pb2

if TYPE_CHECKING:
    from pathlib import Path

    from tests.helpers.api import Api

PROTOBUF = "application/x-protobuf"
LONG = 1000.0


def test_a_rejected_body_frees_its_number_so_that_the_next_runs_at_once(api: Api) -> None:
    api.trainer.scheduler.gap_timeout = LONG
    model = api.model()
    bad = api.train(model, 1)
    bad["forward_backward_input"]["data"][0]["loss_fn_inputs"]["weights"]["data"] = "none"
    refused = api.post("forward_backward", bad)
    assert refused.status_code == 400
    assert "datum 0: weights.data" in refused.json()["detail"]
    assert "loss_fn_outputs" in api.run("forward_backward", api.train(model, 2))
    # Also in protobuf, and for a request whose numbers are fine but whose meaning is not.
    data = [Datum.from_tokens([1, 2, 3])]
    body = protobuf.encode_forward_backward(ForwardBackwardRequest(model, 3, data, "cross_entropy"))
    message = tinker_pb2.ForwardBackwardRequest.FromString(body)
    message.data[0].loss_fn_inputs["weights"].dense = b"\0" * 5
    headers = {"content-type": PROTOBUF}
    refused = api.request("POST", "forward_backward", content=message.SerializeToString(), headers=headers)
    assert refused.status_code == 400
    assert "datum 0: weights: " in refused.json()["detail"]
    step = api.run("optim_step", api.step(model, 4))
    assert step["metrics"]["grad_norm"] > 0
    assert api.post("save_weights", {"model_id": model, "seq_id": 5, "path": "../x"}).status_code == 400
    assert "path" in api.run("save_weights", {"model_id": model, "seq_id": 6, "path": "x"})


def test_requests_posted_in_any_order_run_in_the_order_of_their_numbers(api: Api) -> None:
    api.trainer.scheduler.gap_timeout = LONG
    session = api.session()
    one, other = api.model(session, 0), api.model(session, 1)

    def requests(model: str) -> list[tuple[str, Any]]:
        texts = enumerate(["first", "second", "third"])
        steps = [(("forward_backward", api.train(model, 2 * i + 1, text)), i) for i, text in texts]
        return [request for train, i in steps for request in (train, ("optim_step", api.step(model, 2 * i + 2)))]

    ids = [api.submit(*request) for request in (*requests(one), *reversed(requests(other)))]
    assert all("metrics" in api.result(request_id) for request_id in ids)
    assert api.state(one) == api.state(other)


def test_a_lost_number_is_waited_for_and_then_rejected(api: Api) -> None:
    api.trainer.scheduler.gap_timeout = 0.1
    model = api.model()
    api.run("forward_backward", api.train(model, 1))
    assert "metrics" in api.run("optim_step", api.step(model, 3))
    late = api.post("forward_backward", api.train(model, 2))
    assert late.status_code == 400
    assert "arrived too late" in late.json()["detail"]


def test_a_used_number_cannot_be_used_for_something_else(api: Api) -> None:
    model = api.model()
    api.run("forward_backward", api.train(model, 1))
    refused = api.post("optim_step", api.step(model, 1))
    assert (refused.status_code, refused.headers["x-should-retry"]) == (409, "false")
    assert "already used for forward_backward" in refused.json()["detail"]
    assert "metrics" in api.run("optim_step", api.step(model, 2))


def test_a_used_number_cannot_be_used_for_other_data(api: Api) -> None:  # R5.11
    """Otherwise the client would take the result of the first request for that of the second."""
    session = api.session()
    model, place = api.model(session), api.sampler(session, 0)
    state = api.run("save_weights", {"model_id": model, "seq_id": 1, "path": "state"})["path"]
    create = {"session_id": session, "model_seq_id": 7, "base_model": "tiny", "lora_config": {"rank": 4}}
    sampler = {"session_id": session, "sampling_session_seq_id": 9}
    pairs: list[tuple[str, dict[str, Any], str, dict[str, Any]]] = [
        ("forward_backward", api.train(model, 2), "forward_backward", api.train(model, 2, "other text")),
        ("optim_step", api.step(model, 3), "optim_step", api.step(model, 3, learning_rate=0.5)),
        ("optim_step", api.step(model, 4), "load_weights", {"model_id": model, "seq_id": 4, "path": state}),
        *(
            (
                path,
                {"model_id": model, "seq_id": 5 + i, "path": "a"},
                path,
                {"model_id": model, "seq_id": 5 + i, "path": "b"},
            )
            for i, path in enumerate(("save_weights", "save_weights_for_sampler", "save_weights_external"))
        ),
        ("create_model", create, "create_model", {**create, "lora_config": {"rank": 4, "seed": 3}}),
        ("asample", api.sample(place, 1, seed=1), "asample", api.sample(place, 1, seed=2)),
    ]
    before = {}
    for path, body, other_path, other in pairs:
        answer = api.run(path, body)
        before = api.state(model)
        refused = api.post(other_path, other)
        assert (refused.status_code, refused.headers["x-should-retry"]) == (409, "false"), refused.text
        assert refused.json()["error_class"] == "RequestConflict"
        first, second = re.findall(r"digest ([0-9a-f]{32})", refused.json()["detail"])
        assert first != second
        assert api.run(path, body) == answer  # an equal one is still answered
        assert api.state(model) == before
    assert api.post("create_sampling_session", {**sampler, "base_model": "tiny"}).status_code == 200
    assert api.post("create_sampling_session", {**sampler, "base_model": "tiny"}).status_code == 200
    refused = api.post("create_sampling_session", {**sampler, "model_path": state})
    assert (refused.status_code, refused.headers["x-should-retry"]) == (409, "false")
    assert "already used for a sampler of tiny; this one would be of tinker://" in refused.json()["detail"]


def test_a_backward_that_is_not_retained_leaves_its_number_to_the_whole_pass(api: Api) -> None:
    model = api.model()
    data = [Datum.from_tokens(list(b"hello world"))]
    bare = [Datum(ModelInput([]), {"gradient": [0.5] * 10})]
    headers = {"content-type": PROTOBUF}

    def post(path: str, request: ForwardBackwardRequest) -> int:
        content = protobuf.encode_forward_backward(request)
        return api.request("POST", path, content=content, headers=headers).status_code

    backward = ForwardBackwardRequest(model, 1, bare, "cross_entropy", {"forward": 9.0})
    assert post("http://embedded/ext/v1/retained_backward", backward) == 410
    whole = ForwardBackwardRequest(model, 1, data, "cross_entropy")
    assert [post("forward_backward", whole) for _ in range(2)] == [200, 200]
    assert post("http://embedded/ext/v1/retained_backward", backward) == 409  # now it is used, also for a backward
    assert post("http://embedded/ext/v1/counted_forward_backward", whole) == 409


def test_json_and_protobuf_of_the_same_pass_are_one_request(api: Api) -> None:
    model = api.model()
    body = api.train(model, 1)
    sparse = {"data": [7], "dtype": "int64", "shape": [10, 9], "sparse_crow_indices": [0] * 10 + [1]}
    inputs = body["forward_backward_input"]["data"][0]["loss_fn_inputs"]
    inputs |= {"scalar": {"data": [2.0], "shape": []}, "table": {**sparse, "sparse_col_indices": [5]}}
    body["forward_backward_input"]["loss_fn_config"] = {"b": 2, "a": "text"}
    decoded = wire_json.parse_forward_backward(json.dumps(body).encode(), forward_only=False)
    content = protobuf.encode_forward_backward(decoded)
    first = api.submit("forward_backward", body)
    again = api.request("POST", "forward_backward", content=content, headers={"content-type": PROTOBUF})
    assert again.json()["request_id"] == first


def test_repeats_of_anything_posted_together_run_once(api: Api) -> None:
    session = api.session()
    plain = api.model(session, 0)
    steps = [
        ("forward_backward", api.train(plain, 1)),
        ("optim_step", api.step(plain, 2)),
        ("forward_backward", api.train(plain, 3, "again and again")),
        ("optim_step", api.step(plain, 4)),
        ("save_weights", {"model_id": plain, "seq_id": 5, "path": "state"}),
        ("forward_backward", api.train(plain, 6)),
    ]
    for path, body in steps:
        api.run(path, body)

    create = {"session_id": session, "model_seq_id": 1, "base_model": "tiny", "lora_config": {"rank": 4}}
    made = api.together(*[("create_model", create)] * 4)
    (request_id,) = {response.json()["request_id"] for response in made}
    repeated = api.result(request_id)["model_id"]
    answers = []
    for times, (path, body) in zip((2, 3, 4, 5, 3, 2), steps, strict=True):
        responses = api.together(*[(path, {**body, "model_id": repeated})] * times)
        (request_id,) = {response.json()["request_id"] for response in responses}
        answers.append(api.result(request_id))
    # Saving twice would have said that the name is taken.
    assert answers[4]["path"] == f"tinker://{repeated}/weights/state"
    assert api.state(plain) == api.state(repeated)
    # Long after, still the same answers.
    for (path, body), answer in zip(steps, answers, strict=True):
        assert api.run(path, {**body, "model_id": repeated}) == answer
    assert api.state(plain) == api.state(repeated)


def test_a_repeated_sample_is_drawn_once(api: Api) -> None:
    place = api.sampler()
    responses = api.together(*[("asample", api.sample(place, 10**18))] * 4)
    assert len({response.text for response in responses}) == 1
    results = [api.result(responses[0].json()["request_id"]) for _ in range(2)]
    assert results[0] == results[1]  # without a seed a second draw would differ
    other = api.run("asample", api.sample(place, 10**18 + 1, max_tokens=20))
    again = api.run("asample", api.sample(place, 10**18 + 2, max_tokens=20))
    assert other != again


def test_a_repeated_unnamed_snapshot_is_one_sampler_though_its_session_number_changes(api: Api) -> None:
    model = api.model()
    snapshot = {"model_id": model, "seq_id": 1, "sampling_session_seq_id": 5}
    first = api.run("save_weights_for_sampler", snapshot)
    again = api.run("save_weights_for_sampler", {**snapshot, "sampling_session_seq_id": 6})
    assert first == again
    assert first["sampling_session_id"]
    session = model.split(":")[0]
    assert api.request("GET", f"sessions/{session}").json()["sampler_ids"] == [first["sampling_session_id"]]


def test_a_repeated_create_model_finds_its_model_after_the_result_was_dropped(api: Api) -> None:
    session = api.session()
    model = api.model(session)
    api.trainer.scheduler._jobs.clear()
    assert api.model(session) == model
    assert "metrics" in api.run("optim_step", api.step(model, 1))


def test_a_snapshot_keeps_its_weights_while_training_goes_on(api: Api) -> None:
    model = api.model()
    place = api.run("save_weights_for_sampler", {"model_id": model, "seq_id": 1, "sampling_session_seq_id": 0})
    place = place["sampling_session_id"]
    scored = {**api.sample(place, 0, max_tokens=1), "prompt_logprobs": True}
    before = api.run("asample", scored)["prompt_logprobs"]
    for seq in (2, 4, 6):
        api.run("forward_backward", api.train(model, seq))
        api.run("optim_step", api.step(model, seq + 1, learning_rate=0.1))
    assert api.run("asample", {**scored, "seq_id": 1})["prompt_logprobs"] == before


def test_of_many_snapshots_those_used_last_are_kept(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    model = api.model()
    _, adapter = api.trainer.registry.model(model).ready()
    size = sum(tensor.nbytes for tensor in adapter.weights.tensors.values())
    monkeypatch.setattr(registry, "SAMPLER_BYTES", 3 * size)
    plain = api.sampler(model.split(":")[0], 99)
    places = []
    for seq in range(1, 6):
        body = {"model_id": model, "seq_id": seq, "sampling_session_seq_id": seq}
        places.append(api.run("save_weights_for_sampler", body)["sampling_session_id"])
        assert "sequences" in api.run("asample", api.sample(places[0], seq))  # in use all the time
    assert "sequences" in api.run("asample", api.sample(plain, 0))  # holds no weights, so costs nothing
    assert "sequences" in api.run("asample", api.sample(places[4], 0))
    gone = api.post("asample", api.sample(places[1], 0))
    assert gone.status_code == 404
    assert "Save weights under a name to keep them" in gone.json()["detail"]


def test_a_sampler_on_saved_weights_outlives_the_memory_of_them(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "SAMPLER_BYTES", 1)
    model = api.model()
    path = api.run("save_weights_for_sampler", {"model_id": model, "seq_id": 1, "path": "kept"})["path"]
    session = model.split(":")[0]
    places = [
        api.post(
            "create_sampling_session",
            {"session_id": session, "sampling_session_seq_id": number, "model_path": path},
        ).json()["sampling_session_id"]
        for number in range(5)
    ]
    assert [api.trainer.registry.sampler(place).size > 0 for place in places] == [False] * 4 + [True]
    answers = [api.run("asample", api.sample(place, 0, seed=1))["sequences"] for place in places]
    assert answers == [answers[0]] * 5


def test_a_session_whose_client_died_is_ended_when_another_comes(api: Api) -> None:
    """Also one whose client has never sent a heartbeat. A client that only trains or polls is alive."""
    silent, never_beat, alive, training, polling = models = [api.model() for _ in range(5)]
    sessions = [api.trainer.registry.session(model.split(":")[0]) for model in models]
    for session in (sessions[0], sessions[2]):
        api.post("session_heartbeat", {"session_id": session.session_id})
    receipt = api.submit("optim_step", api.step(polling, 1))
    for session in sessions:
        session.last_seen -= trainer_module.HEARTBEAT_TIMEOUT + 1
    api.post("session_heartbeat", {"session_id": sessions[2].session_id})
    api.run("forward_backward", api.train(training, 1))
    api.result(receipt)
    api.session()
    for model in (silent, never_beat):
        api.trainer.scheduler.find(f"{model.split(':')[0]}:finish").future.result(30)
        assert api.post("session_heartbeat", {"session_id": model.split(":")[0]}).status_code == 410
        refused = api.post("forward_backward", api.train(model, 1))
        assert refused.status_code == 404
        assert "it was unloaded when its session was finished" in refused.text
    for model, seq in ((alive, 1), (training, 2), (polling, 2)):
        assert "metrics" in api.run("forward_backward", api.train(model, seq))


def test_finished_models_are_forgotten(api: Api) -> None:
    for _ in range(3):
        session = api.session()
        model = api.model(session)
        api.post(f"sessions/{session}/finish", {})
        api.trainer.scheduler.find(f"{session}:finish").future.result(30)
        assert api.post("get_info", {"model_id": model}).status_code == 404
    assert not api.trainer.registry.models()


def test_models_of_a_living_session_are_forgotten_with_the_record_of_their_end(
    api: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Until then, every request is answered from the record; afterwards none runs, so no number is used twice."""
    session = api.session()
    model = api.model(session)
    api.run("optim_step", api.step(model, 1))
    failing = {"session_id": session, "model_seq_id": 1, "base_model": "tiny", "lora_config": {"rank": 1 << 40}}
    assert "error" in api.run("create_model", failing)
    unloaded = api.run("unload_model", {"model_id": model})
    assert api.run("unload_model", {"model_id": model}) == unloaded
    assert "metrics" in api.run("optim_step", api.step(model, 1))
    assert api.model(session) == model  # a repeated request creates nothing
    assert "it was unloaded" in api.run("optim_step", api.step(model, 2))["error"]
    assert len(api.trainer.registry.models()) == 2
    monkeypatch.setattr(scheduler, "MAX_FETCHED", 1)
    other = api.model(session, 2)  # its result displaces earlier ones
    assert [each.model_id for each in api.trainer.registry.models()] == [other]
    assert vars(api.trainer.scheduler)["_queues"].keys() == set()
    for path, body in (
        ("optim_step", api.step(model, 3)),
        ("unload_model", {"model_id": model}),
        ("create_model", {"session_id": session, "model_seq_id": 0, "base_model": "tiny"}),
        ("create_model", failing),
    ):
        refused = api.post(path, body)
        assert refused.status_code == 404
        assert "it was unloaded, or its creation failed" in refused.json()["detail"]
    assert "metrics" in api.run("optim_step", api.step(other, 1))
    assert api.request("GET", f"sessions/{session}").json()["training_run_ids"][0] == model


def test_metadata_that_is_nested_too_deep_is_rejected(api: Api) -> None:
    """The encoder of the answers fails at some depth, which would be an internal error of each listing."""
    for depth, status in ((32, 200), (33, 400), (253, 400)):
        metadata: Any = {}
        for _ in range(depth - 2):
            metadata = [metadata]
        response = api.post("create_session", {"user_metadata": {"a": metadata}})
        assert response.status_code == status, response.text
        if status == 200:
            assert api.request("GET", f"sessions/{response.json()['session_id']}").status_code == 200
        body = {"session_id": api.session(), "model_seq_id": 0, "base_model": "tiny", "user_metadata": {"a": metadata}}
        assert api.post("create_model", body).status_code == status


@pytest.mark.parametrize(
    "failure",
    ["unknown loss", "token", "missing targets", "overflow", "learning rate", "unknown path", "taken name"],
)
def test_a_failed_operation_leaves_the_model_bit_for_bit_and_the_next_works(api: Api, failure: str) -> None:
    model = api.model()
    for seq in (1, 2):
        api.run("forward_backward", api.train(model, 2 * seq - 1))
        api.run("optim_step", api.step(model, 2 * seq))
    api.run("save_weights", {"model_id": model, "seq_id": 5, "path": "taken"})
    api.run("forward_backward", api.train(model, 6))
    before = api.state(model)
    assert any(name.startswith("gradient/") for name in before)

    path, body = "forward_backward", api.train(model, 7)
    passes = body["forward_backward_input"]
    good = api.train(model, 7, "good")["forward_backward_input"]["data"][0]
    passes["data"].insert(0, good)
    inputs = passes["data"][1]["loss_fn_inputs"]
    if failure == "unknown loss":
        passes["loss_fn"] = "nonsense"
    elif failure == "token":
        passes["data"][1]["model_input"]["chunks"][0]["tokens"][3] = 259
    elif failure == "missing targets":
        del inputs["target_tokens"]
    elif failure == "overflow":
        inputs["weights"]["data"] = [3e38] * 10
    elif failure == "learning rate":
        path, body = "optim_step", api.step(model, 7, learning_rate=1e300)
    elif failure == "unknown path":
        path, body = "load_weights", {"model_id": model, "seq_id": 7, "path": f"tinker://{model}/weights/none"}
    else:
        path, body = "save_weights", {"model_id": model, "seq_id": 7, "path": "taken"}
    failed = api.run(path, body)
    assert failed["category"] == "user"
    assert api.state(model) == before
    assert "metrics" in api.run("optim_step", api.step(model, 8))
    assert api.state(model) != before


def test_a_string_is_one_model(tmp_path: Path) -> None:
    trainer = EmbeddedTrainer("tiny", data_dir=tmp_path)
    assert trainer.catalog.names == ["tiny"]
    trainer.close()
