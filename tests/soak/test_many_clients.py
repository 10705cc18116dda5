"""Sixteen clients with four keys train and sample at once: each as if it were alone, and none near another's work."""

from __future__ import annotations

import random
import threading
import time
from statistics import mean
from typing import TYPE_CHECKING, Any, Self

import httpx
import pytest
import torch
from safetensors.torch import load_file

from tests.helpers.limited_server import LimitedServer, limited_server
from tests.helpers.soaking import size
from tinker_lightning import AdamParams, Datum, ModelInput, SamplingParams
from tinker_lightning.client import ServiceClient
from tinker_lightning.server.keys import add_key

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

pytestmark = pytest.mark.soak

CLIENTS, PLANS = 16, 4
SECONDS = size("SECONDS", 600)
KEYS = ("alice", "bob", "carol", "dave")
PROMPT = ModelInput.from_ints(list(b"hello"))
EVERY = 10  # steps from one sample of the trained weights to the next


class Client:
    """Trains and samples by a plan; clients with the same plan have different keys."""

    def __init__(self, url: str, key: str, plan: int) -> None:
        self.key, self.plan = key, plan
        self.service = ServiceClient(base_url=url, api_key=key)
        self.model = self.service.create_lora_training_client("tiny", rank=4, seed=plan)
        self.base = self.service.create_sampling_client(base_model="tiny")
        self.record: list[Any] = []  # what the server has answered, by step
        self.state = ""
        self.slowest = 0.0  # seconds of a step
        self.error: BaseException | None = None

    def step(self) -> None:
        number = len(self.record)
        ids = [(31 * self.plan + 7 * number + k * k) % 256 for k in range(16 + self.plan)]
        loss = self.model.forward_backward_custom([Datum.from_tokens(ids)], _loss)
        updated = self.model.optim_step(AdamParams(learning_rate=1e-3, grad_clip_norm=1.0))
        trained = number % EVERY == EVERY - 1
        sampler = self.model.save_weights_and_get_sampling_client() if trained else self.base
        params = SamplingParams(max_tokens=4, seed=1000 * self.plan + number)
        (sample,) = sampler.sample(PROMPT, 1, params).result().sequences
        metrics = loss.result().metrics, updated.result().metrics
        self.record.append((*metrics, list(sample.tokens), list(sample.logprobs or ())))

    def run(self, deadline: float) -> None:
        try:
            while time.monotonic() < deadline:
                started = time.monotonic()
                self.step()
                self.slowest = max(self.slowest, time.monotonic() - started)
            self.save()
        except BaseException as error:
            self.error = error

    def save(self) -> None:
        self.state = self.model.save_state(f"after-{len(self.record)}", overwrite=True).result().path


def _loss(_: Any, logprobs: list[torch.Tensor]) -> tuple[torch.Tensor, dict[str, float]]:
    loss = torch.cat(logprobs).square().mean()
    return loss, {"squares": float(loss.detach())}


def tensors(folder: Path, state: str) -> dict[str, bytes]:
    """Weights and Adam's state, to the bit."""
    (saved,) = folder.rglob(f"{state.split('/')[2].replace(':', '*')}/**/{state.rsplit('/', 1)[-1]}")
    files = saved.glob("*.safetensors")
    return {f"{file.name} {name}": one.numpy().tobytes() for file in files for name, one in load_file(file).items()}


def foreign_requests(client: Client) -> Iterator[tuple[str, str, dict[str, Any] | None]]:
    """Requests for what belongs to a client."""
    model, sampler = client.model.model_id, client.base.sampler_id
    session = model.partition(":")[0]
    prompt = {"chunks": [{"type": "encoded_text", "tokens": [1, 2]}]}
    yield "POST", "get_info", {"model_id": model}
    yield "POST", "optim_step", {"model_id": model, "seq_id": 10**6, "adam_params": {"learning_rate": 1.0}}
    yield "POST", "save_weights", {"model_id": model, "seq_id": 10**6, "path": "stolen"}
    yield "POST", "retrieve_future", {"request_id": f"{model}:{max(1, len(client.record))}"}
    yield "POST", "unload_model", {"model_id": model}
    yield "POST", "asample", {"sampling_session_id": sampler, "seq_id": 1, "prompt": prompt, "sampling_params": {}}
    yield "POST", "session_heartbeat", {"session_id": session}
    yield "POST", f"sessions/{session}/finish", {}
    yield "GET", f"training_runs/{model}", None
    yield "GET", f"training_runs/{model}/checkpoints", None


