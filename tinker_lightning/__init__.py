"""Train remote language models with PyTorch Lightning over the Tinker API."""

from typing import TYPE_CHECKING, Any

from tinker_lightning.types import AdamParams, Datum, ModelInput, SamplingParams, TensorData, collate

if TYPE_CHECKING:
    from tinker_lightning.client import connect
    from tinker_lightning.losses.regularizer import Regularizer
    from tinker_lightning.losses.server_loss import LossFnOutput, custom_loss
    from tinker_lightning.module import RemoteModule
    from tinker_lightning.optim import RemoteAdamW
    from tinker_lightning.remote import RemoteLM

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
    "TensorData",
    "collate",
    "connect",
    "custom_loss",
]

# Loaded when first asked for, so that a server or a data script does not import what it never uses.
_LAZY = {
    "LossFnOutput": "tinker_lightning.losses.server_loss",
    "Regularizer": "tinker_lightning.losses.regularizer",
    "RemoteAdamW": "tinker_lightning.optim",
    "RemoteLM": "tinker_lightning.remote",
    "RemoteModule": "tinker_lightning.module",
    "connect": "tinker_lightning.client",
    "custom_loss": "tinker_lightning.losses.server_loss",
}

# What a LightningModule is made of. With these Trainer(strategy="tinker") is known, whichever package comes first.
_TRAINED = {"RemoteAdamW", "RemoteLM", "RemoteModule"}


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import importlib

    if name in _TRAINED:
        importlib.import_module("tinker_lightning.strategy")
    value = globals()[name] = getattr(importlib.import_module(_LAZY[name]), name)
    return value
