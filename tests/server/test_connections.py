"""Connections that do nothing, or half of something, do not keep others from the server."""  # R5.11

from __future__ import annotations

import logging
import resource
import time
from typing import TYPE_CHECKING

import pytest

from tests.helpers.limited_server import idle_connections, limited_server, training
from tinker_lightning.server.serve import MAX_CONNECTIONS, OncePerMinute, max_connections

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.soak
def test_connections_without_the_key_leave_room_for_a_client(tmp_path: Path) -> None:
    with limited_server(tmp_path, "--api-key", "tml-secret", descriptors=256) as server:
        server.http.headers["x-api-key"] = "tml-secret"
        model = server.model(server.session())
        with idle_connections(server.url, 300):
            before, started = cpu_seconds(server.process.pid), time.monotonic()
            for number in range(1, 4):
                assert "metrics" in server.run("forward_backward", training(model, number, [1, 2, 3]))
            time.sleep(max(0.0, 2.0 - (time.monotonic() - started)))
            busy = (cpu_seconds(server.process.pid) - before) / (time.monotonic() - started)
        assert busy < 0.8  # 0.94 when asyncio could not accept any more
        log = server.log.read_text()
        assert "closed " in log
        assert "Too many open files" not in log


def cpu_seconds(process: int) -> float:
    with open(f"/proc/{process}/stat") as file:
        fields = file.read().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / 100


def test_the_number_of_connections_follows_from_the_descriptors(monkeypatch: pytest.MonkeyPatch) -> None:
    for soft, most in ((1024, 864), (10, 8), (1 << 20, MAX_CONNECTIONS), (resource.RLIM_INFINITY, MAX_CONNECTIONS)):
        monkeypatch.setattr(resource, "getrlimit", lambda _, soft=soft: (soft, soft))
        assert max_connections() == most


def test_a_warning_is_logged_once_per_minute() -> None:
    now = [0.0]
    once = OncePerMinute(lambda: now[0])
    warning = logging.makeLogRecord({"msg": "Invalid HTTP request received.", "levelno": logging.WARNING})
    assert once.filter(warning)
    assert not once.filter(warning)
    assert once.filter(logging.makeLogRecord({"msg": "Invalid HTTP request received.", "levelno": logging.INFO}))
    now[0] = 61.0
    assert once.filter(warning)
