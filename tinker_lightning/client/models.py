"""Models on a server: their creation, with or without a saved state, and their removal."""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Any

from tinker_lightning.client.files import checkpoints
from tinker_lightning.client.transport.operations import encode, operate, perform
from tinker_lightning.errors import InvalidInput, TinkerLightningError
from tinker_lightning.types import AdamParams, LoadWeightsResponse, LoraConfig
from tinker_lightning.types import requests as rq
from tinker_lightning.types.params import optimizer_kind
from tinker_lightning.types.responses import CreateModelResponse, UnloadModelResponse

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from tinker_lightning.client.dialects.dialect import Dialect
    from tinker_lightning.client.futures import TinkerFuture
    from tinker_lightning.client.training_base import BaseTrainingClient
    from tinker_lightning.client.transport.channel import Channel
    from tinker_lightning.client.transport.session import Session
    from tinker_lightning.types import WeightsInfoResponse

logger = logging.getLogger("tinker_lightning.client")

# The settings of an adapter that decide which weights it has.
_ADAPTER = ("rank", "train_mlp", "train_attn", "train_unembed")
# How long the removal of a model may take, in seconds.
_SECONDS = 30.0


async def create(session: Session, model: rq.CreateModelRequest) -> str:
    """Creates a model; returns its id."""
    return (await operate(session, "create_model", model, CreateModelResponse)).model_id


def in_one_request(dialect: Dialect) -> bool:
    """Returns whether one request creates a model from a state; otherwise, `load_weights` follows `create_model`."""
    return dialect.knows("load_weights", "session_id")


async def create_from_state(
    session: Session, model: rq.CreateModelRequest, info: WeightsInfoResponse, path: str, operation: str
) -> str:
    """Creates a model with saved weights in one request; returns its id.

    Args:
        session: The session.
        model: The settings of the model.
        info: What the server reports about the state, which has the same adapter and optimizer.
        path: Where the weights were saved.
        operation: `load_state` or `load_state_with_optimizer`.
    """
    optimizer = operation == "load_state_with_optimizer"
    base_model = None if model.base_model == info.base_model else model.base_model
    # AdamW is the default, and a state with an optimizer determines its kind.
    is_default = optimizer or optimizer_kind(model.optimizer_config) == AdamParams.kind
    config = None if is_default else model.optimizer_config
    request = rq.CreateFromWeightsRequest(
        session.session_id, model.model_seq_id, path, optimizer, base_model, model.user_metadata, config
    )
    loaded = await perform(session, encode(session.dialect, "load_weights", request, LoadWeightsResponse, operation))
    return loaded.model_id or request.model_id


async def create_again(
    session: Session,
    model: rq.CreateModelRequest,
    path: str,
    operation: str,
    token: str | None,
    after: Iterable[TinkerFuture[Any]],
) -> tuple[str, int]:
    """Creates a model with the settings of another one and saved weights; returns its id and its last number.

    It does so when the futures in `after` are done: one of them may save the weights.

    Raises:
        InvalidInput: If the state has another adapter, base model or optimizer, as far as the server reports them.
    """
    for other in after:
        await other.wait_async()
    if in_one_request(session.dialect) and token is None:
        info = await checkpoints.weights_info(session.connection, path)
        if saved := differences(info, settings_of(model)):
            raise InvalidInput(
                f"{operation}: {path} has {', '.join(f'{name}={value}' for name, value in saved.items())}, unlike this "
                "model. Create a model from the state instead: create_training_client_from_state()."
            )
        return await create_from_state(session, model, info, path, operation), 0
    # With a token, the state may not be described to this account; here the server compares it with the model.
    model_id = await create(session, model)
    load = rq.LoadWeightsRequest(model_id, 1, path, operation == "load_state_with_optimizer", token)
    try:
        await perform(session, encode(session.dialect, "load_weights", load, LoadWeightsResponse, operation))
    except TinkerLightningError:
        await unload(session, model_id)
        raise
    return model_id, 1


def settings_of(model: rq.CreateModelRequest) -> dict[str, Any]:
    """Returns the adapter and the optimizer of a model by the names of the arguments that set them."""
    lora = model.lora_config or LoraConfig()
    return {**{name: getattr(lora, name) for name in _ADAPTER}, "optimizer": optimizer_kind(model.optimizer_config)}


def differences(info: WeightsInfoResponse, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Returns what a saved state has in place of other settings, as far as the server reports it."""
    saved = {name: getattr(info, "lora_rank" if name == "rank" else name) for name in _ADAPTER}
    saved["optimizer"] = (info.optimizer_config or {}).get("type")
    return {name: value for name, value in saved.items() if value not in (None, settings[name])}


async def unload(session: Session, model_id: str) -> None:
    """Unloads a model if the server can; saved states are kept."""
    try:
        if session.dialect.unloads_models:
            async with asyncio.timeout(_SECONDS):
                await operate(session, "unload_model", rq.UnloadModelRequest(model_id), UnloadModelResponse)
    except (TinkerLightningError, TimeoutError) as error:
        where = session.connection.url
        logger.info("the model %s stays on %s until the session ends: %s", model_id, where, error)


def remove(channel: Channel, models: Iterable[BaseTrainingClient], paths: Iterable[str]) -> list[str]:
    """Removes models and checkpoints as far as the server can; returns the paths of the checkpoints that stay."""
    session, left = channel.session, []
    for path in paths:
        try:
            channel.wait(checkpoints.delete(session, path, missing_ok=True))
        except TinkerLightningError:
            left.append(path)
    for model in models:
        channel.wait(unload(session, model.model_id))
        model.unread.take_failures()  # whoever measured it has reported them
    return left
