"""Recognizes objects of the official SDK without importing it."""

from __future__ import annotations

from typing import Any


def is_official(instance: Any, name: str) -> bool:
    """Returns whether an object is of the SDK's class of this name, or of a subclass."""
    return any(base.__module__.split(".")[0] == "tinker" and base.__name__ == name for base in type(instance).__mro__)


def created(client: Any) -> Any:
    """Returns the client of which the SDK has returned a future; version 0.38 does so for all clients."""
    return client.result() if is_official(client, "APIFuture") else client
