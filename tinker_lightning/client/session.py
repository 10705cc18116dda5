"""A visit to a server: handshake, heartbeat, farewell."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import os
import time
from typing import TYPE_CHECKING, Any

from tinker_lightning.client.config import ClientConfig, Extensions
from tinker_lightning.errors import InvalidInput, NotATinkerServer, NotFound, TinkerLightningError
from tinker_lightning.types.requests import ClientConfigRequest, CreateSessionRequest, SessionHeartbeatRequest
from tinker_lightning.types.responses import ServerCapabilities
from tinker_lightning.wire import json as wire_json

if TYPE_CHECKING:
    from tinker_lightning.client.connection import Connection

logger = logging.getLogger("tinker_lightning.client")

# The generation of the protocol that is spoken, in the official SDK's counting.
SDK_VERSION = "0.36.0"
_HEARTBEAT_SECONDS = 10.0
_SILENCE_SECONDS = 120.0


class Session:
    """What a server told at the handshake. Made on the client's event loop by `Session.open`."""

    def __init__(
        self, connection: Connection, session_id: str, config: ClientConfig, capabilities: dict[str, Any] | None
    ) -> None:
        self.connection = connection
        self.session_id = session_id
        self.config = config
        announced = (capabilities or {}).get("extensions") or []
        self.extensions = Extensions(**{f.name: f.name in announced for f in dataclasses.fields(Extensions)})
        self._counters: dict[str, int] = {}
        self._heart = asyncio.create_task(self._beat())

    @classmethod
    async def open(cls, connection: Connection) -> Session:
        """Two round trips: the configuration, then session and capabilities together."""
        config = await _configuration(connection)
        if config.pjwt_auth_enabled:

            async def exchange() -> str:
                response = await connection.send("POST", "/api/v1/auth/token", b"{}", raw_key=True)
                return str(connection.json(response)["jwt"])

            connection.credentials.use_tokens(exchange)
        tags = [tag.strip() for tag in os.environ.get("TINKER_TAGS", "").split(",") if tag.strip()]
        request = CreateSessionRequest(tags=tags, sdk_version=SDK_VERSION)
        try:
            created, capabilities = await asyncio.gather(
                connection.post("/api/v1/create_session", request), _capabilities(connection)
            )
        except NotFound as error:
            raise _other_api(connection, str(error)) from error
        if not isinstance(created.get("session_id"), str):
            raise _other_api(connection, f"create_session answered {created}")
        for level in ("info", "warning", "error"):
            if message := created.get(f"{level}_message"):
                logger.log(getattr(logging, level.upper()), "%s", message)
        return cls(connection, created["session_id"], config, capabilities)

    def count(self, kind: str) -> int:
        """The next number of a kind: models and samplers are numbered per session, so that a repeat is known."""
        number = self._counters.get(kind, 0)
        self._counters[kind] = number + 1
        return number

    async def finish(self, status: str) -> None:
        """Says farewell; servers of older generations do not know it."""
        self._heart.cancel()
        body = wire_json.dumps({"reason": {"type": status}})
        try:
            await self.connection.send("POST", f"/api/v1/sessions/{self.session_id}/finish", body, pending=(404, 405))
        except TinkerLightningError as error:
            logger.debug("the session could not be finished: %s", error)

    async def _beat(self) -> None:
        alive = time.monotonic()
        body = wire_json.dumps(SessionHeartbeatRequest(self.session_id))
        while True:
            await asyncio.sleep(_HEARTBEAT_SECONDS)
            try:
                response = await self.connection.send("POST", "/api/v1/session_heartbeat", body, pending=(410,))
            except TinkerLightningError as error:
                if time.monotonic() - alive > _SILENCE_SECONDS:
                    logger.warning("no heartbeat has reached %s for minutes: %s", self.connection.url, error)
                    alive = time.monotonic()
            else:
                if response.status_code == 410:
                    return
                alive = time.monotonic()


async def _configuration(connection: Connection) -> ClientConfig:
    try:
        response = await connection.send(
            "POST", "/api/v1/client/config", wire_json.dumps(ClientConfigRequest(SDK_VERSION)), raw_key=True
        )
    except NotFound:
        return ClientConfig()  # a server of the first generations
    try:
        return wire_json.parse(ClientConfig, wire_json.dumps(connection.json(response)))
    except InvalidInput as error:
        raise _other_api(connection, f"client/config: {error}") from error


async def _capabilities(connection: Connection) -> dict[str, Any] | None:
    try:
        capabilities = await connection.get("/api/v1/get_server_capabilities")
    except NotFound:
        return None
    if not isinstance(capabilities.get("supported_models"), list):
        raise _other_api(connection, f"get_server_capabilities answered {capabilities}")
    return capabilities


async def fetch_capabilities(connection: Connection) -> ServerCapabilities:
    """What the server has, asked anew."""
    capabilities = await _capabilities(connection)
    return wire_json.parse(ServerCapabilities, wire_json.dumps(capabilities or {"supported_models": []}))


def _other_api(connection: Connection, detail: str) -> NotATinkerServer:
    return NotATinkerServer(
        f"{connection.url} answers, but not as a Tinker server does: {detail[:200]}. Correct the URL (TINKER_BASE_URL "
        "or url=)."
    )
