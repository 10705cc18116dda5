"""Train remote language models with PyTorch Lightning over the Tinker API."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tinker_lightning.types import AdamParams, Datum, ModelInput, SamplingParams, TensorData, collate

if TYPE_CHECKING:
    from tinker_lightning.client import ServiceClient, connect
    from tinker_lightning.lightning.module import RemoteModule
    from tinker_lightning.lightning.strategy import TinkerStrategy
    from tinker_lightning.losses.regularizers.regularizer import Regularizer
    from tinker_lightning.lossgraph.server_loss import LossFnOutput, custom_loss
    from tinker_lightning.remote.adamw import RemoteAdamW
    from tinker_lightning.remote.lm import RemoteLM

__all__ = [
    "AdamParams",
    "Datum",
    "LossFnOutput",
    "ModelInput",
    "Regularizer",
    "RemoteAdamW",
    "RemoteLM",
    "RemoteModule",
    "SamplingParams",
    "ServiceClient",
    "TensorData",
    "TinkerStrategy",
    "collate",
    "connect",
    "custom_loss",
]

# Loaded on first access, so that a server, a data script or a plain torch loop does not import what it never uses.
_LAZY = {
    "LossFnOutput": "lossgraph.server_loss",
    "Regularizer": "losses.regularizers.regularizer",
    "RemoteAdamW": "remote.adamw",
    "RemoteLM": "remote.lm",
    "RemoteModule": "lightning.module",
    "ServiceClient": "client",
    "TinkerStrategy": "lightning.strategy",
    "connect": "client",
    "custom_loss": "lossgraph.server_loss",
}

# These register `Trainer(strategy="tinker")`; the others do so only where Lightning is imported already.
_LIGHTNING = {"RemoteModule", "TinkerStrategy"}
_TRAINED = {"RemoteAdamW", "RemoteLM"}


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import importlib
    import sys

    if name in _LIGHTNING or (name in _TRAINED and "lightning.pytorch" in sys.modules):
        importlib.import_module(f"{__name__}.lightning.strategy")
    value = globals()[name] = getattr(importlib.import_module(f"{__name__}.{_LAZY[name]}"), name)
    return value
