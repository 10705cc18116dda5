"""The session of a module with its server, opened at the first use and closed with the module."""

from __future__ import annotations

import os
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from tinker_lightning.client import connect
from tinker_lightning.errors import ClientClosed, InvalidInput, NotFound, TinkerLightningError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tinker_lightning.client import ServiceClient
    from tinker_lightning.remote.saved_state import SavedState
    from tinker_lightning.remote.window import RemoteModel
    from tinker_lightning.types import WeightsInfoResponse

# Settings that choose which layers have an adapter.
_LAYERS = ("train_mlp", "train_attn", "train_unembed")


class LazyClient:
    """Creates the training client of a module at its first use, on a new model or from a saved state."""

    def __init__(self, model: Any, settings: dict[str, Any], base_url: str | None, api_key: str | None) -> None:
        # Empty for a training client, which has a model already.
        named = os.environ.get("TINKER_BASE_MODEL", "") if model is None else model
        self.base_model = named if isinstance(named, str) else ""
        self.is_given = not isinstance(named, str)
        self.resumes_from: str | None = None
        self._settings = settings
        self._base_url = base_url
        self._api_key = api_key
        self._service: ServiceClient | None = None
        self._is_closed = False

    def client(self) -> Any:
        """Creates a training client, from the state that `load` was called with, if any."""
        self.check_open()
        if not self.base_model:
            raise InvalidInput("there is no base model: pass one, for example SFT('tiny'), or set TINKER_BASE_MODEL")
        if self._service is None:
            self._service = connect(self._base_url, api_key=self._api_key)
        path = self.resumes_from
        if path is None:
            return self._service.create_lora_training_client(self.base_model, **self._settings)
        with _explaining_missing(path, self._service):
            _check_adapter(path, self._service.weights_info(path), self._settings)
            client = self._service.create_lora_training_client(self.base_model, **self._settings)
            client.load_state_with_optimizer(path).result()
            return client

    def check_open(self) -> None:
        """Raises `ClientClosed` after `close()`, unless the user has passed a client, which stays open."""
        if self._is_closed and not self.is_given:
            raise ClientClosed("this module was closed, and its model with it. Create a new module.")

    def load(self, remote: RemoteModel, state: SavedState) -> None:
        """Loads a saved state; a model that does not exist yet is created from it at the first use."""
        exists = self.is_given or remote.is_created
        base_model: str | None = self.base_model
        rank = self._settings["rank"]
        if exists:
            info = remote.backend.get_info()
            base_model, rank = info.model_data.model_name, info.lora_rank
        for what, saved, own in (("base model", state.base_model, base_model), ("rank", state.rank, rank)):
            if saved and own and saved != own:
                raise InvalidInput(
                    f"the checkpoint has {what} {saved}, but this module has {what} {own}. Create the module with the "
                    f"{what} of the checkpoint."
                )
        if exists:
            with _explaining_missing(state.path, remote.backend):
                remote.backend.load_state_with_optimizer(state.path).result()
        else:
            self.base_model = self.base_model or state.base_model or ""
            self.resumes_from = state.path

    def close(self, *failure: Any) -> None:
        """Closes the session if it was opened here; does not wait for requests after a `failure`, as in `__exit__`."""
        service, self._service = self._service, None
        self._is_closed = True
        if service is not None:
            service.__exit__(*(failure or (None, None, None)))


def _check_adapter(path: str, info: WeightsInfoResponse, settings: dict[str, Any]) -> None:
    """Raises `InvalidInput` if the adapter of a state has other settings, as far as the server reports them."""
    saved = {"rank": info.lora_rank, **{name: getattr(info, name) for name in _LAYERS}}
    if differ := {name: value for name, value in saved.items() if value is not None and value != settings[name]}:
        theirs = ", ".join(f"{name}={value}" for name, value in differ.items())
        own = ", ".join(f"{name}={settings[name]}" for name in differ)
        raise InvalidInput(
            f"the remote state {path} that the checkpoint names has {theirs}, but this module has {own}. Create the "
            "module with the settings of the state."
        )


@contextmanager
def _explaining_missing(path: str, server: Any) -> Iterator[None]:
    """Raises `NotFound` with the path of the state if loading fails because it is missing."""
    try:
        yield
    except (NotFound, InvalidInput) as error:  # which one depends on the server
        try:
            is_missing = not server.checkpoint_exists(path)
        except TinkerLightningError:  # not supported by some servers
            is_missing = isinstance(error, NotFound)
        if not is_missing:
            raise
        raise NotFound(
            f"the remote state {path} that the checkpoint names is not on the server: {error}. It was deleted or has "
            "expired, or the module is connected to another server. Resume from another checkpoint; the file itself "
            "was not changed."
        ) from error