class Watch:
    """Meanwhile, asks with one client's key for what another one has, and measures the server, until it is stopped."""

    def __init__(self, server: LimitedServer, clients: list[Client]) -> None:
        self.memory: list[int] = []  # of the process
        self.charged: list[float] = []  # what it keeps for its clients, such as results, by its own account
        self.open: list[int] = []
        self.answers: list[tuple[str, int]] = []
        self._server, self._clients = server, clients
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        dice = random.Random(1)  # noqa: S311
        with httpx.Client(base_url=self._server.http.base_url, timeout=120) as http:
            while not self._stop.wait(0.5):
                self.memory.append(self._server.status("VmRSS"))
                self.open.append(self._server.descriptors)
                metrics = http.get(f"{self._server.url}/metrics", headers={"x-api-key": self._clients[0].key}).text
                pools = [line for line in metrics.splitlines() if line.startswith("tinker_memory_bytes{")]
                self.charged.append(sum(float(line.split()[1]) for line in pools))
                victim, thief = dice.sample(self._clients, 2)
                if victim.key != thief.key:
                    for method, path, body in foreign_requests(victim):
                        answer = http.request(method, path, json=body, headers={"x-api-key": thief.key})
                        self.answers.append((f"{method} {path}", answer.status_code))


def test_each_of_many_clients_trains_as_if_it_were_alone(tmp_path: Path) -> None:  # R5.10, R5.11, R5.18
    keys = [add_key(tmp_path / "keys", name) for name in KEYS]
    with limited_server(tmp_path, "--api-key-file", str(tmp_path / "keys")) as server:
        clients = [Client(server.url, keys[i % len(keys)], i // PLANS) for i in range(CLIENTS)]
        deadline = time.monotonic() + SECONDS
        threads = [threading.Thread(target=client.run, args=[deadline]) for client in clients]
        with Watch(server, clients) as watch:
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        steps = [len(client.record) for client in clients]
        print(f"{sum(steps)} steps in {SECONDS} s, by client {steps}", end="; ")
        print(f"the longest step of each in s: {[round(client.slowest, 1) for client in clients]}")
        fifth = max(1, len(watch.memory) // 5)
        early, late = slice(fifth, 2 * fifth), slice(-fifth, None)
        grown, charged = (mean(each[late]) - mean(each[early]) for each in (watch.memory, watch.charged))
        print(f"RSS {mean(watch.memory[early]) / 2**20:.0f} + {grown / 2**20:.0f} MiB", end=", ")
        print(f"of them charged {charged / 2**20:.0f} MiB, descriptors {watch.open[fifth]} → {watch.open[-1]}")
        statuses = {status for _, status in watch.answers}
        print(f"{len(watch.answers)} requests with a foreign key: {statuses}")
        assert [client.error for client in clients if client.error] == []
        assert watch.answers
        assert [answer for answer in watch.answers if answer[1] != 404] == []
        for client in clients:
            client.service.close()
        for plan in range(PLANS):
            same = [client for client in clients if client.plan == plan]
            alone = Client(server.url, keys[0], plan)
            for client in sorted(same, key=lambda client: len(client.record)):
                while len(alone.record) < len(client.record):
                    alone.step()
                alone.save()
                assert client.record == alone.record
                assert tensors(tmp_path, client.state) == tensors(tmp_path, alone.state)
            alone.service.close()
    if SECONDS >= 120:  # time is divided by the clock, so a second in which the machine does something else weighs less
        assert max(steps) <= 1.5 * min(steps), steps
    assert grown < max(charged, 0) + (20 << 20)
