"""Clients that are also futures of themselves, as code for SDK 0.38 uses them."""

from __future__ import annotations

import asyncio
import functools
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, Self, TypeVar

from tinker_lightning.client.futures import TinkerFuture, UnreadFailures
from tinker_lightning.threads import background

if TYPE_CHECKING:
    import concurrent.futures
    from collections.abc import Callable, Generator

    from tinker_lightning.client.transport.channel import Channel

P = ParamSpec("P")
C = TypeVar("C", bound="AwaitableClient")


class AwaitableClient:
    """A client that can be used as the future of itself too.

    Where an event loop is running, it is created on a thread, and its first use waits for that.
    """

    unread: UnreadFailures
    _creation: TinkerFuture[Any] | None = None

    def result(self, timeout: float | None = None) -> Self:
        """Returns the client itself, waiting until it is created; raises what made that fail."""
        if self._creation is not None:
            self._creation.result(timeout)
        return self

    async def result_async(self, timeout: float | None = None) -> Self:
        """Returns the client like `result`, without blocking the event loop; `await client` does the same."""
        if self._creation is not None:
            await self._creation.result_async(timeout)
        return self

    async def coroutine(self) -> Self:
        """Returns the client like `await client`, for functions that only take coroutines."""
        return await self.result_async()

    def future(self) -> concurrent.futures.Future[Self]:
        """Returns a future of the client, for `concurrent.futures.wait` and the like."""
        created = self._creation or TinkerFuture.from_result(None, "create")
        return created.handed(lambda _: self)

    def __await__(self) -> Generator[Any, None, Self]:
        return self.result_async().__await__()

    if not TYPE_CHECKING:  # otherwise, no name would be an error

        def __getattr__(self, name: str) -> Any:
            if self._creation is not None and not name.startswith("__"):
                self._creation.result()
                if name in self.__dict__:
                    return self.__dict__[name]
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    @classmethod
    def started(cls, channel: Channel, create: Callable[[], Self], operation: str) -> Self:
        """Returns a new client, or one that is being created if waiting for it would block an event loop."""
        try:
            asyncio.get_running_loop()
        except RuntimeError:
            return create()
        client = cls.__new__(cls)
        client.unread = UnreadFailures()
        attributes = client.__dict__  # not the client, which the traceback of a failure would keep alive

        def run() -> Any:
            created = create()
            attributes.update(created.__dict__)
            return created  # kept as long as the client: what watches it ends with it

        client._creation = client.unread.add(TinkerFuture(background.run_on_thread(run, operation), operation))
        return channel.watch(client)


def starts(kind: type[C]) -> Callable[[Callable[Concatenate[Any, P], C]], Callable[Concatenate[Any, P], C]]:
    """Returns a decorator of methods that create a client of a kind: they do not block an event loop."""

    def decorate(method: Callable[Concatenate[Any, P], C]) -> Callable[Concatenate[Any, P], C]:
        @functools.wraps(method)
        def start(self: Any, /, *args: P.args, **kwargs: P.kwargs) -> C:
            return kind.started(self._channel, functools.partial(method, self, *args, **kwargs), method.__name__)

        return start

    return decorate
