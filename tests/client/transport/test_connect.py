"""`connect()` selects the server; a session is opened, kept alive and ended with the client."""

from __future__ import annotations

import gc
import logging
import threading
import time
from typing import TYPE_CHECKING, Any

import httpx
import pytest
import tinker

import tinker_lightning
from tests.helpers.backends import recording
from tests.helpers.client_data import DATA
from tinker_lightning.client import ServiceClient, TrainingBackend, as_backend, connect
from tinker_lightning.client.dialects import dialect_named
from tinker_lightning.client.transport import channel
from tinker_lightning.client.transport.target import HOSTED_URL
from tinker_lightning.errors import ClientClosed, InvalidInput
from tinker_lightning.server import create_app

if TYPE_CHECKING:
    import ssl
    from pathlib import Path

    from tests.helpers.backends import Running
    from tinker_lightning.server import EmbeddedTrainer


@pytest.fixture(autouse=True)
def _home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))


CASES: dict[str, tuple[str | None, dict[str, str], str, str | None]] = {
    # argument, environment, where it leads, what the log says
    "argument": ("http://a", {"TINKER_BASE_URL": "http://b", "TINKER_API_KEY": "tml-k"}, "http://a", None),
    "environment": (None, {"TINKER_BASE_URL": "http://b", "TINKER_API_KEY": "tml-k"}, "http://b", "TINKER_BASE_URL"),
    "hosted": (None, {"TINKER_API_KEY": "tml-k"}, HOSTED_URL, "there is an API key"),
    "embedded": (None, {}, "http://embedded", "neither TINKER_BASE_URL nor an API key"),
    "empty": (None, {"TINKER_BASE_URL": "", "TINKER_API_KEY": ""}, "http://embedded", "neither TINKER_BASE_URL nor"),
    "asked for": ("embedded", {"TINKER_BASE_URL": "http://b", "TINKER_API_KEY": "tml-k"}, "http://embedded", None),
    "by name": (None, {"TINKER_BASE_URL": "embedded"}, "http://embedded", "TINKER_BASE_URL"),
}


@pytest.mark.parametrize("case", CASES)
def test_where_it_leads(case: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:  # R1.10
    argument, environment, url, reason = CASES[case]
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    with caplog.at_level(logging.INFO), connect(argument) as service:
        assert service.url == url
    said = [record.getMessage() for record in caplog.records if record.name == "tinker_lightning.client"]
    assert len(said) == (reason is not None)
    assert reason is None or reason in said[0]
    assert not any("tml-k" in message for message in said)


def test_an_unknown_dialect_raises() -> None:
    with pytest.raises(InvalidInput, match="dialect: 'old' is unknown; choose from auto"):
        connect("http://a", dialect="old")


def test_the_embedded_trainer_has_its_own_dialect() -> None:
    with pytest.raises(InvalidInput, match="dialect: the embedded trainer does not speak 'skyrl'"):
        connect("embedded", dialect="skyrl")
    with pytest.raises(InvalidInput, match="does not speak 'mine'"):
        connect(dialect=dialect_named("json").but(name="mine"))
    with connect("embedded", dialect="embedded") as service:
        assert service.session.dialect == dialect_named("embedded")


def test_the_key_comes_from_the_argument_or_the_environment(
    shared: EmbeddedTrainer, running: Running, monkeypatch: pytest.MonkeyPatch
) -> None:  # R1.10
    with running(create_app(shared, api_key="tml-right")) as url:
        monkeypatch.setenv("TINKER_API_KEY", "tml-wrong")
        with connect(url, api_key="tml-right") as service:
            service.create_sampling_client(base_model="tiny")
        monkeypatch.setenv("TINKER_API_KEY", "tml-right")
        monkeypatch.setenv("TINKER_BASE_URL", url)
        with tinker_lightning.connect() as service:
            service.create_sampling_client(base_model="tiny")


def ours() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if thread.name.startswith(("tinker-lightning", "AnyIO"))}


def test_the_embedded_trainer_is_the_default_and_ends_with_the_client() -> None:  # R5.5
    before = ours()
    with connect() as service:
        model = service.create_lora_training_client("tiny", rank=4)
        model.forward_backward(DATA, "cross_entropy")
        assert (model.optim_step().result().metrics or {})["grad_norm"] > 0
        assert len(ours() - before) >= 2
    assert ours() - before == set()
    with pytest.raises(ClientClosed, match=r"Create a new one with connect\(\)"):
        service.get_server_capabilities()


def test_nothing_is_started_before_the_first_use() -> None:
    before = ours()
    with connect():
        assert len(ours() - before) == 1  # the loop that waits


def test_a_client_that_nobody_closes_ends_with_its_last_reference() -> None:
    before = ours()
    service = connect()
    service.create_lora_training_client("tiny", rank=4).forward(DATA, "cross_entropy").result()
    assert ours() - before
    del service
    deadline = time.monotonic() + 5
    while ours() - before and time.monotonic() < deadline:
        gc.collect()
        time.sleep(0.01)
    assert ours() - before == set()


