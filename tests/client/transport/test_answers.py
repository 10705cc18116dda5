"""Answers of servers are bounded in size and time, and passwords in URLs are sent but never shown."""

from __future__ import annotations

import asyncio
import base64
import gzip
import logging
import tracemalloc
import zlib
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import httpx
import pytest

from tinker_lightning import connect
from tinker_lightning.client import RestClient, ServiceClient
from tinker_lightning.client.transport import answers
from tinker_lightning.client.transport.connection import Connection
from tinker_lightning.client.transport.retries import RetryPolicy
from tinker_lightning.client.transport.target import Credentials
from tinker_lightning.errors import AnswerLost, ConnectionDropped, InvalidInput, NotAnApi, TinkerLightningError
from tinker_lightning.wire import compression

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\n"
GZIP = HEAD + b"content-encoding: gzip\r\n"


def whole(head: bytes, body: bytes) -> bytes:
    return head + f"content-length: {len(body)}\r\n\r\n".encode() + body


@asynccontextmanager
async def answering(write: Callable[[asyncio.StreamWriter], Any]) -> AsyncIterator[Connection]:
    """A connection to a server that reads the head of each request and writes whatever a function writes."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await reader.readuntil(b"\r\n\r\n")
            await write(writer)
        except OSError:
            pass
        finally:
            writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1")
    url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    connection = Connection(url, Credentials(None), None, RetryPolicy(0.0))
    async with server:
        yield connection
        await connection.close()


def ask(write: Callable[[asyncio.StreamWriter], Any], **options: Any) -> httpx.Response:
    async def run() -> httpx.Response:
        async with answering(write) as connection:
            return await asyncio.wait_for(connection.send("GET", "/x", **options), 60)

    return asyncio.run(run())


def sends(content: bytes) -> Callable[[asyncio.StreamWriter], Any]:
    async def write(writer: asyncio.StreamWriter) -> None:
        writer.write(content)
        await writer.drain()

    return write


BOMBS = {
    "gzip": gzip.compress(bytes(64 << 20)),
    "deflate": zlib.compress(bytes(64 << 20)),
    "zstd": compression.compress(bytes(64 << 20)),
    "gzip, gzip": gzip.compress(gzip.compress(bytes(64 << 20))),
}


@pytest.mark.parametrize("encoding", BOMBS)
@pytest.mark.parametrize("repeatable", [True, False])
def test_a_decompression_bomb_stays_small(encoding: str, repeatable: bool) -> None:  # R5.18
    head = HEAD + f"content-encoding: {encoding}\r\n".encode()
    tracemalloc.start()
    with pytest.raises(
        NotAnApi if repeatable else AnswerLost, match=r"more than the limit|larger than the limit of 2 MiB"
    ):
        ask(sends(whole(head, BOMBS[encoding])), most=2 << 20, repeatable=repeatable)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 40 << 20  # zstd is decompressed in steps of at most 32 MiB


@pytest.mark.parametrize("head", [HEAD + b"transfer-encoding: chunked\r\n\r\n", HEAD + b"\r\n"])
def test_an_endless_body_ends(head: bytes) -> None:
    async def write(writer: asyncio.StreamWriter) -> None:
        writer.write(head)
        while True:
            part = b" " * 65536
            writer.write(b"10000\r\n" + part + b"\r\n" if b"chunked" in head else part)
            await writer.drain()

    with pytest.raises(NotAnApi, match="cannot be decoded: it is larger than the limit of 4 MiB"):
        ask(write, most=4 << 20)


def test_a_body_that_drips_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(answers, "PATIENCE_SECONDS", 0.3)

    async def write(writer: asyncio.StreamWriter) -> None:
        writer.write(HEAD + b"content-length: 1000000\r\n\r\n")
        while not writer.is_closing():
            writer.write(b" ")
            await writer.drain()
            await asyncio.sleep(0.02)

    with pytest.raises(ConnectionDropped, match=r"connection was lost .* bytes have arrived, which is too slow"):
        ask(write)


@pytest.mark.parametrize(
    ("encoding", "encode"),
    [
        ("gzip", gzip.compress),
        ("X-GZip", gzip.compress),
        ("deflate", zlib.compress),
        ("deflate", lambda body: zlib.compress(body, wbits=-15)),
        ("zstd", compression.compress),
        ("deflate, gzip", lambda body: gzip.compress(zlib.compress(body))),
        ("identity", bytes),
    ],
)
def test_compressed_answers_are_read(encoding: str, encode: Callable[[bytes], bytes]) -> None:
    body = b'{"a": "%s"}' % (b"x" * 5000)
    response = ask(sends(whole(HEAD + f"content-encoding: {encoding}\r\n".encode(), encode(body))))
    assert response.content == body
    assert response.json()["a"][0] == "x"
    assert "content-encoding" not in response.headers


@pytest.mark.parametrize(
    ("encoding", "body"),
    [("gzip", gzip.compress(b"{}", mtime=0)[:-9]), ("gzip", b"{}"), ("deflate", b"{}"), ("zstd", b"{}"), ("br", b"{}")],
)
def test_a_damaged_encoding_is_an_error_of_its_own(encoding: str, body: bytes) -> None:
    with pytest.raises(NotAnApi, match="sent a response that cannot be decoded: "):
        ask(sends(whole(HEAD + f"content-encoding: {encoding}\r\n".encode(), body)))


def test_the_description_of_an_api_is_bounded_too(caplog: pytest.LogCaptureFixture) -> None:
    """A server that answers detection with a bomb is connected to as if it had no description."""
    asked = []

    async def bomb() -> AsyncIterator[bytes]:
        yield gzip.compress(b'{"info": {"title": "Tinker API Mock"}}' + b" " * (9 << 20))

    def handle(request: httpx.Request) -> httpx.Response:
        asked.append(request.url.path)
        if request.url.path == "/openapi.json":
            return httpx.Response(200, content=bomb(), headers={"content-encoding": "gzip"})
        if request.url.path == "/api/v1/get_server_capabilities":
            return httpx.Response(200, json={"supported_models": []})
        if request.url.path == "/api/v1/create_session":
            return httpx.Response(200, json={"session_id": "s"})
        return httpx.Response(404, json={"detail": "no"})

    with (
        caplog.at_level(logging.INFO),
        ServiceClient(base_url="http://x", transport=httpx.MockTransport(handle)) as service,
    ):
        service.get_server_capabilities()
    assert "/openapi.json" in asked
    assert "'skyrl'" not in caplog.text  # what the title would have said


# Passwords in URLs.

SECRET = "s3cret"  # noqa: S105  # made up


def test_a_password_in_a_url_is_sent_to_that_server_only_and_shown_nowhere(caplog: pytest.LogCaptureFixture) -> None:
    seen: list[httpx.Request] = []

    def handle(request: httpx.Request) -> httpx.Response:
        seen.append(request)
        return httpx.Response(404, json={"detail": "no such thing"})

    async def run() -> tuple[str, str]:
        transport = httpx.MockTransport(handle)
        url = f"http://me:{SECRET}%40@example.org/trainer/"
        connection = Connection(url, Credentials("tml-k"), transport, RetryPolicy(0.0))
        with pytest.raises(TinkerLightningError) as caught:
            await connection.send("GET", "/x")
        async with connection.stream("http://elsewhere.org/file"):
            pass
        return connection.url, str(caught.value)

    with caplog.at_level(logging.DEBUG):
        url, message = asyncio.run(run())
    assert url == "http://example.org/trainer"
    there, elsewhere = seen
    assert there.headers["authorization"] == "Basic " + base64.b64encode(f"me:{SECRET}@".encode()).decode()
    assert "authorization" not in elsewhere.headers
    assert SECRET not in message + caplog.text + str(there.url)
    assert "GET http://example.org/trainer/x: no such thing" in message


@pytest.mark.parametrize(
    "url",
    [
        f"http://me:{SECRET}@127.0.0.1:1",
        f"ftp://me:{SECRET}@example.org",
        f"http://me:{SECRET}/@example.org",
        f"http://me:{SECRET}\x00@example.org",
        f"me:{SECRET}@example.org",
    ],
)
def test_errors_and_logs_about_a_url_do_not_have_its_password(url: str, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG), pytest.raises(TinkerLightningError) as caught:
        connect(url).get_server_capabilities()
    cause: BaseException | None = caught.value
    while cause is not None:
        assert SECRET not in repr(cause)
        cause = cause.__cause__
    assert SECRET not in caplog.text


def test_a_url_in_the_wrong_place_is_named_without_its_password() -> None:
    for make in (ServiceClient, RestClient):
        with pytest.raises(InvalidInput, match=r"base_url='http://example\.org'") as caught:
            make(f"http://me:{SECRET}@example.org")  # type: ignore[arg-type]
        assert SECRET not in str(caught.value)
