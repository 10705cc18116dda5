"""Selects the server and connects to it."""

from __future__ import annotations

import logging
import os
from typing import Literal

from tinker_lightning.client import embedded
from tinker_lightning.client.service import ServiceClient
from tinker_lightning.errors import InvalidInput

logger = logging.getLogger("tinker_lightning.client")

HOSTED_URL = "https://tinker.thinkingmachines.dev/services/tinker-prod"
EMBEDDED = "embedded"


def connect(url: str | None = None, *, api_key: str | None = None, dialect: Literal["auto"] = "auto") -> ServiceClient:
    """Connects to a Tinker server.

    Args:
        url: The server's URL, or `"embedded"` for a trainer in this process. If not given: `TINKER_BASE_URL`, then
            hosted Tinker if there is an API key, then the embedded trainer.
        api_key: The API key; `TINKER_API_KEY` if not given.
        dialect: The generation of the protocol; detected from the server.
    """
    if dialect != "auto":
        raise InvalidInput(f"dialect {dialect!r} is unknown; leave it out, and it is detected from the server")
    key = api_key or os.environ.get("TINKER_API_KEY") or None
    if url is None:
        url, why = _default(key)
        logger.info("connecting to %s (%s)", url, why)
    if url == EMBEDDED:
        return embedded.connect()
    return ServiceClient(url, key)


def _default(key: str | None) -> tuple[str, str]:
    if url := os.environ.get("TINKER_BASE_URL"):
        return url, "TINKER_BASE_URL is set"
    if key:
        return HOSTED_URL, "there is an API key"
    return EMBEDDED, "neither TINKER_BASE_URL nor an API key is set"
