"""Finds out which kind of server answers, by requests without side effects."""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from tinker_lightning.client.dialects import servers
from tinker_lightning.errors import InvalidMessage, TinkerLightningError
from tinker_lightning.types.responses import PRODUCT
from tinker_lightning.wire import json as wire_json

if TYPE_CHECKING:
    from tinker_lightning.client.dialects.dialect import Dialect
    from tinker_lightning.client.transport.connection import Connection
    from tinker_lightning.types import ServerCapabilities

logger = logging.getLogger("tinker_lightning.client")

_FORWARD = "/api/v1/forward"
_FORWARD_BACKWARD = "/api/v1/forward_backward"
_HOSTED = "thinkingmachines.dev"
# The titles in the API descriptions of servers that have one.
_TITLES = {"Tinker API Mock": servers.SKYRL, "TuFT": servers.TUFT}
# Far more than any server's description.
_MAX_DESCRIPTION = 8 << 20
_OPEN_RL_TITLE = "Open-RL Server MVP"
_TWINKLE_PATH = "/twinkle/"


async def detect(connection: Connection, capabilities: ServerCapabilities) -> Dialect:
    """Returns the dialect of a server. Our own server names itself; other servers are probed without side effects.

    An empty `forward` tells the encodings apart: servers with JSON passes have this endpoint and reject the body,
    servers with protobuf passes do not have it. The API's description, where it is published, names the server.
    """
    if capabilities.server == PRODUCT:
        return servers.EMBEDDED
    if _is_hosted(connection.url):
        return servers.HOSTED  # never probed: requests there may cost money
    (title, paths), (status, body) = await asyncio.gather(_description(connection), _empty_forward(connection))
    if title in _TITLES:
        return _TITLES[title]
    if title == _OPEN_RL_TITLE:
        # Its versions differ, and the title does not tell them apart, so its gradients are measured.
        return servers.unmeasured(servers.OPEN_RL).but(forward="zero_weights" if status == 404 else "forward")
    if any(_TWINKLE_PATH in path for path in paths):
        return servers.TWINKLE
    if status == 404:
        # Without an endpoint for forwards, a JSON server returns log-probabilities for weights of zero.
        return servers.JSON.but(forward="zero_weights") if _takes_json(paths) else servers.PROTOBUF
    if status is not None and 400 <= status < 500 and status not in (401, 403):
        return servers.JSON
    reason = "does not answer it" if status is None else f"answers HTTP {status}: {body[:80]!r}"
    logger.warning(
        "%s: cannot tell which encoding the server takes, because it %s to an empty POST %s. Assuming protobuf; pass "
        "dialect='json' to connect() if that is wrong.",
        connection.url,
        reason,
        _FORWARD,
    )
    return servers.PROTOBUF


def _is_hosted(url: str) -> bool:
    host = urlsplit(url).hostname or ""
    return host == _HOSTED or host.endswith(f".{_HOSTED}")


async def _description(connection: Connection) -> tuple[str, dict[str, Any]]:
    """Returns the title and the paths of the OpenAPI description, if the server publishes one."""
    try:
        response = await connection.send(
            "GET", "/openapi.json", accept=lambda _: True, seconds=0, most=_MAX_DESCRIPTION
        )
        content = wire_json.loads(response.content)
    except (TinkerLightningError, InvalidMessage):
        return "", {}
    info, paths = content.get("info"), content.get("paths")
    title = info.get("title") if isinstance(info, dict) else None
    return str(title or ""), paths if isinstance(paths, dict) else {}


def _takes_json(paths: dict[str, Any]) -> bool:
    """Returns whether the description of an API says that `forward_backward` takes JSON."""
    found: Any = paths.get(_FORWARD_BACKWARD)
    for key in ("post", "requestBody", "content"):
        found = found.get(key) if isinstance(found, dict) else None
    return isinstance(found, dict) and wire_json.CONTENT_TYPE in found


async def _empty_forward(connection: Connection) -> tuple[int | None, str]:
    try:
        response = await connection.send("POST", _FORWARD, b"{}", accept=lambda _: True, seconds=0)
    except TinkerLightningError:
        return None, ""
    return response.status_code, response.text
