"""Finds out which server is behind a client of the official SDK."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from tinker_lightning.client.dialects import servers
from tinker_lightning.client.dialects.detect import detect
from tinker_lightning.client.transport.connection import Connection
from tinker_lightning.client.transport.credentials import Credentials
from tinker_lightning.client.transport.retries import RetryPolicy
from tinker_lightning.client.transport.session import fetch_capabilities
from tinker_lightning.threads.event_loop import BackgroundLoop

if TYPE_CHECKING:
    from tinker_lightning.client.dialects.dialect import Dialect

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
    """Returns a setting that the SDK resolved or was given, or that of the environment; None without any."""
    holder = vars(client.holder)
    return holder.get(f"_{name}") or holder.get("_constructor_kwargs", {}).get(name) or os.environ.get(variable) or None
