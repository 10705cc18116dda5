"""Servers in separate processes, so that they share neither interpreter nor event loop with the measured client."""

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
