"""Which saved weights are still those of a model in training, for servers where sampling from others replaces them."""

from __future__ import annotations

import threading
import weakref
from typing import TYPE_CHECKING

from tinker_lightning.errors import Unsupported

if TYPE_CHECKING:
    from concurrent.futures import Future

    from tinker_lightning.types import SaveWeightsForSamplerResponse


class LiveWeights:
    """The models that this process trains on one server, and the samplers that were made from them."""

    def __init__(self, server: str) -> None:
        self._server = server
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

    def saving(self, version: tuple[str, int], saved: Future[SaveWeightsForSamplerResponse]) -> None:
        """Notes that a sampler, or a path of weights, has this version of a model once it is saved."""

        def note(source: Future[SaveWeightsForSamplerResponse]) -> None:
            if not source.cancelled() and source.exception() is None:
                result = source.result()
                with self._lock:
                    self._samplers[result.path or result.sampling_session_id or ""] = version

        saved.add_done_callback(note)

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
        if model_id is not None:
            self.check_version(sampler, (model_id, version))

    def check_version(self, sampler: str, version: tuple[str, int]) -> None:
        """Checks that a sampler whose version is known has the present weights of its model; see `check`."""
        model_id, number = version
        with self._lock:
            if self._versions.get(model_id, number) == number:
                return
        raise Unsupported(
            f"sampling from {sampler} would replace the weights of {model_id} on {self._server} by older ones, or "
            "sample from the present ones in their place, while it is being trained. Sample from the present weights: "
            "save_weights_and_get_sampling_client()."
        )


_servers: weakref.WeakValueDictionary[tuple[str, int], LiveWeights] = weakref.WeakValueDictionary()
_finding = threading.Lock()


def on_server(url: str, transport: object | None = None) -> LiveWeights:
    """Returns the models in training on a server, which all clients of this process share.

    Args:
        url: The server's URL.
        transport: What sends the requests, if not the network; its client must keep it alive.
    """
    address = url.rstrip("/").replace("//localhost", "//127.0.0.1")
    with _finding:
        return _servers.setdefault((address, id(transport)), LiveWeights(url))
