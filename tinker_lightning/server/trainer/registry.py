"""The registry of sessions, and of the models and samplers created in them."""

from __future__ import annotations

import copy
import threading
import time
import uuid
from collections import Counter
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from typing import Any, Self

from tinker_lightning.errors import InvalidInput, MemoryLimitExceeded, NotFound, RequestConflict
from tinker_lightning.server.engine.interface import Adapter, AdapterWeights, BaseModel
from tinker_lightning.server.keys import Owner
from tinker_lightning.server.trainer.jobs import Job
from tinker_lightning.server.trainer.memory import Charge, MemoryBudget, format_size
from tinker_lightning.types import LoraConfig
from tinker_lightning.wire import json as wire_json

# Memory limit for sampler weights. Each sampler can be as large as an adapter, and an RL run creates one per step.
SAMPLER_BYTES = 2 << 30
# Limits for the metadata of a session or a model, and for the number of sessions that are remembered.
MAX_METADATA_BYTES = 64 << 10
MAX_METADATA_DEPTH = 32
MAX_SESSIONS = 10_000
_METADATA = "metadata"  # the owner of all metadata, of which the oldest is dropped
_ABANDONED_SECONDS = 60.0


def metadata_bytes(metadata: dict[str, Any]) -> int:
    """Returns the memory that metadata takes; raises `InvalidInput` if it is too large to be kept."""
    for name, value in metadata.items():
        if (depth := _depth(value)) > MAX_METADATA_DEPTH:
            raise InvalidInput(f"{name}: is nested {depth} deep, but at most {MAX_METADATA_DEPTH} levels are kept")
        if value is not None and (size := len(wire_json.dumps(value))) > MAX_METADATA_BYTES:
            raise InvalidInput(
                f"{name}: {size} bytes as JSON, but at most {MAX_METADATA_BYTES} are kept. Store large data elsewhere."
            )
    return wire_json.estimate_parsed_bytes(wire_json.dumps(metadata))


def _depth(value: Any) -> int:
    """Returns how deep lists and objects are nested, without recursion."""
    depth, level = 0, [value]
    while level := [each for each in level if isinstance(each, dict | list)]:
        depth += 1
        level = [inner for each in level for inner in (each.values() if isinstance(each, dict) else each)]
    return depth


class Metadata:
    """Fields that a client attaches to a session or a model, until their memory is needed.

    Args:
        memory: The memory of the trainer.
        of: What they are attached to, for error messages.
        **fields: The fields; together they must not be too large.
    """

    def __init__(self, memory: MemoryBudget, of: str, **fields: Any) -> None:
        self._fields = fields
        size = metadata_bytes(fields)
        self._charge = memory.charge(
            f"the metadata of a {of}", size, "messages", owner=_METADATA, evict=self.forget, expendable=True
        )

    def __getitem__(self, name: str) -> Any:
        """Returns a field, or None if it was forgotten."""
        return self._fields.get(name)

    def forget(self) -> None:
        """Drops the fields."""
        self._fields = {}
        self._charge.release()


@dataclass(slots=True)
class ClientSession:
    """A client session, which owns its models and samplers."""

    session_id: str
    metadata: Metadata
    owner: str | None = None  # the name of the key that created it
    models: list[str] = field(default_factory=list)
    samplers: list[str] = field(default_factory=list)
    last_heartbeat: float | None = None  # monotonic time, which stops while a laptop sleeps
    last_seen: float = field(default_factory=time.monotonic)  # its last heartbeat or request
    finished: bool = False


@dataclass(slots=True)
class Model:
    """An adapter in training. `base` and `adapter` are set from the end of the creation job until `unload`."""

    model_id: str
    session_id: str
    base_model: str
    lora_config: LoraConfig
    metadata: Metadata
    creation: Job
    base: BaseModel | None = None
    adapter: Adapter | None = None
    charge: Charge | None = None  # for the adapter
    last_request_time: datetime = field(default_factory=lambda: datetime.now(UTC))

    def ready(self) -> tuple[BaseModel, Adapter]:
        """Returns the base model and the adapter; raises `NotFound` if creation failed or the model was unloaded."""
        base, adapter = self.base, self.adapter
        if base is None or adapter is None:
            error = self.creation.future.exception() if self.creation.future.done() else None
            reason = f"its creation failed ({error})" if error else "it was unloaded"
            raise NotFound(f"model_id: {self.model_id} has no weights: {reason}. Create a new model.")
        return base, adapter

    def unload(self) -> None:
        """Frees the memory of the model. Checkpoints are kept."""
        self.base = self.adapter = None
        if self.charge is not None:
            self.charge.release()
        self.metadata.forget()


