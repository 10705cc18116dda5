"""Counts what a fit waits for, on a server that is far away."""

from __future__ import annotations

import asyncio
import concurrent.futures
import threading
from typing import TYPE_CHECKING, Any

import httpx
import lightning.pytorch as pl

from tinker_lightning.client.futures import TinkerFuture

if TYPE_CHECKING:
    from collections.abc import Iterable

    import pytest


class Distant(httpx.AsyncBaseTransport):
    """A server so far away that nothing comes back before somebody waits for it."""

    def __init__(self, inner: httpx.AsyncBaseTransport) -> None:
        self.is_far = False
        self._inner = inner

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        response = await self._inner.handle_async_request(request)
        while self.is_far:
            await asyncio.sleep(0.002)
        return response

    async def aclose(self) -> None:
        await self._inner.aclose()


class Trace(pl.Callback):
    """What the main thread waits for in each step, from the first batch to the end of training.

    A wait lasts until all that was asked for is answered. So answers that come together are waited for once, two waits
    are two journeys to the server, and no clock is needed to tell.
    """

    def __init__(self, transport: Distant, patch: pytest.MonkeyPatch) -> None:
        self.steps: list[list[str]] = [[]]
        self._transport = transport
        self._asked: dict[Any, str] = {}
        self._wait = concurrent.futures.wait
        made, result = TinkerFuture.__init__, concurrent.futures.Future.result

        def make(future: Any, source: Any, operation: str, *args: Any) -> None:
            self._asked[source] = operation
            made(future, source, operation, *args)

        def wait(sources: Iterable[Any], timeout: float | None = None, return_when: str = "ALL_COMPLETED") -> Any:
            self._before(sources := list(sources))
            return self._wait(sources, timeout, return_when)

        def read(source: Any, timeout: float | None = None) -> Any:
            self._before([source])
            return result(source, timeout)

        patch.setattr(TinkerFuture, "__init__", make)
        patch.setattr(concurrent.futures, "wait", wait)
        patch.setattr(concurrent.futures.Future, "result", read)

    def on_train_batch_start(self, *_: Any) -> None:
        self._transport.is_far = True

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        if trainer.global_step == len(self.steps):
            self.steps.append([])

    def on_train_end(self, *_: Any) -> None:
        self._transport.is_far = False

    def _before(self, sources: list[Any]) -> None:
        pending = [source for source in sources if not source.done()]
        if pending and self._transport.is_far and threading.current_thread() is threading.main_thread():
            self.steps[-1].append(self._asked.get(pending[0], "?").split(" ")[0])
            self._transport.is_far = False
            self._wait([*self._asked, *pending])
            self._transport.is_far = True
