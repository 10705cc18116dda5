"""A trainer in this process, reached by the same client; the only module of the client that imports the server."""

from __future__ import annotations

import httpx

from tinker_lightning.client.dialects.servers import EMBEDDED
from tinker_lightning.client.transport.target import Target
from tinker_lightning.errors import TinkerLightningError


def start() -> Target:
    """Returns a new trainer, which ends with its client."""
    try:
        from tinker_lightning.server import EmbeddedTrainer, create_app
    except ImportError as error:
        raise TinkerLightningError(
            f"the embedded trainer needs {error.name}, which is not installed. Install it with: python -m pip install "
            "'tinker-lightning[embedded]', or give the URL of a server."
        ) from error
    trainer = EmbeddedTrainer()
    return Target(
        "http://embedded",
        transport=httpx.ASGITransport(create_app(trainer)),
        on_close=trainer.close,
        in_process=trainer.losses.register_function,
        dialect=EMBEDDED,
        data_folder=str(trainer.store.root),
    )
