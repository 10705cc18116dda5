"""Everything that can go wrong between a client and a server has its own exception, which says how to fix it."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import threading
import time
from typing import TYPE_CHECKING, Any

import pytest
from starlette.applications import Starlette
from starlette.responses import HTMLResponse, JSONResponse, PlainTextResponse, Response
from starlette.routing import Route

from tests.helpers.backends import QUICK, recording
from tinker_lightning.client import ServiceClient
from tinker_lightning.client.transport.retries import RetryPolicy
from tinker_lightning.errors import (
    ConnectionDropped,
    InvalidInput,
    NotAnApi,
    NotATinkerServer,
    NotFound,
    ServerUnreachable,
    TinkerLightningError,
    Unauthorized,
)
from tinker_lightning.server import create_app

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tests.helpers.backends import Running
    from tinker_lightning.server import EmbeddedTrainer

SOON = RetryPolicy(0.3, first_delay=0.05, longest_delay=0.1)


@contextlib.contextmanager
def visiting(url: str, retry_policy: RetryPolicy = SOON, **options: Any) -> Iterator[ServiceClient]:
    with ServiceClient(base_url=url, retry_policy=retry_policy, **options) as service:
        yield service


def fail_with(service: ServiceClient) -> TinkerLightningError:
    """What the first use of a client raises, within seconds."""
    started = time.monotonic()
    with pytest.raises(TinkerLightningError) as caught:
        service.create_lora_training_client("tiny")
    assert time.monotonic() - started < 30
    return caught.value


def test_no_server() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    with visiting(f"http://127.0.0.1:{port}", RetryPolicy(300.0)) as service:  # what users get
        error = fail_with(service)
    assert type(error) is ServerUnreachable
    assert isinstance(error, ConnectionError)
    assert f"nothing answers at http://127.0.0.1:{port}" in str(error)
    assert "tinker-lightning serve --model tiny" in str(error)


def test_hosted_tinker_cannot_be_reached(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "tinker_lightning.client.transport.connection.HOSTED_URL", "http://127.0.0.1:9"
    )  # where nothing listens
    with visiting("http://127.0.0.1:9") as service:
        error = str(fail_with(service))
        assert (
            "pass base_url='embedded', or unset TINKER_API_KEY and TINKER_BASE_URL, to train in this process" in error
        )


def test_no_such_host() -> None:
    with visiting("http://no-such-host.invalid") as service:
        assert type(fail_with(service)) is ServerUnreachable


@pytest.mark.parametrize("url", ["", "localhost:8000", "ftp://somewhere", "http://", "http://[::bad", "http://a:65536"])
def test_an_invalid_url_raises(url: str) -> None:
    with pytest.raises(InvalidInput, match=r"is not the URL of a server.* Use http://host:port"):
        ServiceClient(base_url=url)


@pytest.mark.parametrize("key", ["tml-ключ", "tml-a\nb", " tml-a"])
def test_no_key(key: str) -> None:
    with pytest.raises(InvalidInput, match=r"the API key contains .* Copy it again"):
        ServiceClient(base_url="http://somewhere", api_key=key)


@pytest.mark.parametrize("key", [None, "", "tml-wrong"])
def test_a_wrong_key(shared: EmbeddedTrainer, key: str | None) -> None:
    with recording(create_app(shared, api_key="tml-secret"), api_key=key) as recorded:
        error = fail_with(recorded.service)
        assert len(recorded.record.requests) == 1  # it is not tried again
    assert type(error) is Unauthorized
    assert isinstance(error, PermissionError)
    assert "Set TINKER_API_KEY, or pass api_key=" in str(error)
    assert "secret" not in str(error)


def test_the_right_key(shared: EmbeddedTrainer) -> None:
    with recording(create_app(shared, api_key="tml-secret"), api_key="tml-secret") as recorded:
        recorded.service.create_lora_training_client("tiny", rank=4).optim_step().result()


async def page(_: Any) -> Response:
    return HTMLResponse("<html><body>Welcome to nginx!</body></html>")


async def missing(_: Any) -> Response:
    return HTMLResponse("<html>404 Not Found</html>", 404)


async def bad_gateway(_: Any) -> Response:
    return HTMLResponse("<html>502 Bad Gateway</html>", 502)


async def forbidden_method(_: Any) -> Response:
    return JSONResponse({"detail": "Method Not Allowed"}, 405)


async def another_api(_: Any) -> Response:
    return JSONResponse({"hello": "I am a list of pets", "supported_models": "none"})


async def empty_object(_: Any) -> Response:
    return JSONResponse({})


async def a_list(_: Any) -> Response:
    return JSONResponse([1, 2])


async def unknown_path(_: Any) -> Response:
    return JSONResponse({"detail": "Not Found"}, 404)


async def file_server(_: Any) -> Response:
    return HTMLResponse("<html>Unsupported method</html>", 501)  # as `python -m http.server` answers a POST


async def not_quite(_: Any) -> Response:
    return PlainTextResponse("pong")


async def broken_gzip(_: Any) -> Response:
    return Response(b"no gzip", headers={"content-encoding": "gzip"}, media_type="application/json")


async def redirect(_: Any) -> Response:
    return Response(status_code=301, headers={"location": "https://elsewhere"})


@pytest.mark.parametrize(
    ("answer", "kind"),
    [
        (page, NotAnApi),
        (missing, NotAnApi),
        (file_server, NotAnApi),
        (not_quite, NotAnApi),
        (broken_gzip, NotAnApi),
        (redirect, NotAnApi),
        (bad_gateway, ServerUnreachable),
        (another_api, NotATinkerServer),
        (empty_object, NotATinkerServer),
        (a_list, NotATinkerServer),
        (unknown_path, NotATinkerServer),
        (forbidden_method, NotATinkerServer),
    ],
)
def test_a_server_of_another_kind(
    answer: Callable[..., Any], kind: type[TinkerLightningError], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tinker_lightning.client.transport.connection.FIRST_CONTACT_SECONDS", 0.3)
    app = Starlette(routes=[Route("/{path:path}", answer, methods=["GET", "POST"])])
    with recording(app, RetryPolicy(300.0)) as recorded:
        error = fail_with(recorded.service)
    assert type(error) is kind
    fix = "Is that server running?" if answer is bad_gateway else "Correct the URL (TINKER_BASE_URL or url=)"
    assert fix in str(error)
    if answer in (page, missing):
        assert "<html>" in str(error)


@contextlib.contextmanager
def raw_server(answers: Callable[[int], bytes]) -> Iterator[str]:
    """Sends bytes as they are, and closes the connection behind them."""
    count = 0
    loop = asyncio.new_event_loop()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal count
        head = await reader.readuntil(b"\r\n\r\n")
        length = next(
            (int(line[15:]) for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:")), 0
        )
        await reader.readexactly(length)
        writer.write(answers(count))
        count += 1
        await writer.drain()
        writer.close()

    server = loop.run_until_complete(asyncio.start_server(serve, "127.0.0.1", 0))
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    finally:
        loop.call_soon_threadsafe(server.close)
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


def http(body: bytes, length: int | None = None) -> bytes:
    size = len(body) if length is None else length
    return b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n" % size + body


def test_a_connection_dropped_in_the_middle_of_a_body() -> None:
    with raw_server(lambda _: http(b'{"session_', 500)) as url, visiting(url) as service:
        error = fail_with(service)
    assert type(error) is ConnectionDropped
    assert "the connection was lost before the response was complete" in str(error)
    assert "Check the log of the server" in str(error)


def test_a_connection_dropped_without_a_byte() -> None:
    with raw_server(lambda _: b"") as url, visiting(url) as service:
        assert type(fail_with(service)) is ConnectionDropped


def test_something_that_speaks_no_http() -> None:
    with raw_server(lambda _: b"SSH-2.0-OpenSSH_9.2\r\n") as url, visiting(url) as service:
        assert type(fail_with(service)) is ConnectionDropped


def test_a_lost_response_is_requested_again() -> None:
    def answer(count: int) -> bytes:
        body = json.dumps({"session_id": "s", "supported_models": [], "model_id": "m", "request_id": "r"}).encode()
        return http(body[: len(body) // 2], len(body)) if count % 2 else http(body)

    with raw_server(answer) as url, visiting(url, QUICK) as service:
        assert service.create_lora_training_client("tiny").model_id == "m"


def test_a_model_that_is_not_served(shared: EmbeddedTrainer) -> None:
    with recording(create_app(shared)) as recorded:
        with pytest.raises(NotFound, match=r"create_model: .*'gpt-9'.*tiny") as caught:
            recorded.service.create_lora_training_client("gpt-9")
        assert caught.value.operation == "create_model"
        with pytest.raises(InvalidInput, match="rank must be at least 1"):
            recorded.service.create_lora_training_client("tiny", rank=0)
        with pytest.raises(InvalidInput, match="give either base_model or model_path"):
            recorded.service.create_sampling_client()
        with pytest.raises(NotFound, match="tinker://nobody/weights/nothing"):
            recorded.service.create_training_client_from_state("tinker://nobody/weights/nothing")
        recorded.service.create_lora_training_client("tiny", rank=4)


def test_the_networks_own_transport_is_used_by_default(shared: EmbeddedTrainer, running: Running) -> None:
    with running(create_app(shared, api_key="tml-secret")) as url, visiting(url + "/", api_key="tml-secret") as service:
        assert service.get_server_capabilities().supported_models[0].model_name == "tiny"
