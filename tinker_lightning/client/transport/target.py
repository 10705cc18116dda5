"""A server and how to reach it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import httpx

from tinker_lightning.client.dialects.dialect import Dialect
from tinker_lightning.lossgraph.graph_loss import Source

HOSTED_URL = "https://tinker.thinkingmachines.dev/services/tinker-prod"


@dataclass(frozen=True, slots=True)
class Target:
    """A server and how to reach it.

    Args:
        url: The server's URL.
        api_key: The API key, if the server requires one.
        transport: Sends the requests; None for the network.
        on_close: Called after the client is closed.
        in_process: Registers a Python function as a loss of a session, where the trainer runs in this process.
        dialect: What the server speaks; detected if it is not given.
    """

    url: str
    api_key: str | None = None
    transport: httpx.AsyncBaseTransport | None = None
    on_close: Callable[[], None] | None = None
    in_process: Callable[[str, Callable[..., Any], Source, str], str] | None = None
    dialect: Dialect | None = None
