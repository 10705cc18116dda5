"""Selects the server that a client talks to."""

from __future__ import annotations

import logging
import os
from typing import TYPE_CHECKING

from tinker_lightning.client.dialects import servers
from tinker_lightning.client.transport import embedded
from tinker_lightning.client.transport.target import HOSTED_URL, Target, without_password
from tinker_lightning.errors import InvalidInput

if TYPE_CHECKING:
    from tinker_lightning.client.dialects.dialect import Dialect

logger = logging.getLogger("tinker_lightning.client")

EMBEDDED = "embedded"


def find(url: str | None, api_key: str | None, dialect: str | os.PathLike[str] | Dialect | None) -> Target:
    """Returns the server for the arguments of `connect()` and the environment; starts it if it is the embedded one."""
    speaks = servers.as_dialect(dialect)
    key = api_key or os.environ.get("TINKER_API_KEY") or None
    if url is None:
        url, why = _default(key)
        logger.info("connecting to %s (%s)", without_password(url), why)
    if url != EMBEDDED:
        return Target(url, key, dialect=speaks)
    if speaks is not None and speaks != servers.EMBEDDED:
        raise InvalidInput(
            f"dialect: the embedded trainer does not speak {speaks.name!r}. Pass the URL of the server that does, or "
            "leave dialect out."
        )
    return embedded.start()


def _default(key: str | None) -> tuple[str, str]:
    if url := os.environ.get("TINKER_BASE_URL"):
        return url, "TINKER_BASE_URL is set"
    if key:
        return HOSTED_URL, "there is an API key"
    return EMBEDDED, "neither TINKER_BASE_URL nor an API key is set"
