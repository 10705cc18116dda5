"""Prepares a pass with a server-side loss: its name, its inputs and its factor.

A loss is a name (built in, or registered by `custom_loss`), a `ServerLoss`, or the `LossHandle` of a per-datum loss.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
from torch import Tensor

from tinker_lightning.client.futures import TinkerFuture
from tinker_lightning.client.passes.request import ServerPass, chunks_for, surrogate_pass
from tinker_lightning.client.server_losses import LossHandle
from tinker_lightning.errors import InvalidDatum, InvalidInput, InvalidLoss
from tinker_lightning.losses import custom
from tinker_lightning.losses.builtin import LOSSES, scale_loss
from tinker_lightning.lossgraph.graph_loss import SCALE, check_batch_inputs, select_inputs
from tinker_lightning.lossgraph.server_loss import ServerLoss
from tinker_lightning.types import Datum, ForwardBackwardOutput, TensorData
from tinker_lightning.types.tensor import as_array

if TYPE_CHECKING:
    from tinker_lightning.client.dialects.dialect import Dialect
    from tinker_lightning.client.server_losses import Losses
    from tinker_lightning.client.transport.session import Session

_CUSTOM = "custom"
_TARGETS = "target_tokens"
# The suffix that our server adds to diagnostics whose names have no suffix of the protocol.
_NO_SUFFIX = ":unique"


def prepare(
    session: Session,
    losses: Losses,
    data: list[Datum],
    loss_fn: Any,
    config: Mapping[str, float | str] | None,
    inputs: Mapping[str, Any] | None,
    scale: float,
) -> ServerPass:
    """Prepares a pass for this server; raises `InvalidInput` if it cannot use the loss, an input or the factor."""
    if isinstance(loss_fn, LossHandle):
        return _handle_pass(session, losses, data, loss_fn, config, inputs, scale)
    own = loss_fn if isinstance(loss_fn, ServerLoss) else losses.by_name.get(loss_name(loss_fn))
    if own is not None:
        if own.server is not losses:
            raise InvalidLoss(f"{own.name} was registered with another client; register it with this one too")
        present = {*(inputs or {}), *(name for datum in data for name in datum.loss_fn_inputs)}
        if own.reads:
            check_batch_inputs(own.name, inputs or {}, own.reads | {_TARGETS} if own.is_of_library else own.reads)
        if own.is_of_library:
            data, inputs = own.check_datums(spread(data, inputs or {}), config or {}), None
        loss_id, settings = own.resolve(config or {}, present)
        asked = _batch_pass(session, data, loss_id, settings, inputs, scale)
        if own.is_of_library:
            asked = replace(asked, finish=_with_values)
        return replace(asked, lose=functools.partial(own.invalidate, loss_id), graphs=own.graphs(loss_id))
    name = loss_name(loss_fn)
    session.dialect.check_loss(name)
    if not session.extensions.server_losses:
        return built_in(session.dialect, spread(data, inputs or {}), name, config or {}, scale)
    if name not in LOSSES and name != _CUSTOM:
        return _batch_pass(session, data, name, dict(config or {}), inputs, scale)
    if name in LOSSES:
        check_batch_inputs(name, inputs or {}, {*LOSSES[name].reads, _TARGETS})
    return ServerPass(_with_weights(spread(data, inputs or {}), name), name, dict(config or {}), scale=scale)


def loss_name(loss_fn: Any) -> str:
    """Returns the name of a server-side loss; raises `InvalidInput` for anything else."""
    if isinstance(loss_fn, TinkerFuture):
        raise InvalidInput("loss_fn is a future; pass its result: create_custom_loss(...).result()")
    if not isinstance(loss_fn, str):
        raise InvalidInput(
            f"loss_fn must be the name of a loss, e.g. 'cross_entropy', got {type(loss_fn).__name__}. For a Python "
            "function, call forward_backward_custom(data, loss_fn)."
        )
    return loss_fn


def built_in(
    dialect: Dialect, data: list[Datum], loss: str, config: Mapping[str, float | str], scale: float = 1.0
) -> ServerPass:
    """Prepares a pass with a built-in loss on a server without a factor: the loss's own inputs are scaled.

    Raises:
        InvalidInput: If the loss cannot be scaled that way, or the server would misunderstand a datum.
    """
    dialect.check_targets(data)
    data = _with_weights(data, loss)
    # A forward with other weights than the caller's has another sum, so it is computed from the log-probabilities.
    replaces_weights = dialect.unit_forward_weights or dialect.forward == "zero_weights"
    known_scale = 0.0 if replaces_weights else scale
    finish = functools.partial(_with_sum, data=data, loss=loss, config=dict(config), scale=known_scale)
    datums, settings = scale_loss(data, loss, config, scale)
    carrier = dialect.surrogate
    if why := gap(dialect, loss):
        return ServerPass(datums, loss, settings, finish=finish, forward_only="" if dialect.sends_other_losses else why)
    if carrier is None or carrier.loss == "cross_entropy" or loss not in LOSSES:
        return ServerPass(datums, loss, settings, finish=finish)
    finish = functools.partial(finish, scale=0.0)
    if loss == "cross_entropy":
        gradients = [-datum.loss_fn_inputs["weights"].to_torch() for datum in datums]
        return replace(surrogate_pass(carrier, datums, gradients), finish=finish)
    datums = [
        datum.with_inputs(advantages=datum.loss_fn_inputs["advantages"].to_numpy() * carrier.length_factor(datum))
        for datum in datums
    ]
    return ServerPass(datums, loss, settings, finish=finish, per_batch=carrier.per_batch, even_batch=carrier.even_batch)


def gap(dialect: Dialect, loss: str) -> str:
    """Returns why a server is not known to train with a built-in loss as the protocol defines it; empty if it is."""
    carrier = dialect.surrogate
    by_carrier = loss == "cross_entropy" and carrier is not None and carrier.loss == "cispo"
    if dialect.losses is None or loss not in LOSSES or loss in dialect.losses or by_carrier:
        return ""
    return (
        f"{loss}: servers of the dialect {dialect.name!r} are not known to train with this loss as the protocol "
        f"defines it. Use a custom loss: tinker_lightning.losses.{loss}."
    )


def _with_weights(data: list[Datum], loss: str) -> list[Datum]:
    """Fills in the weights of `cross_entropy`: ones where a datum has none."""
    if loss != "cross_entropy":
        return data
    return [
        datum.with_inputs(weights=TensorData.wrap(np.ones(targets.shape, np.float32)))
        if "weights" not in datum.loss_fn_inputs and (targets := datum.loss_fn_inputs.get(_TARGETS)) is not None
        else datum
        for datum in data
    ]


def _batch_pass(
    session: Session,
    data: list[Datum],
    loss: str,
    config: dict[str, float | str],
    inputs: Mapping[str, Any] | None,
    scale: float,
) -> ServerPass:
    """Prepares a pass that must not be split, because its loss is not a sum over datums."""
    if len(chunks_for(session, data)) > 1:
        raise InvalidInput(
            f"data: {len(data)} datums do not fit into one request, and {loss} is computed from the whole batch at "
            "once. Send a smaller batch."
        )
    tensors = {}
    for name, value in (inputs or {}).items():
        try:
            tensors[name] = TensorData.from_data(value)
        except InvalidInput as error:
            raise InvalidInput(f"loss_fn_inputs: {name}: {error}") from error
        if not isinstance(value, TensorData) and as_array(value).dtype.kind == "b":
            raise InvalidInput(
                f"loss_fn_inputs: {name} is boolean, but the server receives numbers. Pass mask.float(), and write "
                "mask > 0 in the loss."
            )
    return ServerPass(data, loss, config, tensors, scale, finish=_with_own_names)


def _handle_pass(
    session: Session,
    losses: Losses,
    data: list[Datum],
    handle: LossHandle,
    config: Mapping[str, float | str] | None,
    inputs: Mapping[str, Any] | None,
    scale: float,
) -> ServerPass:
    """Prepares a pass with a per-datum loss, on the server or locally."""
    if config:
        setting = next(iter(config))
        raise InvalidInput(f"{handle.name} is a per-datum loss without settings; pass {setting} with each datum")
    if handle.session_id != session.session_id:
        raise InvalidLoss(f"{handle.name} was created in another session; create it with this client too")
    check_batch_inputs(handle.name, inputs or {}, {*handle.loss.inputs, _TARGETS} - {"logprobs"})
    data = spread(data, inputs or {})
    for i, datum in enumerate(data):
        try:
            select_inputs(handle.loss, datum.loss_fn_inputs)
        except InvalidDatum as error:
            raise InvalidDatum(f"datum {i}: {error}") from error
    if handle.loss_id is None:
        return ServerPass(data, _CUSTOM, scale=scale, local=handle)
    losses.renew(handle)
    asked = ServerPass(
        data,
        _CUSTOM,
        {"loss_id": handle.loss_id},
        scale=scale,
        lose=functools.partial(losses.lose, handle),
        graphs=[handle.loss.program.graph],
    )
    if not handle.by_input:
        return asked
    factor = TensorData(np.float32(scale))
    data = [datum.with_inputs({SCALE: factor}) for datum in data]
    return replace(asked, data=data, scale=1.0, finish=functools.partial(_unscaled, scale=scale))


def spread(data: list[Datum], inputs: Mapping[str, Any]) -> list[Datum]:
    """Gives each datum its row of the inputs that were passed once for the batch, cut to the datum's length."""
    if not inputs:
        return data
    rows: list[dict[str, TensorData]] = [{} for _ in data]
    for name, value in inputs.items():
        if isinstance(value, TensorData):
            value = value.to_numpy()
        if not isinstance(value, Sequence | np.ndarray | Tensor) or len(value) != len(data):
            raise InvalidInput(f"loss_fn_inputs: {name} must have one row for each of the {len(data)} datums")
        for i, row in enumerate(value):
            if name in data[i].loss_fn_inputs:
                raise InvalidInput(f"loss_fn_inputs: {name} is passed for the batch, but datum {i} has it too")
            array = TensorData.from_data(row).to_numpy()
            rows[i][name] = TensorData.wrap(array[: data[i].model_input.length] if array.ndim else array)
    return [datum.with_inputs(row) for datum, row in zip(data, rows, strict=True)]


