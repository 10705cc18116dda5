"""What many tests share: a tiny model, and trainers that stop by themselves.

The process that only distributes the tests loads this file, too, so torch and the package are imported in the fixtures.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import importlib.metadata
import os
import signal
import sys
import threading
from collections import defaultdict
from typing import TYPE_CHECKING, Any

import hypothesis
import pytest

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterator
    from pathlib import Path

    import torch
    from starlette.types import ASGIApp

    from tests.helpers.api import Api, Served
    from tinker_lightning.client import ServiceClient
    from tinker_lightning.server import EmbeddedTrainer
    from tinker_lightning.server.engine.causal_lm import CausalLM


# Models this small gain nothing from a second thread, and the tests run in parallel. `tox -e portable` tries two.
# Set before torch is imported, and for servers in processes of their own.
os.environ["OMP_NUM_THREADS"] = os.environ.get("TEST_THREADS", "1")

# Lightning 2.5 calls functions that jsonargparse has deprecated.
os.environ["JSONARGPARSE_DEPRECATION_WARNINGS"] = "off"

# Lightning looks through all installed packages for callbacks whenever a trainer is made.
importlib.metadata.entry_points = functools.cache(importlib.metadata.entry_points)  # type: ignore[assignment]

# How long an example takes depends on what else the machine does.
hypothesis.settings.register_profile("no deadline", deadline=None)
hypothesis.settings.load_profile("no deadline")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers() -> int:
    """Takes one process more than there are cores, because tests wait for servers for a third of the time."""
    return (os.cpu_count() or 1) + 1


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, Any, Any]:
    """What is imported and collected stays until the end, so the garbage collector need not look at it."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()
        gc.freeze()


@pytest.fixture(autouse=True)
def no_open_run() -> Iterator[None]:
    """Ends a W&B run that a test leaves open, which the next one would log to."""
    yield
    if getattr(wandb := sys.modules.get("wandb"), "run", None) is not None:
        wandb.finish()  # type: ignore[union-attr]


@pytest.fixture(scope="session", autouse=True)
def _own_folders(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Nothing is kept in the user's folders; models only where the environment names a cache to keep."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_DATA_HOME", str(tmp_path_factory.mktemp("data")))
        if "TINKER_LIGHTNING_CACHE" not in os.environ:
            patch.setenv("TINKER_LIGHTNING_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(scope="session", autouse=True)
def _models_are_handed_on(_own_folders: None) -> Iterator[None]:
    """A closed trainer hands its `tiny` on to the next one, because most tests take less time than loading it."""
    from tinker_lightning.server import EmbeddedTrainer
    from tinker_lightning.server.engine import catalog

    load, close = catalog._load, EmbeddedTrainer.close
    free: defaultdict[tuple[Any, ...], list[CausalLM]] = defaultdict(list)

    def take(name: str, dtype: torch.dtype) -> CausalLM:
        models = free[name, dtype, catalog.cache_dir()]
        return models.pop() if models else load(name, dtype)

    def hand_on(trainer: EmbeddedTrainer, timeout: float = 30.0) -> None:
        close(trainer, timeout)
        thread = trainer.scheduler._thread
        if isinstance(trainer.catalog, catalog.Catalog):
            model = trainer.catalog._models.pop("tiny", None)
            if model is not None and not (thread and thread.is_alive()):
                free["tiny", trainer.catalog._dtype, catalog.cache_dir()].append(model)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(catalog, "_load", take)
        patch.setattr(EmbeddedTrainer, "close", hand_on)
        yield


@pytest.fixture(autouse=True)
def _ctrl_c() -> None:
    """Each test can be interrupted: a shell's jobs in the background cannot, nor can what Lightning has interrupted."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session")
def tiny64() -> CausalLM:
    """`tiny` in float64, where numerics can be compared to many digits."""
    import torch

    from tinker_lightning.server.engine.catalog import Catalog

    return Catalog(["tiny"], dtype=torch.float64).get("tiny")


@pytest.fixture(scope="session")
def tiny() -> CausalLM:
    """`tiny` as users get it, in float32."""
    from tinker_lightning.server.engine.catalog import Catalog

    return Catalog(["tiny"]).get("tiny")


@pytest.fixture
def trainer(tmp_path: Path) -> Iterator[EmbeddedTrainer]:
    """A trainer of its own for a test."""
    from tinker_lightning.server import EmbeddedTrainer

    trainer = EmbeddedTrainer(["tiny"], data_dir=tmp_path)
    yield trainer
    trainer.close()


@pytest.fixture(scope="module")
def service() -> Iterator[ServiceClient]:
    """A client of a trainer in this process, for the tests of one file."""
    from tinker_lightning.testing import embedded_service

    with embedded_service() as service:
        yield service


@contextlib.contextmanager
def _running(app: ASGIApp) -> Iterator[str]:
    """Serves an app on a free loopback port, from a thread of this process; yields its URL."""
    import uvicorn

    # The official SDK leaves a long poll behind, which this server, unlike the command, does not end when it stops.
    config = uvicorn.Config(app, port=0, log_config=None, lifespan="off", timeout_graceful_shutdown=1)
    server = uvicorn.Server(config)
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
def running() -> Callable[[ASGIApp], contextlib.AbstractContextManager[str]]:
    """Serves an app over TCP for the length of a `with` block."""
    return _running


@pytest.fixture(scope="session")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """What `tinker-lightning serve --model tiny` serves, over TCP; the command itself is the subject of test_serve."""
    from tests.helpers.api import Served
    from tinker_lightning.server import EmbeddedTrainer, create_app
    from tinker_lightning.server.http import LocalHost

    data_dir = tmp_path_factory.mktemp("served")
    trainer = EmbeddedTrainer(["tiny"], data_dir=data_dir)
    trainer.catalog.get("tiny")  # the command loads its models before it listens
    with _running(LocalHost(create_app(trainer))) as url:
        yield Served(url, data_dir)
    trainer.close()


@pytest.fixture
def api(trainer: EmbeddedTrainer) -> Iterator[Api]:
    """The protocol in front of a trainer of its own."""
    from tests.helpers.api import Api

    api = Api(trainer)
    yield api
    api.close()


@pytest.fixture(scope="module")
def shared_api(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Api]:
    """One for all tests of a module, for those that expect to change nothing."""
    from tests.helpers.api import Api
    from tinker_lightning.server import EmbeddedTrainer

    trainer = EmbeddedTrainer(["tiny"], data_dir=tmp_path_factory.mktemp("shared"))
    api = Api(trainer)
    yield api
    api.close()
    trainer.close()
