"""Callbacks for remote models; each is imported at its first use."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tinker_lightning.callbacks.cost_monitor import CostMonitor
    from tinker_lightning.callbacks.export_adapter import ExportAdapter
    from tinker_lightning.callbacks.generation import GenerationEval
    from tinker_lightning.callbacks.remote_monitor import RemoteMonitor
    from tinker_lightning.callbacks.sample_table import SampleTable

__all__ = ["CostMonitor", "ExportAdapter", "GenerationEval", "RemoteMonitor", "SampleTable"]

_LAZY = {
    "CostMonitor": "cost_monitor",
    "ExportAdapter": "export_adapter",
    "GenerationEval": "generation",
    "RemoteMonitor": "remote_monitor",
    "SampleTable": "sample_table",
}


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(importlib.import_module(f"{__name__}.{_LAZY[name]}"), name)
    return value
