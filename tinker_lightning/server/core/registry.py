"""What the server holds: sessions, and the models and samplers made in them."""

from __future__ import annotations

import threading
import uuid
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from typing import Any

from tinker_lightning.errors import InvalidInput, NotFound
from tinker_lightning.server.core.scheduler import Job
from tinker_lightning.server.engine.adapter import Adapter
from tinker_lightning.server.engine.base import BaseModel
from tinker_lightning.server.engine.lora import LoraWeights
from tinker_lightning.types import LoraConfig

# Samplers with weights of their own are as large as an adapter, and a reinforcement-learning run opens one a step.
SAMPLER_BYTES = 2 << 30


@dataclass(slots=True)
class ClientSession:
    """A client's visit; owns the models and samplers it made."""

    session_id: str
    user_metadata: dict[str, Any] | None = None
    display_name: str | None = None
    models: list[str] = field(default_factory=list)
    samplers: list[str] = field(default_factory=list)
    last_heartbeat: float | None = None  # by the monotonic clock, which stands still while a laptop sleeps
    finished: bool = False


@dataclass(slots=True)
class Model:
    """An adapter in training. `base` and `adapter` are there from its creation's run until it is unloaded."""

    model_id: str
    session_id: str
    base_model: str
    lora_config: LoraConfig
    user_metadata: dict[str, Any] | None
    creation: Job
    base: BaseModel | None = None
    adapter: Adapter | None = None
    last_request_time: datetime = field(default_factory=lambda: datetime.now(UTC))

    def ready(self) -> tuple[BaseModel, Adapter]:
        """What a job works on.

        Raises:
            NotFound: If the model could not be created, or was unloaded.
        """
        base, adapter = self.base, self.adapter
        if base is None or adapter is None:
            error = self.creation.future.exception() if self.creation.future.done() else None
            reason = f"its creation failed ({error})" if error else "it was unloaded"
            raise NotFound(f"model_id: {self.model_id} has no weights: {reason}. Create a new model.")
        return base, adapter

    def unload(self) -> None:
        """Frees its memory; what was saved of it stays."""
        self.base = self.adapter = None


@dataclass(frozen=True, slots=True)
class Sampler:
    """Something to sample from: a base model, with weights of its own that training does not touch."""

    sampler_id: str
    base_model: str
    weights: LoraWeights | None = None
    model_path: str | None = None

    @property
    def size(self) -> int:
        """The memory of its weights."""
        return 0 if self.weights is None else sum(tensor.nbytes for tensor in self.weights.tensors.values())


class Registry:
    """Looks things up by id, and says what to call where one is missing. Any thread may use it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._sessions: dict[str, ClientSession] = {}
        self._models: dict[str, Model] = {}
        self._samplers: dict[str, Sampler] = {}

    def open_session(
        self, user_metadata: dict[str, Any] | None = None, display_name: str | None = None
    ) -> ClientSession:
        """A new session."""
        session = ClientSession(f"session-{uuid.uuid4().hex[:16]}", user_metadata, display_name)
        with self._lock:
            self._sessions[session.session_id] = session
        return session

    def session(self, session_id: str, *, must_be_open: bool = False) -> ClientSession:
        """The session of that id."""
        session = self._sessions.get(session_id)
        if session is None:
            raise NotFound(f"session_id: there is no session {session_id!r}; call create_session first")
        if must_be_open and session.finished:
            raise InvalidInput(f"session_id: {session_id} was finished; open a new one with create_session")
        return session

    def sessions(self) -> list[ClientSession]:
        """All sessions of this server's life."""
        with self._lock:
            return list(self._sessions.values())

    def add_model(self, model: Model) -> Model:
        """Keeps a model, unless there is one of that id: then returns that."""
        with self._lock:
            kept = self._models.setdefault(model.model_id, model)
            if kept is model:
                self._sessions[model.session_id].models.append(model.model_id)
            return kept

    def has_model(self, model_id: str) -> bool:
        """Whether there is or was a model of that id."""
        return model_id in self._models

    def model(self, model_id: str) -> Model:
        """The model of that id."""
        model = self._models.get(model_id)
        if model is None:
            raise NotFound(f"model_id: there is no model {model_id!r}; call create_model first")
        return model

    def models(self) -> list[Model]:
        """All models of this server's life."""
        with self._lock:
            return list(self._models.values())

    def add_sampler(self, session_id: str, sampler: Sampler) -> Sampler:
        """Keeps a sampler, unless there is one of that id: then returns that."""
        with self._lock:
            kept = self._samplers.setdefault(sampler.sampler_id, sampler)
            session = self._sessions[session_id]
            if sampler.sampler_id not in session.samplers:
                session.samplers.append(sampler.sampler_id)
            self._make_room()
            return kept

    def keep_weights(self, sampler_id: str, weights: LoraWeights) -> None:
        """Gives a sampler back the weights that it had to give up."""
        with self._lock:
            if sampler_id in self._samplers:
                self._samplers[sampler_id] = replace(self._samplers[sampler_id], weights=weights)
                self._make_room()

    def _make_room(self) -> None:
        """Frees the weights not used for longest: those that were saved are loaded again when needed, others are lost.

        Those used last always stay, however large they are.
        """
        total = 0
        for name, sampler in reversed(list(self._samplers.items())):
            if total and sampler.size and total + sampler.size > SAMPLER_BYTES:
                if sampler.model_path is None:
                    del self._samplers[name]
                else:
                    self._samplers[name] = replace(sampler, weights=None)
            else:
                total += sampler.size

    def sampler(self, sampler_id: str) -> Sampler:
        """The sampler of that id."""
        with self._lock:
            sampler = self._samplers.pop(sampler_id, None)
            if sampler is not None:
                self._samplers[sampler_id] = sampler  # to the end: used last
        if sampler is None:
            raise NotFound(
                f"sampling_session_id: there is no sampler {sampler_id!r}, or no longer: of those on weights that were "
                f"not saved only the last {SAMPLER_BYTES >> 20} MiB are kept. Save them under a name to keep them."
            )
        return sampler

    def free(self, session: ClientSession) -> None:
        """Frees the memory of all that a session made."""
        with self._lock:
            for model_id in session.models:
                self._models[model_id].unload()
            for sampler_id in session.samplers:
                self._samplers.pop(sampler_id, None)
