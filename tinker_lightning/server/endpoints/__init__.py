"""The endpoints of the protocol. They only translate between HTTP and the trainer."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from starlette.requests import Request

    from tinker_lightning.server.trainer.trainer import EmbeddedTrainer


def trainer_of(request: Request) -> EmbeddedTrainer:
    """Returns the trainer of the app that received this request."""
    trainer: EmbeddedTrainer = request.app.state.trainer
    return trainer
