"""The embedded trainer: a Tinker-API server that trains real models on this machine.

`EmbeddedTrainer` is the trainer, and `create_app` returns its HTTP app, for uvicorn or `httpx.ASGITransport`.
"""

from tinker_lightning.server.app import create_app
from tinker_lightning.server.trainer.trainer import EmbeddedTrainer

__all__ = ["EmbeddedTrainer", "create_app"]
