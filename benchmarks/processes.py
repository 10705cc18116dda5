"""Separate processes, for servers that share neither interpreter nor event loop with the measured client, and for ways
that would share threads and memory with the ones they are compared with.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import signal
import socket
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from starlette.applications import Starlette

    from tinker_lightning.server import EmbeddedTrainer


@contextlib.contextmanager
def process(serve: Callable[..., None], *arguments: Any) -> Iterator[Any]:
    """Runs `serve(*arguments, ready)` in another process and yields the value that it passes to `ready`."""
    context = multiprocessing.get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    child = context.Process(target=_run, args=(serve, arguments, sender), daemon=True)
    child.start()
    sender.close()
    try:
        yield receiver.recv()
    finally:
        child.terminate()
        child.join()


@contextlib.contextmanager
def worker(build: Callable[..., dict[str, Callable[[], Any]]], *arguments: Any) -> Iterator[Callable[[str], Any]]:
    """Calls `build(stack, *arguments)` in another process; yields a function that runs one of its results there.

    `build` enters what is to be closed at the end into the stack.
    """
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    child = context.Process(target=_work, args=(build, arguments, there), daemon=True)
    child.start()
    there.close()

    def run(name: str) -> Any:
        here.send(name)
        return here.recv()

    try:
        yield run
    finally:
        here.close()
        child.join()


def _work(build: Callable[..., dict[str, Callable[[], Any]]], arguments: tuple[Any, ...], pipe: Any) -> None:
    with contextlib.ExitStack() as stack:
        ways = build(stack, *arguments)
        with contextlib.suppress(EOFError):  # the end
            while True:
                pipe.send(ways[pipe.recv()]())


def _run(serve: Callable[..., None], arguments: tuple[Any, ...], sender: Any) -> None:
    serve(*arguments, sender.send)


def serve_trainer(folder: str, extended: bool, ready: Callable[[str], None]) -> None:
    """Serves `tiny`, whose passes take a few milliseconds."""
    from tinker_lightning.server import create_app

    serve_app(create_app(tiny_trainer(folder), extended=extended), ready)


def tiny_trainer(folder: str) -> EmbeddedTrainer:
    """Returns a trainer of `tiny` that uses one thread."""
    import torch
    from transformers.utils.logging import disable_progress_bar

    from tinker_lightning.server import EmbeddedTrainer

    disable_progress_bar()
    torch.set_num_threads(1)
    trainer = EmbeddedTrainer(["tiny"], data_dir=folder)
    trainer.catalog.get("tiny")
    return trainer


def serve_model(folder: str, model: str, ready: Callable[[str], None]) -> None:
    """Serves a base model."""
    from transformers.utils.logging import disable_progress_bar

    from tinker_lightning.server import EmbeddedTrainer, create_app

    disable_progress_bar()
    serve_app(create_app(EmbeddedTrainer([model], data_dir=folder)), ready)


def serve_app(app: Starlette, ready: Callable[[str], None]) -> None:
    """Serves an app on a free loopback port until it is terminated."""
    import uvicorn

    listener = socket.create_server(("127.0.0.1", 0), backlog=1024)
    listener = socket.socket(
        fileno=listener.detach()
    )  # so that asyncio knows it as TCP and turns off Nagle's algorithm
    ready(f"http://127.0.0.1:{listener.getsockname()[1]}")
    # Keep-alive is on, as behind a load balancer: the benchmark measures the steady state.
    config = uvicorn.Config(app, log_config=None, access_log=False, lifespan="off", timeout_keep_alive=600)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit())  # a clean exit leaves no lock behind
    uvicorn.Server(config).run([listener])
