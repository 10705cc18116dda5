"""The session of a module with its server: begun at the first use, ended with the module."""

from __future__ import annotations

import os
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from tinker_lightning.client import connect
from tinker_lightning.errors import InvalidInput, NotFound, TinkerLightningError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import TracebackType

    from tinker_lightning.client import ServiceClient
    from tinker_lightning.remote.window import Remote
    from tinker_lightning.types import WeightsInfoResponse

# Which parts of the model an adapter is for.
_PARTS = ("train_mlp", "train_attn", "train_unembed")


class LazyClient:
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
        self.is_given = not isinstance(named, str)
        self.resumes_from: str | None = None
        self._settings = settings
        self._base_url = base_url
        self._api_key = api_key
        self._service: ServiceClient | None = None

    def client(self) -> Any:
        """A training client on a new model, or on the state to go on from."""
        if self._service is None:
            self._service = connect(self._base_url, api_key=self._api_key)
        path = self.resumes_from
        if path is None:
            return self._service.create_lora_training_client(self.base_model or None, **self._settings)
        with _naming(path, self._service):
            _check_adapter(path, self._service.weights_info(path), self._settings)
            client = self._service.create_lora_training_client(self.base_model, **self._settings)
            client.load_state_with_optimizer(path).result()
            return client

    def expected(self, remote: Remote) -> tuple[str, int | None]:
        """The base model and the rank that a state must be of; of a model that is there already, as the server says."""
        if not self.is_given and not remote.is_made:
            return self.base_model, self._settings["rank"]
        info = remote.backend.get_info()
        return info.model_data.model_name or "", info.lora_rank

    def resume(self, remote: Remote, path: str, base_model: str) -> None:
        """Goes on from a state; where there is no model yet, it is made from that at the first use.

        Args:
            remote: What goes on.
            path: The state.
            base_model: Of the state, and of this session if none was named.
        """
        if not self.is_given and not remote.is_made:
            self.base_model = self.base_model or base_model
            self.resumes_from = path
            remote.resumes = True
        else:
            with _naming(path, remote.backend):
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


def _check_adapter(path: str, info: WeightsInfoResponse, settings: dict[str, Any]) -> None:
    """Refuses a state of another adapter, as far as the server tells.

    Raises:
        InvalidInput: Says what differs.
    """
    saved = {"rank": info.lora_rank, **{name: getattr(info, name) for name in _PARTS}}
    if differ := {name: it for name, it in saved.items() if it is not None and it != settings[name]}:
        theirs = ", ".join(f"{name}={it}" for name, it in differ.items())
        own = ", ".join(f"{name}={settings[name]}" for name in differ)
        raise InvalidInput(
            f"the remote state {path} that the checkpoint names has {theirs}, but this module has {own}. Make the "
            "module with the settings of the state."
        )


@contextmanager
def _naming(path: str, server: Any) -> Iterator[None]:
    """The error for a state that is gone says which was meant, and what its loss means."""
    try:
        yield
    except (NotFound, InvalidInput) as error:  # a server may say either
        try:
            is_gone = not server.checkpoint_exists(path)
        except TinkerLightningError:  # not every server lists its checkpoints
            is_gone = isinstance(error, NotFound)
        if not is_gone:
            raise
        raise NotFound(
            f"the remote state {path} that the checkpoint names is not on the server: {error}. It was deleted, or has "
            "expired, or the module is connected to another server. Resume from another checkpoint; the file itself "
            "was not changed."
        ) from error
