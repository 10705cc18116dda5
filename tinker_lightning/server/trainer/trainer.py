"""The embedded trainer: its parts, its sessions, and its shutdown."""

from __future__ import annotations

import copy
import dataclasses
import logging
import os
import time
import weakref
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import torch

from tinker_lightning.errors import InvalidInput
from tinker_lightning.server.engine import DEFAULT_ENGINE
from tinker_lightning.server.trainer.checkpoint_store import CheckpointStore
from tinker_lightning.server.trainer.jobs import Job, ModelJobs
from tinker_lightning.server.trainer.loss_registry import LossRegistry
from tinker_lightning.server.trainer.memory import MemoryBudget, resident_memory
from tinker_lightning.server.trainer.operations import Training
from tinker_lightning.server.trainer.passes import Passes, RetainedForwards
from tinker_lightning.server.trainer.registry import ClientSession, Registry
from tinker_lightning.server.trainer.samplers import Sampling
from tinker_lightning.server.trainer.scheduler import GAP_TIMEOUT, Scheduler

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from tinker_lightning.server.engine.interface import BaseModel, Engine
    from tinker_lightning.server.keys import Owner

logger = logging.getLogger("tinker_lightning.server")

# Seconds without a heartbeat or a request after which a client is considered dead. Clients send one every ten seconds.
HEARTBEAT_TIMEOUT = 900.0
# Seconds for which a running job may continue after its trainer was garbage-collected or the interpreter exits.
_EXIT_GRACE = 3.0


def default_data_dir() -> Path:
    """Returns the default folder for checkpoints, in the user's data folder."""
    return Path(os.environ.get("XDG_DATA_HOME") or Path.home() / ".local" / "share") / "tinker_lightning"


