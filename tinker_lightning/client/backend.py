"""What can be trained: anything with these methods, ours or the official SDK's."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from tinker_lightning.errors import InvalidInput

if TYPE_CHECKING:
    from collections.abc import Mapping


@runtime_checkable
class TrainingBackend(Protocol):
    """The training methods of a client. `TrainingClient` has them, and so has the official SDK's."""

    def forward(self, data: list[Any], loss_fn: Any, loss_fn_config: Mapping[str, Any] | None = None) -> Any:
        """A pass without a gradient; a future of a `ForwardBackwardOutput`."""

    def forward_backward(self, data: list[Any], loss_fn: Any, loss_fn_config: Mapping[str, Any] | None = None) -> Any:
        """A pass whose gradient is added; a future of a `ForwardBackwardOutput`.

        Losses of the server are also given `scale=`, by which their gradient is to be multiplied.
        """

    def forward_backward_custom(self, data: list[Any], loss_fn: Any = None, regularizers: Any = None) -> Any:
        """A pass with a loss of one's own; a future of a `ForwardBackwardOutput`."""

    def optim_step(self, optim_params: Any = None) -> Any:
        """A step on the gathered gradient; a future of an `OptimStepResponse`."""

    def save_state(self, name: str) -> Any:
        """Saves weights and optimizer; a future with the `path`."""

    def get_info(self) -> Any:
        """What the model is."""

    def get_tokenizer(self) -> Any:
        """The model's tokenizer."""


def as_backend(client: Any) -> TrainingBackend:
    """A client as something that can be trained: ours as it is, the official SDK's in a thin wrapper.

    Raises:
        InvalidInput: If it has not the methods; names those that it lacks.
    """
    wanted = [name for name in vars(TrainingBackend) if not name.startswith("_")]
    if missing := [name for name in wanted if not hasattr(client, name)]:
        raise InvalidInput(
            f"{type(client).__name__} cannot be trained: it has no {', '.join(missing)}. Pass a training client, as "
            "create_lora_training_client() makes it."
        )
    if _is_official(client):
        from tinker_lightning.client.sdk.clients import OfficialTrainingClient

        return OfficialTrainingClient(client)
    backend: TrainingBackend = client
    return backend


def as_sampler(client: Any) -> Any:
    """A sampling client with our methods, types and errors: ours as it is, the official SDK's in a thin wrapper.

    Raises:
        InvalidInput: If it cannot sample.
    """
    if not hasattr(client, "sample"):
        raise InvalidInput(
            f"{type(client).__name__} cannot sample. Pass a sampling client, as create_sampling_client() makes it."
        )
    if _is_official(client):
        from tinker_lightning.client.sdk.clients import OfficialSamplingClient

        return OfficialSamplingClient(client)
    return client


def _is_official(client: Any) -> bool:
    return any(base.__module__.split(".")[0] == "tinker" for base in type(client).__mro__)
