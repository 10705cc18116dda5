"""A server, how to reach it, and the credentials for it."""

from __future__ import annotations

import asyncio
import base64
import binascii
import logging
import random
import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import httpx

from tinker_lightning.client.dialects.dialect import Dialect
from tinker_lightning.errors import InvalidInput, TinkerLightningError, Unauthorized
from tinker_lightning.lossgraph.graph_loss import Source
from tinker_lightning.wire import json as wire_json

if TYPE_CHECKING:
    from collections.abc import Awaitable

logger = logging.getLogger("tinker_lightning.client")

HOSTED_URL = "https://tinker.thinkingmachines.dev/services/tinker-prod"


def without_password(url: str) -> str:
    """Returns a URL without the user and the password that it may contain, for files and messages.

    >>> without_password("https://me:secret@example.org/trainer")
    'https://example.org/trainer'
    """
    return re.sub(r"^([^/?#]*//)?[^/?#]*@", r"\1", url)


def password_header(url: httpx.URL) -> dict[str, str]:
    """Returns the header for the user and the password of a URL, which some proxies ask for."""
    if not url.userinfo:
        return {}
    sent = base64.b64encode(f"{url.username}:{url.password}".encode()).decode()
    return {"Authorization": f"Basic {sent}"}


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
        data_folder: The folder of checkpoints, where the trainer runs in this process.
    """

    url: str
    api_key: str | None = None
    transport: httpx.AsyncBaseTransport | None = None
    on_close: Callable[[], None] | None = None
    in_process: Callable[[str, Callable[..., Any], Source, str], str] | None = None
    dialect: Dialect | None = None
    data_folder: str | None = None

    @property
    def storage(self) -> str:
        """Where saved states are: a folder on this machine, or the server, without a password in its URL."""
        return self.data_folder or without_password(self.url)


# A token with no more than this many seconds left is not used. An earlier exchange that fails is repeated after them.
_MARGIN = 60.0


class Credentials:
    """The contents of the `X-API-Key` header: the API key, or a token that the server gives for it.

    A token is exchanged for another one at about half of its life, so that clients do not all do so at once.
    """

    def __init__(self, api_key: str | None) -> None:
        if api_key is not None and not (api_key.isascii() and api_key.isprintable() and api_key == api_key.strip()):
            raise InvalidInput(
                "the API key contains white space or characters that no key has. Copy it again, without line breaks."
            )
        self.api_key = api_key
        self._exchange: Callable[[float | None], Awaitable[str]] | None = None
        self._token = ""
        self._expires = self._renewal = 0.0
        self._lock = asyncio.Lock()

    def use_tokens(self, exchange: Callable[[float | None], Awaitable[str]]) -> None:
        """Switches to tokens, which `exchange` obtains for the key, trying for some seconds or as the policy says."""
        self._exchange = exchange

    async def header(self) -> dict[str, str]:
        """Returns the header of a request."""
        if self._exchange is None:
            return self.key_header()
        is_valid = time.time() <= self._expires - _MARGIN
        if not (is_valid and self._lock.locked()):  # others use the old token while one request replaces it
            async with self._lock:
                await self._keep_valid(self._exchange)
        return {"X-API-Key": self._token}

    async def _keep_valid(self, exchange: Callable[[float | None], Awaitable[str]]) -> None:
        """Exchanges a token that has expired, or tries once if half of its life is over."""
        now = time.time()
        if now > self._expires - _MARGIN:
            await self._renew(exchange, None)
        elif now > self._renewal:
            try:
                await self._renew(exchange, 0.0)
            except Unauthorized:  # the key itself is rejected, so the token could not be replaced later either
                raise
            except TinkerLightningError as error:
                logger.warning("the token of the API key could not be replaced yet: %s", error)
                self._renewal = now + _MARGIN

    def key_header(self) -> dict[str, str]:
        """Returns the header with the key itself.

        Raises:
            Unauthorized: If the key is a JWT that has expired.
        """
        if self.api_key is None:
            return {}
        if self.api_key.startswith("eyJ") and 0 < _claim(self.api_key, "exp") <= time.time():
            raise Unauthorized(
                "the API key is a JWT that has expired. Set TINKER_API_KEY to a new one, or pass api_key=."
            )
        return {"X-API-Key": self.api_key}

    async def replaced(self, rejected: dict[str, str]) -> bool:
        """Replaces the token in a header that the server has rejected, unless that is done; returns False for a key."""
        if self._exchange is None:
            return False
        async with self._lock:
            if rejected["X-API-Key"] == self._token:
                await self._renew(self._exchange, None)
        return True

    async def _renew(self, exchange: Callable[[float | None], Awaitable[str]], seconds: float | None) -> None:
        self._token = await exchange(seconds)
        now, expires, issued = time.time(), _claim(self._token, "exp"), _claim(self._token, "iat")
        life = expires - (issued or now)  # both times are the server's, whose clock may differ
        self._expires = now + life
        self._renewal = now + life * random.uniform(0.45, 0.55)  # noqa: S311  # no secret


def _claim(token: str, name: str) -> float:
    """Returns a time that a token contains; 0 if it does not, so that one without an expiry is used once."""
    try:
        payload = token.split(".")[1]
        claims = wire_json.loads(base64.urlsafe_b64decode(payload + "=" * (-len(payload) % 4)))
        return float(claims[name])
    except (IndexError, KeyError, ValueError, TypeError, binascii.Error):
        return 0.0
