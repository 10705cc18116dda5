"""A server in a process of its own, with limits that protect the machine from a server that does not keep its own."""

from __future__ import annotations

import contextlib
import os
import resource
import socket
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import httpx

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

HALF_HEADER = b"POST /api/v1/create_session HTTP/1.1\r\nhost: 127.0.0.1\r\n"
HALF_BODY = HALF_HEADER + b"content-type: application/json\r\ncontent-length: 100\r\n\r\n{"
JSON = {"content-type": "application/json"}
ZSTD = {**JSON, "content-encoding": "zstd"}


class LimitedServer:
    """A running server and the protocol's basic requests."""

    def __init__(self, process: subprocess.Popen[str], log: Path) -> None:
        assert process.stdout is not None
        line = process.stdout.readline()
        assert "http://" in line, log.read_text()
        self.url = "http://" + line.split("http://")[1].strip()
        self.process = process
        self.log = log
        self.http = httpx.Client(base_url=f"{self.url}/api/v1/", timeout=120)

    def status(self, field: str) -> int:
        """A number that the kernel knows about the process, in bytes."""
        with open(f"/proc/{self.process.pid}/status") as file:
            found = next(line for line in file if line.startswith(f"{field}:"))
        return int(found.split()[1]) << 10

    @property
    def descriptors(self) -> int:
        """How many files and connections the process has open."""
        return len(os.listdir(f"/proc/{self.process.pid}/fd"))

    @property
    def peak(self) -> int:
        """The most memory that the process has ever taken."""
        return self.status("VmHWM")

    def post(self, path: str, body: Any) -> httpx.Response:
        return self.http.post(path, json=body)

    def result(self, request_id: str) -> Any:
        while (response := self.post("retrieve_future", {"request_id": request_id})).status_code == 408:
            pass
        return response.json()

    def run(self, path: str, body: Any) -> Any:
        """The result of a request, or the error of a rejected one."""
        receipt = self.post(path, body).json()
        return self.result(receipt["request_id"]) if "request_id" in receipt else receipt

    def session(self) -> str:
        return str(self.post("create_session", {}).json()["session_id"])

    def model(self, session: str, base_model: str = "tiny") -> str:
        body = {"session_id": session, "model_seq_id": 0, "base_model": base_model, "lora_config": {"rank": 4}}
        return str(self.run("create_model", body)["model_id"])

    def sampler(self, session: str, base_model: str = "tiny") -> str:
        body = {"session_id": session, "sampling_session_seq_id": 0, "base_model": base_model}
        return str(self.post("create_sampling_session", body).json()["sampling_session_id"])


@contextlib.contextmanager
def idle_connections(url: str, count: int) -> Iterator[None]:
    """Opens connections and keeps them: a third sends nothing, a third half a header, and a third half a body."""
    host, port = url.removeprefix("http://").split(":")
    with contextlib.ExitStack() as opened:
        for start in (b"", HALF_HEADER, HALF_BODY):
            for _ in range(count // 3):
                connection = opened.enter_context(socket.socket())
                connection.settimeout(0.5)
                with contextlib.suppress(OSError):  # closed at once, or not accepted
                    connection.connect((host, int(port)))
                    connection.sendall(start)
        yield


def datum(tokens: list[int]) -> dict[str, Any]:
    """A datum as JSON, whose targets are its own tokens."""
    targets = {"data": tokens, "dtype": "int64", "shape": [len(tokens)]}
    inputs = {"target_tokens": targets, "weights": {**targets, "data": [1.0] * len(tokens), "dtype": "float32"}}
    return {"model_input": {"chunks": [{"type": "encoded_text", "tokens": tokens}]}, "loss_fn_inputs": inputs}


def training(model: str, number: int, tokens: list[int]) -> dict[str, Any]:
    """A forward_backward over one datum."""
    passes = {"data": [datum(tokens)], "loss_fn": "cross_entropy"}
    return {"forward_backward_input": passes, "model_id": model, "seq_id": number}


@contextlib.contextmanager
def limited_server(
    folder: Path, *options: str, model: str = "tiny", data: int | None = None, descriptors: int | None = None
) -> Iterator[LimitedServer]:
    """Starts a server that may take `data` bytes and open `descriptors` files."""

    def limit() -> None:
        if data is not None:
            resource.setrlimit(resource.RLIMIT_DATA, (data, data))
        if descriptors is not None:
            resource.setrlimit(resource.RLIMIT_NOFILE, (descriptors, descriptors))

    log = folder / "log"
    command = [sys.executable, "-m", "tinker_lightning", "serve", "--model", model, "--port", "0"]
    with (
        log.open("w") as stderr,
        subprocess.Popen(
            [*command, "--data-dir", str(folder), *options],
            stdout=subprocess.PIPE,
            stderr=stderr,
            text=True,
            preexec_fn=limit,  # nothing else runs in this process's threads meanwhile
        ) as process,
    ):
        try:
            server = LimitedServer(process, log)
            with server.http:
                yield server
        finally:
            process.kill()
