"""Connections that do nothing, or half of something, do not keep others from the server."""  # R5.11

from __future__ import annotations

import logging
import resource
import socket
import time
from typing import TYPE_CHECKING

import httpx
import pytest

from tests.helpers.limited_server import limited_server, training
from tinker_lightning.server.connections import MAX_CONNECTIONS, OncePerMinute, most_connections

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

HALF_HEADER = b"POST /api/v1/create_session HTTP/1.1\r\nhost: 127.0.0.1\r\n"
HALF_BODY = HALF_HEADER + b"content-type: application/json\r\ncontent-length: 100\r\n\r\n{"


@pytest.fixture
def sockets() -> Iterator[list[socket.socket]]:
    opened: list[socket.socket] = []
    yield opened
    for each in opened:
        each.close()


def open_many(url: str, count: int, start: bytes, opened: list[socket.socket]) -> None:
    host, port = url.removeprefix("http://").split(":")
    for _ in range(count):
        connection = socket.socket()
        connection.settimeout(0.5)
        opened.append(connection)
        try:
            connection.connect((host, int(port)))
            connection.sendall(start)
        except OSError:  # refused, or closed at once
            continue


@pytest.mark.parametrize("key", [False, pytest.param(True, marks=pytest.mark.soak)])
def test_more_connections_than_descriptors_leave_room_for_a_client(
    tmp_path: Path, sockets: list[socket.socket], key: bool
) -> None:
    options = ["--api-key", "tml-secret"] if key else []
    with limited_server(tmp_path, *options, descriptors=256) as server:
        server.http.headers["x-api-key"] = "tml-secret" if key else ""
        model = server.model(server.session())
        for start in (b"", HALF_HEADER, HALF_BODY):
            open_many(server.url, 100, start, sockets)
        size = server.log.stat().st_size
        before, started = cpu_seconds(server.process.pid), time.monotonic()
        fresh = httpx.post(
            f"{server.url}/api/v1/create_session", json={}, headers=dict(server.http.headers), timeout=60
        )
        assert fresh.status_code == 200
        for number in range(1, 4):
            assert "metrics" in server.run("forward_backward", training(model, number, [1, 2, 3]))
        time.sleep(max(0.0, 2.0 - (time.monotonic() - started)))
        busy = (cpu_seconds(server.process.pid) - before) / (time.monotonic() - started)
        assert busy < 0.8  # 0.94 when asyncio could not accept any more
        log = server.log.read_text()
        assert len(log) - size < 20_000
        assert log.count("closed ") == 1
        assert "Too many open files" not in log


def cpu_seconds(process: int) -> float:
    with open(f"/proc/{process}/stat") as file:
        fields = file.read().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / 100


def test_the_number_of_connections_follows_from_the_descriptors(monkeypatch: pytest.MonkeyPatch) -> None:
    for soft, most in ((1024, 864), (10, 8), (1 << 20, MAX_CONNECTIONS), (resource.RLIM_INFINITY, MAX_CONNECTIONS)):
        monkeypatch.setattr(resource, "getrlimit", lambda _, soft=soft: (soft, soft))
        assert most_connections() == most


def test_a_warning_is_logged_once_per_minute() -> None:
    now = [0.0]
    once = OncePerMinute(lambda: now[0])
    warning = logging.makeLogRecord({"msg": "Invalid HTTP request received.", "levelno": logging.WARNING})
    assert once.filter(warning)
    assert not once.filter(warning)
    assert once.filter(logging.makeLogRecord({"msg": "Invalid HTTP request received.", "levelno": logging.INFO}))
    now[0] = 61.0
    assert once.filter(warning)
