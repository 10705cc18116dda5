"""Background threads: event loops for the network, and functions and coroutines of regularizers, rewards and rollouts.

Functions run on a thread each, coroutines on one shared event loop. Both have the caller's torch modes, which are per
thread. A thread that waits for a trainer in this process leaves the cores to it. On the main thread, Ctrl-C can be
delayed during work that must not be interrupted halfway.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import contextvars
import ctypes
import os
import signal
import threading
import time
import types
from collections.abc import Coroutine
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Self, TypeVar

import torch
from typing_extensions import override

from tinker_lightning.errors import ClientClosed

if TYPE_CHECKING:
    from asyncio import AbstractEventLoop
    from collections.abc import Awaitable, Callable, Generator, Iterable, Iterator

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


THREAD = "tinker-lightning-background"
_SLOW_SECONDS = 0.1  # as in asyncio's own debug mode


@dataclass(frozen=True, slots=True)
class Modes:
    """The torch modes of a thread."""

    grad: bool
    inference: bool
    autocast: tuple[tuple[str, torch.dtype], ...]
    autocast_cache: bool

    @classmethod
    def current(cls) -> Self:
        """Returns the modes of the calling thread."""
        accelerator = torch.accelerator.current_accelerator()
        devices = ["cpu"] if accelerator is None else ["cpu", accelerator.type]
        return cls(
            torch.is_grad_enabled(),
            torch.is_inference_mode_enabled(),
            tuple((each, torch.get_autocast_dtype(each)) for each in devices if torch.is_autocast_enabled(each)),
            torch.is_autocast_cache_enabled(),
        )

    def applied(self) -> contextlib.ExitStack:
        """Returns a context in which the calling thread, which must not use autocast, has these modes."""
        with contextlib.ExitStack() as stack:
            # Inference mode also sets the grad mode, so it comes first.
            stack.enter_context(torch.inference_mode(self.inference))
            stack.enter_context(torch.set_grad_enabled(self.grad))
            for device, dtype in self.autocast:
                stack.enter_context(torch.autocast(device, dtype, cache_enabled=self.autocast_cache))
            return stack.pop_all()


def run_on_thread(call: Callable[[], T], name: str) -> Future[T]:
    """Runs a function on a new daemon thread, so that a hanging one does not block others or the process exit."""
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


def run_on_loop(awaitable: Awaitable[T], name: str = "") -> Future[T]:
    """Awaits something on the shared event loop, which is never closed, so that clients bound to it can be reused."""
    loop = _Loop.shared()
    coroutine = awaitable if isinstance(awaitable, types.CoroutineType) else _awaited(awaitable)
    if threading.current_thread() is loop.thread:
        coroutine.close()
        raise RuntimeError("called by an async regularizer, on the event loop that it would wait for")
    return asyncio.run_coroutine_threadsafe(_InModes(coroutine, Modes.current(), loop, name), loop.loop)


def blocker() -> str:
    """Returns the `run_on_loop` name of the coroutine that blocks the loop; empty if none does."""
    step = _Loop.shared().step
    return step[0] if step is not None and time.monotonic() - step[1] > _SLOW_SECONDS else ""


def seconds_blocked() -> float:
    """Returns for how long the loop has not run the callback that an earlier call submitted; 0 if it has."""
    return _Loop.shared().seconds_blocked()


def is_cancellation(error: BaseException) -> bool:
    """Returns whether an error ends the current task from outside, and was not raised by what it awaits."""
    if isinstance(error, asyncio.CancelledError):
        task = asyncio.current_task()
        return task is None or task.cancelling() > 0
    return isinstance(error, GeneratorExit)


class _Loop:
    """An event loop on its own thread."""

    _lock = threading.Lock()
    _shared: _Loop | None = None

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self.pid = os.getpid()
        self.step: tuple[str, float] | None = None  # the running coroutine and its start time
        self._pinged: float | None = None  # the time of a ping that it has not answered
        self.thread = threading.Thread(target=self._run, name=THREAD, daemon=True)
        self.thread.start()

    def _run(self) -> None:
        while True:
            try:
                return self.loop.run_forever()
            except (KeyboardInterrupt, SystemExit):
                # Raised by a task, which keeps it as its exception; it ends `run_forever`, but not the other tasks.
                continue

    @classmethod
    def shared(cls) -> _Loop:
        """Returns the loop of this process; a forked process gets a new one."""
        with cls._lock:
            if cls._shared is None or cls._shared.pid != os.getpid():
                cls._shared = cls()
            return cls._shared

    def seconds_blocked(self) -> float:
        """Returns the age of an unanswered ping, and sends one if there is none."""
        pinged = self._pinged
        if pinged is None:
            self._pinged = time.monotonic()
            self.loop.call_soon_threadsafe(self._answer)
            return 0.0
        return time.monotonic() - pinged

    def _answer(self) -> None:
        self._pinged = None


async def _awaited(awaitable: Awaitable[T]) -> T:
    return await awaitable


class _InModes(Coroutine[Any, Any, T]):
    """A coroutine that keeps its torch modes across awaits: a `no_grad` around one must not affect other coroutines."""

    def __init__(self, coroutine: Coroutine[Any, Any, T], modes: Modes, loop: _Loop, name: str) -> None:
        self._coroutine = coroutine
        self._modes = modes
        self._loop = loop
        self._name = name

    @override
    def send(self, value: Any) -> Any:
        """Runs the coroutine up to its next await."""
        return self._advance(lambda: self._coroutine.send(value))

    @override
    def throw(self, *error: Any) -> Any:
        """Raises an exception, a cancellation for example, at the await where the coroutine is suspended."""
        return self._advance(lambda: self._coroutine.throw(*error))

    @override
    def close(self) -> None:
        """Closes the coroutine."""
        self._coroutine.close()

    def __await__(self) -> Generator[Any, Any, T]:
        return self._coroutine.__await__()

    def _advance(self, step: Callable[[], Any]) -> Any:
        with self._modes.applied():
            self._loop.step = self._name, time.monotonic()
            try:
                awaited = step()
            except (GeneratorExit, KeyboardInterrupt, SystemExit) as error:
                # They would end the caller's process or coroutine, not only what it waits for.
                raise RuntimeError(f"{self._name or 'a coroutine'} raised {type(error).__name__}") from error
            finally:
                self._loop.step = None
            self._modes = Modes.current()
            return awaited


# torch has a team of OpenMP threads for each thread that calls it. GNU's OpenMP lets threads wait actively for their
# next piece of work only while all teams of a process together have no more threads than there are cores. A custom loss
# or a metric of a few thousand numbers gives the calling thread a team, and from then on the trainer's threads would
# sleep and wake for every operation, although that team is idle: a pass of smollm2-135m takes 1.2 to 1.5 times as long,
# and more on a virtual machine. So the team is ended while its thread waits, in 0.3 ms; torch starts another one when
# it needs it.
_SOFT = 1  # of omp_pause_resource_t
_end_team: Callable[[int], object] | None = None
_wait_observers: dict[int, Callable[[float, float], object]] = {}  # by thread


def enable_openmp_end() -> None:
    """Lets `end_openmp` end threads; called when a client connects to a trainer in this process."""
    global _end_team
    try:
        library = ctypes.CDLL(None)
    except (OSError, TypeError):  # Windows has no such handle
        return
    # Other OpenMP libraries do not have the problem, and would pause the trainer's threads too.
    if hasattr(library, "GOACC_parallel") and not hasattr(library, "__kmpc_fork_call"):
        _end_team = getattr(library, "omp_pause_resource_all", None)


def end_openmp() -> None:
    """Ends the OpenMP threads of the calling thread, if this process has had a trainer."""
    if _end_team is not None:
        _end_team(_SOFT)


def wait(sources: Iterable[Future[Any]], timeout: float | None = None) -> Any:
    """Waits like `concurrent.futures.wait`, without idle threads; see `observed_waits`."""
    end_openmp()
    start = time.perf_counter()
    try:
        return concurrent.futures.wait(sources, timeout)
    finally:
        if (observe := _wait_observers.get(threading.get_ident())) is not None:
            observe(start, time.perf_counter())


@contextlib.contextmanager
def observed_waits(observe: Callable[[float, float], object]) -> Iterator[None]:
    """Calls a function with the start and the end of each `wait` of the current thread in the `with` block."""
    thread = threading.get_ident()
    _wait_observers[thread] = observe
    try:
        yield
    finally:
        _wait_observers.pop(thread, None)


class SigintHold:
    """Delays SIGINT while it is active; several may overlap, and the last one to end delivers it.

    Has no effect outside of the main thread, the only one that receives signals.
    """

    _active: ClassVar[set[SigintHold]] = set()
    _received: ClassVar[list[tuple[int, Any]]] = []
    _handler: ClassVar[Callable[[int, Any], Any]]

    def begin(self) -> None:
        """Starts the hold."""
        handler = signal.getsignal(signal.SIGINT)
        if threading.current_thread() is not threading.main_thread() or not callable(handler):
            return
        if handler is not SigintHold._defer:  # also if another handler was installed in the meantime
            SigintHold._handler = handler
            SigintHold._active.clear()
            SigintHold._received.clear()
            signal.signal(signal.SIGINT, SigintHold._defer)
        SigintHold._active.add(self)

    @staticmethod
    def _defer(number: int, frame: Any) -> None:
        SigintHold._received.append((number, frame))

    def end(self, *, deliver: bool = True) -> None:
        """Ends the hold, and delivers a SIGINT that was received unless `deliver` is False."""
        if self not in SigintHold._active:
            return
        SigintHold._active.remove(self)
        if not SigintHold._active:
            signal.signal(signal.SIGINT, SigintHold._handler)
            if SigintHold._received and deliver:
                SigintHold._handler(*SigintHold._received[0])


@contextlib.contextmanager
def sigint_held() -> Iterator[None]:
    """Delays a SIGINT during the `with` block until its end."""
    hold = SigintHold()
    hold.begin()
    try:
        yield
    finally:
        hold.end()
