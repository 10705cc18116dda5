"""The losses that clients have uploaded, by session, and those that the owner of the process has registered."""

from __future__ import annotations

import hashlib
import pickle
import threading
from collections import OrderedDict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

from tinker_lightning.errors import InvalidInput, InvalidLoss
from tinker_lightning.losses.batch_loss import BatchLoss
from tinker_lightning.losses.datum_loss import DatumLoss, LossInput
from tinker_lightning.server.engine.losses import LOSSES
from tinker_lightning.server.engine.python_loss import PythonLoss

if TYPE_CHECKING:
    from collections.abc import Callable

    from tinker_lightning.losses.batch_loss import Source
    from tinker_lightning.types import requests as rq

    Loss: TypeAlias = DatumLoss | BatchLoss | PythonLoss

# Nodes and their arguments of all losses together, a few hundred megabytes; those not used for longest go first.
MAX_VALUES = 1 << 20
CUSTOM = "custom"
_RESERVED = (*LOSSES, CUSTOM, "stable_reinforce")


@dataclass(slots=True)
class _Entry:
    loss: Loss
    size: int


class LossRegistry:
    """Keeps losses and finds them. Any thread may use it.

    Args:
        allow_pickled: Whether to take pickled functions, which means to run whatever a client sends.
    """

    def __init__(self, allow_pickled: bool = False) -> None:
        self._allow_pickled = allow_pickled
        self._lock = threading.Lock()
        self._entries: OrderedDict[tuple[str, str], _Entry] = OrderedDict()  # by session and id
        self._latest: dict[tuple[str, str], str] = {}  # the id that a session's name stands for
        self._functions: dict[str, PythonLoss] = {}

    def create(self, request: rq.CreateCustomLossRequest) -> str:
        """Keeps a loss of one datum; returns its id, the same for a repeat.

        Raises:
            InvalidLoss: If it is none that can be run here.
        """
        loss_id = f"{request.session_id}:loss:{request.custom_loss_seq_id}"
        if (request.session_id, loss_id) in self._entries:
            return loss_id
        inputs = [LossInput(each.name, each.rank) for each in request.inputs]
        loss = DatumLoss.decode(request.name, inputs, request.graph)
        self._keep(request.session_id, loss_id, loss, loss.program.graph.size)
        return loss_id

    def register(self, request: rq.RegisterLossRequest) -> str:
        """Keeps a loss of a batch under its name; returns an id that stands for exactly this one.

        Raises:
            InvalidLoss: If it is none that can be run here, or pickled where that is not allowed.
        """
        if request.pickled is not None:
            python = self._unpickled(request.loss, request.pickled)
            loss_id = f"{python.name}@{hashlib.sha256(request.pickled).hexdigest()[:16]}"
            self._keep(request.session_id, loss_id, python, len(request.pickled) // 64)
            name = python.name
        else:
            graphs = BatchLoss.decode(request.loss)
            loss_id, name = f"{graphs.name}@{graphs.digest}", graphs.name
            size = sum(variant.program.graph.size for variant in graphs.variants)
            self._check_name(name)
            self._keep(request.session_id, loss_id, graphs, size)
        with self._lock:
            self._latest[request.session_id, name] = loss_id
        return loss_id

    def register_function(self, name: str, function: Callable[..., Any], source: Source = "logits") -> None:
        """Lets every session use a Python function of this process, as it is, under a name.

        Raises:
            InvalidLoss: If it has not the parameters of a loss, or the name is taken by a built-in one.
        """
        self._check_name(name)
        self._functions[name] = PythonLoss.of(name, source, function)

    def find(self, session_id: str, loss_fn: str, loss_id: Any = None) -> Callable[[], Loss | None]:
        """What gives the loss that a pass names, as it is now; None for a built-in one.

        It raises `InvalidInput` where there is none: a pass fails by its result, whatever is wrong with it.
        """
        if loss_fn in LOSSES:
            return lambda: None
        key = str(loss_id) if loss_fn == CUSTOM else self._latest.get((session_id, loss_fn), loss_fn)
        with self._lock:
            entry = self._entries.get((session_id, key))
            if entry is not None:
                self._entries.move_to_end((session_id, key))
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
            raise InvalidInput(
                f"loss_fn {loss_fn!r:.140} is not known here; known are {known}. Register your own with "
                "@custom_loss(client, name=...)."
            )

        return found

    def listing(self, session_id: str) -> dict[str, str]:
        """The names that a session can use, built-in ones first, with what each is."""
        listed = {name: (spec.formula.__doc__ or "").partition("\n")[0] for name, spec in LOSSES.items()}
        listed |= {name: function.description for name, function in self._functions.items()}
        with self._lock:
            for (session, name), loss_id in self._latest.items():
                entry = self._entries.get((session, loss_id))
                if session == session_id and entry is not None and not isinstance(entry.loss, DatumLoss):
                    listed[name] = entry.loss.description
        return listed

    def free(self, session_id: str) -> None:
        """Forgets the losses of a session that has ended."""
        with self._lock:
            for table in (self._entries, self._latest):
                for key in [key for key in table if key[0] == session_id]:
                    del table[key]

    def _keep(self, session_id: str, loss_id: str, loss: Loss, size: int) -> None:
        with self._lock:
            self._entries[session_id, loss_id] = _Entry(loss, size)
            self._entries.move_to_end((session_id, loss_id))
            total = sum(entry.size for entry in self._entries.values())
            while total > MAX_VALUES and len(self._entries) > 1:
                total -= self._entries.popitem(last=False)[1].size

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
            raise InvalidInput(f"a loss cannot be called {name!r}: that is the name of a built-in one")
