"""A TCP proxy in front of a server that makes requests fail the way networks and servers do, by a plan from a seed."""

from __future__ import annotations

import asyncio
import contextlib
import random
import socket
import struct
import threading
from collections import Counter
from typing import TYPE_CHECKING, Any, Literal, Self, TypeAlias, get_args
from urllib.parse import urlsplit

if TYPE_CHECKING:
    from asyncio import StreamReader, StreamWriter
    from collections.abc import Coroutine, Sequence

Kind: TypeAlias = Literal[
    "reset",  # the connection breaks before the server gets the request
    "lost answer",  # the connection breaks after the server has answered
    "duplicate",  # the request arrives twice, at the same time
    "delay",  # the request arrives late, perhaps behind later ones
    "408",  # this and the next three: a status in place of the server, which does not get the request
    "429",
    "500",
    "503",
    "502",  # from a gateway that has passed the request on and lost the answer
    "truncated",  # the connection ends in the middle of the answer
    "garbage",  # random bytes in place of the answer
    "garbage body",  # random bytes in place of its body
    "drip",  # the answer arrives in small pieces
]
KINDS: tuple[Kind, ...] = get_args(Kind)
_PIECES = 10


class FaultProxy:
    """Passes requests of HTTP/1.1 on to a server; some of them fail. A context manager.

    Args:
        target: The URL of the server; may be changed, for example to a server that was started again on another port.
        rate: The fraction of requests that fail; may be changed.
        seed: With the same seed, the n-th request to arrive meets the same fault.
        kinds: The faults to choose from.
        seconds: The length of a delay, and of an answer in pieces.
    """

    def __init__(
        self, target: str, rate: float = 0.0, seed: int = 0, kinds: Sequence[Kind] = KINDS, seconds: float = 0.05
    ) -> None:
        self.target = target
        self.requests = 0
        self.injected: list[tuple[Kind, str]] = []  # with the path of the request
        self.rate = rate
        self._kinds, self._seconds = kinds, seconds
        self._plan = random.Random(seed)  # noqa: S311  # repeatable, not secret
        self._noise = random.Random(seed)  # noqa: S311
        self._audible = asyncio.Event()
        self._connections: set[asyncio.Task[None]] = set()

    @property
    def counts(self) -> Counter[Kind]:
        """How often each fault has happened."""
        return Counter(kind for kind, _ in self.injected)

    def silence(self, *, on: bool) -> None:
        """While it is on, connections stay open and nothing arrives on either side; then all of it does."""
        self._loop.call_soon_threadsafe(self._audible.clear if on else self._audible.set)

    def __enter__(self) -> Self:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="fault-proxy", daemon=True)
        self._thread.start()
        self._server = self._run(asyncio.start_server(self._serve, "127.0.0.1"))
        self.url = f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        self.silence(on=False)
        return self

    def __exit__(self, *_: object) -> None:
        self._run(self._close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def _run(self, call: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(call, self._loop).result(30)

    async def _close(self) -> None:
        self._server.close()
        for connection in self._connections:
            connection.cancel()
        await asyncio.gather(*self._connections, return_exceptions=True)

    async def _serve(self, reader: StreamReader, writer: StreamWriter) -> None:
        """Answers the requests of one connection, one after another."""
        task = asyncio.current_task()
        assert task is not None
        self._connections.add(task)
        try:
            while not writer.is_closing():
                await self._answer(await _message(reader), writer)
        except (OSError, EOFError, asyncio.CancelledError):  # either side has gone, or the proxy ends
            pass
        finally:
            self._connections.discard(task)
            writer.close()

    async def _answer(self, request: bytes, writer: StreamWriter) -> None:
        kind = self._fault(request.split(b" ", 2)[1].decode())
        await self._audible.wait()
        if kind == "reset":
            return _reset(writer)
        if kind == "delay":
            await asyncio.sleep(self._seconds)
        if kind in ("408", "429", "500", "503"):
            answer = _status(kind)
        elif kind == "duplicate":
            answer, _ = await asyncio.gather(self._forward(request), self._forward(request))
        else:
            answer = await self._forward(request)
        await self._audible.wait()
        if kind == "lost answer":
            return _reset(writer)
        body = answer.index(b"\r\n\r\n") + 4
        if kind == "502":
            answer = _status(kind)
        elif kind == "truncated":
            answer = answer[: (body + len(answer)) // 2]
        elif kind == "garbage":
            answer = self._noise.randbytes(len(answer))
        elif kind == "garbage body":
            answer = answer[:body] + self._noise.randbytes(len(answer) - body)
        step = -(-len(answer) // _PIECES) if kind == "drip" else len(answer)
        for start in range(0, len(answer), step):
            writer.write(answer[start : start + step])
            await writer.drain()
            if kind == "drip":
                await asyncio.sleep(self._seconds / _PIECES)
        if kind in ("truncated", "garbage"):
            writer.close()
        return None

    def _fault(self, path: str) -> Kind | None:
        """The fault of the next request."""
        self.requests += 1
        fails, kind = self._plan.random() < self.rate, self._plan.choice(self._kinds)
        if not fails:
            return None
        self.injected.append((kind, path))
        return kind

    async def _forward(self, request: bytes) -> bytes:
        parts = urlsplit(self.target)
        reader, writer = await asyncio.open_connection(parts.hostname, parts.port)
        try:
            writer.write(request)
            return await _message(reader)
        finally:
            _reset(writer)  # an orderly end would keep the port for a minute


async def _message(reader: StreamReader) -> bytes:
    """A whole request or response."""
    message = await reader.readuntil(b"\r\n\r\n")
    headers = dict(line.split(b":", 1) for line in message.lower().split(b"\r\n")[1:-2])
    if b"transfer-encoding" in headers:
        size = 1
        while size:
            line = await reader.readline()
            size = int(line, 16)
            message += line + await reader.readexactly(size + 2)
    return message + await reader.readexactly(int(headers.get(b"content-length", 0)))


def _status(status: str) -> bytes:
    """An error as servers send it, or as a gateway does."""
    gateway = status in ("502", "503")
    kind, body = ("text/html", b"<html>injected</html>") if gateway else ("application/json", b'{"detail":"injected"}')
    head = f"HTTP/1.1 {status} Injected\r\ncontent-type: {kind}\r\ncontent-length: {len(body)}\r\n\r\n"
    return head.encode() + body


def _reset(writer: StreamWriter) -> None:
    """Breaks a connection at once, without an orderly end."""
    with contextlib.suppress(OSError):
        writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    writer.transport.abort()
