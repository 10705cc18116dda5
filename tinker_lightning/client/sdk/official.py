"""Recognizes objects of the official SDK without importing it, and finds the server behind a client."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from tinker_lightning.client.dialects import servers
from tinker_lightning.client.dialects.detect import detect
from tinker_lightning.client.transport.connection import Connection
from tinker_lightning.client.transport.retries import RetryPolicy
from tinker_lightning.client.transport.session import fetch_capabilities
from tinker_lightning.client.transport.target import Credentials
from tinker_lightning.threads.background import BackgroundLoop

if TYPE_CHECKING:
    from tinker_lightning.client.dialects.dialect import Dialect


def is_official(instance: Any, name: str) -> bool:
    """Returns whether an object is of the SDK's class of this name, or of a subclass."""
    return any(base.__module__.split(".")[0] == "tinker" and base.__name__ == name for base in type(instance).__mro__)


def created(client: Any) -> Any:
    """Returns the client of which the SDK has returned a future; version 0.38 does so for all clients."""
    return client.result() if is_official(client, "APIFuture") else client


_RETRY_POLICY = RetryPolicy(10.0)


def detect_behind(client: Any) -> Dialect:
    """Returns the dialect of the server that a client of the official SDK talks to."""
    url = server_url(client)
    if url is None:
        return servers.HOSTED
    connection = Connection(url, Credentials(_given(client, "api_key", "TINKER_API_KEY")), None, _RETRY_POLICY)
    loop = BackgroundLoop(connection.close)
    try:
        return loop.run(_detect(connection)).result()
    finally:
        loop.close()


def server_url(client: Any) -> str | None:
    """Returns the URL that a client of the official SDK was given; None for the SDK's default."""
    return _given(client, "base_url", "TINKER_BASE_URL")


async def _detect(connection: Connection) -> Dialect:
    return await detect(connection, await fetch_capabilities(connection))


def _given(client: Any, name: str, variable: str) -> str | None:
    """Returns a setting that the SDK resolved or was given, or its environment variable; None without any."""
    holder = vars(client.holder)
    return holder.get(f"_{name}") or holder.get("_constructor_kwargs", {}).get(name) or os.environ.get(variable) or None
