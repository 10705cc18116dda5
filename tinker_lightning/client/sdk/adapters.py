"""Adapts the official SDK's clients, and those with its methods, to the interfaces of this package."""

from __future__ import annotations

import sys
from functools import partial
from typing import TYPE_CHECKING, Any

from tinker import types as sdk

from tinker_lightning.client.backend import TrainingBackend
from tinker_lightning.client.dialects import servers
from tinker_lightning.client.dialects.servers import as_dialect
from tinker_lightning.client.dialects.surrogate import Surrogate
from tinker_lightning.client.sdk import convert
from tinker_lightning.client.sdk.clients import OfficialTrainingClient
from tinker_lightning.client.sdk.official import created, is_official
from tinker_lightning.errors import InvalidInput, Unsupported

if TYPE_CHECKING:
    import os
    from collections.abc import Sequence

    from torch import Tensor

    from tinker_lightning.client.dialects.dialect import Dialect
    from tinker_lightning.client.futures import TinkerFuture
    from tinker_lightning.client.passes.request import ServerPass
    from tinker_lightning.types import Datum, ForwardBackwardOutput, GetInfoResponse

# What makes a client of another vendor trainable: the SDK's names.
_OF_VENDORS = ("forward", "forward_backward_custom", "optim_step", "save_state")
# The packages of vendors whose `forward_backward_custom` is known to send the gradient of the loss.
_TRUSTED = frozenset({"together", "fireworks"})
# How many clients may be wrapped around the SDK's.
_WRAPPERS = 3


def as_backend(client: Any, dialect: str | os.PathLike[str] | Dialect | None = None) -> TrainingBackend:
    """Returns a training client as a `TrainingBackend`: ours unchanged, the SDK's or a vendor's in a wrapper.

    Args:
        client: The training client. One that wraps the official SDK's is recognized if it has that as an attribute.
        dialect: What the server behind a client of another library speaks, as in `connect()`; detected if it is not
            given.

    Raises:
        InvalidInput: If the client cannot be trained.
        Unsupported: If what its server does with a gradient is not known.
    """
    speaks = as_dialect(dialect)
    client = created(client)
    if hasattr(client, "prepare_gradient") or not all(hasattr(client, name) for name in _OF_VENDORS):
        if speaks is not None:
            raise InvalidInput(f"dialect: not supported for a {type(client).__name__}. Pass it to connect() instead.")
        return _checked(client)
    if (inner := _sdk_client(client, _WRAPPERS)) is not None:
        from tinker_lightning.client.sdk.clients import OfficialTrainingClient

        return OfficialTrainingClient(client, inner, speaks)
    if speaks is None and not _packages(client) & _TRUSTED:
        raise Unsupported(
            f"{type(client).__name__} has the methods of a training client, but the server behind it is not known, so "
            "custom losses might train wrong. Pass the client that it wraps, or as_backend(client, dialect=...) with "
            "what the server speaks: the name of a known dialect, or one that `tinker-lightning doctor` has measured."
        )

    return VendorTrainingClient(client, speaks)


def _checked(client: Any) -> TrainingBackend:
    wanted = [name for name in vars(TrainingBackend) if not name.startswith("_")]
    if missing := [name for name in wanted if not hasattr(client, name)]:
        raise InvalidInput(
            f"{type(client).__name__} cannot be trained: it has no {', '.join(missing)}. Pass a training client that "
            "create_lora_training_client() returned, or implement tinker_lightning.client.TrainingBackend."
        )
    backend: TrainingBackend = client
    return backend


def as_sampler(client: Any) -> Any:
    """Returns a sampling client with our methods, types and errors; the official SDK's in a thin wrapper."""
    client = created(client)
    if not hasattr(client, "sample"):
        raise InvalidInput(
            f"{type(client).__name__} cannot sample. Pass a sampling client that create_sampling_client() returned."
        )
    if is_official(client, "SamplingClient"):
        from tinker_lightning.client.sdk.clients import OfficialSamplingClient

        return OfficialSamplingClient(client)
    return client


