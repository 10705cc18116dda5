"""A hundred thousand damaged requests over TCP to the command: no 5xx, and the server does not grow."""  # R5.11

from __future__ import annotations

import threading
import time
from collections import Counter
from typing import TYPE_CHECKING

import pytest

from tests.helpers.api import TcpApi
from tests.helpers.damaged_requests import REFUSALS, Fuzzer
from tests.helpers.limited_server import LimitedServer, limited_server
from tests.helpers.soaking import size

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.soak

REQUESTS = size("REQUESTS", 100_000)
THREADS = 4


class Attack:
    """Sends its share of the requests."""

    def __init__(self, url: str, seed: int) -> None:
        self.counts: Counter[str] = Counter()
        self.faults: list[object] = []
        self._url, self._seed = url, seed
        self.thread = threading.Thread(target=self._run)
        self.thread.start()

    def _run(self) -> None:
        api = TcpApi(self._url)
        try:
            fuzzer = Fuzzer(api, self._seed)
            for _ in range(REQUESTS // THREADS):
                self._send(api, fuzzer)
        except BaseException as error:
            self.faults.append(error)
        finally:
            api.close()

    def _send(self, api: TcpApi, fuzzer: Fuzzer) -> None:
        method, path, content, headers = fuzzer.damaged()
        last = api.last_number(fuzzer.model)
        response = api.request(method, path, content=content, headers=headers)
        self.counts[str(response.status_code)] += 1
        if response.status_code >= 400 and response.status_code not in (429, *REFUSALS):
            self.faults.append((response.status_code, method, path, content[:500], response.text[:500]))
        # The result of a number that does not wait for another one.
        if response.status_code == 200 and api.last_number(fuzzer.model) == last + 1 and path != "retrieve_future":
            result = api.result(f"{fuzzer.model}:{last + 1}")
            self.counts["failed" if "error" in result else "done"] += 1
            if result.get("category") == "server":
                self.faults.append((result, method, path, content[:500]))

    @property
    def sent(self) -> int:
        return sum(count for status, count in self.counts.items() if status.isdecimal())


def grown(server: LimitedServer, attacks: list[Attack]) -> tuple[int, int]:
    """The server's memory after a third of the requests, and at the end."""
    memory: list[int] = []
    while any(attack.thread.is_alive() for attack in attacks):
        sent = sum(attack.sent for attack in attacks)
        if sent >= REQUESTS * (len(memory) + 1) // 12:
            memory.append(server.status("VmRSS"))
            print(f"{sent} requests, RSS {memory[-1] >> 20} MiB, {server.descriptors} descriptors")
        time.sleep(0.2)
    return memory[3], server.status("VmRSS")


def test_damaged_requests_over_tcp_leave_no_trace(tmp_path: Path) -> None:
    with limited_server(tmp_path) as server:
        bystander = TcpApi(server.url)
        model = bystander.model()
        first = bystander.run("forward_backward", bystander.train(model, 1))
        attacks = [Attack(server.url, seed) for seed in range(THREADS)]
        before, after = grown(server, attacks)
        counts = sum((attack.counts for attack in attacks), Counter[str]())
        print(f"{dict(counts)}; RSS {before >> 20} → {after >> 20} MiB")
        assert [fault for attack in attacks for fault in attack.faults] == []
        assert bystander.run("forward_backward", bystander.train(model, 2)) == first
        bystander.close()
    assert counts["done"] > REQUESTS // 200
    assert after < before + (50 << 20)
