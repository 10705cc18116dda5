"""`tinker-lightning serve` as users run it: a process that says where it listens, logs what it does, and stops."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import pytest
import tinker
from starlette.responses import PlainTextResponse

from tinker_lightning import AdamParams, Datum, cli, connect
from tinker_lightning.errors import InvalidInput, ModelNotFound, ServerUnreachable, Unauthorized
from tinker_lightning.server import create_app, serve
from tinker_lightning.server.http import LocalHost, is_loopback
from tinker_lightning.server.keys import add_key, remove_key

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tinker_lightning.server import EmbeddedTrainer

SOON = 120.0  # on a busy machine


class Server:
    """A running command, its URL, and what it wrote."""

    def __init__(self, process: subprocess.Popen[str], log: Path) -> None:
        assert process.stdout is not None
        self.process = process
        line = process.stdout.readline()
        assert "://" in line, f"no URL but {line!r}, and on stderr {log.read_text()!r}"
        self.url = line.split()[-1]
        self._log = log

    @property
    def log(self) -> str:
        return self._log.read_text()

    def client(self, **options: Any) -> httpx.Client:
        return httpx.Client(base_url=f"{self.url}/api/v1/", timeout=SOON, **options)

    def stop(self, how: signal.Signals = signal.SIGTERM) -> tuple[int, float]:
        """The exit code, and how many seconds it took."""
        started = time.monotonic()
        self.process.send_signal(how)
        return self.process.wait(SOON), time.monotonic() - started


@contextlib.contextmanager
def running(folder: Path, *options: str, python: tuple[str, ...] = ()) -> Iterator[Server]:
    log = folder / "log"
    command = [sys.executable, *python, "-m", "tinker_lightning", "serve", "--model", "tiny", "--port", "0"]
    with (
        log.open("w") as stderr,
        subprocess.Popen(
            [*command, "--data-dir", str(folder), *options], stdout=subprocess.PIPE, stderr=stderr, text=True
        ) as process,
    ):
        try:
            yield Server(process, log)
        finally:
            process.kill()


def send_part_of_a_request(url: str, body: bytes) -> socket.socket:
    connection = socket.create_connection(("127.0.0.1", int(url.rsplit(":", 1)[1])), timeout=SOON)
    head = b"POST /api/v1/create_session HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-type: application/json\r\n"
    connection.sendall(head + body)
    return connection


@contextlib.contextmanager
def waiting_clients(server: Server, **options: Any) -> Iterator[list[int]]:
    """Two clients that wait for samples which take minutes; yields the statuses of the answers that they get."""
    answers: list[int] = []
    connected = threading.Barrier(3)

    def poll(request_id: str) -> None:
        with server.client(**options) as other:
            other.get("healthz")
            connected.wait(SOON)
            answers.append(other.post("retrieve_future", json={"request_id": request_id}).status_code)

    with server.client(**options) as http:
        session = http.post("create_session", json={}).json()["session_id"]
        body = {"session_id": session, "sampling_session_seq_id": 0, "base_model": "tiny"}
        sampler = http.post("create_sampling_session", json=body).json()["sampling_session_id"]
        prompt = {"chunks": [{"tokens": [1]}]}
        work = {"sampling_session_id": sampler, "prompt": prompt, "sampling_params": {"stop": []}, "num_samples": 256}
        # Without a bound on its length the first one takes minutes.
        ids = [http.post("asample", json={**work, "seq_id": i}).json()["request_id"] for i in range(2)]
        polls = [threading.Thread(target=poll, args=[request_id]) for request_id in ids]
        for thread in polls:
            thread.start()
        connected.wait(SOON)
        for _ in range(20):  # meanwhile the polls arrive; the server answers while it computes
            assert http.get("healthz").status_code == 200
        yield answers
        for thread in polls:
            thread.join(SOON)


def test_it_says_where_it_listens_logs_each_operation_needs_no_lightning_and_stops(tmp_path: Path) -> None:
    """All in one test, because the start of a server takes longer than all of it."""
    with running(tmp_path, python=("-X", "importtime")) as server:
        assert re.fullmatch(r"http://127\.0\.0\.1:\d+", server.url)
        # Clients that hang up in the middle leave no trace.
        for part in (b"content-length: 100\r\n\r\n{", b"transfer-encoding: chunked\r\n\r\n5\r\n{"):
            send_part_of_a_request(server.url, part).close()
        with server.client() as http:

            def run(path: str, body: dict[str, Any]) -> Any:
                request_id = http.post(path, json=body).json()["request_id"]
                return http.post("retrieve_future", json={"request_id": request_id}).json()

            assert http.get("healthz").json() == {"status": "ok"}
            assert http.get("healthz", headers={"host": "attacker.example:80"}).status_code == 403
            session = http.post("create_session", json={}).json()["session_id"]
            model = run("create_model", {"session_id": session, "model_seq_id": 0, "base_model": "tiny"})["model_id"]
            tokens = {"data": [2, 3, 4], "dtype": "int64", "shape": [3]}
            datum = {
                "model_input": {"chunks": [{"type": "encoded_text", "tokens": [1, 2, 3]}]},
                "loss_fn_inputs": {"target_tokens": tokens, "weights": {**tokens, "dtype": "float32"}},
            }
            passes = {"data": [datum, datum], "loss_fn": "cross_entropy"}
            assert "metrics" in run(
                "forward_backward", {"forward_backward_input": passes, "model_id": model, "seq_id": 1}
            )
            nowhere = f"tinker://{model}/weights/none"
            assert "error" in run("load_weights", {"model_id": model, "seq_id": 2, "path": nowhere})
        with tinker.ServiceClient(base_url=server.url, api_key="tml-any") as official:
            client = official.create_lora_training_client(base_model="tiny", rank=4).result()
            client.optim_step(tinker.AdamParams()).result()
        half = b"content-length: 100\r\n\r\n{"
        with (
            waiting_clients(server) as answers,
            send_part_of_a_request(server.url, b""),
            send_part_of_a_request(server.url, half) as unfinished,
        ):
            code, seconds = server.stop(signal.SIGINT)
            assert unfinished.recv(1000).startswith(b"HTTP/1.1 503 ")
        log = server.log
    assert code == 0
    assert seconds < 60  # and not the minutes that the samples take
    assert answers == [408, 408]
    (passed,) = re.findall(r"op=forward_backward .*", log)
    assert re.fullmatch(rf"op=forward_backward model={model} seq=1 datums=2 tokens=6 ms=\d+\.\d ok", passed)
    (failed,) = re.findall(r"op=load_weights .*", log)
    assert re.fullmatch(
        rf"op=load_weights model={model} seq=2 ms=\d+\.\d failed: {nowhere}: there is no such checkpoint", failed
    )
    assert "Traceback" not in log
    assert "Exception" not in log
    imported = set(re.findall(r"^import time:.*\| +([\w.]+)$", log, re.MULTILINE))
    assert "tinker_lightning.server.serve" in imported
    assert not {name.split(".")[0] for name in imported} & {"lightning", "pytorch_lightning", "wandb"}


@pytest.mark.soak
@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM])
def test_with_a_key_it_stops_while_it_computes_and_clients_wait(tmp_path: Path, how: signal.Signals) -> None:
    """Others may reach these ones, with a key only."""
    with running(tmp_path, "--host", "0.0.0.0", "--api-key", "tml-secret") as server:  # noqa: S104
        server.url = server.url.replace("0.0.0.0", "127.0.0.1")  # noqa: S104
        with server.client() as http:
            assert http.get("healthz").status_code == 200
            assert http.get("sessions").status_code == 401
            assert http.get("sessions", headers={"x-api-key": "tml-wrong"}).status_code == 401
        with waiting_clients(server, headers={"x-api-key": "tml-secret"}) as answers, contextlib.ExitStack() as slow:
            # One client never ends its request. It is not waited for longer than a moment.
            if how == signal.SIGINT:
                slow.enter_context(send_part_of_a_request(server.url, b"content-length: 100\r\n\r\n{"))
            code, seconds = server.stop(how)
        assert code == 0
        assert seconds < 60  # and not the minutes that the samples take
        assert answers == [408, 408]
        assert "Traceback" not in server.log
        assert "tml-secret" not in server.log


def test_an_address_that_others_can_reach_needs_a_key(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["serve", "--model", "tiny", "--host", "0.0.0.0"]) == 2  # noqa: S104
    printed = capsys.readouterr().err
    assert printed.startswith("tinker-lightning: --host 0.0.0.0 can be reached from other machines")
    assert "set TINKER_LIGHTNING_SERVE_KEY" in printed
    assert "--api-key-file FILE" in printed
    assert "Traceback" not in printed


def test_a_port_that_is_taken_is_named_before_any_model_is_loaded(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(InvalidInput) as refused:
            serve.serve(["no such model"], port=port, data_dir=tmp_path)
    assert f"cannot listen on --host 127.0.0.1 --port {port}: Address already in use" in str(refused.value)
    assert "Choose another host or port; port 0 selects a free one" in str(refused.value)


@pytest.mark.parametrize(("host", "port"), [("127.0.0.1", 70000), ("127.0.0.1", -1), ("no.such.host.invalid", 0)])
def test_addresses_that_cannot_be_are_named(host: str, port: int, tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match=rf"cannot listen on --host {host} --port {port}: "):
        serve.serve(["tiny"], host=host, port=port, api_key="tml-x", data_dir=tmp_path)


def test_a_model_that_does_not_exist_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFound, match=r"there is no model 'nonsense'\. Use tiny, smollm2-135m"):
        serve.serve(["nonsense"], port=0, data_dir=tmp_path)


@pytest.mark.parametrize(
    ("host", "expected"),
    [
        ("127.0.0.1", True),
        ("127.8.8.8", True),
        ("::1", True),
        ("localhost", True),
        ("0.0.0.0", False),  # noqa: S104
        ("::", False),
        ("192.168.1.2", False),
        ("example.org", False),
        ("", False),
    ],
)
def test_which_addresses_only_this_machine_can_reach(host: str, expected: bool) -> None:
    assert is_loopback(host) is expected


def test_a_folder_that_cannot_be_written_is_named_at_the_start(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("not a folder")
    with pytest.raises(InvalidInput, match=r"cannot store .* in .*file.*Choose another --data-dir"):
        serve.serve(["tiny"], port=0, data_dir=tmp_path / "file")


def test_a_read_only_folder_is_named_at_the_start(tmp_path: Path) -> None:
    """It exists and can be listed, so only a write shows it."""
    folder = Path(tempfile.mkdtemp())  # one that another user reaches, too
    (folder / "checkpoints").mkdir()
    for each in (folder / "checkpoints", folder):
        each.chmod(0o555)

    def start() -> str:
        with pytest.raises(InvalidInput) as caught:
            serve.serve(["tiny"], port=0, data_dir=folder)
        return str(caught.value)

    said = tmp_path / "said"
    with said.open("w") as file, warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of a fork with threads
        child = os.fork()
        if not child:
            try:
                if not os.geteuid():
                    os.setuid(65534)  # permissions do not bind root
                file.write(start())
                file.flush()
            finally:
                os._exit(0)
        os.waitpid(child, 0)
    shutil.rmtree(folder)
    expected = rf"cannot store checkpoints in {folder}/checkpoints: Permission denied. Choose another --data-dir"
    assert re.match(expected, said.read_text())


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("127.0.0.1:8000", 200),
        ("localhost", 200),
        ("[::1]:8000", 200),
        ("evil.example", 403),
        ("10.0.0.1", 403),
        ("[::1", 403),
        ("a]b", 403),
    ],
)
def test_without_a_key_only_this_machines_own_names_are_answered(host: str, status: int) -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        await PlainTextResponse("in")(scope, receive, send)

    async def ask() -> httpx.Response:
        transport = httpx.ASGITransport(LocalHost(app))
        async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as client:
            return await client.get("/", headers={"host": host})

    response = asyncio.run(ask())
    assert response.status_code == status
    assert status == 200 or "start the server with --api-key" in response.json()["detail"]


def authority(folder: Path, name: str) -> tuple[Path, Path, Path]:
    """Makes a certificate authority, and a certificate for this machine that it signs; returns both and the key."""
    ca, ca_key, cert, key = (folder / f"{name}{end}" for end in ("-ca.pem", "-ca.key", ".pem", ".key"))
    request, extensions = folder / f"{name}.csr", folder / f"{name}.ext"
    extensions.write_text("subjectAltName=IP:127.0.0.1\nbasicConstraints=CA:FALSE\n")
    new = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
    usage = ["-addext", "keyUsage=critical,keyCertSign"]
    for command in (
        ["req", "-x509", *new, "-days", "2", "-subj", f"/CN={name}", *usage, "-keyout", ca_key, "-out", ca],
        ["req", *new, "-subj", "/CN=server", "-keyout", key, "-out", request],
        [
            "x509",
            "-req",
            "-in",
            request,
            "-CA",
            ca,
            "-CAkey",
            ca_key,
            "-days",
            "2",
            "-extfile",
            extensions,
            "-out",
            cert,
        ],
    ):
        subprocess.run(["openssl", *map(str, command)], check=True, capture_output=True)  # noqa: S607
    return ca, cert, key


@pytest.mark.skipif(shutil.which("openssl") is None, reason="certificates are made by the command openssl")
def test_tls_with_a_private_authority(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:  # R5.18
    ca, certificate, key = authority(tmp_path, "ours")
    other, *_ = authority(tmp_path, "theirs")
    keys = tmp_path / "keys"
    secret = add_key(keys, "alice")
    options = ("--ssl-certfile", str(certificate), "--ssl-keyfile", str(key), "--api-key-file", str(keys))
    with running(tmp_path, *options) as server:
        assert server.url.startswith("https://127.0.0.1:")
        monkeypatch.setenv("SSL_CERT_FILE", str(ca))
        with connect(server.url, api_key=secret) as service:
            client = service.create_lora_training_client("tiny", rank=4)
            client.forward_backward([Datum.from_tokens([1, 2, 3])], "cross_entropy").result()
            client.optim_step(AdamParams()).result()
        with tinker.ServiceClient(base_url=server.url, api_key=secret) as official:
            theirs = official.create_lora_training_client(base_model="tiny", rank=4).result()
            theirs.optim_step(tinker.AdamParams()).result()
        monkeypatch.setenv("SSL_CERT_FILE", str(other))
        with pytest.raises(ServerUnreachable, match="CERTIFICATE_VERIFY_FAILED"):
            connect(server.url, api_key=secret).get_server_capabilities()
        assert secret not in server.log


@pytest.mark.soak
def test_a_key_that_is_removed_ends_the_run_of_its_client_and_no_other(tmp_path: Path) -> None:  # R5.18
    keys = tmp_path / "keys"
    secrets = {name: add_key(keys, name) for name in ("alice", "bob", "carol")}
    with running(tmp_path, "--api-key-file", str(keys)) as server, contextlib.ExitStack() as stack:
        ours, others = (
            stack.enter_context(connect(server.url, api_key=secrets[name])).create_lora_training_client("tiny", rank=4)
            for name in ("alice", "carol")
        )
        stack.enter_context(pytest.raises(tinker.AuthenticationError))  # when it ends its session
        service = stack.enter_context(tinker.ServiceClient(base_url=server.url, api_key=secrets["bob"]))
        official = service.create_lora_training_client(base_model="tiny", rank=4).result()

        def step(client: Any) -> None:
            client.optim_step(AdamParams() if client is not official else tinker.AdamParams()).result()

        for client in (ours, official, others):
            step(client)
        for name in ("alice", "bob"):
            remove_key(keys, name)
        with pytest.raises(Unauthorized, match="rejected the API key"):
            step(ours)
        with pytest.raises(tinker.AuthenticationError):
            step(official)
        step(others)
        shown = server.client(headers={"x-api-key": secrets["carol"]}).get(f"{server.url}/metrics").text
        assert "\ntinker_sessions 1\n" in shown
        assert [name for name in ("alice", "bob", "carol") if f"the key {name} was removed" in server.log] == [
            "alice",
            "bob",
        ]
        assert not any(secret in server.log for secret in secrets.values())


def test_a_certificate_that_cannot_be_used_is_named(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match="--ssl-keyfile needs the certificate"):
        serve.serve(["tiny"], port=0, data_dir=tmp_path, ssl_keyfile=tmp_path / "key")
    (tmp_path / "bad").write_text("no certificate")
    for name in ("missing", "bad"):
        with pytest.raises(InvalidInput, match=rf"cannot use --ssl-certfile .*{name} with"):
            serve.serve(["tiny"], port=0, data_dir=tmp_path, ssl_certfile=tmp_path / name)


def test_while_models_are_loaded_the_server_says_so(
    tmp_path: Path, trainer: EmbeddedTrainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    may_load, get = threading.Event(), trainer.catalog.get
    monkeypatch.setattr(trainer.catalog, "get", lambda name: may_load.wait(SOON) and get(name))
    loader = serve.Loader(trainer, ["tiny"])
    ended: list[bool] = []
    loader.start(ended.append)

    async def ask() -> httpx.Response:
        transport = httpx.ASGITransport(loader.guard(create_app(trainer)))
        async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as client:
            return await client.get("/api/v1/healthz")

    loading = asyncio.run(ask())
    assert (loading.status_code, loading.json()["status"], loading.headers["retry-after"]) == (503, "loading", "1")
    may_load.set()
    loader.join(SOON)
    ready = asyncio.run(ask())
    assert (ready.status_code, ready.json()) == (200, {"status": "ok"})
    assert ended == [True]
