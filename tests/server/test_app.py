"""The app around the work: configuration, sessions, what models and samplers are, keys."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import pytest

from tinker_lightning.server import bodies

if TYPE_CHECKING:
    from tests.helpers.api import Api
    from tinker_lightning.server import EmbeddedTrainer


def test_the_configuration_keeps_every_sdk_generation_on_the_simple_path(api: Api) -> None:
    config = api.post("client/config", {"sdk_version": "0.36.0"}).json()
    assert config["pjwt_auth_enabled"] is False
    assert config["parallel_fwdbwd_chunks"] is False  # a number that is never sent is then noticed within seconds
    ours = {"user-agent": "tinker-lightning"}
    assert api.post("client/config", {"sdk_version": "0"}, headers=ours).json()["parallel_fwdbwd_chunks"] is True
    assert config["sample_use_retrieve_futures"] is True  # one poll for all samples of a sampler
    newer = {"user-agent": "AsyncTinker/Python 0.38.0"}  # whose poller can keep a client from closing
    config_of_newer = api.post("client/config", {"sdk_version": "0.38.0"}, headers=newer).json()
    assert config_of_newer["sample_use_retrieve_futures"] is False
    assert config["sample_join_sampling_session"] is True
    assert config["proto_compress_fwdbwd"] is False
    assert config["fwdbwd_max_chunk_len"] >= 1 << 20
    assert config["fwdbwd_max_chunk_bytes_count"] == bodies.MAX_JSON_BYTES // 2  # taken as JSON too
    assert api.post("client/dynamic_config", {"sdk_version": "0.36.0"}).json() == {"sample_cancel_enabled": True}
    assert api.post("telemetry", {"events": [{"event": "SESSION_START"}]}).json() == {"status": "accepted"}
    assert api.request("GET", "healthz").json() == {"status": "ok"}


def test_capabilities_list_the_models(api: Api) -> None:
    expected = {"model_name": "tiny", "trainable": True, "sampleable": True}
    assert api.request("GET", "get_server_capabilities").json()["supported_models"] == [expected]
    api.model()
    expected = {**expected, "max_context_length": 2048}
    folder = api.trainer.catalog.get("tiny").tokenizer_id
    listed = api.request("GET", "get_server_capabilities").json()["supported_models"]
    assert listed == [expected, {**expected, "model_name": folder}]


def test_a_model_can_be_given_by_its_folder(api: Api) -> None:  # R5.17
    """The official SDK loads the tokenizer of such a client from the name that it was given."""
    session, folder = api.session(), api.trainer.catalog.get("tiny").tokenizer_id
    body = {"session_id": session, "base_model": folder}
    model = api.run("create_model", {**body, "model_seq_id": 0, "lora_config": {"rank": 4, "seed": 1}})["model_id"]
    assert api.state(model) == api.state(api.model(session, 1, seed=1))
    assert api.post("get_info", {"model_id": model}).json()["model_name"] == "tiny"
    saved = api.run("save_weights", {"model_id": model, "seq_id": 1, "path": "state"})["path"]
    assert api.post("weights_info", {"tinker_path": saved}).json()["base_model"] == "tiny"
    resumed = {**body, "model_seq_id": 2, "path": saved}
    assert "error" not in api.run("load_weights", resumed)
    sampler = api.post("create_sampling_session", {**body, "sampling_session_seq_id": 0}).json()["sampling_session_id"]
    assert "error" not in api.run("asample", api.sample(sampler, 0))
    assert list(api.trainer.catalog._models) == ["tiny"]  # type: ignore[attr-defined]  # it was not loaded twice


def test_sessions_live_until_they_are_finished(api: Api) -> None:
    body = {"tags": ["a"], "user_metadata": {"k": 1}, "display_name": "mine", "type": "create_session", "new": 1}
    session = api.post("create_session", body).json()["session_id"]
    assert api.post("session_heartbeat", {"session_id": session}).json() == {"type": "session_heartbeat"}
    assert api.post("session_heartbeat", {"session_id": "no"}).status_code == 404
    model = api.model(session)
    place = api.sampler(session)
    assert session in api.request("GET", "sessions").json()["sessions"]
    assert api.request("GET", f"sessions/{session}").json() == {
        "training_run_ids": [model],
        "sampler_ids": [place],
        "user_metadata": {"k": 1},
        "display_name": "mine",
    }
    assert api.request("GET", "sessions/no").status_code == 404
    assert api.post("sessions/no/finish", {}).status_code == 404
    for _ in range(2):
        finished = api.post(f"sessions/{session}/finish", {"reason": {"type": "success"}, "detail": None})
        assert finished.status_code == 200
    assert api.post("session_heartbeat", {"session_id": session}).status_code == 410
    late = api.post("create_model", {"session_id": session, "model_seq_id": 7, "base_model": "tiny"})
    assert late.status_code == 400
    assert "is finished" in late.json()["detail"]
    api.trainer.scheduler.find(f"{session}:finish").future.result(30)
    gone = api.post("forward_backward", api.train(model, 1))
    assert gone.status_code == 404
    assert "it was unloaded when its session was finished" in gone.json()["detail"]
    assert api.post("get_info", {"model_id": model}).status_code == 404
    assert api.post("asample", api.sample(place, 0)).status_code == 404


def test_models_tell_what_they_are_until_they_are_unloaded(api: Api) -> None:
    model = api.model(rank=8)
    info = api.post("get_info", {"model_id": model, "type": "get_info"}).json()
    assert info["model_id"] == model
    assert info["is_lora"] is True
    assert info["lora_rank"] == 8
    assert info["model_name"] == info["model_data"]["model_name"] == "tiny"
    assert info["model_data"]["arch"] == "llama"
    assert info["optimizer_config"] == {"type": "adamw"}
    assert api.run("unload_model", {"model_id": model}) == {"type": "unload_model", "model_id": model}
    assert api.post("get_info", {"model_id": model}).status_code == 404


@pytest.mark.parametrize(("release", "loads_from_the_name"), [("0.36.0", False), ("0.38.0", True), ("1.0.0", True)])
def test_models_name_a_folder_where_the_sdk_loads_tokenizers_of_samplers_from_it(
    api: Api, release: str, loads_from_the_name: bool
) -> None:  # R5.17
    headers = {"user-agent": f"AsyncTinker/Python {release}"}
    info = api.post("get_info", {"model_id": api.model()}, headers=headers).json()
    folder = api.trainer.catalog.get("tiny").tokenizer_id
    assert info["model_data"]["model_name"] == (folder if loads_from_the_name else "tiny")
    assert (info["model_name"], info["model_data"]["tokenizer_id"]) == ("tiny", folder)


def test_samplers_name_a_folder_the_sdk_can_load_the_tokenizer_from(api: Api) -> None:
    place = api.sampler()
    found = api.request("GET", f"samplers/{place}").json()
    assert found["sampler_id"] == place
    assert found["base_model"] == api.trainer.catalog.get("tiny").tokenizer_id
    assert api.request("GET", "samplers/none").status_code == 404


def test_unset_fields_of_early_sdks_take_their_defaults(api: Api) -> None:
    model = api.model()
    body = api.train(model, 1)
    del body["forward_backward_input"]["data"][0]["model_input"]["chunks"][0]["type"]
    body["forward_backward_input"]["loss_fn_config"] = None
    api.run("forward_backward", body)
    assert "metrics" in api.run("optim_step", {"model_id": model, "seq_id": 2, "adam_params": {"learning_rate": 0.1}})
    forward = {"forward_input": body["forward_backward_input"], "model_id": model, "seq_id": 3}
    before = api.state(model)
    assert "loss:sum" in api.run("forward", forward)["metrics"]
    assert api.state(model) == before


@pytest.mark.parametrize(
    ("method", "path"), [("GET", "sessions"), ("POST", "create_session"), ("DELETE", "sessions/healthz")]
)
def test_with_a_key_everything_but_the_health_check_needs_it(
    trainer: EmbeddedTrainer, method: str, path: str, api: Api
) -> None:
    locked = type(api)(trainer, api_key="tml-right")
    try:
        missing = locked.request(method, path)
        assert missing.status_code == 401
        assert "X-API-Key header is missing; set TINKER_API_KEY" in missing.json()["detail"]
        for key in ("tml-wrong", "tml-rightx", "tml-righ"):
            wrong = locked.request(method, path, headers={"x-api-key": key})
            assert wrong.status_code == 401
            assert "is wrong" in wrong.json()["detail"]
        assert locked.request("GET", "healthz").status_code == 200
        body: dict[str, Any] = {"json": {}} if method == "POST" else {}
        right = locked.request(method, path, headers={"x-api-key": "tml-right"}, **body)
        assert right.status_code in (200, 405)
    finally:
        locked.close()


def test_a_checkpoint_called_healthz_cannot_be_deleted_without_the_key(trainer: EmbeddedTrainer, api: Api) -> None:
    model = api.model()
    saved = api.run("save_weights", {"model_id": model, "seq_id": 1, "path": "healthz"})
    locked = type(api)(trainer, api_key="tml-right")
    try:
        path = f"training_runs/{model}/checkpoints/weights/healthz"
        assert locked.request("DELETE", path).status_code == 401
        assert api.post("weights_info", {"tinker_path": saved["path"]}).status_code == 200
    finally:
        locked.close()


def test_unknown_paths_and_methods_are_json_errors(api: Api) -> None:
    missing = api.request("GET", "nowhere")
    assert missing.status_code == 404
    assert missing.json()["detail"] == "GET /api/v1/nowhere: Not Found"
    wrong = api.request("GET", "create_session")
    assert wrong.status_code == 405
    assert wrong.headers["allow"] == "POST"


def test_metrics_are_numbers_of_the_whole_server_without_any_text_of_clients(
    trainer: EmbeddedTrainer, api: Api
) -> None:
    secret = "a-name-that-a-client-chose"  # noqa: S105  # not one that opens anything
    session = api.post("create_session", {"display_name": secret, "user_metadata": {"k": secret}}).json()["session_id"]
    model = api.model(session)
    api.run("forward_backward", api.train(model, 1, "hello"))
    assert "error" in api.run(
        "load_weights", {"model_id": model, "seq_id": 2, "path": f"tinker://{model}/weights/{secret}"}
    )
    api.run("asample", api.sample(api.sampler(session), 0, max_tokens=4))
    api.run("optim_step", api.step(model, 3))  # the jobs before it have been counted when it runs
    api.request("GET", f"sessions/{secret}")
    response = api.request("GET", "http://embedded/metrics")
    assert response.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
    text = response.text
    assert secret not in text
    assert "session-" not in text
    values: dict[str, float] = {}
    for line in text.splitlines():
        if not line.startswith("#"):
            assert re.fullmatch(r'tinker_[a-z_]+({[a-z]+="\w+"(,[a-z]+="\w+")*})? [0-9.e+-]+', line), line
            name, value = line.rsplit(" ", 1)
            values[name] = float(value)
    for name in {line.split("{")[0].split(" ")[0] for line in values}:
        assert f"# TYPE {name} " in text
    assert values["tinker_sessions"] == values["tinker_models"] == values["tinker_samplers"] == 1
    assert values["tinker_jobs_waiting"] == 0
    assert values['tinker_jobs_total{operation="forward_backward",outcome="ok"}'] == 1
    assert values['tinker_jobs_total{operation="load_weights",outcome="failed"}'] == 1
    assert values['tinker_tokens_total{operation="forward_backward",outcome="ok"}'] == 4
    assert values['tinker_tokens_total{operation="sample",outcome="ok"}'] == 3 + 4
    assert values['tinker_errors_total{status="404"}'] == 1
    assert values['tinker_memory_bytes{pool="weights"}'] > 0
    assert values["tinker_memory_limit_bytes"] == trainer.memory.limit
    api.post(f"sessions/{session}/finish", {})
    trainer.scheduler.find(f"{session}:finish").future.result(60)
    assert "tinker_sessions 0\n" in api.request("GET", "http://embedded/metrics").text


def test_metrics_need_the_key_where_there_is_one(trainer: EmbeddedTrainer, api: Api) -> None:
    locked = type(api)(trainer, api_key="tml-right")
    try:
        assert locked.request("GET", "http://embedded/metrics").status_code == 401
        header = {"authorization": "Bearer tml-right"}  # as Prometheus sends it
        text = locked.request("GET", "http://embedded/metrics", headers=header).text
        assert 'tinker_errors_total{status="401"} 1\n' in text
    finally:
        locked.close()
