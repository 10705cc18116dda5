"""The losses that clients have uploaded, by session, and those that the owner of the process has registered."""

from __future__ import annotations

import hashlib
import itertools
import pickle
import threading
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeAlias

from tinker_lightning.errors import InvalidInput, InvalidLoss
from tinker_lightning.losses.builtin import LOSSES
from tinker_lightning.lossgraph.batch_loss import UNLISTED, BatchLoss
from tinker_lightning.lossgraph.datum_loss import DatumLoss, LossInput
from tinker_lightning.server.engine.python_loss import PythonLoss

if TYPE_CHECKING:
    from collections.abc import Callable

    from tinker_lightning.lossgraph.batch_loss import Source
    from tinker_lightning.types import requests as rq

    Loss: TypeAlias = DatumLoss | BatchLoss | PythonLoss

# Nodes and their arguments, of all graphs of a session's losses: about a hundred megabytes. In a session those not used
# for longest go first; of another session none ever goes.
MAX_VALUES = 1 << 18
MAX_VALUES_OF_ALL = 1 << 22
CUSTOM = "custom"
_RESERVED = (*LOSSES, CUSTOM, "stable_reinforce")


@dataclass(slots=True)
class _Entry:
    loss: Loss
    size: int


@dataclass(slots=True)
class _SessionLosses:
    entries: OrderedDict[str, _Entry] = field(default_factory=OrderedDict)  # by id, the last used at the end
    latest: dict[str, str] = field(default_factory=dict)  # the id that a name stands for
    size: int = 0


