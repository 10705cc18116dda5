"""What the server holds: sessions, and the models and samplers made in them."""

from __future__ import annotations

import threading
import uuid
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from tinker_lightning.errors import InvalidInput, NotFound, OperationFailed
from tinker_lightning.server.engine.adapter import Adapter
from tinker_lightning.server.engine.base import BaseModel
from tinker_lightning.server.engine.lora import LoraWeights
from tinker_lightning.server.scheduler import Operation
from tinker_lightning.types import LoraConfig


@dataclass(slots=True)
class Session:
    """A client's visit; owns the models and samplers it made."""

    session_id: str
    user_metadata: dict[str, Any] | None = None
    display_name: str | None = None
    models: list[str] = field(default_factory=list)
    samplers: list[str] = field(default_factory=list)
    finished: bool = False


@dataclass(slots=True)
class Model:
    """An adapter in training. `base` and `adapter` are there from its creation's run until it is unloaded."""

    model_id: str
    session_id: str
    base_model: str
    lora_config: LoraConfig
    user_metadata: dict[str, Any] | None
    creation: Operation
    base: BaseModel | None = None
    adapter: Adapter | None = None
    last_request_time: datetime = field(default_factory=lambda: datetime.now(UTC))

    def ready(self) -> tuple[BaseModel, Adapter]:
        """What an operation works on.

        Raises:
            OperationFailed: If the model could not be created, or was unloaded.
        """
        if self.base is None or self.adapter is None:
            error = self.creation.future.exception() if self.creation.future.done() else None
            raise OperationFailed(f"{self.model_id} has no weights: {error or 'it was unloaded'}")
        return self.base, self.adapter

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


class Registry:
    """Looks things up by id, and says what to call where one is missing. Any thread may use it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._sessions: dict[str, Session] = {}
        self._models: dict[str, Model] = {}
        self._samplers: dict[str, Sampler] = {}

    def open_session(self, user_metadata: dict[str, Any] | None = None, display_name: str | None = None) -> Session:
        """A new session."""
        session = Session(f"session-{uuid.uuid4().hex[:16]}", user_metadata, display_name)
        with self._lock:
            self._sessions[session.session_id] = session
        return session

    def session(self, session_id: str, *, must_be_open: bool = False) -> Session:
        """The session of that id."""
        session = self._sessions.get(session_id)
        if session is None:
            raise NotFound(f"session_id: there is no session {session_id!r}; call create_session first")
        if must_be_open and session.finished:
            raise InvalidInput(f"session_id: {session_id} was finished; open a new one with create_session")
        return session

    def sessions(self) -> list[Session]:
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
            if kept is sampler:
                self._sessions[session_id].samplers.append(sampler.sampler_id)
            return kept

    def sampler(self, sampler_id: str) -> Sampler:
        """The sampler of that id."""
        sampler = self._samplers.get(sampler_id)
        if sampler is None:
            raise NotFound(f"sampling_session_id: there is no sampler {sampler_id!r}; call create_sampling_session")
        return sampler

    def free(self, session: Session) -> None:
        """Frees the memory of all that a session made."""
        with self._lock:
            for model_id in session.models:
                self._models[model_id].unload()
            for sampler_id in session.samplers:
                self._samplers.pop(sampler_id, None)
