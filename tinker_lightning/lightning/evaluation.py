"""Validation and test steps of a `RemoteModule`: its own loss with its metrics, and the likelihood of all tokens."""

from __future__ import annotations

import copy
import warnings
from typing import TYPE_CHECKING, Any

from typing_extensions import override

from tinker_lightning.errors import InvalidInput, InvalidLoss, MissingInput, OperationFailed
from tinker_lightning.lightning import _compat, deferred_metrics
from tinker_lightning.lightning.checkpoint.loaders import isolated_rng
from tinker_lightning.lightning.deferred_metrics import TOTAL, VALUE
from tinker_lightning.losses.batch import target_weights
from tinker_lightning.losses.regularizers import composition
from tinker_lightning.rows.batches import as_list
from tinker_lightning.rows.formats import DatumLike
from tinker_lightning.types.datum import to_datums

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from torch import Tensor

    from tinker_lightning.lightning.module import RemoteModule
    from tinker_lightning.lightning.routes import Route

# `val_loss` is the loss, so that a metric of that name is `val_loss/loss`.
_RESERVED = deferred_metrics.RESERVED | {"loss"}


class Evaluation:
    """Evaluates a module on batches of validation and test data, and logs the results."""

    def __init__(self, module: RemoteModule) -> None:
        self._module = module
        # The metrics of the loss that each stage and loader has logged in this epoch; None if the data lack an input.
        self._logged: dict[tuple[str, int], set[str] | None] = {}
        self._warned: set[str] = set()

    def step(self, stage: str, batch: Any, batch_idx: int, loader: int) -> None:
        """Logs the loss of a batch, unless a batch of the loader lacks an input of it, and the scores.

        A metric of the loss takes the place of the score of the same name.
        """
        module = self._module
        data = as_list(module.datums(batch))
        logprobs = module.lm(data)
        scores = module._scores.updated(stage, loader, zip(logprobs, map(target_weights, data), strict=True))
        _compat.METRIC_ATTRIBUTES.set(module, None)  # makes Lightning look up the names of new metrics
        if batch_idx == 0:
            self._logged[stage, loader] = set()
        self._log_loss(stage, batch, loader, data, logprobs)
        for name, metric in scores.items():
            if name not in (self._logged.get((stage, loader)) or ()):
                module.log(f"{stage}_{name}", metric, batch_size=len(data))

    def _log_loss(self, stage: str, batch: Any, loader: int, data: list[Any], logprobs: list[Tensor]) -> None:
        module, logged = self._module, self._logged.get((stage, loader))
        if logged is None:
            return  # an earlier batch lacks an input of the loss
        try:
            with isolated_rng():  # a validation that is repeated after a resume must not change what training draws
                value, metrics, weight = _own_loss(module, batch, data, logprobs)
        except _LossUnavailable as error:
            self._drop_loss(stage, loader, logged, str(error))
            return
        # Scores of earlier batches, in which the loss did not return these metrics.
        self._forget(stage, loader, metrics.keys() & deferred_metrics.SCORES - logged)
        for name, number in {"loss": value, **metrics}.items():
            reduce = deferred_metrics.reduction(name)
            if not weight and reduce == "mean":
                continue  # a policy loss on a batch without actions
            logged.add(name)
            module.log(f"{stage}_{name}", number, prog_bar=name == "loss", batch_size=weight, reduce_fx=reduce)

    def _drop_loss(self, stage: str, loader: int, logged: set[str], reason: str) -> None:
        """Removes the loss from the scores of a loader, because a mean of the other batches would be misleading."""
        self._logged[stage, loader] = None
        self._forget(stage, loader, {"loss", *logged})
        if stage not in self._warned:
            self._warned.add(stage)
            warnings.warn(
                f"{stage}_loss is not logged, because the loss cannot be evaluated on this data: {reason}. "
                f"{stage}_nll is logged.",
                stacklevel=2,
            )

    def _forget(self, stage: str, loader: int, metrics: Iterable[str]) -> None:
        """Removes metrics of a loader that were logged in this epoch."""
        trainer, names = self._module.trainer, [f"{stage}_{name}" for name in metrics]
        by_loader = _compat.drop_logged(trainer, "validation_step" if stage == "val" else "test_step", names, loader)
        for name in names:
            trainer.callback_metrics.pop(name + (f"/dataloader_idx_{loader}" if by_loader else ""), None)


class _LossUnavailable(Exception):  # never reaches the user
    """The batch lacks an input of the loss, or the server cannot evaluate the loss without a backward pass."""