class LossRegistry:
    """Keeps losses and finds them. Any thread may use it.

    Args:
        allow_pickled: Whether to take pickled functions, which means to run whatever a client sends.
    """

    def __init__(self, allow_pickled: bool = False) -> None:
        self._allow_pickled = allow_pickled
        self._lock = threading.Lock()
        self._sessions: dict[str, _SessionLosses] = {}
        self._size = 0  # of all sessions
        self._functions: dict[str, PythonLoss] = {}  # those of all sessions
        self._count = itertools.count()

    def create(self, request: rq.CreateCustomLossRequest) -> str:
        """Keeps a loss of one datum; returns its id, the same for a repeat.

        Raises:
            InvalidLoss: If it is none that can be run here, or there is no room for it.
        """
        loss_id = f"{request.session_id}:loss:{request.custom_loss_seq_id}"
        with self._lock:
            if loss_id in self._sessions.get(request.session_id, _SessionLosses()).entries:
                return loss_id
        inputs = [LossInput(each.name, each.rank) for each in request.inputs]
        loss = DatumLoss.decode(request.name, inputs, request.graph)
        self._keep(request.session_id, loss_id, loss, loss.program.graph.size)
        return loss_id

    def register(self, request: rq.RegisterLossRequest) -> str:
        """Keeps a loss of a batch under its name; returns an id that stands for exactly this one.

        Raises:
            InvalidLoss: If it is none that can be run here, there is no room for it, or it is pickled where that is
                not allowed.
        """
        if request.pickled is not None:
            python = self._unpickled(request.loss, request.pickled)
            loss_id = f"{python.name}@{hashlib.sha256(request.pickled).hexdigest()[:16]}"
            self._keep(request.session_id, loss_id, python, 1 + len(request.pickled) // 64, python.name)
        else:
            graphs = BatchLoss.decode(request.loss)
            loss_id = f"{graphs.name}@{graphs.digest}"
            size = graphs.program.graph.size
            self._check_name(graphs.name)
            self._keep(request.session_id, loss_id, graphs, size, graphs.name)
        return loss_id

    def register_function(
        self, name: str, function: Callable[..., Any], source: Source = "logits", session_id: str | None = None
    ) -> str:
        """Lets a session, or all of them, use a Python function of this process as it is; returns its id.

        Raises:
            InvalidLoss: If it has not the parameters of a loss, or the name is taken by a built-in one.
        """
        self._check_name(name)
        loss = PythonLoss.of(name, source, function)
        if session_id is None:
            with self._lock:
                self._functions[name] = loss
            return name
        loss_id = f"{name}@function-{next(self._count)}"
        self._keep(session_id, loss_id, loss, 1, name)
        return loss_id

    def find(self, session_id: str, loss_fn: str, loss_id: Any = None) -> Callable[[], Loss | None]:
        """What gives the loss that a pass names, as it is now; None for a built-in one.

        It raises `InvalidInput` where there is none: a pass fails by its result, whatever is wrong with it.
        """
        if loss_fn in LOSSES:
            return lambda: None
        with self._lock:
            session = self._sessions.get(session_id, _SessionLosses())
            key = str(loss_id) if loss_fn == CUSTOM else session.latest.get(loss_fn, loss_fn)
            entry = session.entries.get(key)
            if entry is not None:
                session.entries.move_to_end(key)
            loss = self._functions.get(loss_fn) if entry is None else entry.loss

        def found() -> Loss:
            if loss is not None:
                return loss
            if loss_fn == CUSTOM:
                raise InvalidInput(
                    f"loss_fn_config: loss_id: this session has no loss {key!r:.140}, or no longer. Upload it with "
                    "create_custom_loss and pass the handle that this returns."
                )
            known = ", ".join(self.listing(session_id))
            gone = ", or no longer" if "@" in loss_fn else ""  # an id that was given out here
            raise InvalidInput(
                f"loss_fn {loss_fn!r:.140} is not known here{gone}; known are {known}. Register your own with "
                "@custom_loss(client, name=...)."
            )

        return found

    def listing(self, session_id: str | None) -> dict[str, str]:
        """The names that a session, or every one, can use, built-in ones first, with what each is."""
        listed = {name: loss.description for name, loss in LOSSES.items()}
        with self._lock:
            listed |= {name: function.description for name, function in self._functions.items()}
            session = self._sessions.get(session_id or "", _SessionLosses())
            for name, loss_id in session.latest.items():
                loss = session.entries[loss_id].loss
                if not isinstance(loss, DatumLoss) and not name.startswith(UNLISTED):
                    listed[name] = loss.description
        return listed

    def free(self, session_id: str) -> None:
        """Forgets the losses of a session that has ended."""
        with self._lock:
            self._size -= self._sessions.pop(session_id, _SessionLosses()).size

    def _keep(self, session_id: str, loss_id: str, loss: Loss, size: int, name: str | None = None) -> None:
        """Keeps a loss, and lets its name stand for it; the session's own make room."""
        if size > MAX_VALUES:
            raise InvalidLoss(
                f"{loss.name}: its graphs have {size} values together; a session may keep {MAX_VALUES}. Give tables as "
                "inputs instead of constants."
            )
        with self._lock:
            session = self._sessions.setdefault(session_id, _SessionLosses())
            replaced = session.entries.get(loss_id)
            # Counted before anything is changed: to be refused must not cost a session what it has.
            kept = session.size - (0 if replaced is None else replaced.size)
            going: list[str] = []
            for each, entry in session.entries.items():
                if kept + size <= MAX_VALUES:
                    break
                if each != loss_id:
                    going.append(each)
                    kept -= entry.size
            if self._size - session.size + kept + size > MAX_VALUES_OF_ALL:
                raise InvalidLoss(
                    f"{loss.name}: the sessions of this server keep as many losses as it has room for. Sessions that "
                    "have ended make room, so try again later, or end those that you no longer need."
                )
            for each in going:
                del session.entries[each]
            gone = set(going)
            session.latest = {called: each for called, each in session.latest.items() if each not in gone}
            session.entries[loss_id] = _Entry(loss, size)
            session.entries.move_to_end(loss_id)
            if name is not None:
                session.latest[name] = loss_id
            self._size += kept + size - session.size
            session.size = kept + size

    def _unpickled(self, message: dict[str, Any], pickled: bytes) -> PythonLoss:
        name = message.get("name")
        if not self._allow_pickled:
            raise InvalidLoss(
                f"{name!r:.80} is a pickled function, and to load one means to run whatever its sender likes. This "
                "server does not; its owner can start it with --allow-pickled-losses and an --api-key. A function "
                "that can be traced needs neither."
            )
        self._check_name(str(name))
        try:
            function = pickle.loads(pickled)  # noqa: S301  # the owner has allowed it
        except Exception as error:
            raise InvalidLoss(f"{name}: the pickled function cannot be loaded here: {error}") from error
        source = message.get("source", "logits")
        if source not in ("logits", "logprobs"):
            raise InvalidLoss(f"source must be logits or logprobs, got {source!r:.40}")
        return PythonLoss.of(str(name), source, function)

    @staticmethod
    def _check_name(name: str) -> None:
        if name in _RESERVED:
            raise InvalidInput(
                f"a loss cannot be called {name!r}: that is the name of a built-in one. Give it another."
            )
