"""Train remote language models with PyTorch Lightning over the Tinker API."""

from __future__ import annotations

import importlib
import sys
from typing import TYPE_CHECKING, Any

from tinker_lightning.errors import TinkerLightningError
from tinker_lightning.types import AdamParams, Datum, ModelInput, SamplingParams, TensorData, collate

if TYPE_CHECKING:
    from tinker_lightning.client import SamplingClient, ServiceClient, TrainingClient, as_backend, connect
    from tinker_lightning.lightning.module import RemoteModule
    from tinker_lightning.lightning.strategy import TinkerStrategy
    from tinker_lightning.losses.regularizers import Regularizer
    from tinker_lightning.lossgraph.server_loss import LossFnOutput, custom_loss
    from tinker_lightning.remote.lm import RemoteLM
    from tinker_lightning.remote.optimizers import RemoteAdamW, RemoteDiMuon

    __version__: str

__all__ = [
    "AdamParams",
    "Datum",
    "LossFnOutput",
    "ModelInput",
    "Regularizer",
    "RemoteAdamW",
    "RemoteDiMuon",
    "RemoteLM",
    "RemoteModule",
    "SamplingClient",
    "SamplingParams",
    "ServiceClient",
    "TensorData",
    "TinkerLightningError",
    "TinkerStrategy",
    "TrainingClient",
    "__version__",
    "as_backend",
    "collate",
    "connect",
    "custom_loss",
]

# Loaded on first access, so that a server, a data script or a plain torch loop does not import what it never uses.
_LAZY = {
    "LossFnOutput": "lossgraph.server_loss",
    "Regularizer": "losses.regularizers",
    "RemoteAdamW": "remote.optimizers",
    "RemoteDiMuon": "remote.optimizers",
    "RemoteLM": "remote.lm",
    "RemoteModule": "lightning.module",
    "SamplingClient": "client",
    "ServiceClient": "client",
    "TinkerStrategy": "lightning.strategy",
    "TrainingClient": "client",
    "as_backend": "client",
    "connect": "client",
    "custom_loss": "lossgraph.server_loss",
}
# Packages that are attributes without an import of their own.
_PACKAGES = (
    *("callbacks", "client", "data", "doctor", "lightning", "losses"),
    *("metrics", "recipes", "remote", "rl", "server", "testing", "types"),
)

# These register `Trainer(strategy="tinker")`; the others, and the package itself, only where Lightning is imported.
_LIGHTNING = {"RemoteModule", "TinkerStrategy"}
_TRAINED = {"RemoteAdamW", "RemoteDiMuon", "RemoteLM"}


def __getattr__(name: str) -> Any:
    if name in _PACKAGES:
        return importlib.import_module(f"{__name__}.{name}")
    if name == "__version__":
        from importlib.metadata import version

        return version("tinker-lightning")
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if name in _LIGHTNING or (name in _TRAINED and "lightning.pytorch" in sys.modules):
        importlib.import_module(f"{__name__}.lightning.strategy")
    value = globals()[name] = getattr(importlib.import_module(f"{__name__}.{_LAZY[name]}"), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, *_PACKAGES})


if not sys.modules.keys().isdisjoint(("lightning.pytorch", "pytorch_lightning")):
    importlib.import_module(f"{__name__}.lightning.strategy")
