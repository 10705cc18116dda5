"""The losses of each session: graphs uploaded by clients, and Python functions registered in this process."""

from __future__ import annotations

import hashlib
import itertools
import pickle
import threading
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from tinker_lightning.errors import InvalidInput, InvalidLoss, RequestConflict
from tinker_lightning.losses.builtin import LOSSES, NOT_PUBLISHED, UNPUBLISHED
from tinker_lightning.lossgraph.graph_loss import UNLISTED_PREFIXES, GraphLoss, Source
from tinker_lightning.lossgraph.server_loss import PythonLoss, RegisteredLoss
from tinker_lightning.server.trainer.memory import Charge, MemoryBudget

if TYPE_CHECKING:
    from collections.abc import Callable

    from tinker_lightning.types import requests as rq

# Limits for the number of nodes and arguments in the graphs of a session, about a hundred megabytes, and of all
# sessions. A session evicts its own least recently used losses, never the losses of another session.
MAX_VALUES = 1 << 18
MAX_TOTAL_VALUES = 1 << 22
_VALUE_BYTES = 400
CUSTOM = "custom"
_RESERVED = (*LOSSES, CUSTOM, UNPUBLISHED)


@dataclass(slots=True)
class _Entry:
    loss: RegisteredLoss
    size: int


@dataclass(slots=True)
class _SessionLosses:
    entries: OrderedDict[str, _Entry] = field(default_factory=OrderedDict)  # by id, least recently used first
    latest: dict[str, str] = field(default_factory=dict)  # loss id by name
    size: int = 0
    charge: Charge | None = None