class EmbeddedTrainer:
    """Trains and samples models on this machine, on a single worker thread.

    Args:
        models: The base model or models that clients may use, or None for all that can be found on this machine.
        data_dir: The folder for checkpoints.
        dtype: The dtype of the models; float64 is meant for numerical tests.
        gap_timeout: Seconds that the requests of a model wait for one with a lower number.
        allow_pickled_losses: Whether to accept pickled loss functions, which lets clients execute arbitrary code.
        sampling_seed: Makes sampling requests without a seed reproducible: their tokens depend on this number, on the
            numbers of the sampler and the request in their session, and on the index of the sample.
        memory_limit: The most memory in bytes that models, passes, sampling and messages take together; by default 60 %
            of the machine's memory. A request that does not fit fails with `MemoryLimitExceeded`.
        token_budget: The number of positions per model call, which decides memory and rounding; by default, it depends
            on the model. A resumed run keeps the budget that it was started with.
        disk_limit: The most bytes that all checkpoints take together, imported adapters included; by default no limit.
        engine: Creates the base models; by default, models of transformers with adapters of peft.
    """

    def __init__(
        self,
        models: str | Sequence[str] | None = None,
        *,
        data_dir: Path | str | None = None,
        dtype: torch.dtype = torch.float32,
        gap_timeout: float = GAP_TIMEOUT,
        allow_pickled_losses: bool = False,
        sampling_seed: int | None = None,
        memory_limit: int | None = None,
        token_budget: int | None = None,
        disk_limit: int | None = None,
        engine: Engine = DEFAULT_ENGINE,
    ) -> None:
        if token_budget is not None and token_budget < 1:
            raise InvalidInput(f"token_budget must be at least 1, got {token_budget}")
        models = [models] if isinstance(models, str) else models
        self.memory = memory = MemoryBudget(memory_limit)

        def charge_model(base: BaseModel) -> None:
            memory.charge(f"the model {base.name}", base.nbytes, "models", fix="Serve fewer or smaller models.")

        self.catalog = engine(models, dtype=dtype, on_load=charge_model, token_budget=token_budget)
        folder = Path(data_dir or default_data_dir()).expanduser().absolute()
        self.store = CheckpointStore(folder / "checkpoints", disk_limit)
        self.registry = self._all = Registry(memory)
        memory.key_of = self.registry.owner_of
        self.scheduler = Scheduler(
            gap_timeout,
            memory=memory,
            key_of=self.registry.owner_of,
            has_ended=self.registry.has_ended,
            forget_model=self.registry.forget_model,
        )
        self.losses = LossRegistry(allow_pickled_losses, memory)
        self.retained = RetainedForwards(memory)
        self.sampling = Sampling(self.registry, self.catalog, self.store, self.scheduler, memory, sampling_seed)
        self._connect()
        self.closing = Closing()
        # Calling close() is optional: the thread stops when the trainer is garbage-collected or the interpreter exits.
        weakref.finalize(self, self.scheduler.close, _EXIT_GRACE)

    def _connect(self) -> None:
        """Creates the parts that look objects up in the registry and the store."""
        self.jobs = ModelJobs(self.registry, self.scheduler)
        self.passes = Passes(self.jobs, self.registry, self.losses, self.retained, self.memory)
        self.training = Training(
            self.jobs, self.registry, self.catalog, self.store, self.scheduler, self.retained, self.memory
        )

    def owned_by(self, owner: Owner) -> Self:
        """Returns a view of this trainer that finds the objects of one owner only; others do not exist for it.

        Everything else is shared. Endpoints get such a view, so that they cannot reach another owner's objects.
        """
        view = copy.copy(self)
        view.registry, view.store = self.registry.owned_by(owner), self.store.owned_by(owner)
        view.sampling = dataclasses.replace(self.sampling, _registry=view.registry, _store=view.store)
        view._connect()
        return view

    def charge_process(self) -> None:
        """Charges the memory of this process in addition to its models, for a process that does nothing but serve."""
        self.memory.covers_process = True
        rest = resident_memory() - self.memory.used("models")
        self.memory.charge("this process", max(0, rest), "models", fix="Serve fewer or smaller models.")

    def open_session(
        self, user_metadata: dict[str, Any] | None = None, display_name: str | None = None
    ) -> ClientSession:
        """Creates a session, and finishes sessions whose clients send neither heartbeats nor requests any more."""
        for session in self._all.sessions():
            if not session.finished and time.monotonic() - session.last_seen > HEARTBEAT_TIMEOUT:
                logger.warning("finishing %s: no heartbeat for %.0f min", session.session_id, HEARTBEAT_TIMEOUT / 60)
                self._finish(session)
        return self.registry.open_session(user_metadata, display_name)

    def finish_session(self, session_id: str) -> None:
        """Finishes a session. Its memory is freed after its pending jobs."""
        self._finish(self.registry.session(session_id))

    def finish_sessions(self, owner: str) -> None:
        """Finishes the sessions of an owner whose key was removed."""
        for session in self._all.sessions():
            if session.owner == owner and not session.finished:
                logger.warning("finishing %s: the key %s was removed", session.session_id, owner)
                self._finish(session)

    def _finish(self, session: ClientSession) -> None:
        session.finished = True
        session_id = session.session_id

        def free() -> None:
            self._all.free(session)
            self.losses.free(session_id)
            self.scheduler.finish(session_id)
            for model_id in session.models:
                self.retained.drop(model_id)

        job = Job(f"{session_id}:finish", "finish", free, owner=session_id, session=session_id)
        self.scheduler.submit(job, frees_memory=True)

    def close(self, timeout: float = 30.0) -> None:
        """Stops the trainer after the running job. Checkpoints are kept."""
        self.closing.announce()
        self.scheduler.close(timeout)


class Closing:
    """Wakes requests that wait for a result when their trainer closes, so that a server stops without delay."""

    def __init__(self) -> None:
        self._is_announced = False
        self.waiters: set[Callable[[], object]] = set()

    @contextmanager
    def waking(self, wake: Callable[[], object]) -> Iterator[None]:
        """Calls `wake`, from any thread, if the trainer closes during the `with` block or is already closed."""
        self.waiters.add(wake)
        try:
            if self._is_announced:
                wake()
            yield
        finally:
            self.waiters.discard(wake)

    def announce(self) -> None:
        """Wakes all waiters."""
        # No lock, because signal handlers call this too and may interrupt the thread that holds it. A waiter is added
        # before the flag is checked, so it either sees the flag or is woken here.
        self._is_announced = True
        for wake in list(self.waiters):
            wake()
