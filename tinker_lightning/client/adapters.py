"""Adapts the official SDK's clients to the interfaces of this package."""

from __future__ import annotations

from typing import Any

from tinker_lightning.client.backend import TrainingBackend
from tinker_lightning.errors import InvalidInput

# What makes a client of another vendor trainable: the SDK's names.
_OF_VENDORS = ("forward", "forward_backward_custom", "optim_step", "save_state")


def as_backend(client: Any) -> TrainingBackend:
    """Returns a training client as a `TrainingBackend`: ours unchanged, the SDK's or a vendor's in a wrapper."""
    if _is_official(client, "TrainingClient"):
        from tinker_lightning.client.sdk.clients import OfficialTrainingClient

        return OfficialTrainingClient(client)
    if not hasattr(client, "prepare_gradient") and all(hasattr(client, name) for name in _OF_VENDORS):
        from tinker_lightning.client.sdk.vendors import VendorTrainingClient

        return VendorTrainingClient(client)
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
    if not hasattr(client, "sample"):
        raise InvalidInput(
            f"{type(client).__name__} cannot sample. Pass a sampling client that create_sampling_client() returned."
        )
    if _is_official(client, "SamplingClient"):
        from tinker_lightning.client.sdk.clients import OfficialSamplingClient

        return OfficialSamplingClient(client)
    return client


def _is_official(client: Any, name: str) -> bool:
    return any(base.__module__.split(".")[0] == "tinker" and base.__name__ == name for base in type(client).__mro__)