def _own_loss(
    module: RemoteModule, batch: Any, data: list[Any], logprobs: list[Tensor]
) -> tuple[float, dict[str, float], float]:
    """Returns the value of the module's loss with its regularizers, its metrics, and the weight of the batch.

    Errors other than `_LossUnavailable` are bugs.
    """
    route = module.chosen_route()
    tracked = _tracked_batch(batch)
    try:
        inputs = module.loss_fn_inputs(tracked)
    except (KeyError, AttributeError) as error:
        rows = tracked if isinstance(tracked, list | tuple) else ()
        if _is_missing(error, (tracked, *rows, *data)):
            raise _LossUnavailable(_reason(error)) from error
        raise
    data = route.with_inputs(data, inputs)
    value = 0.0
    metrics: dict[str, float] = {}
    if route.local is None and route.loss is not None:
        value, metrics = _value_on_server(module, route, data, inputs)
        if not route.regularized:
            return value, deferred_metrics.loss_metrics(metrics, _RESERVED), route.weight(data)
        metrics = {f"base_loss/{VALUE}": value, **deferred_metrics.prefixed_metrics(metrics, "base_loss/")}
    local_value, local_metrics = _local_value(module, route, data, logprobs)
    value += local_value
    metrics |= local_metrics
    if route.regularized:
        return value, metrics | {TOTAL: value}, route.weight(data)
    if route.is_of_library:  # nll and perplexity are logged by token
        metrics = {name: number for name, number in metrics.items() if name not in deferred_metrics.SCORES}
    return value, deferred_metrics.loss_metrics(metrics, _RESERVED), route.weight(data)


def _value_on_server(
    module: RemoteModule, route: Route, data: list[Any], inputs: Mapping[str, Any]
) -> tuple[float, dict[str, float]]:
    """Evaluates a loss that only the server can evaluate, in a second forward pass."""
    backend = module.lm.backend
    try:
        forward = backend.forward(to_datums(data), route.loss, route.config, loss_fn_inputs=inputs)
        output = module.lm.handle.remote.wait(forward)
    except InvalidLoss:
        raise
    except (InvalidInput, OperationFailed) as error:
        raise _LossUnavailable(_reason(error)) from error
    if "loss:sum" not in output.metrics:
        raise _LossUnavailable(f"{backend.server} does not return its value")
    metrics = deferred_metrics.pass_metrics(output, route.loss, data, route.config)
    return float(output.metrics["loss:sum"]), metrics


def _local_value(
    module: RemoteModule, route: Route, data: list[Any], logprobs: list[Tensor]
) -> tuple[float, dict[str, float]]:
    """Evaluates a loss that runs locally, and the regularizers."""
    tracked = [_tracked(datum) for datum in data]
    try:
        total, telemetry = composition.evaluate(
            tracked,
            logprobs,
            route.local,
            module.regularizers,
            step=module.global_step,
            grad_norms=False,
            timeout=module.regularizer_timeout,
        )
    except Exception as error:
        cause = error.__cause__ if isinstance(error, InvalidLoss) else error  # errors of regularizers are wrapped
        if cause is not None and _is_missing(cause, tracked):
            raise _LossUnavailable(_reason(cause)) from error
        raise
    return total.item(), composition.flatten(telemetry)


def _is_missing(error: BaseException, rows: Sequence[Any]) -> bool:
    """Returns whether an error is due to an input or attribute that the rows of a batch lack."""
    if isinstance(error, MissingInput):
        return True
    if isinstance(error, AttributeError) and any(error.obj is row for row in rows):
        return True
    # An error about None may also be a bug, unless the loss has got None in place of an input.
    inputs = [getattr(row, "loss_fn_inputs", row) for row in rows] if "NoneType" in str(error) else []
    return any(isinstance(each, _TrackedInputs) and each.has_returned_none for each in inputs)


def _tracked_batch(batch: Any) -> Any:
    """Returns a copy of a batch whose missing inputs raise `MissingInput`, if it is of plain lists and dicts."""
    if type(batch) in (list, tuple):
        return type(batch)(_TrackedInputs(row) if type(row) is dict else _tracked(row) for row in batch)
    return _TrackedInputs(batch) if type(batch) is dict else batch


def _tracked(row: Any) -> Any:
    """Returns a copy of a datum of any SDK whose missing inputs raise `MissingInput`; other rows as they are."""
    if not isinstance(row, DatumLike):
        return row
    tracked = copy.copy(row)
    object.__setattr__(tracked, "loss_fn_inputs", _TrackedInputs(row.loss_fn_inputs))
    return tracked


class _TrackedInputs(dict[str, Any]):
    has_returned_none = False

    def __missing__(self, name: str) -> Any:
        raise _MissingKey(f"{name}: missing")

    @override
    def get(self, name: str, default: Any = None) -> Any:
        self.has_returned_none |= default is None and name not in self
        return super().get(name, default)


class _MissingKey(MissingInput, KeyError):
    """A missing input, which a loss may handle as the `KeyError` that it is without tracking."""

    __str__ = Exception.__str__  # a `KeyError` would quote the message


def _reason(error: BaseException) -> str:
    kind = MissingInput if isinstance(error, MissingInput) else type(error)
    return f"{kind.__name__}: {str(error).rstrip('.')}"
