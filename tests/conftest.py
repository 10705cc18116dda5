"""What many tests share: a tiny model, and trainers that stop by themselves."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
from typing import TYPE_CHECKING

import hypothesis
import pytest
import torch
import uvicorn

from tests.helpers.api import Api, Served
from tinker_lightning.server import EmbeddedTrainer
from tinker_lightning.server.engine.catalog import Catalog
from tinker_lightning.testing import embedded_service

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from starlette.applications import Starlette

    from tinker_lightning.client import ServiceClient
    from tinker_lightning.server.engine.base import BaseModel


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


@pytest.fixture(scope="module")
def service() -> Iterator[ServiceClient]:
    """A client of a trainer in this process, for the tests of one file."""
    with embedded_service() as service:
        yield service


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