def _with_sum(
    output: ForwardBackwardOutput, *, data: list[Datum], loss: str, config: Mapping[str, float | str], scale: float
) -> ForwardBackwardOutput:
    """Returns a result with the `loss:sum` of the given datums, computed here if the server does not return it.

    It has none if the server does not return the log-probabilities of a backward either.

    Args:
        output: The server's result.
        data: The datums before scaling.
        loss: The built-in loss.
        config: Its settings before scaling.
        scale: What the `loss:sum` in the result is multiplied by; 0 if that sum belongs to another loss.
    """
    if scale and "loss:sum" in output.metrics:
        return _unscaled(output, scale=scale)
    metrics = {name: value for name, value in output.metrics.items() if name != "loss:sum"}
    if loss in LOSSES and len(output.loss_fn_outputs) == len(data) and custom.has_logprobs(output):
        logprobs = custom.read_logprobs(output, data)
        metrics["loss:sum"] = LOSSES[loss].total(logprobs, [datum.loss_fn_inputs for datum in data], config)
    return replace(output, metrics=metrics)


def _unscaled(output: ForwardBackwardOutput, *, scale: float) -> ForwardBackwardOutput:
    """Returns a result whose loss is the one before scaling."""
    if scale == 0 or "loss:sum" not in output.metrics:
        return output
    return replace(output, metrics={**output.metrics, "loss:sum": output.metrics["loss:sum"] / scale})


def _with_own_names(output: ForwardBackwardOutput) -> ForwardBackwardOutput:
    return replace(output, metrics={name.removesuffix(_NO_SUFFIX): value for name, value in output.metrics.items()})


def _with_values(output: ForwardBackwardOutput) -> ForwardBackwardOutput:
    """Leaves out the metrics of a library loss that have no value; a traced loss returns NaN for them."""
    named = _with_own_names(output)
    return replace(named, metrics={name: value for name, value in named.metrics.items() if not math.isnan(value)})
