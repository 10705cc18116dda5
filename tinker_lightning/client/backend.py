"""What can be trained: anything with these methods, ours or the official SDK's."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

if TYPE_CHECKING:
    from collections.abc import Mapping


class Pending(Protocol):
    """A result on its way."""

    def result(self, timeout: float | None = None) -> Any:
        """The result, waiting for it if need be."""


@runtime_checkable
class TrainingBackend(Protocol):
    """The training methods of a client. `TrainingClient` has them, and so has the official SDK's."""

    def forward(self, data: list[Any], loss_fn: Any, loss_fn_config: Mapping[str, Any] | None = None) -> Any:
        """A pass without a gradient; a future of a `ForwardBackwardOutput`."""

    def forward_backward(self, data: list[Any], loss_fn: Any, loss_fn_config: Mapping[str, Any] | None = None) -> Any:
        """A pass whose gradient is added; a future of a `ForwardBackwardOutput`."""

    def forward_backward_custom(self, data: list[Any], loss_fn: Any) -> Any:
        """A pass with a loss of one's own; a future of a `ForwardBackwardOutput`."""

    def optim_step(self, optim_params: Any = None) -> Any:
        """A step on the gathered gradient; a future of an `OptimStepResponse`."""

    def save_state(self, name: str) -> Any:
        """Saves weights and optimizer; a future with the `path`."""

    def get_info(self) -> Any:
        """What the model is."""

    def get_tokenizer(self) -> Any:
        """The model's tokenizer."""
