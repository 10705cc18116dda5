"""Wraps training clients of other vendors whose methods have the SDK's names, such as Together's and Fireworks'.

Imported only after the user has passed such a client, so that `tinker` stays an extra.
"""

from __future__ import annotations

import sys
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from tinker import types as sdk
from typing_extensions import override

from tinker_lightning.client.dialects import servers
from tinker_lightning.client.dialects.surrogate import Surrogate
from tinker_lightning.client.sdk import convert
from tinker_lightning.client.sdk.clients import OfficialTrainingClient
from tinker_lightning.client.sdk.sender import SdkSender
from tinker_lightning.errors import Unsupported

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from tinker_lightning.client.dialects.dialect import Dialect
    from tinker_lightning.client.futures import TinkerFuture
    from tinker_lightning.client.passes.request import ServerPass
    from tinker_lightning.types import Datum, ForwardBackwardOutput, GetInfoResponse
    from tinker_lightning.types.responses import Checkpoint


class VendorTrainingClient(OfficialTrainingClient):
    """A vendor's training client as a `TrainingBackend`.

    Without a dialect, what the vendor's built-in losses compute is not known, so gradients are sent by its own
    `forward_backward_custom`, which runs another forward; built-in losses run locally.

    Args:
        client: The vendor's client.
        dialect: What its server speaks, if that is known.
    """

    def __init__(self, client: Any, dialect: Dialect | None = None) -> None:
        super().__init__(client, sender=_VendorSender(client, dialect))

    @override
    def get_info(self) -> GetInfoResponse:
        """Returns the base model and the LoRA rank; raises `Unsupported` if the client does not report them."""
        if getattr(self.client, "get_info", None) is None:
            raise Unsupported(f"{type(self.client).__name__} does not report its base model")
        return super().get_info()

    @override
    def checkpoint_exists(self, path: str) -> bool:
        """Raises `Unsupported`: such clients do not list checkpoints."""
        raise Unsupported(f"{path}: {type(self.client).__name__} does not list checkpoints")

    @override
    def list_checkpoints(self) -> list[Checkpoint]:
        """Raises `Unsupported`: such clients do not list checkpoints."""
        raise Unsupported(f"{type(self.client).__name__} does not list checkpoints")

    @override
    def delete_checkpoint(self, path: str, *, missing_ok: bool = False) -> None:
        """Raises `Unsupported`: such clients do not delete checkpoints."""
        raise Unsupported(f"{path} stays on the server: {type(self.client).__name__} does not delete checkpoints")

    @property
    @override
    def can_expire(self) -> bool:
        """Always False: such clients do not change when a saved state expires."""
        return False

    @override
    def set_checkpoint_ttl(self, path: str, ttl_seconds: int | None) -> None:
        """Raises `Unsupported`: such clients do not change when a saved state expires."""
        raise Unsupported(f"{path}: {type(self.client).__name__} does not change when a checkpoint expires")


class _VendorSender(SdkSender):
    """Calls a vendor's training client."""

    def __init__(self, client: Any, dialect: Dialect | None) -> None:
        self._has_own_call = dialect is None
        dialect = dialect or servers.JSON.but(
            name=type(client).__module__.split(".")[0],
            # This carries gradients to `post_one` only, which hands them to the vendor's own call.
            surrogate=Surrogate(),
            losses=frozenset(),
            sends_other_losses=False,
            # Log-probabilities may come back as 0 wherever the weight is not 1.
            unit_forward_weights=True,
        )
        super().__init__(client, client, dialect, _types_of(client))

    @property
    @override
    def server(self) -> str:
        return f"the server of {type(self.client).__name__}"

    @override
    def post_one(self, request: ServerPass, *, forward_only: bool) -> TinkerFuture[ForwardBackwardOutput]:
        if forward_only or not self._has_own_call:
            return super().post_one(request, forward_only=forward_only)
        datums = [convert.datum(datum, self.types) for datum in request.data]
        linear = partial(_linear, given=request.data)
        return self.calls.submit(
            "forward_backward_custom", lambda: self.client.forward_backward_custom(datums, linear), convert.output
        )


def _linear(_: Sequence[Any], logprobs: Sequence[Tensor], *, given: Sequence[Datum]) -> tuple[Tensor, dict[str, float]]:
    """A loss whose gradient is minus the weights of the datums, whatever the log-probabilities are."""
    terms = [
        -(datum.loss_fn_inputs["weights"].to_torch().reshape(each.shape) * each).sum()
        for datum, each in zip(given, logprobs, strict=True)
    ]
    return torch.stack(terms).sum(), {}


def _types_of(client: Any) -> Any:
    """Returns the module with the vendor's datums: the one that its client's module calls `types`."""
    for base in type(client).__mro__:
        types = getattr(sys.modules.get(base.__module__), "types", None)
        if hasattr(types, "Datum"):
            return types
    return sdk
