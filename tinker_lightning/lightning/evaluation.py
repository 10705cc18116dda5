"""The loss of a `RemoteModule` on a batch of validation or test data."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from tinker_lightning.client.sdk.inputs import to_datums
from tinker_lightning.errors import InvalidInput, InvalidLoss, MissingInput, OperationFailed
from tinker_lightning.lightning import deferred_metrics
from tinker_lightning.lightning.deferred_metrics import TOTAL, VALUE, of_pass
from tinker_lightning.losses.regularizers import composition
from tinker_lightning.rows.formats import DatumLike

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from tinker_lightning.lightning.base import RemoteBase


class LossUnavailable(Exception):  # never reaches the user
    """The batch lacks an input of the loss, or the server cannot evaluate the loss without a backward pass."""


def own_loss(
    module: RemoteBase, batch: Any, data: list[Any], logprobs: list[Tensor]
) -> tuple[float, dict[str, float], float]:
    """Returns the value of the module's loss with its regularizers, its metrics, and the weight of the batch.

    A loss that only the server can evaluate takes a second forward pass. Errors other than `LossUnavailable` are bugs.
    """
    chosen = module.chosen_route()
    try:
        inputs = module.loss_fn_inputs(batch)
    except (KeyError, AttributeError) as error:
        if _is_missing(error, batch, data, module.loss_fn_inputs):
            raise LossUnavailable(_reason(error)) from error
        raise
    data = chosen.with_inputs(data, inputs)
    try:
        value, metrics = _evaluate(module, data, logprobs, inputs)
    except Exception as error:
        if missing := _missing_input(error, data, lambda tracked: _evaluate(module, tracked, logprobs, inputs)):
            raise LossUnavailable(_reason(missing)) from error
        raise
    return value, metrics, chosen.weight(data)


def _evaluate(
    module: RemoteBase, data: list[Any], logprobs: list[Tensor], inputs: Mapping[str, Any]
) -> tuple[float, dict[str, float]]:
    chosen = module.chosen_route()
    value, flat = 0.0, {}
    if chosen.local is None and chosen.loss is not None:
        backend = module.lm.backend
        try:
            forward = backend.forward(to_datums(data), chosen.loss, chosen.config, loss_fn_inputs=inputs)
            output = module.lm.handle.remote.wait(forward)
        except InvalidLoss:
            raise
        except (InvalidInput, OperationFailed) as error:
            raise LossUnavailable(_reason(error)) from error
        if "loss:sum" not in output.metrics:
            raise LossUnavailable(f"{backend.server} does not return its value")
        value, flat = float(output.metrics["loss:sum"]), of_pass(output, chosen.loss, data, chosen.config)
        if not chosen.regularized:
            return value, deferred_metrics.of_loss(flat, is_of_library=False)
        flat = {f"base_loss/{VALUE}": value, **deferred_metrics.of_part(flat, "base_loss/")}
    total, telemetry = composition.evaluate(
        data,
        logprobs,
        chosen.local,
        module.regularizers,
        step=module.global_step,
        grad_norms=False,
        timeout=module.regularizer_timeout,
    )
    value += total.item()
    flat |= composition.flatten(telemetry)
    if chosen.regularized:
        return value, flat | {TOTAL: value}
    if chosen.is_of_library:  # whose nll and perplexity are those of all tokens
        flat = {name: number for name, number in flat.items() if name not in deferred_metrics.SCORES}
    return value, deferred_metrics.of_loss(flat, is_of_library=chosen.is_of_library)


def _is_missing(error: KeyError | AttributeError, batch: Any, data: list[Any], inputs: Callable[[Any], Any]) -> bool:
    """Returns whether the batch or one of its rows lacks the key or attribute that `inputs(batch)` reads.

    A `KeyError` may also be a bug, so `inputs` is called again with a batch whose missing keys raise `MissingInput`.
    """
    if isinstance(error, AttributeError):
        return any(error.obj is each for each in (batch, *data))
    try:
        inputs([_tracked_row(row) for row in batch] if isinstance(batch, list | tuple) else _tracked_row(batch))
    except MissingInput:
        return True
    except Exception:  # the first error is raised
        return False
    return False


def _tracked_row(row: Any) -> Any:
    if isinstance(row, Mapping):
        return _TrackedInputs(row, also_get=False)
    return _tracked(row, also_get=False) if isinstance(row, DatumLike) else row


def _missing_input(error: Exception, data: list[Any], evaluate: Any) -> Exception | None:
    """Returns the error that names a missing input, if that is why a loss has failed.

    A `KeyError`, or an error about None, may also be a bug. So the loss is called again with datums whose missing
    inputs raise `MissingInput`.
    """
    cause = error.__cause__ if isinstance(error, InvalidLoss) else error  # errors of regularizers are wrapped
    if isinstance(cause, MissingInput):
        return cause
    if isinstance(cause, AttributeError) and any(cause.obj is datum for datum in data):
        return cause
    is_about_none = "NoneType" in str(cause)
    if isinstance(cause, KeyError) or is_about_none:
        try:
            evaluate([_tracked(datum, is_about_none) for datum in data])
        except MissingInput as missing:
            return missing
        except Exception:  # the first error is raised
            return None
    return None


def _tracked(datum: Any, also_get: bool) -> Any:
    """Returns a copy of a datum of any SDK whose missing inputs raise `MissingInput`."""
    tracked = copy.copy(datum)
    object.__setattr__(tracked, "loss_fn_inputs", _TrackedInputs(datum.loss_fn_inputs, also_get))
    return tracked


class _TrackedInputs(dict[str, Any]):
    def __init__(self, inputs: Mapping[str, Any], also_get: bool) -> None:
        super().__init__(inputs)
        self._also_get = also_get

    def __missing__(self, name: str) -> Any:
        raise MissingInput(f"{name}: missing")

    def get(self, name: str, default: Any = None) -> Any:
        return self[name] if self._also_get and default is None else super().get(name, default)


def _reason(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).rstrip('.')}"
