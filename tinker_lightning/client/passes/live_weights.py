"""Guards models in training on servers where sampling from older weights would replace the current ones."""

from __future__ import annotations

import contextlib
import threading
import weakref
from concurrent.futures import Future, InvalidStateError
from typing import TYPE_CHECKING, TypeVar

from tinker_lightning.client.futures import TinkerFuture
from tinker_lightning.errors import Unsupported

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tinker_lightning.types import SaveWeightsForSamplerResponse

T = TypeVar("T")


class LiveWeights:
    """The models that this process trains on one server, and the samplers that were made from them."""

    def __init__(self, server: str) -> None:
        self._server = server
        self._lock = threading.Lock()
        self._versions: dict[str, int] = {}
        self._samplers: dict[str, tuple[str, int]] = {}
        self._in_flight: dict[str, set[Future[None]]] = {}  # the samples from each model

    @contextlib.contextmanager
    def changing(self, model_id: str) -> Iterator[list[TinkerFuture[None]]]:
        """Surrounds the submission of a request that changes the weights of a model.

        Returns the samples in flight, which must end before it is posted: the server might run them after it. What is
        saved by another thread in the meantime may have the weights before or after, and counts as older.
        """
        self._count(model_id)  # from here on, nobody samples from the present weights
        try:
            yield self._samples(model_id)
        finally:
            self._count(model_id)

    def _samples(self, model_id: str) -> list[TinkerFuture[None]]:
        with self._lock:
            return [TinkerFuture(ended, "sample") for ended in self._in_flight.get(model_id, ())]

    def _count(self, model_id: str) -> None:
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
        """Returns the model in training that a sampler's weights belong to, if there is one; see `sample`."""
        with self._lock:
            model_id, _ = self._samplers.get(sampler, (run, 0))
            return model_id if model_id in self._versions else None

    def sample(self, sampler: str, run: str | None, send: Callable[[], TinkerFuture[T]]) -> TinkerFuture[T]:
        """Samples, unless that would replace the weights of a model in training.

        Args:
            sampler: The sampler or path of weights.
            run: The model that the weights belong to, if their path names it.
            send: Sends the request.

        Raises:
            Unsupported: If it would.
        """
        with self._lock:
            model_id, version = self._samplers.get(sampler, (run, -1))
        return send() if model_id is None else self.sample_version(sampler, (model_id, version), send)

    def sample_version(
        self, sampler: str, version: tuple[str, int], send: Callable[[], TinkerFuture[T]]
    ) -> TinkerFuture[T]:
        """Samples from a sampler whose version is known; see `sample`."""
        model_id, number = version
        ended: Future[None] = Future()
        future: TinkerFuture[T] | None = None

        def end(_: object) -> None:
            with self._lock:
                self._in_flight.get(model_id, set()).discard(ended)
            with contextlib.suppress(InvalidStateError):
                ended.set_result(None)

        try:
            with self._lock:  # one block, so that a step either waits for this sample or comes before the check
                if self._versions.get(model_id, number) != number:
                    raise Unsupported(
                        f"sampling from {sampler} would replace the weights of {model_id} on {self._server} by older "
                        "ones, or sample from the present ones in their place, while it is being trained. Sample from "
                        "the present weights: save_weights_and_get_sampling_client()."
                    )
                self._in_flight.setdefault(model_id, set()).add(ended)
            future = send()
            future._source.add_done_callback(end)
            return future
        except BaseException:  # an interrupt must not leave a sample that never ends
            if future is None:
                end(None)
            else:
                future._source.add_done_callback(end)
            raise


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
