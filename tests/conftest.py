"""What many tests share: a tiny model, and trainers that stop by themselves."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import threading
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import httpx
import hypothesis
import pytest
import torch
import uvicorn

from tinker_lightning.server import EmbeddedTrainer, create_app
from tinker_lightning.server.engine.catalog import Catalog

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Iterator
    from pathlib import Path

    from starlette.applications import Starlette

    from tinker_lightning.server.engine.base import BaseModel

T = TypeVar("T")

# Models this small gain nothing from a second thread, and the tests run in parallel. `tox -e portable` tries two.
_THREADS = os.environ.get("TEST_THREADS", "1")
torch.set_num_threads(int(_THREADS))
os.environ["OMP_NUM_THREADS"] = _THREADS  # for servers in processes of their own

# How long an example takes depends on what else the machine does.
hypothesis.settings.register_profile("no deadline", deadline=None)
hypothesis.settings.load_profile("no deadline")


@pytest.fixture(scope="session", autouse=True)
def _own_folders(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Nothing is kept in the user's folders; models only where the environment names a cache to keep."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_DATA_HOME", str(tmp_path_factory.mktemp("data")))
        if "TINKER_LIGHTNING_CACHE" not in os.environ:
            patch.setenv("TINKER_LIGHTNING_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(autouse=True)
def _ctrl_c() -> None:
    """Each test can be interrupted: a shell's jobs in the background cannot, nor can what Lightning has interrupted."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session")
def tiny64() -> BaseModel:
    """`tiny` in float64, where numerics can be compared to many digits."""
    return Catalog(["tiny"], dtype=torch.float64).get("tiny")


@pytest.fixture(scope="session")
def tiny() -> BaseModel:
    """`tiny` as users get it, in float32."""
    return Catalog(["tiny"]).get("tiny")


@pytest.fixture
def trainer(tmp_path: Path) -> Iterator[EmbeddedTrainer]:
    """A trainer of its own for a test."""
    trainer = EmbeddedTrainer(["tiny"], data_dir=tmp_path)
    yield trainer
    trainer.close()


@contextlib.contextmanager
def _running(app: Starlette) -> Iterator[str]:
    """Serves an app on a free loopback port, from a thread of this process; yields its URL."""
    server = uvicorn.Server(uvicorn.Config(app, port=0, log_config=None, lifespan="off"))
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    try:
        while not server.started:
            assert thread.is_alive(), "the server died at its start"
            thread.join(0.01)
        port = server.servers[0].sockets[0].getsockname()[1]
        yield f"http://127.0.0.1:{port}"
    finally:
        server.should_exit = True
        thread.join(10)


@pytest.fixture(scope="session")
def running() -> Callable[[Starlette], contextlib.AbstractContextManager[str]]:
    """Serves an app over TCP for the length of a `with` block."""
    return _running


