"""Functions and coroutines that run beside the caller's thread, with the torch modes that the caller has.

Grad, inference and autocast modes belong to a thread: without care a function on another one would see none of them.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import os
import threading
import time
import types
from collections.abc import Coroutine
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self, TypeVar

import torch

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Generator

T = TypeVar("T")

THREAD = "tinker-lightning-regularizers"
_SLOW_SECONDS = 0.1  # what asyncio itself calls slow


@dataclass(frozen=True, slots=True)
class Modes:
    """The modes of torch that belong to a thread."""

    grad: bool
    inference: bool
    autocast: tuple[tuple[str, torch.dtype], ...]
    autocast_cache: bool

    @classmethod
    def current(cls) -> Self:
        """Those of the calling thread."""
        accelerator = torch.accelerator.current_accelerator()
        devices = ["cpu"] if accelerator is None else ["cpu", accelerator.type]
        return cls(
            torch.is_grad_enabled(),
            torch.is_inference_mode_enabled(),
            tuple((each, torch.get_autocast_dtype(each)) for each in devices if torch.is_autocast_enabled(each)),
            torch.is_autocast_cache_enabled(),
        )

    def applied(self) -> contextlib.ExitStack:
        """A block in which the calling thread has them. It is one of ours, where nothing is cast by itself."""
        with contextlib.ExitStack() as stack:
            # Inference mode sets the grad mode too, so it comes first.
            stack.enter_context(torch.inference_mode(self.inference))
            stack.enter_context(torch.set_grad_enabled(self.grad))
            for device, dtype in self.autocast:
                stack.enter_context(torch.autocast(device, dtype, cache_enabled=self.autocast_cache))
            return stack.pop_all()


def on_thread(call: Callable[[], T], name: str) -> Future[T]:
    """Runs a function on a new thread; one that hangs keeps neither others nor the end of the process waiting."""
    future: Future[T] = Future()
    future.set_running_or_notify_cancel()
    modes, context = Modes.current(), contextvars.copy_context()

    def run() -> None:
        try:
            with modes.applied():
                result = context.run(call)
        except BaseException as error:
            future.set_exception(error)
        else:
            future.set_result(result)

    threading.Thread(target=run, name=f"{THREAD}: {name}", daemon=True).start()
    return future


def on_loop(awaitable: Awaitable[T], name: str = "") -> Future[T]:
    """Awaits something on the event loop that all share. It lives on, so that clients which belong to it can be kept.

    Args:
        awaitable: What is awaited.
        name: Whose it is, for `blocker`.

    Raises:
        RuntimeError: If called on that loop, which would then wait for itself.
    """
    loop = _Loop.shared()
    coroutine = awaitable if isinstance(awaitable, types.CoroutineType) else _awaited(awaitable)
    if threading.current_thread() is loop.thread:
        coroutine.close()
        raise RuntimeError("it was called by an async regularizer, on the event loop that it needs itself")
    return asyncio.run_coroutine_threadsafe(_InModes(coroutine, Modes.current(), loop, name), loop.loop)


def blocker() -> str:
    """The name of what runs on the shared loop without an await and keeps all others waiting; empty if none does."""
    step = _Loop.shared().step
    return step[0] if step is not None and time.monotonic() - step[1] > _SLOW_SECONDS else ""


class _Loop:
    """An event loop on a thread of its own."""

    _lock = threading.Lock()
    _shared: _Loop | None = None

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self.pid = os.getpid()
        self.step: tuple[str, float] | None = None  # whose code it runs, and since when
        self.thread = threading.Thread(target=self.loop.run_forever, name=THREAD, daemon=True)
        self.thread.start()

    @classmethod
    def shared(cls) -> _Loop:
        """The one of this process; a fork has none of its parent's threads."""
        with cls._lock:
            if cls._shared is None or cls._shared.pid != os.getpid():
                cls._shared = cls()
            return cls._shared


async def _awaited(awaitable: Awaitable[T]) -> T:
    return await awaitable


class _InModes(Coroutine[Any, Any, T]):
    """A coroutine that goes on, after every await, in the modes with which it stopped there.

    Coroutines take turns on one thread: without this, a `no_grad` around an await would reach into all the others.
    """

    def __init__(self, coroutine: Coroutine[Any, Any, T], modes: Modes, loop: _Loop, name: str) -> None:
        self._coroutine = coroutine
        self._modes = modes
        self._loop = loop
        self._name = name

    def send(self, value: Any) -> Any:
        """Runs it up to its next await."""
        return self._advance(lambda: self._coroutine.send(value))

    def throw(self, *error: Any) -> Any:
        """Raises at the await where it stands; a cancellation is its own to handle."""
        return self._advance(lambda: self._coroutine.throw(*error))

    def close(self) -> None:
        """Ends it."""
        self._coroutine.close()

    def __await__(self) -> Generator[Any, Any, T]:
        return self._coroutine.__await__()

    def _advance(self, step: Callable[[], Any]) -> Any:
        with self._modes.applied():
            self._loop.step = self._name, time.monotonic()
            try:
                awaited = step()
            except (KeyboardInterrupt, SystemExit) as error:
                # Either would end the loop, and whoever needs it next would wait for ever.
                raise RuntimeError(f"it raised {type(error).__name__}") from error
            finally:
                self._loop.step = None
            self._modes = Modes.current()
            return awaited
