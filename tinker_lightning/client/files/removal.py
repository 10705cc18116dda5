"""Removes models and checkpoints that exist only to measure a server."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from tinker_lightning.client.files import checkpoints
from tinker_lightning.client.transport.operations import encode, perform
from tinker_lightning.errors import TinkerLightningError
from tinker_lightning.types.requests import UnloadModelRequest
from tinker_lightning.types.responses import UnloadModelResponse

if TYPE_CHECKING:
    from collections.abc import Iterable

    from tinker_lightning.client.training_base import BaseTrainingClient
    from tinker_lightning.client.transport.channel import Channel

logger = logging.getLogger("tinker_lightning.client")

# How long the removal of a model may take, in seconds.
_SECONDS = 30.0


def remove(channel: Channel, models: Iterable[BaseTrainingClient], paths: Iterable[str]) -> list[str]:
    """Removes models and checkpoints as far as the server can; returns the paths of the checkpoints that stay."""
    session, left = channel.session, []
    for path in paths:
        try:
            channel.wait(checkpoints.delete(session, path, missing_ok=True))
        except TinkerLightningError:
            left.append(path)
    for model in models:
        request = UnloadModelRequest(model.model_id)
        operation = encode(session.dialect, "unload_model", "unload_model", request, UnloadModelResponse)
        try:
            channel.run(perform(session, operation)).result(_SECONDS)
        except (TinkerLightningError, TimeoutError) as error:
            logger.info("the model %s stays on %s until the session ends: %s", model.model_id, channel.url, error)
        model.unread.take_failures()  # whoever measured it has reported them
    return left