@pytest.fixture(scope="session")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """The real command, `tinker-lightning serve --model tiny`, in a process of its own."""
    data_dir = tmp_path_factory.mktemp("served")
    command = [sys.executable, "-m", "tinker_lightning", "serve", "--model", "tiny", "--port", "0"]
    with subprocess.Popen(
        [*command, "--data-dir", str(data_dir)], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as process:
        assert process.stdout is not None
        line = process.stdout.readline()
        assert "http://" in line, f"the server did not start: {line!r}"
        yield Served("http://" + line.split("http://")[1].strip(), data_dir)
        process.terminate()
        assert process.wait(30) == 0


class Served(NamedTuple):
    """A server in a process of its own."""

    url: str
    data_dir: Path


class Api:
    """Speaks the protocol to a trainer's app, without a network; each model's numbers are the caller's business."""

    def __init__(self, trainer: EmbeddedTrainer, api_key: str | None = None) -> None:
        self.trainer = trainer
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        transport = httpx.ASGITransport(create_app(trainer, api_key=api_key))
        self._http = httpx.AsyncClient(transport=transport, base_url="http://embedded/api/v1/")

    def request(self, method: str, path: str, **options: Any) -> httpx.Response:
        """One request; fails the test where no answer comes."""
        return self._wait(self._http.request(method, path, **options))

    def post(self, path: str, body: Any, **options: Any) -> httpx.Response:
        """A JSON body to an endpoint."""
        return self.request("POST", path, json=body, **options)

    def together(self, *posts: tuple[str, Any]) -> list[httpx.Response]:
        """JSON bodies to endpoints, all at the same time."""

        async def gather() -> list[httpx.Response]:
            return list(await asyncio.gather(*(self._http.post(path, json=body) for path, body in posts)))

        return self._wait(gather())

    def submit(self, path: str, body: Any) -> str:
        """The id under which the result will be found."""
        response = self.post(path, body)
        assert response.status_code == 200, response.text
        return str(response.json()["request_id"])

    def result(self, request_id: str) -> Any:
        """A result, or the error of an operation that failed."""
        response = self.post("retrieve_future", {"request_id": request_id})
        assert response.status_code == 200, response.text
        return response.json()

    def run(self, path: str, body: Any) -> Any:
        """A result from its request."""
        return self.result(self.submit(path, body))

    def session(self) -> str:
        """A new session."""
        return str(self.post("create_session", {}).json()["session_id"])

    def model(self, session: str | None = None, number: int = 0, **lora: Any) -> str:
        """A new model on `tiny`."""
        body = {"session_id": session or self.session(), "model_seq_id": number, "base_model": "tiny"}
        return str(self.run("create_model", {**body, "lora_config": {"rank": 4, **lora}})["model_id"])

    def train(self, model: str, seq: int, text: str = "hello world") -> dict[str, Any]:
        """The body of a forward_backward over one datum."""
        ids = list(text.encode())
        inputs = {
            "target_tokens": {"data": ids[1:], "dtype": "int64", "shape": [len(ids) - 1]},
            "weights": {"data": [1.0] * (len(ids) - 1), "dtype": "float32", "shape": [len(ids) - 1]},
        }
        chunks = [{"type": "encoded_text", "tokens": ids[:-1]}]
        data = [{"model_input": {"chunks": chunks}, "loss_fn_inputs": inputs}]
        passes = {"data": data, "loss_fn": "cross_entropy"}
        return {"forward_backward_input": passes, "model_id": model, "seq_id": seq}

    def step(self, model: str, seq: int, **params: float) -> dict[str, Any]:
        """The body of an optim_step."""
        return {"model_id": model, "seq_id": seq, "adam_params": {"learning_rate": 0.01, **params}}

    def sampler(self, session: str | None = None, number: int = 0) -> str:
        """A new sampler on `tiny`."""
        body = {"session_id": session or self.session(), "sampling_session_seq_id": number, "base_model": "tiny"}
        return str(self.post("create_sampling_session", body).json()["sampling_session_id"])

    def sample(self, sampler: str, seq: int, **params: Any) -> dict[str, Any]:
        """The body of an asample."""
        prompt = {"chunks": [{"type": "encoded_text", "tokens": [1, 2, 3]}]}
        options = {"max_tokens": 4, "stop": [], **params}
        return {"sampling_session_id": sampler, "seq_id": seq, "prompt": prompt, "sampling_params": options}

    def state(self, model: str) -> dict[str, bytes]:
        """The bits of all that training changes: weights, gathered gradient, moments."""
        _, adapter = self.trainer.registry.model(model).ready()
        tensors = {**adapter.weights.tensors, **adapter.training_state()}
        return {name: tensor.detach().numpy().tobytes() for name, tensor in tensors.items()}

    def close(self) -> None:
        self._wait(self._http.aclose())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)
        self._loop.close()

    def _wait(self, call: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(call, self._loop).result(30)


@pytest.fixture
def api(trainer: EmbeddedTrainer) -> Iterator[Api]:
    """The protocol in front of a trainer of its own."""
    api = Api(trainer)
    yield api
    api.close()


@pytest.fixture(scope="module")
def shared_api(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Api]:
    """One for all tests of a module, for those that expect to change nothing."""
    trainer = EmbeddedTrainer(["tiny"], data_dir=tmp_path_factory.mktemp("shared"))
    api = Api(trainer)
    yield api
    api.close()
    trainer.close()