def _sdk_client(client: Any, wrappers: int) -> Any | None:
    """Returns the SDK's training client that a client is or wraps: the object with the SDK's connection."""
    if is_official(client, "TrainingClient") or "tinker" in _packages(getattr(client, "holder", None)):
        return client
    wrapped = getattr(client, "__dict__", {}).values() if wrappers else ()
    found = (_sdk_client(each, wrappers - 1) for each in wrapped if hasattr(each, "forward_backward_custom"))
    return next((each for each in found if each is not None), None)


def _packages(instance: Any) -> set[str]:
    return {base.__module__.split(".")[0] for base in type(instance).__mro__}


class VendorTrainingClient(OfficialTrainingClient):
    """A vendor's training client as a `TrainingBackend`.

    Without a dialect, what the vendor's built-in losses compute is not known, so gradients are sent by its own
    `forward_backward_custom`, which runs another forward; built-in losses run locally.

    Args:
        client: The vendor's client.
        dialect: What its server speaks, if that is known.
    """

    def __init__(self, client: Any, dialect: Dialect | None = None) -> None:
        super().__init__(client)
        self._types = _types_of(client)
        self._has_own_call = dialect is None
        self._dialect = dialect or servers.JSON.but(
            name=type(client).__module__.split(".")[0],
            # This carries gradients to `_post_pass` only, which hands them to the vendor's own call.
            surrogate=Surrogate(),
            losses=frozenset(),
            sends_other_losses=False,
            # Log-probabilities may come back as 0 wherever the weight is not 1.
            unit_forward_weights=True,
        )

    @property
    def server(self) -> str:
        """A name of the server for users."""
        return f"the server of {type(self.client).__name__}"

    def get_info(self) -> GetInfoResponse:
        """Returns the base model and the LoRA rank; raises `Unsupported` if the client does not report them."""
        if getattr(self.client, "get_info", None) is None:
            raise Unsupported(f"{type(self.client).__name__} does not report its base model")
        return super().get_info()

    def checkpoint_exists(self, path: str) -> bool:
        """Raises `Unsupported`: such clients do not list checkpoints."""
        raise Unsupported(f"{path}: {type(self.client).__name__} does not list checkpoints")

    def delete_checkpoint(self, path: str, *, missing_ok: bool = False) -> None:  # noqa: ARG002
        """Raises `Unsupported`: such clients do not delete checkpoints."""
        raise Unsupported(f"{path} stays on the server: {type(self.client).__name__} does not delete checkpoints")

    @property
    def can_expire(self) -> bool:
        """Always False: such clients do not change when a saved state expires."""
        return False

    def set_checkpoint_ttl(self, path: str, ttl_seconds: int | None) -> None:  # noqa: ARG002
        """Raises `Unsupported`: such clients do not change when a saved state expires."""
        raise Unsupported(f"{path}: {type(self.client).__name__} does not change when a checkpoint expires")

    def _post_pass(self, request: ServerPass, *, forward_only: bool) -> TinkerFuture[ForwardBackwardOutput]:
        if forward_only or not self._has_own_call:
            return super()._post_pass(request, forward_only=forward_only)
        datums = [convert.datum(datum, self._types) for datum in request.data]
        linear = partial(_linear, given=request.data)
        return self._calls.future(
            "forward_backward_custom", lambda: self.client.forward_backward_custom(datums, linear), convert.output
        )


def _linear(_: Sequence[Any], logprobs: Sequence[Tensor], *, given: Sequence[Datum]) -> tuple[Tensor, dict[str, float]]:
    """A loss whose gradient is minus the weights of the datums, whatever the log-probabilities are."""
    terms = [
        -(datum.loss_fn_inputs["weights"].to_torch().reshape(each.shape) * each).sum()
        for datum, each in zip(given, logprobs, strict=True)
    ]
    total = terms[0]
    for term in terms[1:]:
        total = total + term
    return total, {}


def _types_of(client: Any) -> Any:
    """Returns the module with the vendor's datums: the one that its client's module calls `types`."""
    for base in type(client).__mro__:
        types = getattr(sys.modules.get(base.__module__), "types", None)
        if hasattr(types, "Datum"):
            return types
    return sdk
