"""The four ways to reach a trainer, and clients that record what they send."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import httpx
import tinker

from tests.helpers.reference import bits
from tinker_lightning.client import ServiceClient, as_backend, as_sampler
from tinker_lightning.client.transport.retries import RetryPolicy
from tinker_lightning.server import EmbeddedTrainer, create_app
from tinker_lightning.testing import RecordingTransport, embedded_service

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from starlette.types import ASGIApp

    Running: TypeAlias = Callable[[Any], contextlib.AbstractContextManager[str]]


BackendName: TypeAlias = Literal["in process", "tcp", "tcp without extensions", "official SDK"]
BACKENDS: tuple[BackendName, ...] = ("in process", "tcp", "tcp without extensions", "official SDK")
SDK_KEY = "tml-any"
QUICK = RetryPolicy(20.0, first_delay=0.01, longest_delay=0.05, billing_delay=0.01)


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


@contextlib.contextmanager
def reach(name: BackendName, trainer: EmbeddedTrainer, running: Running) -> Iterator[Backend]:
    """One of the four ways to a trainer."""
    if name == "in process":
        with embedded_service(trainer) as service:
            yield Backend(name, service, trainer)
        return
    with running(create_app(trainer, extended=name != "tcp without extensions")) as url:
        client: Any = (
            tinker.ServiceClient(base_url=url, api_key=SDK_KEY)
            if name == "official SDK"
            else ServiceClient(base_url=url)
        )
        with client as service:
            yield Backend(name, service, trainer)


@dataclass(frozen=True)
class Recorded:
    """A client of a trainer in this process, with a record of what it sends."""

    service: ServiceClient
    record: RecordingTransport

    def paths(self) -> list[str]:
        """The last part of each request's path, in the order they were sent."""
        return [request.path.rsplit("/", 1)[1] for request in self.record.requests]


@contextlib.contextmanager
def recording(app: ASGIApp, retry_policy: RetryPolicy = QUICK, api_key: str | None = None) -> Iterator[Recorded]:
    """A client of an app, with a record of what it sends."""
    record = RecordingTransport(httpx.ASGITransport(app))
    with ServiceClient(
        base_url="http://embedded", api_key=api_key, transport=record, retry_policy=retry_policy
    ) as service:
        yield Recorded(service, record)
