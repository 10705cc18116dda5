"""Runs the app on a port until it is told to stop."""

from __future__ import annotations

import ipaddress
import logging
import sys
from typing import TYPE_CHECKING, Any

import uvicorn

from tinker_lightning.errors import InvalidInput
from tinker_lightning.server.app import create_app
from tinker_lightning.server.trainer import EmbeddedTrainer

if TYPE_CHECKING:
    import socket
    from collections.abc import Sequence
    from pathlib import Path

logger = logging.getLogger("tinker_lightning.server")


def serve(
    models: Sequence[str],
    *,
    host: str = "127.0.0.1",
    port: int = 8000,
    api_key: str | None = None,
    data_dir: Path | None = None,
) -> None:
    """Loads the models, serves them, and prints the URL once clients can connect.

    Raises:
        InvalidInput: If others could reach the server and there is no API key.
    """
    if not _is_loopback(host) and not api_key:
        raise InvalidInput(
            f"--host {host} can be reached from other machines, so an API key is needed: pass --api-key KEY (clients "
            "set TINKER_API_KEY to it), or leave --host out to serve this machine only."
        )
    trainer = EmbeddedTrainer(models, data_dir=data_dir)
    try:
        for name in models:
            trainer.catalog.get(name)
        app = create_app(trainer, api_key=api_key)
        config = uvicorn.Config(app, host=host, port=port, log_config=None, access_log=False, lifespan="off")
        _Server(config, trainer).run()
    finally:
        trainer.close()


class _Server(uvicorn.Server):
    """uvicorn, saying when it is ready, and not waiting for clients that wait for results when it is to stop."""

    def __init__(self, config: uvicorn.Config, trainer: EmbeddedTrainer) -> None:
        super().__init__(config)
        self._trainer = trainer

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self.started:
            address = self.servers[0].sockets[0].getsockname()
            host = f"[{address[0]}]" if ":" in address[0] else address[0]
            print(f"tinker-lightning: serving {', '.join(self._trainer.catalog.names)} at http://{host}:{address[1]}")
            sys.stdout.flush()

    def handle_exit(self, sig: int, frame: Any) -> None:
        self._trainer.announce_close()
        super().handle_exit(sig, frame)


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
