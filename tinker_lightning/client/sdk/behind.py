"""Finds out which server is behind a client of the official SDK."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from tinker_lightning.client.connection import Connection
from tinker_lightning.client.credentials import Credentials
from tinker_lightning.client.dialects import known
from tinker_lightning.client.dialects.detect import detect
from tinker_lightning.client.loop import BackgroundLoop
from tinker_lightning.client.retry_policy import RetryPolicy
from tinker_lightning.client.session import fetch_capabilities

if TYPE_CHECKING:
    from tinker_lightning.client.dialects.dialect import Dialect

_PATIENCE = RetryPolicy(10.0)


def detect_behind(client: Any) -> Dialect:
    """Returns the dialect of the server that a client of the official SDK talks to."""
    url = _url(client)
    if url is None:
        return known.HOSTED
    connection = Connection(url, Credentials(os.environ.get("TINKER_API_KEY")), None, _PATIENCE)
    loop = BackgroundLoop(connection.close)
    try:
        return loop.run(_detect(connection)).result()
    finally:
        loop.close()


async def _detect(connection: Connection) -> Dialect:
    return await detect(connection, await fetch_capabilities(connection))


def _url(client: Any) -> str | None:
    """Returns the URL that the SDK resolved or was given; None for its default, hosted Tinker."""
    holder = client.holder
    given = vars(holder).get("_base_url") or vars(holder).get("_constructor_kwargs", {}).get("base_url")
    return given or os.environ.get("TINKER_BASE_URL") or None
