"""Event loops on background threads, for the network."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import Future
from contextlib import suppress
from typing import TYPE_CHECKING, Any, TypeVar

from tinker_lightning.errors import ClientClosed

if TYPE_CHECKING:
    from asyncio import AbstractEventLoop
    from collections.abc import Callable, Coroutine

T = TypeVar("T")


class BackgroundLoop:
    """Runs coroutines in the background; they start in the order of submission.

    Args:
        on_close: Runs on the loop last, before the remaining tasks are cancelled.
    """

    def __init__(self, on_close: Callable[[], Coroutine[Any, Any, None]]) -> None:
        self._lock = threading.Lock()
        self._closed = False
        started: Future[tuple[asyncio.AbstractEventLoop, asyncio.Event]] = Future()
        self._thread = threading.Thread(
            target=_serve, args=[started, on_close], name="tinker-lightning-client", daemon=True
        )
        self._thread.start()
        self._loop, self._stop = started.result()

    def run(self, coroutine: Coroutine[Any, Any, T]) -> Future[T]:
        """Starts a coroutine from any thread.

        Raises:
            ClientClosed: If the loop is closed.
        """
        with self._lock:
            if not self._closed:
                return asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        coroutine.close()
        raise ClientClosed("this client was closed. Create a new one with connect().")

    @property
    def is_current(self) -> bool:
        """Whether the caller is on the thread of the loop, where the garbage collector may run too."""
        return threading.current_thread() is self._thread

    def close(self) -> None:
        """Cancels running coroutines and ends the thread."""
        with self._lock:
            closed, self._closed = self._closed, True
        if not closed:
            self._loop.call_soon_threadsafe(self._stop.set)
        if not self.is_current:
            self._thread.join()


def _serve(
    started: Future[tuple[asyncio.AbstractEventLoop, asyncio.Event]], on_close: Callable[[], Coroutine[Any, Any, None]]
) -> None:
    async def main() -> None:
        stop = asyncio.Event()
        started.set_result((asyncio.get_running_loop(), stop))
        await stop.wait()
        await on_close()
        left = asyncio.all_tasks() - {asyncio.current_task()}
        for task in left:
            task.cancel()
        # Their outcomes are in their futures; asyncio.run would also print them.
        await asyncio.gather(*left, return_exceptions=True)

    asyncio.run(main())


def call_soon(loop: AbstractEventLoop, callback: Callable[[], object]) -> None:
    """Runs a callback on a loop, from any thread; does nothing if the loop is closed and nobody waits."""
    with suppress(RuntimeError):
        loop.call_soon_threadsafe(callback)
