"""Selects the server and connects to it."""

from __future__ import annotations

import logging
import os
from pathlib import Path

from tinker_lightning.client import embedded
from tinker_lightning.client.dialects.dialect import Dialect
from tinker_lightning.client.dialects.known import known
from tinker_lightning.client.service import ServiceClient
from tinker_lightning.errors import InvalidInput, InvalidMessage
from tinker_lightning.wire import json as wire_json

logger = logging.getLogger("tinker_lightning.client")

HOSTED_URL = "https://tinker.thinkingmachines.dev/services/tinker-prod"
EMBEDDED = "embedded"


def connect(
    url: str | None = None, *, api_key: str | None = None, dialect: str | os.PathLike[str] | Dialect = "auto"
) -> ServiceClient:
    """Connects to a Tinker server.

    Args:
        url: The server's URL, or `"embedded"` for a trainer in this process. If not given: `TINKER_BASE_URL`, then
            hosted Tinker if there is an API key, then the embedded trainer.
        api_key: The API key; `TINKER_API_KEY` if not given.
        dialect: What the server speaks: `"auto"` to detect it, the name of a known dialect, a `Dialect`, or the path of
            a JSON file that `tinker-lightning doctor --save` has written.

    Raises:
        InvalidInput: If the URL or the dialect is invalid.
    """
    speaks = _dialect(dialect)
    key = api_key or os.environ.get("TINKER_API_KEY") or None
    if url is None:
        url, why = _default(key)
        logger.info("connecting to %s (%s)", url, why)
    if url == EMBEDDED:
        return embedded.connect()
    return ServiceClient(url, key, dialect=speaks)


def _dialect(given: str | os.PathLike[str] | Dialect) -> Dialect | None:
    if isinstance(given, Dialect):
        return given
    if given == "auto":
        return None
    path = Path(given)
    if path.suffix != ".json":
        return known(str(given))
    try:
        return Dialect.from_dict(wire_json.loads(path.read_bytes()))
    except (OSError, InvalidMessage) as error:
        raise InvalidInput(f"dialect: cannot read {path}: {error}") from error


def _default(key: str | None) -> tuple[str, str]:
    if url := os.environ.get("TINKER_BASE_URL"):
        return url, "TINKER_BASE_URL is set"
    if key:
        return HOSTED_URL, "there is an API key"
    return EMBEDDED, "neither TINKER_BASE_URL nor an API key is set"
