"""A session with a server: handshake, heartbeat and end."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

from tinker_lightning.client.dialects.servers import detect
from tinker_lightning.client.transport.answers import detail_of, json_body
from tinker_lightning.client.transport.retries import Wait
from tinker_lightning.errors import InvalidInput, NotFound, ResultExpired, SessionLost, TinkerLightningError
from tinker_lightning.types.requests import ClientConfigRequest, CreateSessionRequest, SessionHeartbeatRequest
from tinker_lightning.types.responses import ServerCapabilities
from tinker_lightning.wire import json as wire_json

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tinker_lightning.client.dialects.dialect import Dialect
    from tinker_lightning.client.transport.connection import Connection
    from tinker_lightning.client.transport.recording import Recording

logger = logging.getLogger("tinker_lightning.client")

# The generation of the protocol, as the last release of the official SDK that was tested.
SDK_VERSION = "0.38.0"
_HEARTBEAT_SECONDS = 10.0
_WARNING_SECONDS = 120.0
_FINISH_SECONDS = 1.0
# How often in a row a session must be missing, and the pause: a gateway that reloads its routes answers 404, too.
_MISSES = 3
_MISSED_SECONDS = 1.0
_ENDERS = "by another client, because its API key was removed, or because no heartbeat has arrived for minutes"
_LOSS = "Its models are gone, with all training after the last saved state. Load that state in a new client."


@dataclass(frozen=True, slots=True)
class _CreatedSession:
    session_id: str
    info_message: str | None = None
    warning_message: str | None = None
    error_message: str | None = None


@dataclass(frozen=True, slots=True)
class _Token:
    jwt: str


class Session:
    """A session with a server. Created by `Session.open` on the client's event loop."""

    def __init__(
        self,
        connection: Connection,
        session_id: str,
        config: ClientConfig,
        capabilities: ServerCapabilities,
        dialect: Dialect,
    ) -> None:
        self.connection = connection
        connection.has_session = True
        self.session_id = session_id
        self.config = config
        self.dialect = dialect
        # Requests of one model may be posted concurrently where the server orders them by their number. Where an answer
        # that is lost ends the training, a step must not be under way before the answers to its passes.
        concurrent = config.parallel_fwdbwd_chunks if dialect.concurrent is None else dialect.concurrent
        self.is_concurrent = concurrent and dialect.deduplicates
        announced = capabilities.extensions
        self.extensions = Extensions(**{each.name: each.name in announced for each in fields(Extensions)})
        self.recording: Recording | None = None  # what operations are reported to, if anyone measures them
        self.saves_external: bool | None = None  # whether the server saves weights for download; None until it is asked
        self._counters: dict[str, int] = {}
        self._is_owner = True
        self._is_known = False  # whether the server has answered a heartbeat
        self.lost: SessionLost | None = None
        self._running: set[asyncio.Task[Any]] = set()
        self._heart = asyncio.create_task(self._beat())

    @classmethod
    async def open(cls, connection: Connection, dialect: Dialect | None, request: CreateSessionRequest) -> Session:
        """Opens a session in two round trips: the configuration, then session and capabilities together.

        Args:
            connection: The connection to the server.
            dialect: What the server speaks; detected if it is not given.
            request: What the server records about the session.
        """
        try:
            config = await cls._configure(connection)
            created, capabilities = await asyncio.gather(
                connection.post("/api/v1/create_session", request, _CreatedSession),
                fetch_capabilities(connection),
            )
            if dialect is None:
                dialect = await detect(connection, capabilities)
                logger.info("%s: detected the dialect %r", connection.url, dialect.name)
        except (NotFound, InvalidInput) as error:  # these requests contain nothing from the user
            raise connection.not_a_tinker_server(str(error)) from error
        messages = created.info_message, created.warning_message, created.error_message
        for level, message in zip((logging.INFO, logging.WARNING, logging.ERROR), messages, strict=True):
            if message:
                logger.log(level, "%s", message)
        return cls(connection, created.session_id, config, capabilities, dialect)

    @classmethod
    async def join(cls, connection: Connection, dialect: Dialect | None, session_id: str) -> Session:
        """Joins the session of another process, which keeps it alive and ends it."""
        config = await cls._configure(connection)
        capabilities = await fetch_capabilities(connection)
        session = cls(connection, session_id, config, capabilities, dialect or await detect(connection, capabilities))
        session._heart.cancel()  # before it has begun
        session._is_owner = False
        return session

    @staticmethod
    async def _configure(connection: Connection) -> ClientConfig:
        config = await _configuration(connection)
        connection.billing_pause_seconds = config.billing_exception_max_pause_duration_sec
        if config.pjwt_auth_enabled:
            connection.credentials.use_tokens(lambda seconds: _token(connection, seconds))
        return config

    def count(self, kind: str) -> int:
        """Returns the next number of a kind; the server recognizes a repeated model or sampler by its number."""
        number = self._counters.get(kind, 0)
        self._counters[kind] = number + 1
        return number

    async def finish(self, status: str, detail: str | None = None) -> None:
        """Finishes the session; older servers and unreachable ones are ignored."""
        self._heart.cancel()
        if not self._is_owner:
            return
        body = wire_json.dumps({"reason": {"type": status} | ({} if detail is None else {"detail": detail})})
        path = f"/api/v1/sessions/{self.session_id}/finish"
        try:
            async with asyncio.timeout(_FINISH_SECONDS):
                await self.connection.send("POST", path, body)
        except (TinkerLightningError, TimeoutError) as error:
            logger.debug("the session could not be finished: %s", error)

    @contextlib.contextmanager
    def running(self, name: str) -> Iterator[Wait]:
        """Runs an operation of the session, which fails at once if the session is lost."""
        self._check_lost()
        task = asyncio.current_task()
        assert task is not None  # noqa: S101 for the type checker
        self._running.add(task)
        try:
            with self.connection.waits.waiting(name) as wait:
                yield wait
        except asyncio.CancelledError:
            if self.lost is not None:
                task.uncancel()
            self._check_lost()
            raise
        finally:
            self._running.discard(task)

    async def reason_of(self, error: TinkerLightningError) -> TinkerLightningError:
        """Returns the loss of the session if that is why something was not found, otherwise the error itself."""
        if isinstance(error, NotFound | ResultExpired):
            with contextlib.suppress(TinkerLightningError):
                await self.check(1)
        return self.lost or error

    def _check_lost(self) -> None:
        if self.lost is not None:
            raise SessionLost(*self.lost.args)

    async def check(self, named: int = _MISSES) -> None:
        """Sends a heartbeat. If the server does not have the session any more, everything that runs in it fails.

        Args:
            named: How often in a row a session must be missing that the answer names, which a gateway's does not.
        """
        for misses in range(1, _MISSES + 1):
            self.connection.waits.pinged()
            response = await self.connection.send(
                "POST",
                "/api/v1/session_heartbeat",
                wire_json.dumps(SessionHeartbeatRequest(self.session_id)),
                accept=lambda response: response.status_code in (404, 410),
                seconds=0,
                wait=Wait("session_heartbeat"),
                timeout=_HEARTBEAT_SECONDS,
            )
            if response.is_success:
                self._is_known = True
                return
            if response.status_code == 410:
                self._lose(f"{self.session_id} was ended on {self.connection.url}: {_ENDERS}.")
                return
            detail = detail_of(json_body(response))
            if detail in ("", "Not Found") or not (self._is_known or self.dialect.deduplicates):
                return
            if misses >= (named if self.session_id in detail else _MISSES):
                break
            await asyncio.sleep(_MISSED_SECONDS)
        reason = "was restarted, and no longer has {0}."
        if not self._is_known:  # it may be another server
            reason = "does not have {0}: it was restarted, or several servers share this URL."
        self._lose(f"{self.connection.url} {reason.format(self.session_id)}")

    def _lose(self, reason: str) -> None:
        if self.lost is None:
            self.lost = SessionLost(f"{reason} {_LOSS}")
            for task in self._running:
                task.cancel()

    async def _beat(self) -> None:
        alive = time.monotonic()
        ping = self.connection.waits.ping = asyncio.Event()
        while self.lost is None:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_HEARTBEAT_SECONDS):
                    await ping.wait()
            ping.clear()
            try:
                await self.check()
            except TinkerLightningError as error:
                if time.monotonic() - alive > _WARNING_SECONDS:
                    logger.warning("no heartbeat has reached %s for minutes: %s", self.connection.url, error)
                    alive = time.monotonic()
            else:
                alive = time.monotonic()


