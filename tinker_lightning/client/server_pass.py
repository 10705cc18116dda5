"""A pass with a loss of the server's: how it says which one, with what inputs, and by what factor.

A loss is a name (built in, or registered by `custom_loss`), a `ServerLoss`, or the `LossHandle` of a loss of one datum.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np
from torch import Tensor

from tinker_lightning.client.loss_handle import LossHandle, located
from tinker_lightning.client.sdk.inputs import loss_name
from tinker_lightning.errors import InvalidDatum, InvalidInput, InvalidLoss
from tinker_lightning.losses.builtin import LOSSES
from tinker_lightning.losses.scaling import scaled
from tinker_lightning.lossgraph.batch_loss import check_given
from tinker_lightning.lossgraph.datum_loss import SCALE
from tinker_lightning.lossgraph.graphs.graph import Graph
from tinker_lightning.lossgraph.server_loss import ServerLoss
from tinker_lightning.types import Datum, ForwardBackwardOutput, TensorData
from tinker_lightning.types.tensor import as_array

if TYPE_CHECKING:
    from concurrent.futures import Future

    from tinker_lightning.client.futures import TinkerFuture
    from tinker_lightning.client.service import ServiceClient

_CUSTOM = "custom"
_TARGETS = "target_tokens"
# How our server ends the names of diagnostics that have no ending of the protocol's.
_NO_ENDING = ":unique"


@dataclass(frozen=True, slots=True)
class ServerPass:
    """What a pass with a loss of the server's sends.

    Args:
        data: The datums.
        loss: The loss's name.
        config: Its settings.
        inputs: Its inputs that are the batch's.
        scale: What the server is to multiply the gradient by.
        whole: Whether the batch must not be split: the loss is not a sum over datums.
        finish: What becomes of the result.
        lose: Told of a failure that may have come because the server no longer knows the loss.
        graphs: What the server runs, as it was traced here.
    """

    data: list[Datum]
    loss: str
    config: dict[str, float | str] = field(default_factory=dict)
    inputs: dict[str, TensorData] = field(default_factory=dict)
    scale: float = 1.0
    whole: bool = False
    finish: Callable[[ForwardBackwardOutput], ForwardBackwardOutput] | None = None
    lose: Callable[[], None] | None = None
    graphs: Sequence[Graph] = ()

    def received(self, future: TinkerFuture[ForwardBackwardOutput]) -> TinkerFuture[ForwardBackwardOutput]:
        """The result as the caller gets it.

        A server makes room by letting go of losses. Nothing can be sent in place of a pass that has failed, for others
        are under way behind it; but the next one with this loss uploads it again.
        """
        lose = self.lose
        if lose is not None:
            # First, so that whoever sees the failure and goes on finds it told.
            future._source.add_done_callback(lambda source: lose() if _is_refused(source) else None)
        return future.then(self.finish or _unchanged, functools.partial(located, graphs=self.graphs))


def prepare(
    service: ServiceClient,
    data: list[Datum],
    loss_fn: Any,
    config: Mapping[str, float | str] | None,
    inputs: Mapping[str, Any] | None,
    scale: float,
) -> ServerPass:
    """A pass with a loss of the server's, in the words that this server knows.

    Raises:
        InvalidInput: If the loss, an input or a factor is none that the server can use.
    """
    extended = service.session.extensions.server_losses
    if isinstance(loss_fn, LossHandle):
        data = handle_data(service, data, loss_fn, config, inputs)
        service.losses.renew(loss_fn)
        lose = functools.partial(service.losses.lose, loss_fn)
        return replace(_datum_pass(data, loss_fn, scale), lose=lose, graphs=[loss_fn.loss.program.graph])
    own = loss_fn if isinstance(loss_fn, ServerLoss) else service.losses.by_name.get(loss_name(loss_fn))
    if own is not None:
        if own.server is not service.losses:
            raise InvalidLoss(f"{own.name} was registered with another client; register it with this one too")
        present = {*(inputs or {}), *(name for datum in data for name in datum.loss_fn_inputs)}
        if own.reads:
            check_given(own.name, inputs or {}, own.reads | {_TARGETS} if own.is_of_library else own.reads)
        if own.is_of_library:
            data, inputs = own.checked(spread(data, inputs or {}), config or {}), None
        loss_id, settings = own.resolve(config or {}, present)
        asked = _batch_pass(data, loss_id, settings, inputs, scale)
        if own.is_of_library:
            asked = replace(asked, finish=_with_values)
        return replace(asked, lose=functools.partial(own.lose, loss_id), graphs=own.graphs(loss_id))
    name = loss_name(loss_fn)
    if name not in LOSSES and name != _CUSTOM and extended:
        return _batch_pass(data, name, dict(config or {}), inputs, scale)
    if extended and name in LOSSES:
        check_given(name, inputs or {}, {*LOSSES[name].reads, _TARGETS})
    data = spread(data, inputs or {})
    if extended:
        return ServerPass(data, name, dict(config or {}), scale=scale)
    return plainly_scaled(data, name, config or {}, scale)


def _is_refused(source: Future[Any]) -> bool:
    return not source.cancelled() and isinstance(source.exception(), InvalidInput)


def _unchanged(output: ForwardBackwardOutput) -> ForwardBackwardOutput:
    return output


def _batch_pass(
    data: list[Datum], loss: str, config: dict[str, float | str], inputs: Mapping[str, Any] | None, scale: float
) -> ServerPass:
    tensors = {}
    for name, value in (inputs or {}).items():
        try:
            tensors[name] = TensorData.of(value)
        except InvalidInput as error:
            raise InvalidInput(f"loss_fn_inputs: {name}: {error}") from error
        if not isinstance(value, TensorData) and as_array(value).dtype.kind == "b":
            raise InvalidInput(
                f"loss_fn_inputs: {name} holds truth values, which come to the server as numbers, and no mask. "
                "Give mask.float(), and write mask > 0 in the loss."
            )
    return ServerPass(data, loss, config, tensors, scale, whole=True, finish=_with_own_names)


def handle_data(
    service: ServiceClient,
    data: list[Datum],
    handle: LossHandle,
    config: Mapping[str, float | str] | None,
    inputs: Mapping[str, Any] | None,
) -> list[Datum]:
    """Datums with all that a loss of one datum reads, wherever it runs.

    Raises:
        InvalidInput: If a datum lacks an input, or the loss is another session's or has no such settings.
    """
    if config:
        setting = next(iter(config))
        raise InvalidInput(f"{handle.name} is a loss of one datum, without settings; give {setting} with each datum")
    if handle.session_id != service.session.session_id:
        raise InvalidLoss(f"{handle.name} was created in another session; create it with this client too")
    check_given(handle.name, inputs or {}, {*(each.name for each in handle.loss.inputs[1:]), _TARGETS})
    data = spread(data, inputs or {})
    for i, datum in enumerate(data):
        try:
            handle.loss.select(datum.loss_fn_inputs)
        except InvalidDatum as error:
            raise InvalidDatum(f"datum {i}: {error}") from error
    return data


def _datum_pass(data: list[Datum], handle: LossHandle, scale: float) -> ServerPass:
    settings: dict[str, float | str] = {"loss_id": handle.loss_id or ""}
    if not handle.by_input:
        return ServerPass(data, _CUSTOM, settings, scale=scale)
    factor = TensorData(np.float32(scale))
    data = [datum.with_inputs({SCALE: factor}) for datum in data]
    return ServerPass(data, _CUSTOM, settings, finish=functools.partial(_unscaled, scale=scale))


def spread(data: list[Datum], inputs: Mapping[str, Any]) -> list[Datum]:
    """Datums with their rows of inputs that were given once for the batch; rows are cut to the datum's length.

    Raises:
        InvalidInput: If an input has not one row for each datum, or a datum has it already.
    """
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
                raise InvalidInput(f"loss_fn_inputs: {name} is given for the batch, and by datum {i} too")
            array = TensorData.of(row).to_numpy()
            rows[i][name] = TensorData(array[: data[i].model_input.length] if array.ndim else array)
    return [datum.with_inputs(row) for datum, row in zip(data, rows, strict=True)]


def plainly_scaled(data: list[Datum], loss_fn: Any, config: Mapping[str, float | str], scale: float) -> ServerPass:
    """A pass with a built-in loss on a server that knows no factor: the loss's own inputs are scaled.

    Raises:
        InvalidLoss: If the loss cannot be scaled so.
    """
    name = loss_name(loss_fn)
    datums, settings = scaled(data, name, config, scale)
    return ServerPass(datums, name, settings, finish=functools.partial(_unscaled, scale=scale) if scale != 1 else None)


def _unscaled(output: ForwardBackwardOutput, *, scale: float) -> ForwardBackwardOutput:
    """The metrics of the loss itself."""
    if scale == 0 or "loss:sum" not in output.metrics:
        return output
    metrics = {**output.metrics, "loss:sum": output.metrics["loss:sum"] / scale}
    return ForwardBackwardOutput(output.loss_fn_outputs, metrics, output.loss_fn_output_type)


def _with_own_names(output: ForwardBackwardOutput) -> ForwardBackwardOutput:
    metrics = {name.removesuffix(_NO_ENDING): value for name, value in output.metrics.items()}
    return ForwardBackwardOutput(output.loss_fn_outputs, metrics, output.loss_fn_output_type)


def _with_values(output: ForwardBackwardOutput) -> ForwardBackwardOutput:
    """Leaves out the metrics of a library loss that have no value; a traced loss returns NaN for them."""
    named = _with_own_names(output)
    metrics = {name: value for name, value in named.metrics.items() if not math.isnan(value)}
    return ForwardBackwardOutput(named.loss_fn_outputs, metrics, named.loss_fn_output_type)
