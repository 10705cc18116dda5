"""The `_async` names of the official SDK, derived from the methods without the suffix.

They have the same arguments. An override of the method in a subclass changes its `_async` form too.
"""

from __future__ import annotations

import asyncio
import functools
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, TypeVar

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Coroutine

    from tinker_lightning.client.futures import TinkerFuture

P = ParamSpec("P")
S = TypeVar("S")
T = TypeVar("T")
F = TypeVar("F", bound="TinkerFuture[Any]")


def in_thread(method: Callable[Concatenate[S, P], T]) -> Callable[Concatenate[S, P], Coroutine[Any, Any, T]]:
    """Returns the async form of a method that waits for the server: it runs on a thread."""

    async def run(self: S, /, *args: P.args, **kwargs: P.kwargs) -> T:
        return await asyncio.to_thread(getattr(self, method.__name__), *args, **kwargs)

    return _named(run, method)


def submitted(
    method: Callable[Concatenate[S, P], F], before: Callable[[S], Awaitable[None]] | None = None
) -> Callable[Concatenate[S, P], Coroutine[Any, Any, F]]:
    """Returns the async form of a method that returns a future: awaiting it returns that future, with its request sent.

    Args:
        method: The method, which runs on the event loop's thread so that requests keep the order of the calls.
        before: Awaited first, where the method would otherwise block the event loop.
    """

    async def run(self: S, /, *args: P.args, **kwargs: P.kwargs) -> F:
        if before is not None:
            await before(self)
        future: F = getattr(self, method.__name__)(*args, **kwargs)
        await future.sent_async()
        return future

    return _named(run, method)


def awaited(
    method: Callable[Concatenate[S, P], Awaitable[T]],
) -> Callable[Concatenate[S, P], Coroutine[Any, Any, T]]:
    """Returns the async form of a method that returns a future: awaiting it returns the future's result."""

    async def run(self: S, /, *args: P.args, **kwargs: P.kwargs) -> T:
        result: T = await getattr(self, method.__name__)(*args, **kwargs)
        return result

    return _named(run, method)


def _named(
    run: Callable[Concatenate[S, P], Coroutine[Any, Any, T]], method: Callable[Concatenate[S, P], Any]
) -> Callable[Concatenate[S, P], Coroutine[Any, Any, T]]:
    functools.update_wrapper(run, method)  # `inspect.signature` follows it to the arguments
    run.__name__ = f"{method.__name__}_async"
    run.__qualname__ = f"{method.__qualname__}_async"
    return run