class LossRegistry:
    """Stores losses and looks them up. All methods are thread-safe."""

    def __init__(self, allow_pickled: bool = False, memory: MemoryBudget | None = None) -> None:
        self._memory = memory or MemoryBudget()
        self._allow_pickled = allow_pickled
        self._lock = threading.Lock()
        self._sessions: dict[str, _SessionLosses] = {}
        self._size = 0  # total of all sessions
        self._count = itertools.count()

    def create(self, request: rq.CreateCustomLossRequest) -> str:
        """Stores a per-datum loss and returns its id. A repeated request returns the id of the first one."""
        loss_id = f"{request.session_id}:loss:{request.custom_loss_seq_id}"
        inputs = {each.name: each.rank for each in request.inputs}
        message = {"name": request.name, "source": "datum", "inputs": inputs, "graph": request.graph}
        loss = GraphLoss.decode(message, ("datum",))
        with self._lock:
            stored = self._sessions.get(request.session_id, _SessionLosses()).entries.get(loss_id)
        if stored is not None:
            if not isinstance(stored.loss, GraphLoss) or stored.loss.digest != loss.digest:
                raise RequestConflict(
                    f"custom_loss_seq_id: {request.custom_loss_seq_id} of this session was already used for the loss "
                    f"{stored.loss.name}, and this one differs from it. Use the next number for another loss."
                )
            return loss_id
        self._store(request.session_id, loss_id, loss, loss.program.graph.size)
        return loss_id

    def register(self, request: rq.RegisterLossRequest) -> str:
        """Stores a batch-level loss by name and returns an id for this version of it."""
        if request.pickled is not None:
            python = self._unpickle(request.loss, request.pickled)
            loss_id = f"{python.name}@{hashlib.sha256(request.pickled).hexdigest()[:16]}"
            self._store(request.session_id, loss_id, python, 1 + len(request.pickled) // 64, python.name)
        else:
            loss = GraphLoss.decode(request.loss)
            loss_id = f"{loss.name}@{loss.digest}"
            self._check_name(loss.name)
            self._store(request.session_id, loss_id, loss, loss.program.graph.size, loss.name)
        return loss_id

    def register_function(self, name: str, function: Callable[..., Any], source: Source, session_id: str) -> str:
        """Registers a Python function of this process for a session, and returns its id."""
        self._check_name(name)
        loss = PythonLoss.from_function(name, source, function)
        loss_id = f"{name}@function-{next(self._count)}"
        self._store(session_id, loss_id, loss, 1, name)
        return loss_id

    def find(self, session_id: str, loss_fn: str, loss_id: Any = None) -> Callable[[], RegisteredLoss | None]:
        """Looks up a loss now and returns a function that returns it, or None if it is a built-in loss.

        For an unknown loss the returned function raises, so that the error becomes the result of the pass.
        """
        if loss_fn in LOSSES:
            return lambda: None
        with self._lock:
            session = self._sessions.get(session_id, _SessionLosses())
            key = str(loss_id) if loss_fn == CUSTOM else session.latest.get(loss_fn, loss_fn)
            entry = session.entries.get(key)
            if entry is not None:
                session.entries.move_to_end(key)

        def resolve() -> RegisteredLoss:
            if entry is not None:
                return entry.loss
            if loss_fn == CUSTOM:
                raise InvalidInput(
                    f"loss_fn_config: loss_id: this session has no loss {key!r:.140}, or it was evicted. Upload it "
                    "with create_custom_loss and pass the returned handle."
                )
            if loss_fn == UNPUBLISHED:
                raise InvalidInput(f"loss_fn: {NOT_PUBLISHED}")
            available = ", ".join(self.listing(session_id))
            evicted = ", or was evicted" if "@" in loss_fn else ""  # an id from register()
            raise InvalidInput(
                f"loss_fn {loss_fn!r:.140} is not registered{evicted}; available losses: {available}. Register a "
                "custom loss with @custom_loss(client, name=...)."
            )

        return resolve

    def listing(self, session_id: str | None) -> dict[str, str]:
        """Returns the losses available to a session, or to all sessions if None, as descriptions by name."""
        listed = {name: loss.description for name, loss in LOSSES.items()}
        with self._lock:
            session = self._sessions.get(session_id or "", _SessionLosses())
            for name, loss_id in session.latest.items():
                if not name.startswith(UNLISTED_PREFIXES):
                    listed[name] = session.entries[loss_id].loss.description
        return listed

    def free(self, session_id: str) -> None:
        """Removes the losses of a session."""
        with self._lock:
            session = self._sessions.pop(session_id, _SessionLosses())
            self._size -= session.size
            if session.charge is not None:
                session.charge.release()

    def _store(self, session_id: str, loss_id: str, loss: RegisteredLoss, size: int, name: str | None = None) -> None:
        """Stores a loss, and evicts the least recently used losses of the session to make room."""
        if size > MAX_VALUES:
            raise InvalidLoss(
                f"{loss.name}: its graph has {size} values, but a session may store at most {MAX_VALUES}. Pass tables "
                "as inputs instead of constants."
            )
        with self._lock:
            session = self._sessions.setdefault(session_id, _SessionLosses())
            replaced = session.entries.get(loss_id)
            # Computed before anything is changed, so that a rejected loss does not evict others.
            kept = session.size - (0 if replaced is None else replaced.size)
            evicted: set[str] = set()
            for each, entry in session.entries.items():
                if kept + size <= MAX_VALUES:
                    break
                if each != loss_id:
                    evicted.add(each)
                    kept -= entry.size
            if self._size - session.size + kept + size > MAX_TOTAL_VALUES:
                raise InvalidLoss(
                    f"{loss.name}: the losses of all sessions exceed the memory limit of this server. Finish sessions "
                    "that you no longer need, or try again later."
                )
            if session.charge is None:
                session.charge = self._memory.charge("the losses of a session", 0, "messages", owner=session_id)
            session.charge.resize(_VALUE_BYTES * (kept + size))
            for each in evicted:
                del session.entries[each]
            session.latest = {key: each for key, each in session.latest.items() if each not in evicted}
            session.entries[loss_id] = _Entry(loss, size)
            session.entries.move_to_end(loss_id)
            if name is not None:
                session.latest[name] = loss_id
            self._size += kept + size - session.size
            session.size = kept + size

    def _unpickle(self, message: dict[str, Any], pickled: bytes) -> PythonLoss:
        name = message.get("name")
        if not self._allow_pickled:
            raise InvalidLoss(
                f"{name!r:.80} is a pickled function. Loading it could run arbitrary code, which this server does not "
                "allow. Trace the function, or start the server with --allow-pickled-losses and --api-key."
            )
        self._check_name(str(name))
        try:
            function = pickle.loads(pickled)  # noqa: S301  # allowed by --allow-pickled-losses
        except Exception as error:
            raise InvalidLoss(f"{name}: the pickled function cannot be loaded here: {error}") from error
        return PythonLoss.from_function(str(name), message.get("source", "logits"), function)

    @staticmethod
    def _check_name(name: str) -> None:
        if name in _RESERVED:
            raise InvalidInput(f"invalid loss name {name!r}: it is reserved for a built-in loss; use another name")
