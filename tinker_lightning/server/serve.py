"""Serves a trainer over TCP with uvicorn until it is interrupted, and limits its connections.

Clients that open connections without using them cannot lock others out: `Connections` closes the oldest of them.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
import socket
import sys
import threading
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import uvicorn
from starlette.responses import JSONResponse
from typing_extensions import override
from uvicorn.protocols.http.auto import AutoHTTPProtocol

from tinker_lightning.errors import InvalidInput
from tinker_lightning.server.app import create_app
from tinker_lightning.server.http import LocalHost, is_loopback
from tinker_lightning.server.keys import Keys
from tinker_lightning.server.trainer.memory import return_large_blocks
from tinker_lightning.server.trainer.trainer import EmbeddedTrainer

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from starlette.types import ASGIApp, Receive, Scope, Send

logger = logging.getLogger("tinker_lightning.server")

KEY_VARIABLE = "TINKER_LIGHTNING_SERVE_KEY"

# Seconds that a shutdown waits for open requests, and then for the running job.
_GRACE = 3
# Seconds for a request to arrive up to the end of its headers.
HEADER_SECONDS = 15.0
# Seconds after which a response that the client does not read is aborted.
RESPONSE_SECONDS = 60.0
# asyncio accepts this many connections at a time, before any of them is known here, and tries as often if it has no
# descriptors left. More may wait in the queue of the operating system.
BACKLOG = 32
QUEUE = 512
MAX_CONNECTIONS = 4096
# Descriptors for everything else: models, checkpoints, the event loop, the log, and connections that are accepted but
# not yet counted, or closed but not yet gone.
_OTHER_DESCRIPTORS = 64 + 3 * BACKLOG
_SWEEP_SECONDS = 1.0
_LOG_SECONDS = 60.0


def serve(
    models: Sequence[str],
    *,
    host: str = "127.0.0.1",
    port: int = 8000,
    api_key: str | None = None,
    api_key_file: Path | None = None,
    allow_pickled_losses: bool = False,
    ssl_certfile: Path | None = None,
    ssl_keyfile: Path | None = None,
    **options: Any,
) -> None:
    """Serves the models, and prints the URL once they are loaded. Until then, every answer is 503.

    An API key is required if other machines can connect, or if pickled losses are allowed: by default the environment
    variable `TINKER_LIGHTNING_SERVE_KEY`. Further options are passed to `EmbeddedTrainer`.
    """
    keys = _keys(api_key, api_key_file)
    if not is_loopback(host) and keys is None:
        raise InvalidInput(
            f"--host {host} can be reached from other machines, so an API key is required: set {KEY_VARIABLE} (clients "
            "set TINKER_API_KEY to it), or pass --api-key-file FILE for several users, or omit --host to serve this "
            "machine only."
        )
    if allow_pickled_losses and (keys is None or api_key_file is not None):
        raise InvalidInput(
            "--allow-pickled-losses lets clients run arbitrary code on this machine, so a single API key is required: "
            f"set {KEY_VARIABLE}. The keys of a file would not protect their owners from each other."
        )
    if ssl_keyfile is not None and ssl_certfile is None:
        raise InvalidInput("--ssl-keyfile needs the certificate of the key: pass --ssl-certfile FILE, too")
    trainer = EmbeddedTrainer(models, allow_pickled_losses=allow_pickled_losses, **options)
    try:
        trainer.store.prepare()
    except OSError as error:
        raise InvalidInput(
            f"cannot store checkpoints in {trainer.store.root}: {error.strerror or error}. Choose another --data-dir, "
            "or let this user write there."
        ) from error
    app = create_app(trainer, api_key=keys)
    # The port is bound before the models are loaded, so that a port in use fails early.
    with _listen(host, port) as listener:
        return_large_blocks()
        trainer.charge_process()
        connections = Connections(max_connections())
        logging.getLogger("uvicorn.error").addFilter(OncePerMinute())
        loader = Loader(trainer, models)
        config = uvicorn.Config(
            loader.guard(LocalHost(app) if keys is None else app),
            log_config=None,
            access_log=False,
            lifespan="off",
            http=connections.protocol(),
            ws="none",
            backlog=BACKLOG,
            timeout_graceful_shutdown=_GRACE,
            ssl_certfile=ssl_certfile,
            ssl_keyfile=ssl_keyfile,
        )
        try:
            config.load()
        except OSError as error:  # also of what OpenSSL finds
            raise InvalidInput(
                f"cannot use --ssl-certfile {ssl_certfile} with --ssl-keyfile {ssl_keyfile}: "
                f"{error.strerror or error}. Both are PEM files, and the key has no password."
            ) from error
        try:
            _Server(config, trainer, keys, loader).run([listener])
            loader.raise_failure()
        finally:
            trainer.close(_GRACE)
            loader.join(_GRACE)


class Loader:
    """Loads models on a thread of its own, while the server already says that it does.

    Args:
        trainer: The trainer.
        models: The names of the models.
    """

    def __init__(self, trainer: EmbeddedTrainer, models: Sequence[str]) -> None:
        self._trainer = trainer
        self._models = models
        self._is_done = False
        self._failure: Exception | None = None
        self._thread: threading.Thread | None = None

    def start(self, on_end: Callable[[bool], object]) -> None:
        """Starts to load; `on_end` is called on the thread with whether that succeeded."""
        self._thread = threading.Thread(target=self._load, args=[on_end], name="tinker-lightning-load", daemon=True)
        self._thread.start()

    def _load(self, on_end: Callable[[bool], object]) -> None:
        try:
            for name in self._models:
                self._trainer.catalog.get(name)
            self._trainer.charge_process()
            self._is_done = True
        except Exception as error:
            self._failure = error
        on_end(self._is_done)

    def raise_failure(self) -> None:
        """Raises the error of a model that could not be loaded."""
        if self._failure is not None:
            raise self._failure

    def join(self, seconds: float) -> None:
        """Waits until no model is being loaded."""
        if self._thread is not None:
            self._thread.join(seconds)

    def guard(self, app: ASGIApp) -> ASGIApp:
        """Returns an app that answers 503 until the models are loaded, which clients repeat."""

        async def guarded(scope: Scope, receive: Receive, send: Send) -> None:
            if self._is_done or scope["type"] != "http":
                await app(scope, receive, send)
                return
            body = {"status": "loading", "detail": "the server is loading its models", "category": "server"}
            await JSONResponse(body, 503, {"Retry-After": "1"})(scope, receive, send)

        return guarded


def _keys(api_key: str | None, file: Path | None) -> Keys | None:
    from_environment = os.environ.get(KEY_VARIABLE)
    if file is not None:
        if api_key is not None or from_environment is not None:
            other = "--api-key" if api_key is not None else KEY_VARIABLE
            raise InvalidInput(f"{other} and --api-key-file exclude each other: add the key to the file, or omit one")
        return Keys.from_file(file)
    if api_key is not None:
        logger.warning(
            "--api-key can be read by every user of this machine, for example by `ps`. Set %s instead", KEY_VARIABLE
        )
        return Keys.single(api_key, "--api-key")
    return None if from_environment is None else Keys.single(from_environment, KEY_VARIABLE)


class _Server(uvicorn.Server):
    """A uvicorn server that prints its URL when it is ready, and wakes requests that wait for results on shutdown."""

    def __init__(self, config: uvicorn.Config, trainer: EmbeddedTrainer, keys: Keys | None, loader: Loader) -> None:
        super().__init__(config)
        self._trainer = trainer
        self._keys = keys
        self._loader = loader

    @override
    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        for listener in sockets or []:
            listener.listen(QUEUE)
        if self.started:
            self._loader.start(self._loaded)

    def _loaded(self, succeeded: bool) -> None:
        if not succeeded or self.should_exit:
            self.should_exit = True
            return
        address = self.servers[0].sockets[0].getsockname()
        host = f"[{address[0]}]" if ":" in address[0] else address[0]
        url = f"{'https' if self.config.is_ssl else 'http'}://{host}:{address[1]}"
        print(f"tinker-lightning: serving {', '.join(self._trainer.catalog.names)} at {url}")
        sys.stdout.flush()

    @override
    async def on_tick(self, counter: int) -> bool:
        # Ten times per second. A key that was removed ends its sessions also if no request arrives.
        if self._keys is not None and counter % 10 == 0:
            self._keys.refresh()
        return await super().on_tick(counter)

    @override
    def handle_exit(self, *_: Any) -> None:
        # Unlike in uvicorn, the signal is not raised again after the shutdown, because the shutdown is a normal exit.
        self._trainer.closing.announce()
        self.force_exit = self.should_exit  # a second signal stops the server without waiting
        self.should_exit = True


def _listen(host: str, port: int) -> socket.socket:
    try:
        if not 0 <= port <= 65535:  # getaddrinfo would wrap it modulo 65536
            raise OverflowError("ports lie in 0..65535")
        family, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.create_server(address, family=family)
        # A socket created from the descriptor has its protocol set to TCP. Otherwise asyncio would not disable Nagle's
        # algorithm, and every response would wait 40 ms for the client's delayed ACK.
        return socket.socket(fileno=listener.detach())
    except (OSError, OverflowError) as error:
        reason = (error.strerror if isinstance(error, OSError) else None) or error
        raise InvalidInput(
            f"cannot listen on --host {host} --port {port}: {reason}. Choose another host or port; port 0 selects a "
            "free one."
        ) from error


def max_connections() -> int:
    """Returns how many connections the descriptor limit of this process allows."""
    try:
        import resource
    except ImportError:  # not a POSIX system
        return MAX_CONNECTIONS
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return MAX_CONNECTIONS
    return max(8, min(MAX_CONNECTIONS, soft - _OTHER_DESCRIPTORS))


class Connections:
    """The open connections of a server. Used by one event loop.

    If there are too many, the oldest one that never sent a request makes room, or else the oldest one that is idle, or
    the oldest one whose request is not complete.
    """

    def __init__(self, limit: int, header_seconds: float = HEADER_SECONDS) -> None:
        self._limit = limit
        self._header_seconds = header_seconds
        self._open: dict[Any, _State] = {}  # by protocol, oldest first
        self._timer: asyncio.TimerHandle | None = None
        self._closed = 0
        self._logged = -_LOG_SECONDS

    def protocol(self) -> type[asyncio.Protocol]:
        """Returns the protocol of connections that are counted here, for `uvicorn.Config(http=)`."""
        return type("BoundedProtocol", (_Protocol,), {"open_connections": self})

    def add(self, protocol: Any) -> None:
        """Adds a connection, and closes another one if there are too many."""
        now = time.monotonic()
        self._open[protocol] = _State(now, now)
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(_SWEEP_SECONDS, self._sweep)
        if len(self._open) > self._limit:
            idle = [each for each in self._open if each is not protocol and not _is_busy(each)]
            silent = (each for each in idle if each.cycle is None)
            unfinished = (each for each in self._open if _is_busy(each) and each.cycle.more_body)
            oldest = next(itertools.chain(silent, idle, unfinished), protocol)
            self._close(oldest, f"there are more than {self._limit}")

    def remove(self, protocol: Any) -> None:
        """Removes a connection."""
        self._open.pop(protocol, None)

    def _sweep(self) -> None:
        """Closes connections that have been idle, or whose client does not read the response."""
        now = time.monotonic()
        for protocol, state in list(self._open.items()):
            unsent = protocol.transport.get_write_buffer_size()
            if _is_busy(protocol):
                state.since = now
            if not unsent or unsent != state.unsent:
                state.unsent, state.unsent_since = unsent, now
            if now - state.since > self._header_seconds:
                self._close(protocol, f"no request arrived for {self._header_seconds:g} s")
            elif now - state.unsent_since > RESPONSE_SECONDS:
                self._close(protocol, f"the response was not read for {RESPONSE_SECONDS:g} s")
        loop = asyncio.get_running_loop()
        self._timer = loop.call_later(_SWEEP_SECONDS, self._sweep) if self._open else None

    def _close(self, protocol: Any, reason: str) -> None:
        self._open.pop(protocol, None)
        self._closed += 1
        protocol.transport.abort()
        now = time.monotonic()
        if now - self._logged >= _LOG_SECONDS:  # one line, however many connections there are
            self._logged = now
            logger.warning("closed %d connections; the last one because %s", self._closed, reason)


@dataclass(slots=True)
class _State:
    since: float  # when it was last seen with a request
    unsent_since: float
    unsent: int = 0


class _Protocol(AutoHTTPProtocol):  # type: ignore[misc, valid-type]
    """uvicorn's protocol, which reports when a connection is opened and closed."""

    open_connections: Connections

    @override
    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self.open_connections.add(self)

    @override
    def connection_lost(self, exc: Exception | None) -> None:
        self.open_connections.remove(self)
        super().connection_lost(exc)


def _is_busy(protocol: Any) -> bool:
    """Returns whether a request is being answered."""
    cycle = protocol.cycle
    return cycle is not None and not cycle.response_complete


class OncePerMinute(logging.Filter):
    """Passes each message once per minute: a client can cause as many warnings as it likes."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self._clock = clock
        self._logged: dict[str, float] = {}

    @override
    def filter(self, record: logging.LogRecord) -> bool:
        """Returns whether to log a record."""
        if record.levelno < logging.WARNING:
            return True
        now = self._clock()
        fresh = now - self._logged.get(str(record.msg), -_LOG_SECONDS) >= _LOG_SECONDS
        if fresh:
            self._logged[str(record.msg)] = now
        return fresh