@dataclass(frozen=True, slots=True)
class Sampler:
    """A base model and, optionally, adapter weights that training does not change."""

    sampler_id: str
    base_model: str
    weights: AdapterWeights | None = None
    model_path: str | None = None

    @property
    def size(self) -> int:
        """Size of the weights in bytes."""
        return 0 if self.weights is None else self.weights.nbytes


class Registry:
    """Sessions, models and samplers by id. All methods are thread-safe.

    The id of every object begins with the id of its session, to whose owner it belongs. The objects of other owners are
    not found, with the error of an id that does not exist.
    """

    def __init__(self, memory: MemoryBudget) -> None:
        self.owner = Owner()
        self._memory = memory
        self._charge = memory.charge("the weights of samplers", 0, "weights")
        self._lock = threading.Lock()
        self._sessions: dict[str, ClientSession] = {}
        self._models: dict[str, Model] = {}
        self._samplers: dict[str, Sampler] = {}
        self._clones: Counter[str] = Counter()

    def owned_by(self, owner: Owner) -> Self:
        """Returns a view that has the objects of an owner only, and shares everything else."""
        view = copy.copy(self)
        view.owner = owner
        return view

    def owns(self, object_id: str) -> bool:
        """Returns whether the session with which the id of an object begins belongs to the owner of this view."""
        if self.owner.name is None:
            return True
        session = self._sessions.get(object_id.partition(":")[0])
        return session is not None and self.owner.owns(session.owner)

    def has_ended(self, session_id: str | None) -> bool:
        """Returns whether a session is finished."""
        session = self._sessions.get(session_id or "")
        return session is not None and session.finished

    def owner_of(self, session_id: str | None) -> str | None:
        """Returns the name of the key that created a session."""
        session = self._sessions.get(session_id or "")
        return None if session is None else session.owner

    def open_session(
        self, user_metadata: dict[str, Any] | None = None, display_name: str | None = None
    ) -> ClientSession:
        """Creates a session; raises `InvalidInput` if its metadata is too large."""
        metadata = Metadata(self._memory, "session", user_metadata=user_metadata, display_name=display_name)
        session = ClientSession(f"session-{uuid.uuid4().hex[:16]}", metadata, self.owner.name)
        with self._lock:
            self._sessions[session.session_id] = session
            if len(self._sessions) > MAX_SESSIONS:
                self._forget_session()
        return session

    def _forget_session(self) -> None:
        """Removes the oldest session that is finished, or that its client has never used."""
        now = time.monotonic()
        for session in self._sessions.values():
            unused = not session.models and not session.samplers
            beat = session.last_heartbeat
            if session.finished or (unused and (beat is None or now - beat > _ABANDONED_SECONDS)):
                del self._sessions[session.session_id]
                session.metadata.forget()
                return

    def session(self, session_id: str, *, must_be_open: bool = False) -> ClientSession:
        """Returns the session with this id; raises `InvalidInput` if it must be open but is finished."""
        session = self._sessions.get(session_id)
        if session is None or not self.owns(session_id):
            raise NotFound(
                f"session_id: there is no session {session_id!r}: it has ended, or the server was restarted. Open "
                "another with create_session, or create a new client"
            )
        if must_be_open and session.finished:
            raise InvalidInput(f"session_id: {session_id} is finished; open a new one with create_session")
        return session

    def sessions(self) -> list[ClientSession]:
        """Returns all sessions since the server started."""
        with self._lock:
            return [session for session in self._sessions.values() if self.owner.owns(session.owner)]

    def add_model(self, model: Model) -> Model:
        """Adds a model, or returns the existing one with its id; raises `NotFound` if that has been forgotten."""
        with self._lock:
            ids = self._sessions[model.session_id].models
            if model.model_id in ids and model.model_id not in self._models:
                model.metadata.forget()
                raise self._absent(model.model_id)
            kept = self._models.setdefault(model.model_id, model)
            if kept is model:
                ids.append(model.model_id)
        if kept is not model:
            model.metadata.forget()
        return kept

    def has_model(self, model_id: str) -> bool:
        """Returns whether a model with this id was created, even if it has been unloaded."""
        return model_id in self._models and self.owns(model_id)

    def model(self, model_id: str) -> Model:
        """Returns the model with this id; raises `NotFound` if there is none."""
        model = self._models.get(model_id)
        if model is None or not self.owns(model_id):
            raise self._absent(model_id)
        self.see(model_id)
        return model

    def _absent(self, model_id: str) -> NotFound:
        session = self._sessions.get(model_id.partition(":")[0])
        fix = "call create_model first"
        if session is not None and self.owner.owns(session.owner) and model_id in session.models:
            fix = "it was unloaded, or its creation failed. Create another, with the next model_seq_id."
            if session.finished:
                fix = "it was unloaded when its session was finished"
        return NotFound(f"model_id: there is no model {model_id!r}; {fix}")

    def forget_model(self, job: Job) -> str | None:
        """Removes the model that a job has unloaded or failed to create, when that is forgotten; returns its id."""
        model_id, _, name = job.request_id.rpartition(":")
        if name != "unload" and (name != "create" or job.future.exception() is None):
            return None
        with self._lock:
            model = self._models.pop(model_id, None)
        if model is None:
            return None
        model.unload()
        return model_id

    def see(self, object_id: str) -> None:
        """Records that a client uses an object, whose id begins with the id of its session."""
        session = self._sessions.get(object_id.partition(":")[0])
        if session is not None:
            session.last_seen = time.monotonic()

    def models(self) -> list[Model]:
        """Returns the models of all sessions that are not finished."""
        with self._lock:
            return [model for model in self._models.values() if self.owns(model.model_id)]

    def add_sampler(self, session_id: str, sampler: Sampler) -> Sampler:
        """Adds a sampler, or returns the existing one with its id; raises `RequestConflict` if that is another one."""
        with self._lock:
            kept = self._samplers.setdefault(sampler.sampler_id, sampler)
            if (kept.base_model, kept.model_path) != (sampler.base_model, sampler.model_path):
                raise RequestConflict(
                    f"sampling_session_seq_id: the number of {sampler.sampler_id} was already used for a sampler of "
                    f"{kept.model_path or kept.base_model}; this one would be of "
                    f"{sampler.model_path or sampler.base_model}. Use the next number for another sampler."
                )
            session = self._sessions[session_id]
            if sampler.sampler_id not in session.samplers:
                session.samplers.append(sampler.sampler_id)
            try:
                self._make_room()
            except MemoryLimitExceeded:
                self._samplers.pop(sampler.sampler_id, None)
                raise
            return kept

    def keep_weights(self, sampler_id: str, weights: AdapterWeights) -> None:
        """Restores the weights of a sampler after they were evicted and loaded again."""
        with self._lock:
            if sampler_id in self._samplers:
                before = self._samplers[sampler_id]
                self._samplers[sampler_id] = replace(before, weights=weights)
                try:
                    self._make_room()
                except MemoryLimitExceeded:  # they are loaded again for the next request
                    self._samplers[sampler_id] = before

    def _make_room(self) -> None:
        """Evicts the least recently used weights, but never the most recent ones. Unsaved weights are lost."""
        total = 0
        for name, sampler in reversed(list(self._samplers.items())):
            if total and sampler.size and total + sampler.size > self._samplers_limit:
                if sampler.model_path is None:
                    del self._samplers[name]
                else:
                    self._samplers[name] = replace(sampler, weights=None)
            else:
                total += sampler.size
        self._charge.resize(total)

    @property
    def _samplers_limit(self) -> int:
        return min(SAMPLER_BYTES, self._memory.limit // 8)

    def sampler(self, sampler_id: str) -> Sampler:
        """Returns the sampler with this id; raises `NotFound` if there is none, or if it was evicted."""
        with self._lock:
            sampler = self._samplers.pop(sampler_id, None) if self.owns(sampler_id) else None
            if sampler is not None:
                self._samplers[sampler_id] = sampler  # moves it to the end, as most recently used
                self.see(sampler_id)
        if sampler is None:
            raise NotFound(
                f"sampling_session_id: there is no sampler {sampler_id!r}, or it was evicted, because only the last "
                f"{format_size(self._samplers_limit)} of unsaved weights are kept. Save weights under a name to keep "
                "them."
            )
        return sampler

    def join_sampler(self, sampler_id: str) -> int:
        """Returns the number of a further client of a sampler, from 1; clients number their requests after it."""
        self.sampler(sampler_id)
        with self._lock:
            self._clones[sampler_id] += 1
            return self._clones[sampler_id]

    def counts(self) -> dict[str, int]:
        """Returns how many sessions are open, and how many models and samplers there are."""
        with self._lock:
            return {
                "sessions": sum(not session.finished for session in self._sessions.values()),
                "models": sum(model.adapter is not None for model in self._models.values()),
                "samplers": len(self._samplers),
            }

    def free(self, session: ClientSession) -> None:
        """Frees the memory of all models and samplers of a session."""
        with self._lock:
            for model_id in session.models:
                if (model := self._models.pop(model_id, None)) is not None:
                    model.unload()
            for sampler_id in session.samplers:
                self._samplers.pop(sampler_id, None)
                self._clones.pop(sampler_id, None)
            self._make_room()
            session.metadata.forget()
