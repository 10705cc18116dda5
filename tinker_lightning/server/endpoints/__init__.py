"""The protocol's endpoints, a file for each of its subjects. They translate; what happens is decided behind them."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from starlette.requests import Request

    from tinker_lightning.server.core.trainer import EmbeddedTrainer


def trainer_of(request: Request) -> EmbeddedTrainer:
    """The trainer behind the app that got this request."""
    trainer: EmbeddedTrainer = request.app.state.trainer
    return trainer
