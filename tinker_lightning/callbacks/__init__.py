"""Callbacks for remote models."""

from tinker_lightning.callbacks.cost_monitor import CostMonitor
from tinker_lightning.callbacks.export_adapter import ExportAdapter
from tinker_lightning.callbacks.generation import GenerationEval
from tinker_lightning.callbacks.remote_monitor import RemoteMonitor
from tinker_lightning.callbacks.sample_table import SampleTable

__all__ = ["CostMonitor", "ExportAdapter", "GenerationEval", "RemoteMonitor", "SampleTable"]
