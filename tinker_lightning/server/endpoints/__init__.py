"""The endpoints of the protocol. They only translate between HTTP and the trainer."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from starlette.requests import Request

    from tinker_lightning.server.keys import Owner
    from tinker_lightning.server.trainer.trainer import EmbeddedTrainer


def trainer_of(request: Request, owner: Owner | None = None) -> EmbeddedTrainer:
    """Returns the trainer of the app that received this request, with the objects of the owner of its key only.

    An endpoint that is open to requests without a key has to name the owner.
    """
    trainer: EmbeddedTrainer = request.app.state.trainer
    return trainer if request.app.state.keys is None else trainer.owned_by(owner or request.scope["owner"])
