"""The embedded trainer as one object: what the HTTP app stands in front of."""

from __future__ import annotations

import logging
import os
import time
import weakref
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from tinker_lightning.server.core.checkpoint_store import CheckpointStore
from tinker_lightning.server.core.loss_registry import LossRegistry
from tinker_lightning.server.core.registry import ClientSession, Registry
from tinker_lightning.server.core.samplers import Sampling
from tinker_lightning.server.core.scheduler import GAP_TIMEOUT, Job, Scheduler
from tinker_lightning.server.core.training_service import Training
from tinker_lightning.server.engine.catalog import Catalog

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence


logger = logging.getLogger("tinker_lightning.server")

# Clients that send heartbeats do so every ten seconds; after this many without one a client is taken for dead.
SILENCE = 900.0
# How long a job that runs may go on when its trainer is no longer needed.
_LAST_SECONDS = 3.0


def default_data_dir() -> Path:
    """Where checkpoints are kept if nothing else is said: the user's data folder."""
    return Path(os.environ.get("XDG_DATA_HOME") or Path.home() / ".local" / "share") / "tinker_lightning"


class EmbeddedTrainer:
    """Models, checkpoints and the one thread that computes.

    Args:
        models: The base models that may be asked for; None for any that can be found on this machine.
        data_dir: Where checkpoints are kept.
        dtype: What the models compute in; float64 is for checking numerics.
        gap_timeout: How many seconds a model's requests wait for one that is missing in their order.
        allow_pickled_losses: Whether to run pickled functions that clients send. Whoever can send one can do with this
            process what they like.
    """

    def __init__(
        self,
        models: Sequence[str] | None = None,
        *,
        data_dir: Path | str | None = None,
        dtype: torch.dtype = torch.float32,
        gap_timeout: float = GAP_TIMEOUT,
        allow_pickled_losses: bool = False,
    ) -> None:
        self.catalog = Catalog(models, dtype=dtype)
        self.store = CheckpointStore(Path(data_dir or default_data_dir()).expanduser().absolute() / "checkpoints")
        self.registry = Registry()
        self.scheduler = Scheduler(gap_timeout)
        self.losses = LossRegistry(allow_pickled_losses)
        self.training = Training(self.registry, self.catalog, self.store, self.scheduler, self.losses)
        self.sampling = Sampling(self.registry, self.catalog, self.store, self.scheduler)
        self._closing = False
        self._waiters: set[Callable[[], object]] = set()
        # Nobody has to close it: the thread ends with the trainer or, at the latest, before the interpreter.
        weakref.finalize(self, self.scheduler.close, _LAST_SECONDS)

    def open_session(
        self, user_metadata: dict[str, Any] | None = None, display_name: str | None = None
    ) -> ClientSession:
        """A new session; those whose clients have died without a word make room for it."""
        for session in self.registry.sessions():
            beat = session.last_heartbeat
            if not session.finished and beat is not None and time.monotonic() - beat > SILENCE:
                logger.warning("%s has been silent for %.0f minutes and is ended", session.session_id, SILENCE / 60)
                self.finish_session(session.session_id)
        return self.registry.open_session(user_metadata, display_name)

    def finish_session(self, session_id: str) -> None:
        """Ends a session; its memory is freed behind what it still has to do."""
        session = self.registry.session(session_id)
        session.finished = True

        def free() -> None:
            self.registry.free(session)
            self.losses.free(session_id)

        self.scheduler.submit(Job(f"{session_id}:finish", "finish", free, session=session_id))

    @contextmanager
    def waking(self, wake: Callable[[], object]) -> Iterator[None]:
        """Calls `wake`, from some thread, if the trainer closes inside the `with` block or has done so."""
        self._waiters.add(wake)
        try:
            if self._closing:
                wake()
            yield
        finally:
            self._waiters.discard(wake)

    def announce_close(self) -> None:
        """Wakes whoever waits for a result, so that a server can stop without making them wait."""
        # No lock: this is called by signal handlers too, which may interrupt the thread that holds it. A waiter is
        # added before it looks at the flag, so either it sees the flag or it is seen here.
        self._closing = True
        for wake in list(self._waiters):
            wake()

    def close(self, timeout: float = 30.0) -> None:
        """Stops computing, behind the job that runs; what was saved stays."""
        self.announce_close()
        self.scheduler.close(timeout)
