"""Everything the clients of one server share: its connection, the session, and a background loop for requests."""

from __future__ import annotations

import logging
import os
import threading
import time
import weakref
from concurrent.futures import CancelledError
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from tinker_lightning.client.futures import UnreadFailures, raise_together
from tinker_lightning.client.passes import live_weights
from tinker_lightning.client.transport.connection import Connection
from tinker_lightning.client.transport.retries import RetryPolicy
from tinker_lightning.client.transport.session import Session
from tinker_lightning.client.transport.target import Credentials, Target, without_password
from tinker_lightning.errors import ClientClosed, ClientForked, printable
from tinker_lightning.threads.background import BackgroundLoop, wait

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Mapping
    from concurrent.futures import Future

    from tinker_lightning.client.dialects.dialect import Dialect

T = TypeVar("T")
C = TypeVar("C", bound="_Client")

logger = logging.getLogger("tinker_lightning.client")


def _make_printable(record: logging.LogRecord) -> bool:
    """A filter of log records, which contain texts of servers."""
    record.msg, record.args = printable(record.getMessage()), None
    return True


for _name in ("tinker_lightning", "tinker_lightning.client", "tinker_lightning.doctor", "tinker_lightning.rl"):
    logging.getLogger(_name).addFilter(_make_printable)

# How long a process that ends without close() waits for requests in flight, in seconds.
_EXIT_SECONDS = 2.0


class _Client(Protocol):
    unread: UnreadFailures


