"""The session of a module with its server: begun at the first use, ended with the module."""

from __future__ import annotations

import os
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from tinker_lightning.client import connect
from tinker_lightning.errors import InvalidInput, NotFound

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import TracebackType

    from tinker_lightning.client import ServiceClient
    from tinker_lightning.window import Remote


class Session:
    """Makes a training client when one is needed, anew or from a state.

    Args:
        model: The name of a base model, a training client, or None for what `TINKER_BASE_MODEL` names.
        settings: Of a new adapter.
        base_url: Where the server is; see `connect`.
        api_key: What it wants to see.
    """

    def __init__(self, model: Any, settings: dict[str, Any], base_url: str | None, api_key: str | None) -> None:
        # Empty for a client that was given: then the model is the client's, whatever the environment names.
        named = os.environ.get("TINKER_BASE_MODEL", "") if model is None else model
        self.base_model = named if isinstance(named, str) else ""
        self.rank: int = settings["rank"]
        self.resumes_from: str | None = None
        self._settings = settings
        self._base_url = base_url
        self._api_key = api_key
        self._service: ServiceClient | None = None

    def client(self) -> Any:
        """A training client on a new model, or on the state to go on from."""
        if self._service is None:
            self._service = connect(self._base_url, api_key=self._api_key)
        if self.resumes_from is not None:
            with _naming(self.resumes_from):
                return self._service.create_training_client_from_state_with_optimizer(self.resumes_from)
        return self._service.create_lora_training_client(self.base_model or None, **self._settings)

    def resume(self, remote: Remote, path: str) -> None:
        """Goes on from a state; where there is no model yet, it is made from that at the first use."""
        if self.base_model and not remote.is_made:
            self.resumes_from = path
            remote.resumes = True
        else:
            with _naming(path):
                remote.load(path)

    def close(self) -> None:
        """Ends what this has begun; a client that was given stays open."""
        service, self._service = self._service, None
        if service is not None:
            service.close()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        service, self._service = self._service, None
        if service is not None:
            service.__exit__(kind, error, traceback)  # after an error it waits for nothing more


@contextmanager
def _naming(path: str) -> Iterator[None]:
    """Errors of the server say which state was meant, and what its loss means."""
    try:
        yield
    except (NotFound, InvalidInput) as error:  # a server may say either
        raise NotFound(
            f"the remote state {path} that the checkpoint names is not on the server: {error}. It was deleted, or has "
            "expired, or the module is connected to another server. Resume from another checkpoint; the file itself "
            "was not changed."
        ) from error
