"""A server, how to reach it, and the credentials for it."""

from __future__ import annotations

import asyncio
import base64
import binascii
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import httpx

from tinker_lightning.client.dialects.dialect import Dialect
from tinker_lightning.errors import InvalidInput
from tinker_lightning.lossgraph.graph_loss import Source
from tinker_lightning.wire import json as wire_json

if TYPE_CHECKING:
    from collections.abc import Awaitable

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


# A token is replaced when it has no more than this many seconds left.
_MARGIN = 60.0


class Credentials:
    """The contents of the `X-API-Key` header."""

    def __init__(self, api_key: str | None) -> None:
        if api_key is not None and not (api_key.isascii() and api_key.isprintable() and api_key == api_key.strip()):
            raise InvalidInput(
                "the API key contains white space or characters that no key has. Copy it again, without line breaks."
            )
        self.api_key = api_key
        self._exchange: Callable[[], Awaitable[str]] | None = None
        self._token = ""
        self._expires = 0.0
        self._lock = asyncio.Lock()

    def use_tokens(self, exchange: Callable[[], Awaitable[str]]) -> None:
        """Switches to tokens, which `exchange` obtains for the key."""
        self._exchange = exchange

    async def header(self) -> dict[str, str]:
        """Returns the header of a request."""
        if self._exchange is None:
            return self.key_header()
        async with self._lock:
            if time.time() > self._expires - _MARGIN:
                self._token = await self._exchange()
                self._expires = _expiry(self._token)
            return {"X-API-Key": self._token}

    def key_header(self) -> dict[str, str]:
        """Returns the header with the key itself."""
        return {} if self.api_key is None else {"X-API-Key": self.api_key}


def _expiry(token: str) -> float:
    """Returns when a token expires; one without an expiry is used once."""
    try:
        payload = token.split(".")[1]
        claims = wire_json.loads(base64.urlsafe_b64decode(payload + "=" * (-len(payload) % 4)))
        return float(claims["exp"])
    except (IndexError, KeyError, ValueError, TypeError, binascii.Error):
        return 0.0
