"""Saves the logged values of an unfinished epoch, so that its means cover the whole epoch after a resume."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torchmetrics import Metric

from tinker_lightning.lightning import _compat

if TYPE_CHECKING:
    import lightning.pytorch as pl

# The arguments of `self.log` that Lightning stores with a value and compares with those of the next call.
_ARGUMENTS = ("fx", "name", "prog_bar", "logger", "on_step", "on_epoch", "enable_graph", "add_dataloader_idx")


def capture(trainer: pl.Trainer) -> dict[str, Any]:
    """Returns the logged values and the states of the module's metrics, as tensors and plain data."""
    of_validation = {item.meta.metric_attribute for item in _compat.VAL_RESULTS.get(trainer).values()}
    logged = _compat.TRAIN_RESULTS.get(trainer).values()
    return {
        "logged": [_logged(item) for item in logged if item.meta.on_epoch and not item.has_reset],
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
    results = _compat.TRAIN_RESULTS.get(trainer)
    for entry in state["logged"]:
        attribute = entry["metric_attribute"]
        value: Any = metrics.get(attribute) if entry["value"] is None else entry["value"]
        if value is None:
            continue
        results.log(
            **{name: entry[name] for name in _ARGUMENTS},
            value=value,
            reduce_fx=getattr(torch, entry["reduce_fx"]),
            sync_dist_fn=trainer.strategy.reduce,
            metric_attribute=attribute,
            batch_size=1,
        )
        item = results[f"{entry['fx']}.{entry['name']}"]
        _compat.FORWARD_CACHE.set(item, entry["last"])
        if entry["value"] is not None:
            item.value = value
        if entry["weight"] is not None:
            item.cumulated_batch_size = entry["weight"]


def _metrics(trainer: pl.Trainer) -> dict[str, Metric]:
    modules = trainer.lightning_module.named_modules()
    return {name: module for name, module in modules if isinstance(module, Metric)}


def _logged(item: Any) -> dict[str, Any]:
    arguments = {name: getattr(item.meta, name) for name in _ARGUMENTS}
    last = _compat.FORWARD_CACHE.get(item)
    return {
        **arguments,
        "reduce_fx": item.meta.reduce_fx.__name__,
        "metric_attribute": item.meta.metric_attribute,
        "value": item.value.clone() if item.is_tensor else None,
        "weight": getattr(item, "cumulated_batch_size", None),
        "last": last if isinstance(last, Tensor) else None,
    }


def _state(metric: Metric) -> dict[str, Any]:
    # A metric changes its tensors in place, but only appends to its lists.
    states = {
        name: state.clone() if isinstance(state, Tensor) else list(state) for name, state in metric.metric_state.items()
    }
    return {"count": metric.update_count, "states": states}