class Channel:
    """The way to one server, shared by the `ServiceClient` and the clients that it creates.

    The session is opened at the first use. A channel that is never closed ends with its last client, or with the
    process; unhandled failures are then logged.

    Args:
        target: The server.
        retry_policy: How long failing requests are retried.
        open_session: Opens the session, given the connection and the server's dialect if that is known.
        headers: Headers of every request.
    """

    def __init__(
        self,
        target: Target,
        retry_policy: RetryPolicy,
        open_session: Callable[[Connection, Dialect | None], Coroutine[Any, Any, Session]],
        headers: Mapping[str, str],
    ) -> None:
        self.target = target
        self.url = without_password(target.url)
        self.headers = headers
        self._open = open_session
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._connection = Connection(target.url, Credentials(target.api_key), target.transport, retry_policy, headers)
        self._loop = BackgroundLoop(self._connection.close)
        self._session: Session | None = None
        self.live = live_weights.on_server(target.url, target.transport)
        self._closed = False
        # The unread failures of each client, kept beyond the client itself. Changed in place: the finalizer holds it.
        self._unread: list[tuple[weakref.ref[Any], UnreadFailures]] = []
        self._release = weakref.finalize(self, _release, self._pid, self._loop, target.on_close, self._unread)

    @property
    def session(self) -> Session:
        """The session, opened at the first use."""
        self.check_usable()
        with self._lock:
            if self._session is None:
                self._session = self.wait(self._open(self._connection, self.target.dialect))
            return self._session

    def count(self, kind: str) -> int:
        """Returns the next number of a kind in this session."""
        session = self.session
        with self._lock:
            return session.count(kind)

    def run(self, coroutine: Coroutine[Any, Any, T]) -> Future[T]:
        """Runs a coroutine in the background; the channel lives on until it ends."""
        try:
            return self._loop.run(self._held_by(coroutine))
        except ClientClosed:
            coroutine.close()
            raise

    async def _held_by(self, coroutine: Coroutine[Any, Any, T]) -> T:
        return await coroutine

    def wait(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Runs a coroutine in the background and waits for it; an interrupt cancels it."""
        future = self._loop.run(coroutine)
        try:
            wait([future])
            return future.result()
        except CancelledError:
            raise ClientClosed("this client was closed in the meantime. Create a new one with connect().") from None
        finally:
            future.cancel()

    def call(self, path: str, request: Any, result: type[T]) -> T:
        """Posts a request that the server answers at once."""
        self.check_usable()
        return self.wait(self._connection.post(path, request, result))

    def fetch(self, path: str, result: type[T]) -> T:
        """Gets a resource."""
        self.check_usable()
        return self.wait(self._connection.get(path, result))

    def check_usable(self) -> None:
        """Raises `ClientClosed` after `close()`, and `ClientForked` in a forked process."""
        if self.is_foreign:
            raise ClientForked(
                "this client was created in another process, whose threads and connections do not exist here. Create a "
                "new one in this process, or use the 'spawn' start method."
            )
        if self._closed:
            raise ClientClosed("this client was closed. Create a new one with connect().")

    @property
    def is_foreign(self) -> bool:
        """Whether the channel was created in another process, of which this one is a fork."""
        return os.getpid() != self._pid

    def watch(self, client: C) -> C:
        """Keeps track of unhandled failures of a client; returns the client."""
        with self._lock:
            self._forget_collected()  # a run that creates a sampler at each step creates many
            self._unread.append((weakref.ref(client), client.unread))
        return client

    def raise_left_over(self) -> None:
        """Raises unhandled failures of clients that no longer exist."""
        self.check_usable()
        with self._lock:
            self._forget_collected()
            left = [unread for client, unread in self._unread if client() is None]
        for unread in left:
            unread.raise_first()

    def close(self, status: str, *, read_failures: bool, detail: str | None = None) -> None:
        """Ends the session; does nothing if it was closed before.

        Args:
            status: What the session ends with: `success`, `errored` or `interrupted`.
            read_failures: Whether unhandled failures are raised, with `success` after waiting for
                everything in flight and evaluating custom losses that are still pending.
            detail: What the server records about the end.
        """
        if self._closed or self.is_foreign:
            return
        failures: list[BaseException] = []
        try:
            if read_failures:
                unread = [each for _, each in self._unread]
                if status == "success":
                    for each in unread:
                        each.finish()
                failures += [failure for each in unread for failure in each.take_failures()]
        finally:
            with self._lock:
                closed, self._closed = self._closed, True
            if not closed:
                self._end("errored" if failures else status, detail)
        raise_together(failures)

    def _forget_collected(self) -> None:
        """Drops the entries of clients that were garbage-collected and leave no failure."""
        self._unread[:] = [(client, unread) for client, unread in self._unread if client() or not unread.is_empty]

    def _end(self, status: str, detail: str | None) -> None:
        try:
            if self._session is not None:
                self.wait(self._session.finish(status, detail))
        finally:
            self._unread.clear()
            self._release()


def _release(
    pid: int,
    loop: BackgroundLoop,
    on_close: Callable[[], None] | None,
    unread: list[tuple[weakref.ref[Any], UnreadFailures]],
) -> None:
    if os.getpid() != pid:
        return  # the threads exist only in the parent
    if loop.is_current:  # a request has ended whose client is gone; the wait below would hold back its result
        threading.Thread(target=_release, args=(pid, loop, on_close, unread)).start()
        return
    deadline = time.monotonic() + _EXIT_SECONDS  # of all clients together
    for _, each in unread:
        each.log_failures(max(0.0, deadline - time.monotonic()))
    loop.close()
    if on_close is not None:
        on_close()


# Copies of sampling clients share the channel to a server; it ends with the last of them.
_joined: weakref.WeakValueDictionary[tuple[str, str, str | None], Channel] = weakref.WeakValueDictionary()
_joining = threading.Lock()


def joined(url: str, api_key: str | None, session_id: str, dialect: Dialect, headers: Mapping[str, str]) -> Channel:
    """Returns a channel in the session of another process."""
    key = url, session_id, api_key
    with _joining:
        channel = _joined.get(key)
        if channel is None or channel.is_foreign:
            join = partial(Session.join, session_id=session_id)
            target = Target(url, api_key, dialect=dialect)
            channel = _joined[key] = Channel(target, RetryPolicy(300.0), join, headers)
        return channel
