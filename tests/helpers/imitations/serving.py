"""Servers that imitate other Tinker-API servers, in this process or on a loopback port."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import tempfile
import threading
from collections import Counter
from typing import TYPE_CHECKING, Any, Literal, Self, TypeAlias

import httpx

from tests.helpers.imitations.behavior import Behavior
from tests.helpers.imitations.kinds import KINDS
from tests.helpers.imitations.state import Crash
from tinker_lightning.errors import InvalidInput

if TYPE_CHECKING:
    from collections.abc import Iterator

    from starlette.types import ASGIApp, Message, Receive, Scope, Send

    from tinker_lightning.server import EmbeddedTrainer

Kind: TypeAlias = Literal["skyrl", "tuft", "twinkle", "open-rl", "together"]


def imitate(kind: Kind | Behavior, *, trainer: EmbeddedTrainer | None = None, **changes: Any) -> Imitation:
    """Creates a server that behaves like another Tinker-API server, but trains `tiny` with our own trainer.

    Args:
        kind: The server to imitate: `"skyrl"`, `"tuft"`, `"twinkle"`, `"open-rl"` or `"together"`, or a custom
            `Behavior`.
        trainer: The trainer to use, which the caller closes. By default, a new one that serves `tiny`.
        **changes: Fields of `Behavior` that differ from those of the kind, to plant defects or to shorten waits.

    Raises:
        InvalidInput: If the kind or a field is unknown.

    Example:
        with imitate("skyrl", hold=1.0) as server:
            print(server.url)
    """
    if isinstance(kind, str) and kind not in KINDS:
        raise InvalidInput(f"there is no server {kind!r} to imitate; there are {', '.join(KINDS)}")
    behavior = KINDS[kind] if isinstance(kind, str) else kind
    known = {field.name for field in dataclasses.fields(Behavior)}
    if unknown := sorted(changes.keys() - known):
        raise InvalidInput(f"Behavior has no field {', '.join(unknown)}; it has {', '.join(sorted(known))}")
    return Imitation(dataclasses.replace(behavior, **changes), trainer)


class Imitation:
    """A server that behaves like another one. It closes at the end of a `with` block.

    Attributes:
        behavior: What the server does.
        app: The ASGI app.
        ran: How often each operation succeeded, e.g. `ran["forward_backward"]`, whether or not the answer arrived.
    """

    def __init__(self, behavior: Behavior, trainer: EmbeddedTrainer | None = None) -> None:
        from tests.helpers.imitations.app import create_app
        from tinker_lightning.server import EmbeddedTrainer

        self._stack = contextlib.ExitStack()
        if trainer is None:
            folder = self._stack.enter_context(tempfile.TemporaryDirectory(ignore_cleanup_errors=True))
            trainer = EmbeddedTrainer(["tiny"], data_dir=folder)
            self._stack.callback(trainer.close)
        app, submissions = create_app(behavior, trainer)
        self._stack.callback(submissions.close)
        self.behavior = behavior
        self.app: ASGIApp = _LosingApp(app, behavior)
        self.ran = submissions.ran
        self._url: str | None = None

    @property
    def url(self) -> str:
        """The URL of the server, which starts to listen on a free loopback port when this is read first."""
        if self._url is None:
            self._url = self._stack.enter_context(_listening(self.app))
        return self._url

    @property
    def transport(self) -> httpx.AsyncBaseTransport:
        """A transport that reaches the server without a port."""
        return _Transport(self.app)

    def close(self) -> None:
        """Stops the server, and its trainer unless the caller provided it."""
        self._stack.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class _LosingApp:
    """Runs the requests whose answers are to be lost, and then breaks the connection."""

    def __init__(self, app: ASGIApp, behavior: Behavior) -> None:
        self._app = app
        self._drops = behavior.drops_answers
        self._counts: Counter[str] = Counter()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        endpoint = scope.get("path", "").removeprefix("/api/v1/")
        self._counts[endpoint] += 1
        if self._counts[endpoint] not in self._drops.get(endpoint, ()):
            await self._app(scope, receive, send)
            return

        async def swallow(_: Message) -> None:
            pass

        with contextlib.suppress(Crash):
            await self._app(scope, receive, swallow)
        # uvicorn closes the connection if an app raises after the start of its answer.
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"1")]})
        raise Crash


class _Transport(httpx.AsyncBaseTransport):
    """Reaches an app in this process; a lost answer is a `ReadError`, as over a network."""

    def __init__(self, app: ASGIApp) -> None:
        async def until_crash(scope: Scope, receive: Receive, send: Send) -> None:
            is_complete = False

            async def watch(message: Message) -> None:
                nonlocal is_complete
                is_complete |= message["type"] == "http.response.body" and not message.get("more_body", False)
                await send(message)

            try:
                await app(scope, receive, watch)
            except Crash:
                if not is_complete:
                    raise

        self._inner = httpx.ASGITransport(until_crash)

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        try:
            return await self._inner.handle_async_request(request)
        except Crash as error:
            raise httpx.ReadError("imitated: the answer was lost", request=request) from error


@contextlib.contextmanager
def _listening(app: ASGIApp) -> Iterator[str]:
    import uvicorn

    def is_news(record: logging.LogRecord) -> bool:
        return not (record.exc_info and record.exc_info[0] is Crash)

    logger = logging.getLogger("uvicorn.error")
    logger.addFilter(is_news)
    config = uvicorn.Config(app, port=0, log_config=None, access_log=False, lifespan="off", timeout_graceful_shutdown=1)
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, name="imitation-http", daemon=True)
    thread.start()
    while not server.started and thread.is_alive():
        thread.join(0.01)
    if not server.started:
        raise RuntimeError("the imitated server did not start; see the log of uvicorn")
    try:
        yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join(10)
        logger.removeFilter(is_news)
