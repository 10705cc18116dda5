"""A TCP proxy that delays every byte, to put a network of known latency in front of a local server."""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence


def serve_delays(host: str, port: int, delays: Sequence[float], ready: Callable[[list[str]], None]) -> None:
    """Listens on one port for each delay (in seconds, applied in either direction) and never returns.

    Bandwidth is not limited, order is kept, and opening a connection takes no round trip, as on one kept warm.
    """
    asyncio.run(_serve(host, port, delays, ready))


async def _serve(host: str, port: int, delays: Sequence[float], ready: Callable[[list[str]], None]) -> None:
    urls = []
    for delay in delays:

        async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, delay: float = delay) -> None:
            up_reader, up_writer = await asyncio.open_connection(host, port)
            await asyncio.gather(_pipe(reader, up_writer, delay), _pipe(up_reader, writer, delay))

        server = await asyncio.start_server(connected, "127.0.0.1", 0, backlog=1024)
        urls.append(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}")
    ready(urls)
    await asyncio.Event().wait()


async def _pipe(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, delay: float) -> None:
    """Forwards each chunk `delay` seconds after it arrived; an empty chunk ends the stream."""
    loop = asyncio.get_running_loop()
    under_way: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue()

    async def read() -> None:
        piece = b"first"
        while piece:
            try:
                piece = await reader.read(1 << 20)
            except ConnectionError:
                piece = b""
            under_way.put_nowait((loop.time() + delay, piece))

    reading = asyncio.create_task(read())
    with contextlib.suppress(ConnectionError):
        while True:
            due, piece = await under_way.get()
            if (wait := due - loop.time()) > 0:
                await asyncio.sleep(wait)
            if not piece:
                break
            writer.write(piece)
            await writer.drain()
    reading.cancel()
    writer.close()
