"""Which saved weights are still those of a model in training, for servers where sampling from others replaces them."""

from __future__ import annotations

import threading

from tinker_lightning.errors import Unsupported


class LiveWeights:
    """The models that one client trains, and the samplers that were made from them."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._versions: dict[str, int] = {}
        self._samplers: dict[str, tuple[str, int]] = {}

    def changed(self, model_id: str) -> None:
        """Notes that the weights of a model have changed."""
        with self._lock:
            self._versions[model_id] = self._versions.get(model_id, 0) + 1

    def version(self, model_id: str) -> tuple[str, int]:
        """Returns what identifies the present weights of a model."""
        with self._lock:
            return model_id, self._versions.setdefault(model_id, 0)

    def saved(self, sampler: str, version: tuple[str, int]) -> None:
        """Notes that a sampler, or a path of weights, has this version of a model."""
        with self._lock:
            self._samplers[sampler] = version

    def model_of(self, sampler: str, run: str | None) -> str | None:
        """Returns the model in training that a sampler's weights belong to, if there is one; see `check`."""
        with self._lock:
            model_id, _ = self._samplers.get(sampler, (run, 0))
            return model_id if model_id in self._versions else None

    def check(self, sampler: str, run: str | None) -> None:
        """Checks that sampling does not replace the weights of a model in training.

        Args:
            sampler: The sampler or path of weights.
            run: The model that the weights belong to, if their path names it.

        Raises:
            Unsupported: If it would.
        """
        with self._lock:
            model_id, version = self._samplers.get(sampler, (run, -1))
            if model_id is None or self._versions.get(model_id, version) == version:
                return
        raise Unsupported(
            f"sampling from {sampler} would replace the weights of {model_id} on this server by older ones, while it "
            "is being trained. Sample from the present weights: save_weights_and_get_sampling_client()."
        )
