"""A check of a server, its outcome, and the scratch models on which it runs."""

from __future__ import annotations

import uuid
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

from tinker_lightning.client import models
from tinker_lightning.client.dialects.measure import Scratch
from tinker_lightning.client.dialects.surrogate import Surrogate
from tinker_lightning.client.transport.operations import operate
from tinker_lightning.errors import TinkerLightningError

if TYPE_CHECKING:
    from concurrent.futures import Future

    from tinker_lightning.client.service import ServiceClient
    from tinker_lightning.client.training import TrainingClient
    from tinker_lightning.types import requests as rq

T = TypeVar("T")


class Probe:
    """Creates scratch models on a server, and removes them.

    While it is open, the client sends requests unchanged, without the corrections of a dialect.

    Args:
        service: A client of the server.
        base_model: The base model of the scratch models.

    Attributes:
        dialect: The dialect of the server, updated by the measurements.
        statuses: The outcomes of the checks so far, by their names.
        left: The paths of the checkpoints that could not be removed.
    """

    def __init__(self, service: ServiceClient, base_model: str) -> None:
        self.service = service
        self.base_model = base_model
        self.dialect = service.session.dialect
        self.statuses: dict[str, str] = {}
        self.left: list[str] = []
        self._detected = self.dialect
        self._scratch: Scratch | None = None
        self._models: list[TrainingClient] = []
        self._paths: list[str] = []
        service.session.dialect = self.dialect.but(
            surrogate=Surrogate(),
            losses=None,
            clips_gradients=True,
            resets_optimizer=True,
            clears_gradient=True,
            deletes_checkpoints=True,
            samples_old_weights=True,
        )

    @property
    def scratch(self) -> Scratch:
        """The model that most checks measure."""
        if self._scratch is None:
            client = self.model()
            if self._forbids_loads(client):
                client = self.model()  # in whose numbers no request is missing
            self._scratch = Scratch(client, self.save(client))
            self._models.remove(client)
            self._paths.remove(self._scratch.start)
        return self._scratch

    def _forbids_loads(self, client: TrainingClient) -> bool:
        """Returns whether the server turns out to load states only into new models, as all checks do from then on."""
        session = self.service.session
        if session.dialect.loads_first:
            return False
        try:
            client.load_state_with_optimizer(self.save(client)).result()
        except TinkerLightningError as error:
            if not session.dialect.load_hint(str(error)):
                raise
            self.dialect, session.dialect = (each.but(loads_first=True) for each in (self.dialect, session.dialect))
            return True
        return False

    def model(self, seed: int = 0, **flags: Any) -> TrainingClient:
        """Creates a model that is removed at the end of the check."""
        client = self.service.create_lora_training_client(self.base_model, rank=8, seed=seed, **flags)
        self._models.append(client)
        return client

    def measured(self, client: TrainingClient) -> Scratch:
        """Returns a model to be measured, with the same step size as `scratch`."""
        return Scratch(client, self.save(client), self.scratch.rate)

    def save(self, client: TrainingClient) -> str:
        """Saves a state that is removed at the end of the check; returns its path."""
        path = str(client.save_state(f"doctor-{uuid.uuid4().hex[:8]}").result().path)
        self._paths.append(path)
        return path

    def forget(self, path: str) -> None:
        """Excludes a state that is already gone from the removal."""
        self._paths.remove(path)

    def post(self, endpoint: str, request: rq.ModelRequest, result: type[T]) -> Future[T]:
        """Posts a request under the number that it has, whatever was sent before."""
        return self.service._channel.run(operate(self.service.session, endpoint, request, result))

    def end_check(self) -> None:
        """Removes the checkpoints and models of a check, as far as the server can."""
        self.left += models.remove(self.service._channel, self._models, self._paths)
        self._paths, self._models = [], []

    def close(self) -> None:
        """Removes everything, and gives the client its dialect back."""
        if self._scratch is not None:
            self._paths.append(self._scratch.start)
            self._models.append(self._scratch.backend)  # type: ignore[arg-type]
        self.end_check()
        self.service.session.dialect = self._detected


@dataclass(frozen=True, slots=True)
class Check:
    """One check.

    Args:
        name: A short name.
        shows: The behavior of a server that passes.
        advice: The advice if it fails.
        run: Runs it. Raises `NotOffered` if the server has no such function.
    """

    name: str
    shows: str
    advice: str
    run: Callable[[Probe], Finding]


@dataclass(frozen=True, slots=True)
class Finding:
    """The outcome of a check that ran.

    Args:
        fault: The fault of the server; None if there is none.
        detail: The measurement.
        dialect: The fields of the dialect that follow from it.
    """

    fault: str | None = None
    detail: str = ""
    dialect: dict[str, Any] = field(default_factory=dict)


class NotOffered(Exception):
    """Ends a check of a function that the server does not offer.

    Args:
        reason: The missing function.
        dialect: The fields of the dialect that follow from it.
    """

    def __init__(self, reason: str, **dialect: Any) -> None:
        super().__init__(reason)
        self.dialect = dialect


def reason(error: BaseException) -> str:
    """Returns the message of an error without the ids of the request, which are different each time."""
    while isinstance(error, TinkerLightningError) and error.operation is not None and error.__cause__ is not None:
        error = error.__cause__
    return str(error) or type(error).__name__