def test_close_leaves_no_connections_open(
    shared: EmbeddedTrainer, running: Running, recwarn: pytest.WarningsRecorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(channel, "_EXIT_SECONDS", 600.0)
    with running(create_app(shared)) as url:
        future = connect(url).create_lora_training_client("tiny", rank=4).forward(DATA, "cross_entropy")
        gc.collect()
        # Its client is held until the request ends, and then does not wait for it.
        assert future.result(timeout=120).metrics["loss:sum"] > 0
        del future
        gc.collect()
    assert not [each for each in recwarn if issubclass(each.category, ResourceWarning)]


def test_the_handshake_takes_two_round_trips(shared: EmbeddedTrainer) -> None:
    """Construction to the first model: the configuration, session and capabilities together, the model."""
    with recording(create_app(shared)) as recorded:
        recorded.service.create_lora_training_client("tiny", rank=4)
        assert recorded.paths()[0] == "config"
        assert set(recorded.paths()[1:3]) == {"create_session", "get_server_capabilities"}
        assert recorded.paths()[3:] == ["create_model"]


def test_tags_go_with_the_session(shared: EmbeddedTrainer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TINKER_TAGS", "a, b,,c ")
    with recording(create_app(shared)) as recorded:
        recorded.service.create_sampling_client(base_model="tiny")
    (created,) = (each.message for each in recorded.record.requests if each.path.endswith("create_session"))
    assert created["tags"] == ["a", "b", "c"]


def test_messages_of_the_server_are_logged_at_the_start(
    shared: EmbeddedTrainer, caplog: pytest.LogCaptureFixture
) -> None:
    async def answer(request: httpx.Request) -> httpx.Response:
        if request.url.path.endswith("create_session"):
            return httpx.Response(200, json={"session_id": "s", "warning_message": "upgrade", "info_message": None})
        return httpx.Response(200, json={"supported_models": []})

    with ServiceClient(base_url="http://a", transport=httpx.MockTransport(answer)) as service:
        assert service.session.session_id == "s"
    assert [
        (record.levelname, record.getMessage()) for record in caplog.records if "upgrade" in record.getMessage()
    ] == [("WARNING", "upgrade")]


def test_a_server_of_the_first_generations_works() -> None:
    """It has neither a configuration nor capabilities nor a farewell."""

    async def answer(request: httpx.Request) -> httpx.Response:
        body = {
            "create_session": {"session_id": "s"},
            "create_model": {"request_id": "r"},
            "retrieve_future": {"model_id": "m"},
        }
        known = body.get(request.url.path.rsplit("/", 1)[1])
        return httpx.Response(404, json={"detail": "Not Found"}) if known is None else httpx.Response(200, json=known)

    with ServiceClient(base_url="http://old", transport=httpx.MockTransport(answer)) as service:
        assert service.get_server_capabilities().supported_models == []
        assert service.create_lora_training_client("any").model_id == "m"
        assert not service.session.config.parallel_fwdbwd_chunks


def test_the_session_is_kept_alive(shared: EmbeddedTrainer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tinker_lightning.client.transport.session._HEARTBEAT_SECONDS", 0.02)
    with recording(create_app(shared)) as recorded:
        session = recorded.service.session
        while recorded.paths().count("session_heartbeat") < 3:
            time.sleep(0.01)
        shared.finish_session(session.session_id)  # from now on the server answers 410
        while not session._heart.done():
            time.sleep(0.01)
        count = recorded.paths().count("session_heartbeat")
        time.sleep(0.1)
        assert recorded.paths().count("session_heartbeat") == count


def test_as_backend_accepts_clients_with_all_methods(shared: EmbeddedTrainer) -> None:
    with recording(create_app(shared)) as recorded:
        model = recorded.service.create_lora_training_client("tiny", rank=4)
        assert as_backend(model) is model
        assert isinstance(model, TrainingBackend)
    something: Any = "a model"
    with pytest.raises(
        InvalidInput,
        match=r"str cannot be trained: it has no unread, losses, .*, can_expire, prepare, .*optim",
    ):
        as_backend(something)
    with pytest.raises(InvalidInput, match=r"AdamParams cannot be trained: .*Pass a training client"):
        as_backend(tinker.AdamParams())


def test_the_environment_may_name_the_base_model(shared: EmbeddedTrainer, monkeypatch: pytest.MonkeyPatch) -> None:
    with recording(create_app(shared)) as recorded:  # R1.10
        monkeypatch.delenv("TINKER_BASE_MODEL", raising=False)
        with pytest.raises(InvalidInput, match="set TINKER_BASE_MODEL"):
            recorded.service.create_lora_training_client()
        monkeypatch.setenv("TINKER_BASE_MODEL", "tiny")
        assert recorded.service.create_lora_training_client(rank=4).get_info().model_name == "tiny"


def test_clients_read_the_certificates_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read, create = [], httpx.create_ssl_context

    def create_ssl_context() -> ssl.SSLContext:
        read.append(1)
        return create()

    monkeypatch.setattr(httpx, "create_ssl_context", create_ssl_context)
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        monkeypatch.setenv("SSL_CERT_DIR", str(tmp_path / folder))
        for _ in range(2):
            ServiceClient(base_url="https://127.0.0.1:9").close()
    assert len(read) == 2  # for each setting
