"""Fixtures of the client's tests: one trainer, and the transports to it."""

from __future__ import annotations

import contextlib
import threading
from typing import TYPE_CHECKING, Any

import pytest

from tests.helpers.backends import BACKENDS, Backend, BackendName, Recorded, reach, recording
from tests.helpers.soaking import mostly_soak
from tinker_lightning.client import ServiceClient
from tinker_lightning.server import EmbeddedTrainer, create_app
from tinker_lightning.server.engine.datum_pass import start_pass

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tests.helpers.backends import Running
    from tinker_lightning.client import TrainingClient


@pytest.fixture(scope="session", autouse=True)
def _no_environment() -> Iterator[None]:
    """Nothing of the machine's own settings, and no telemetry of the SDK's."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("TINKER_BASE_URL", "TINKER_API_KEY", "TINKER_TAGS"):
            patch.delenv(name, raising=False)
        patch.setenv("TINKER_TELEMETRY", "0")
        yield


@pytest.fixture(scope="session")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedTrainer]:
    """One trainer for all tests that only need separate models."""
    trainer = EmbeddedTrainer(["tiny"], data_dir=tmp_path_factory.mktemp("shared"))
    yield trainer
    trainer.close()


@pytest.fixture(scope="module")
def ways(shared: EmbeddedTrainer, running: Running) -> Iterator[Callable[[BackendName], Backend]]:
    """Opens each way once for a file of tests."""
    with contextlib.ExitStack() as stack:
        opened: dict[str, Backend] = {}

        def way(name: BackendName) -> Backend:
            if name not in opened:
                opened[name] = stack.enter_context(reach(name, shared, running))
            return opened[name]

        yield way


# Our client over TCP with the extensions is what the pages of the docs and the examples use.
@pytest.fixture(params=mostly_soak(BACKENDS, but=["in process", "tcp without extensions", "official SDK"]))
def backend(request: pytest.FixtureRequest, ways: Callable[[BackendName], Backend]) -> Backend:
    """Each of the four ways; what holds, holds on all of them."""
    return ways(request.param)


@pytest.fixture(params=["in process", "tcp without extensions"])
def service(request: pytest.FixtureRequest, ways: Callable[[BackendName], Backend]) -> ServiceClient:
    """Our client where the submission answers itself, and where the result is fetched."""
    client = ways(request.param).service
    assert isinstance(client, ServiceClient)
    return client


@pytest.fixture
def model(service: ServiceClient) -> TrainingClient:
    """A model on either."""
    return service.create_lora_training_client("tiny", rank=4, seed=1)


@pytest.fixture
def reached() -> threading.Event:
    """Set once the trainer has begun a pass."""
    return threading.Event()


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch, reached: threading.Event) -> Iterator[threading.Event]:
    """Keeps trainers from answering passes until the event is set."""
    go_on = threading.Event()

    def waiting(*args: Any, **options: Any) -> Any:
        reached.set()
        go_on.wait(30)
        return start_pass(*args, **options)

    monkeypatch.setattr("tinker_lightning.server.engine.causal_lm.CausalLM.start_pass", waiting)
    yield go_on
    go_on.set()


@pytest.fixture
def recorded(shared: EmbeddedTrainer) -> Iterator[Recorded]:
    """An in-process client whose requests can be looked at."""
    with recording(create_app(shared)) as recorded:
        yield recorded