async def fetch_capabilities(connection: Connection) -> ServerCapabilities:
    """Fetches the server's capabilities."""
    try:
        return await connection.get("/api/v1/get_server_capabilities", ServerCapabilities)
    except NotFound:
        return ServerCapabilities([])


async def _configuration(connection: Connection) -> ClientConfig:
    body = wire_json.dumps(ClientConfigRequest(SDK_VERSION))
    try:
        response = await connection.send("POST", "/api/v1/client/config", body, raw_key=True)
    except NotFound:
        return ClientConfig()  # an early generation of servers
    return connection.parse(ClientConfig, response)


async def _token(connection: Connection, seconds: float | None) -> str:
    response = await connection.send("POST", "/api/v1/auth/token", b"{}", raw_key=True, seconds=seconds)
    return connection.parse(_Token, response).jwt


@dataclass(frozen=True, slots=True)
class ClientConfig:
    """The response of `client/config`; every flag is optional, and unknown ones are ignored."""

    pjwt_auth_enabled: bool = False
    proto_compress_fwdbwd: bool = False
    # The server runs a model's requests by number, so they may arrive in any order. Otherwise they are posted one after
    # another.
    parallel_fwdbwd_chunks: bool = False
    fwdbwd_max_chunk_len: int = 1024
    fwdbwd_max_chunk_bytes_count: int = 5_000_000
    billing_exception_max_pause_duration_sec: float = 3600.0
    # The server runs uploaded per-datum losses; otherwise they are computed locally.
    custom_loss_server_side: bool = False


@dataclass(frozen=True, slots=True)
class Extensions:
    """The extensions that a server announces with its capabilities."""

    # A pass can leave out the log-probabilities that its built-in loss does not depend on.
    counted_logprobs: bool = False
    # Forwards can be kept for a backward that sends their gradient only.
    retained_forwards: bool = False
    # Whole-batch losses can be registered by name, and a pass may have batch inputs and a scale.
    server_losses: bool = False
    # The response to a submission may be the result itself: one round trip for an operation.
    submit_and_wait: bool = False
    # The server offers the files of its tokenizers.
    tokenizer_files: bool = False
    # A PEFT adapter can be uploaded as a checkpoint.
    import_adapter: bool = False
