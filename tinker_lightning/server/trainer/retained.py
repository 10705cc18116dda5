"""Forward passes whose activations are kept until their gradient arrives, so that no second forward is needed."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tinker_lightning.errors import MemoryLimitExceeded, NotRetained
from tinker_lightning.server.engine.interface import Activations
from tinker_lightning.server.trainer.memory import Charge
from tinker_lightning.server.trainer.sizes import data_bytes
from tinker_lightning.types import Datum

if TYPE_CHECKING:
    from tinker_lightning.server.trainer.memory import MemoryBudget

# Forwards of one model without a step between them. Their datums are small, but their number must be bounded.
MAX_FORWARDS = 256


@dataclass(eq=False, slots=True)
class RetainedForward:
    """The datums of a forward pass and, unless they were evicted, its activations."""

    data: list[Datum]
    activations: Activations | None
    charge: Charge | None = None  # for the activations
    data_charge: Charge | None = None

    def take(self) -> Activations | None:
        """Returns the activations, which can be used once; without them the forward has to run again."""
        taken, self.activations = self.activations, None
        if self.charge is not None:
            self.charge.release()
        return taken

    def release(self) -> None:
        """Frees a forward that is no longer kept."""
        self.take()
        if self.data_charge is not None:
            self.data_charge.release()


class RetainedForwards:
    """The retained forwards of all models. All methods are thread-safe.

    Activations are evicted, the oldest first, beyond the limit and when other work needs their memory. The datums are
    kept, so a backward still needs no tokens, and it gives the same bits because the forward runs again on them.

    Args:
        memory: The memory of the trainer, a quarter of which they may take.
    """

    def __init__(self, memory: MemoryBudget) -> None:
        self.limit = memory.limit // 4
        self._memory = memory
        self._lock = threading.Lock()
        self._forwards: dict[tuple[str, int], RetainedForward] = {}

    def add(self, model_id: str, number: int, forward: RetainedForward) -> None:
        """Keeps the forward with this number of a model, if there is memory for its datums."""
        key = (model_id, number)
        try:
            forward.data_charge = self._memory.charge(
                "the datums of a retained forward",
                data_bytes(forward.data),
                "messages",
                owner=model_id.partition(":")[0],
                evict=lambda: self._forget(key),
                expendable=True,
            )
        except MemoryLimitExceeded:
            return  # the client sends the datums with the gradient
        if forward.activations is not None:
            size = forward.activations.size
            try:
                forward.charge = self._memory.charge("a retained forward", size, evict=forward.take)
            except MemoryLimitExceeded:
                forward.activations = None
        with self._lock:
            self._forwards[key] = forward
            own = [key for key in self._forwards if key[0] == model_id]
            for old in own[:-MAX_FORWARDS]:
                self._forwards.pop(old).release()
            self._make_room()

    def find(self, model_id: str, number: int) -> RetainedForward:
        """Returns a forward; raises `NotRetained` if it is unknown or no longer kept."""
        with self._lock:
            forward = self._forwards.get((model_id, number))
        if forward is None:
            raise NotRetained(f"forward {number} of {model_id} is not retained; send its datums with the gradient")
        return forward

    def drop(self, model_id: str) -> None:
        """Frees the forwards of a model, whose weights have changed."""
        with self._lock:
            for key in [key for key in self._forwards if key[0] == model_id]:
                self._forwards.pop(key).release()

    def _forget(self, key: tuple[str, int]) -> None:
        with self._lock:
            forward = self._forwards.pop(key, None)
        if forward is not None:
            forward.release()

    def _make_room(self) -> None:
        total = 0
        for forward in reversed(self._forwards.values()):
            if forward.activations is not None:
                total += forward.activations.size
                if total > self.limit:
                    forward.take()
