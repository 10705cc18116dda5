"""The interface of training clients."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from torch import Tensor

    from tinker_lightning.client.dialects.dialect import Dialect
    from tinker_lightning.client.futures import TinkerFuture, UnreadFailures
    from tinker_lightning.client.server_losses import Losses
    from tinker_lightning.client.transport.recording import Recording
    from tinker_lightning.client.transport.retries import Pause
    from tinker_lightning.types import Datum, ForwardBackwardOutput, GetInfoResponse
    from tinker_lightning.types.params import OptimParams
    from tinker_lightning.types.responses import Checkpoint


@runtime_checkable
class TrainingBackend(Protocol):
    """The interface that `RemoteLM` and `RemoteModule` train through. `TrainingClient` implements it.

    The official SDK's clients are adapted to it by `as_backend`. To write one, wrap a `TrainingClient` or implement
    every method; `as_backend` names those that are missing. Methods that reach the model return a future.
    """

    @property
    def unread(self) -> UnreadFailures:
        """The futures of this backend with unhandled failures."""

    @property
    def losses(self) -> Losses | None:
        """Uploads losses to the server; None if this backend cannot."""

    @property
    def server(self) -> str:
        """The server's URL, or another name of it, for users."""

    @property
    def storage(self) -> str:
        """Where saved states are, for users: a folder, or the server."""

    @property
    def dialect(self) -> Dialect:
        """The dialect of the server."""

    @property
    def pause(self) -> Pause | None:
        """What the requests of this backend wait for; None if they get on, or if it is not known."""

    @property
    def optimizer_kind(self) -> str | None:
        """The optimizer that the model was created for, by the protocol's name; None if it is not known."""

    @property
    def retains(self) -> bool:
        """Whether the server can keep a forward pass until its gradient arrives."""

    @property
    def can_expire(self) -> bool:
        """Whether the server supports `ttl_seconds` on saved states and lets clients change it later."""

    def prepare(
        self,
        data: list[Datum],
        loss_fn: Any,
        loss_fn_config: Mapping[str, Any] | None = None,
        *,
        loss_fn_inputs: Mapping[str, Any] | None = None,
        scale: float = 1.0,
    ) -> Any:
        """Checks a pass and converts it into the request that `send` takes; raises `InvalidInput` if it is invalid."""

    def prepare_gradient(
        self,
        data: list[Datum],
        gradients: Sequence[Tensor],
        logprobs: Sequence[Tensor] | None = None,
        retained: tuple[tuple[int, int], ...] | None = None,
    ) -> Any:
        """Converts the gradient of a loss with respect to log-probabilities into the request that `send` takes."""

    def computes(self, loss: str) -> bool:
        """Returns whether the server is known to train with a built-in loss as the protocol defines it."""

    def logprobs(self, data: list[Datum], *, retain: bool = False) -> TinkerFuture[ForwardBackwardOutput]:
        """Sends a forward for the log-probabilities of datums; `retain` keeps it for its gradient where possible."""

    def send(self, request: Any) -> TinkerFuture[ForwardBackwardOutput]:
        """Sends a request that `prepare` or `prepare_gradient` returned, and accumulates its gradient."""

    def forward(
        self,
        data: list[Any],
        loss_fn: Any,
        loss_fn_config: Mapping[str, Any] | None = None,
        *,
        loss_fn_inputs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Runs a pass without a gradient; the result is a `ForwardBackwardOutput`."""

    def forward_backward(self, data: list[Any], loss_fn: Any, loss_fn_config: Mapping[str, Any] | None = None) -> Any:
        """Runs a pass and accumulates its gradient; the result is a `ForwardBackwardOutput`."""

    def forward_backward_custom(self, data: list[Any], loss_fn: Any = None) -> Any:
        """Runs a pass with a custom loss; the result is a `ForwardBackwardOutput`."""

    def prepare_step(self, params: OptimParams) -> None:
        """Checks the settings of a step and waits for what must precede it, before anything of the step is sent."""

    def drop_unsent(self, reason: str) -> int:
        """Drops passes that were not sent yet; returns the number of sequences sent since the last step."""

    def optim_step(self, optim_params: Any = None) -> Any:
        """Takes a step on the accumulated gradient; the result is an `OptimStepResponse`."""

    def save_state(
        self, name: str, ttl_seconds: int | None = None, *, user_metadata: dict[str, str] | None = None
    ) -> Any:
        """Saves weights and optimizer state; the result has the `path`. Options are given if `can_expire`."""

    def load_state_with_optimizer(self, path: str) -> Any:
        """Loads saved weights and optimizer state."""

    def checkpoint_exists(self, path: str) -> bool:
        """Returns whether a saved state exists."""

    def list_checkpoints(self) -> list[Checkpoint]:
        """Returns everything that the user has saved on the server; called if `can_expire`."""

    def delete_checkpoint(self, path: str, *, missing_ok: bool = False) -> None:
        """Deletes a saved state."""

    def set_checkpoint_ttl(self, path: str, ttl_seconds: int | None) -> None:
        """Sets after how many seconds the server deletes a saved state; None keeps it."""

    def save_weights_external(self, name: str, ttl_seconds: int | None = None) -> Any:
        """Saves weights for download; the result has the `path`."""

    def download_checkpoint(self, path: str, folder: Path) -> None:
        """Downloads saved weights into an existing folder."""

    def save_weights_and_get_sampling_client(self) -> Any:
        """Returns a client that samples from the current weights."""

    def submit_sampling_client(self) -> TinkerFuture[Any]:
        """Returns a future of a client that samples from the weights as they are after all requests so far."""

    def create_sampling_client(self, model_path: str) -> Any:
        """Returns a client that samples from saved weights."""

    def create_base_sampling_client(self, base_model: str | None = None) -> Any:
        """Returns a client that samples from a base model; by default the one that is trained."""

    def record(self, recording: Recording | None) -> None:
        """Adds all operations of this client's session to a recording; None stops that."""

    def max_context_length(self) -> int | None:
        """Returns the maximum number of tokens of an input; None if the server does not report it."""

    def get_info(self) -> GetInfoResponse:
        """Returns the base model and the LoRA rank."""

    def get_tokenizer(self) -> Any:
        """Returns the model's tokenizer."""
