"""Runs the app with uvicorn until it is interrupted."""

from __future__ import annotations

import logging
import socket
import sys
from typing import TYPE_CHECKING, Any

import uvicorn

from tinker_lightning.errors import InvalidInput
from tinker_lightning.server.app import create_app
from tinker_lightning.server.connections import BACKLOG, QUEUE, Connections, OncePerMinute, most_connections
from tinker_lightning.server.http import LocalHost, is_loopback
from tinker_lightning.server.trainer.process_memory import return_large_blocks
from tinker_lightning.server.trainer.trainer import EmbeddedTrainer

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

# How many seconds a shutdown waits for open requests, and then for the running job.
_GRACE = 3


def serve(
    models: Sequence[str],
    *,
    host: str = "127.0.0.1",
    port: int = 8000,
    api_key: str | None = None,
    data_dir: Path | None = None,
    allow_pickled_losses: bool = False,
    sampling_seed: int | None = None,
    memory_limit: int | None = None,
    token_budget: int | None = None,
) -> None:
    """Loads the models, serves them, and prints the URL once clients can connect.

    An API key is required if other machines can connect, or if pickled losses are allowed.
    """
    if not is_loopback(host) and not api_key:
        raise InvalidInput(
            f"--host {host} can be reached from other machines, so an API key is required: pass --api-key KEY (clients "
            "set TINKER_API_KEY to it), or omit --host to serve this machine only."
        )
    if allow_pickled_losses and not api_key:
        raise InvalidInput(
            "--allow-pickled-losses lets clients run arbitrary code on this machine, so an API key is required: pass "
            "--api-key KEY too."
        )
    trainer = EmbeddedTrainer(
        models,
        data_dir=data_dir,
        allow_pickled_losses=allow_pickled_losses,
        sampling_seed=sampling_seed,
        memory_limit=memory_limit,
        token_budget=token_budget,
    )
    try:
        trainer.store.root.mkdir(parents=True, exist_ok=True)
        trainer.store.listing()  # removes expired checkpoints
    except OSError as error:
        raise InvalidInput(
            f"cannot store checkpoints in {trainer.store.root}: {error.strerror}. Choose another --data-dir."
        ) from error
    app = create_app(trainer, api_key=api_key)
    # The port is bound before the models are loaded, so that a port in use fails early.
    with _listen(host, port) as listener:
        return_large_blocks()
        trainer.charge_process()
        for name in models:
            trainer.catalog.get(name)
        trainer.charge_process()
        connections = Connections(most_connections())
        logging.getLogger("uvicorn.error").addFilter(OncePerMinute())
        config = uvicorn.Config(
            app if api_key else LocalHost(app),
            log_config=None,
            access_log=False,
            lifespan="off",
            http=connections.protocol(),
            ws="none",
            backlog=BACKLOG,
            timeout_graceful_shutdown=_GRACE,
        )
        try:
            _Server(config, trainer).run([listener])
        finally:
            trainer.close(_GRACE)


class _Server(uvicorn.Server):
    """A uvicorn server that prints its URL when it is ready, and wakes requests that wait for results on shutdown."""

    def __init__(self, config: uvicorn.Config, trainer: EmbeddedTrainer) -> None:
        super().__init__(config)
        self._trainer = trainer

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        for listener in sockets or []:
            listener.listen(QUEUE)
        if self.started:
            address = self.servers[0].sockets[0].getsockname()
            host = f"[{address[0]}]" if ":" in address[0] else address[0]
            print(f"tinker-lightning: serving {', '.join(self._trainer.catalog.names)} at http://{host}:{address[1]}")
            sys.stdout.flush()

    def handle_exit(self, *_: Any) -> None:
        # Unlike in uvicorn, the signal is not raised again after the shutdown, because the shutdown is a normal exit.
        self._trainer.announce_close()
        self.force_exit = self.should_exit  # a second signal stops the server without waiting
        self.should_exit = True


def _listen(host: str, port: int) -> socket.socket:
    try:
        if not 0 <= port <= 65535:  # getaddrinfo would wrap it modulo 65536
            raise OverflowError("ports lie in 0..65535")
        family, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.create_server(address, family=family)
        # A socket created from the descriptor has its protocol set to TCP. Otherwise asyncio would not disable Nagle's
        # algorithm, and every response would wait 40 ms for the client's delayed ACK.
        return socket.socket(fileno=listener.detach())
    except (OSError, OverflowError) as error:
        reason = (error.strerror if isinstance(error, OSError) else None) or error
        raise InvalidInput(
            f"cannot listen on --host {host} --port {port}: {reason}. Choose another host or port; port 0 selects a "
            "free one."
        ) from error
