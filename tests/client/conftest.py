"""What the tests of the client share: one trainer, and the ways that lead to it."""

from __future__ import annotations

import contextlib
import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import httpx
import numpy as np
import pytest
import tinker
import torch

from tinker_lightning import Datum, ModelInput, TensorData
from tinker_lightning.client import ServiceClient, as_backend, as_sampler
from tinker_lightning.client.retry_policy import RetryPolicy
from tinker_lightning.server import EmbeddedTrainer, create_app
from tinker_lightning.server.engine.passes import run_pass
from tinker_lightning.testing import RecordingTransport, embedded_service

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from starlette.types import ASGIApp

    from tinker_lightning.client import TrainingClient

    Running: TypeAlias = Callable[[Any], contextlib.AbstractContextManager[str]]

BackendName: TypeAlias = Literal["in process", "tcp", "tcp without extensions", "official SDK"]
BACKENDS: tuple[BackendName, ...] = ("in process", "tcp", "tcp without extensions", "official SDK")
SDK_KEY = "tml-any"
TEXTS = ("hello world, this is a text", "a short one", "and another, of a middling length")
QUICK = RetryPolicy(20.0, first_delay=0.01, longest_delay=0.05, billing_delay=0.01)


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
    """One trainer for all tests that need no more than models of their own."""
    trainer = EmbeddedTrainer(["tiny"], data_dir=tmp_path_factory.mktemp("shared"))
    yield trainer
    trainer.close()


@dataclass(frozen=True)
class Backend:
    """A way to a trainer: our client, or the official SDK's behind the methods of ours."""

    name: BackendName
    service: Any
    trainer: EmbeddedTrainer

    def model(self, rank: int = 4, seed: int = 1) -> Any:
        """A new model on `tiny`."""
        return as_backend(self.service.create_lora_training_client("tiny", rank=rank, seed=seed))

    def resumed(self, path: str, *, optimizer: bool) -> Any:
        """A new model from a saved one."""
        suffix = "_with_optimizer" if optimizer else ""
        return as_backend(getattr(self.service, f"create_training_client_from_state{suffix}")(path))

    def sampler(self, **source: str) -> Any:
        """A sampler on saved weights or a base model."""
        sampler = self.service.create_sampling_client(**source)
        return as_sampler(sampler) if self.name == "official SDK" else sampler

    def bits(self, model: Any) -> dict[str, bytes]:
        """All that training changes in a model, to the bit: weights, gathered gradient, moments."""
        return bits(self.trainer, model.model_id)

    def kinds(self, model: Any) -> list[str]:
        """What the server ran for a model, by number; fails where a number was left out."""
        kinds = []
        with contextlib.suppress(LookupError):
            for number in range(1, 1000):
                kinds.append(self.trainer.scheduler.find(f"{model.model_id}:{number}").kind)
        return kinds


def bits(trainer: EmbeddedTrainer, model_id: str) -> dict[str, bytes]:
    _, adapter = trainer.registry.model(model_id).ready()
    tensors = {**adapter.weights.tensors, **adapter.training_state()}
    return {name: tensor.detach().numpy().tobytes() for name, tensor in tensors.items()}


@contextlib.contextmanager
def reach(name: BackendName, trainer: EmbeddedTrainer, running: Running) -> Iterator[Backend]:
    """One of the four ways to a trainer."""
    if name == "in process":
        with embedded_service(trainer) as service:
            yield Backend(name, service, trainer)
        return
    with running(create_app(trainer, extended=name != "tcp without extensions")) as url:
        client: Any = (
            tinker.ServiceClient(base_url=url, api_key=SDK_KEY) if name == "official SDK" else ServiceClient(url)
        )
        with client as service:
            yield Backend(name, service, trainer)


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


@pytest.fixture(params=BACKENDS)
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
        return run_pass(*args, **options)

    monkeypatch.setattr("tinker_lightning.server.core.training_service.run_pass", waiting)
    yield go_on
    go_on.set()


@dataclass(frozen=True)
class Recorded:
    """A client of a trainer in this process, with a record of what it sends."""

    service: ServiceClient
    record: RecordingTransport

    def paths(self) -> list[str]:
        """The last part of each request's path, in the order they were sent."""
        return [request.path.rsplit("/", 1)[1] for request in self.record.requests]


@pytest.fixture
def recorded(shared: EmbeddedTrainer) -> Iterator[Recorded]:
    """An in-process client whose requests can be looked at."""
    with recording(create_app(shared)) as recorded:
        yield recorded


@contextlib.contextmanager
def recording(app: ASGIApp, retry_policy: RetryPolicy = QUICK, api_key: str | None = None) -> Iterator[Recorded]:
    """A client of an app, with a record of what it sends."""
    record = RecordingTransport(httpx.ASGITransport(app))
    with ServiceClient("http://embedded", api_key, transport=record, retry_policy=retry_policy) as service:
        yield Recorded(service, record)


def datum(text: str, **inputs: Any) -> Datum:
    ids = np.frombuffer(text.encode(), np.uint8).astype(np.int64)
    named = inputs or {"weights": np.ones(len(ids) - 1, np.float32)}
    return Datum(ModelInput.from_ints(ids[:-1]), {"target_tokens": ids[1:], **named})


def policy(text: str, seed: int, **inputs: Any) -> Datum:
    """A datum of reinforcement learning: what the policy thought, and how good it was."""
    random = np.random.default_rng(seed)
    logprobs = random.normal(-5.5, 0.2, len(text) - 1).astype(np.float32)
    advantages = random.normal(0, 1, len(text) - 1).astype(np.float32)
    return datum(text, logprobs=logprobs, advantages=advantages, **inputs)


def top_k(text: str, *, sparse: bool) -> Datum:
    """Two targets at each position, in four columns."""
    ids = list(text.encode())
    targets = np.array([[i, (i + 1) % 256, 0, 0] for i in ids[1:]])
    weights = np.array([[0.75, 0.25, 0.0, 0.0]] * len(targets), np.float32)
    named = {"target_tokens": TensorData(targets), "weights": TensorData(weights)}
    if sparse:
        named = {name: csr(tensor.to_numpy()) for name, tensor in named.items()}
    return Datum(ModelInput.from_ints(ids[:-1]), named)


def csr(dense: Any) -> TensorData:
    rows, columns = np.nonzero(dense)
    pointers = np.concatenate([[0], np.cumsum(np.bincount(rows, minlength=len(dense)))])
    return TensorData(dense[rows, columns], None, list(dense.shape), pointers, columns)


DATA = [datum(text) for text in TEXTS]


def nll(_: list[Any], logprobs: list[torch.Tensor]) -> tuple[torch.Tensor, dict[str, Any]]:
    """Cross-entropy as a custom loss."""
    loss = -torch.cat([each.flatten() for each in logprobs]).sum()
    return loss, {"nll": loss}
