"""Forward passes whose activations are kept until their gradient arrives, so that no second forward is needed."""

from __future__ import annotations

import threading
from dataclasses import dataclass

from tinker_lightning.errors import NotRetained
from tinker_lightning.server.engine.passes import Activations
from tinker_lightning.types import Datum

# Forwards of one model without a step between them. Their datums are small, but their number must be bounded.
MAX_FORWARDS = 256


@dataclass(eq=False, slots=True)
class RetainedForward:
    """The datums of a forward pass and, unless they were evicted, its activations."""

    data: list[Datum]
    activations: Activations | None

    def take(self) -> Activations | None:
        """Returns the activations, which can be used once; without them the forward has to run again."""
        taken, self.activations = self.activations, None
        return taken


class RetainedForwards:
    """The retained forwards of all models. All methods are thread-safe.

    Activations beyond the limit are evicted, the oldest first. The datums are kept, so a backward still needs no
    tokens, and it gives the same bits because the forward runs again on them.

    Args:
        limit: The memory limit for activations in bytes.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._lock = threading.Lock()
        self._forwards: dict[tuple[str, int], RetainedForward] = {}

    def add(self, model_id: str, number: int, forward: RetainedForward) -> None:
        """Keeps the forward with this number of a model."""
        with self._lock:
            self._forwards[model_id, number] = forward
            own = [key for key in self._forwards if key[0] == model_id]
            for key in own[:-MAX_FORWARDS]:
                del self._forwards[key]
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
                del self._forwards[key]

    def _make_room(self) -> None:
        total = 0
        for forward in reversed(self._forwards.values()):
            if forward.activations is not None:
                total += forward.activations.size
                if total > self.limit:
                    forward.activations = None
