"""Adapts the official SDK's clients, and those with its methods, to the interfaces of this package."""

from __future__ import annotations

import functools
import logging
import re
from typing import TYPE_CHECKING, Any

from tinker_lightning.client.backend import TrainingBackend
from tinker_lightning.client.dialects.servers import as_dialect
from tinker_lightning.client.transport.session import SDK_VERSION
from tinker_lightning.errors import InvalidInput, Unsupported

if TYPE_CHECKING:
    import os

    from tinker_lightning.client.dialects.dialect import Dialect

logger = logging.getLogger("tinker_lightning.client")

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
    client = _created(client)
    if hasattr(client, "prepare_gradient") or not all(hasattr(client, name) for name in _OF_VENDORS):
        if speaks is not None:
            raise InvalidInput(f"dialect: not supported for a {type(client).__name__}. Pass it to connect() instead.")
        return _checked(client)
    if (inner := _sdk_client(client, _WRAPPERS)) is not None:
        _check_release()
        from tinker_lightning.client.sdk.clients import OfficialTrainingClient

        return OfficialTrainingClient(client, inner, speaks)
    if speaks is None and not _packages(client) & _TRUSTED:
        raise Unsupported(
            f"{type(client).__name__} has the methods of a training client, but the server behind it is not known, so "
            "custom losses might train wrong. Pass the client that it wraps, or as_backend(client, dialect=...) with "
            "what the server speaks: the name of a known dialect, or one that `tinker-lightning doctor` has measured."
        )
    from tinker_lightning.client.sdk.vendors import VendorTrainingClient

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
    client = _created(client)
    if not hasattr(client, "sample"):
        raise InvalidInput(
            f"{type(client).__name__} cannot sample. Pass a sampling client that create_sampling_client() returned."
        )
    if _is_official(client, "SamplingClient"):
        from tinker_lightning.client.sdk.clients import OfficialSamplingClient

        return OfficialSamplingClient(client)
    return client


def _sdk_client(client: Any, wrappers: int) -> Any | None:
    """Returns the SDK's training client that a client is or wraps: the object with the SDK's connection."""
    if _is_official(client, "TrainingClient"):
        return _created(client)
    wrapped = getattr(client, "__dict__", {}).values() if wrappers else ()
    found = (_sdk_client(each, wrappers - 1) for each in wrapped if hasattr(each, "forward_backward_custom"))
    own = client if "tinker" in _packages(getattr(client, "holder", None)) else None
    return next((each for each in found if each is not None), own)


@functools.cache
def _check_release() -> None:
    """Logs, once, that the official SDK is newer than the releases that this package was tested with."""
    from tinker import __version__ as release

    if _minor(release) > _minor(SDK_VERSION):
        logger.warning("the official SDK %s is newer than %s, the last release that was tested", release, SDK_VERSION)


def _minor(release: str) -> tuple[int, ...]:
    return tuple(map(int, re.findall(r"\d+", release)[:2]))


def _packages(instance: Any) -> set[str]:
    return {base.__module__.split(".")[0] for base in type(instance).__mro__}


def _is_official(instance: Any, name: str) -> bool:
    """Returns whether an object is of the SDK's class of this name, or of a subclass."""
    return any(base.__module__.split(".")[0] == "tinker" and base.__name__ == name for base in type(instance).__mro__)


def _created(client: Any) -> Any:
    """Returns the client of which the SDK has returned a future; version 0.38 does so for all clients."""
    return client.result() if _is_official(client, "APIFuture") else client
