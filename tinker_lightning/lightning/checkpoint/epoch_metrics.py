"""Saves the logged values of an unfinished epoch, so that its means cover the whole epoch after a resume."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torchmetrics import Metric

from tinker_lightning.lightning import _compat

if TYPE_CHECKING:
    import lightning.pytorch as pl


def capture(trainer: pl.Trainer) -> dict[str, Any]:
    """Returns the logged values and the states of the module's metrics, as tensors and plain data."""
    of_validation = {_compat.LOGGED_ATTRIBUTE.get(item) for item in _compat.VAL_RESULTS.get(trainer).values()}
    logged = _compat.TRAIN_RESULTS.get(trainer).values()
    return {
        "logged": [
            _logged(item) for item in logged if _compat.LOGGED_BY_EPOCH.get(item) and not _compat.HAS_RESET.get(item)
        ],
        "metrics": {
            name: _state(metric)
            for name, metric in _metrics(trainer).items()
            if metric.update_called and name not in of_validation
        },
    }


def restore(trainer: pl.Trainer, state: dict[str, Any]) -> None:
    """Restores the result of `capture`, before anything is logged."""
    metrics = _metrics(trainer)
    for name, saved in state["metrics"].items():
        if name in metrics:
            for key, part in saved["states"].items():
                setattr(metrics[name], key, part)
            _compat.UPDATE_COUNT.set(metrics[name], saved["count"])
    for entry in state["logged"]:
        attribute = entry["metric_attribute"]
        value: Any = metrics.get(attribute) if entry["value"] is None else entry["value"]
        if value is None:
            continue
        item = _compat.log_again(trainer, entry, value, getattr(torch, entry["reduce_fx"]), attribute)
        _compat.FORWARD_CACHE.set(item, entry["last"])
        if entry["value"] is not None:
            _compat.LOGGED_VALUE.set(item, value)
        if entry["weight"] is not None:
            _compat.CUMULATED_BATCH_SIZE.set(item, entry["weight"])


def _metrics(trainer: pl.Trainer) -> dict[str, Metric]:
    modules = trainer.lightning_module.named_modules()
    return {name: module for name, module in modules if isinstance(module, Metric)}


def _logged(item: Any) -> dict[str, Any]:
    last = _compat.FORWARD_CACHE.get(item)
    is_tensor = _compat.IS_TENSOR.get(item)
    return {
        **_compat.log_arguments(item),
        "reduce_fx": _compat.LOGGED_REDUCTION.get(item).__name__,
        "metric_attribute": _compat.LOGGED_ATTRIBUTE.get(item),
        "value": _compat.LOGGED_VALUE.get(item).clone() if is_tensor else None,
        "weight": _compat.CUMULATED_BATCH_SIZE.get(item) if is_tensor and _compat.IS_MEAN.get(item) else None,
        "last": last if isinstance(last, Tensor) else None,
    }


def _state(metric: Metric) -> dict[str, Any]:
    # A metric changes its tensors in place, but only appends to its lists.
    states = {
        name: state.clone() if isinstance(state, Tensor) else list(state) for name, state in metric.metric_state.items()
    }
    return {"count": metric.update_count, "states": states}
