"""An event loop on a thread of its own, for everything that waits on the network."""

from __future__ import annotations

import asyncio
import threading
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from collections.abc import Coroutine
    from concurrent.futures import Future

T = TypeVar("T")


class BackgroundLoop:
    """Runs coroutines in the background; they begin in the order in which they were handed over."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="tinker-lightning-client", daemon=True)
        self._thread.start()

    def run(self, coroutine: Coroutine[Any, Any, T]) -> Future[T]:
        """Starts a coroutine from any thread."""
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop)

    @property
    def is_current_thread(self) -> bool:
        """Whether this is called on the loop's own thread, where waiting would wait for ever."""
        return threading.current_thread() is self._thread

    def close(self) -> None:
        """Cancels what still runs and ends the thread."""
        if self._loop.is_closed():
            return
        self.run(_cancel_others()).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.run_until_complete(self._loop.shutdown_asyncgens())
        self._loop.close()


async def _cancel_others() -> None:
    tasks = asyncio.all_tasks() - {asyncio.current_task()}
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
