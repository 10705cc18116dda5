"""Remote models in PyTorch Lightning: the module, the strategy, checkpoints and exact resume."""

from tinker_lightning.lightning.hyperparameters import ModelSettings
from tinker_lightning.lightning.module import RemoteModule
from tinker_lightning.lightning.strategy import TinkerStrategy

__all__ = ["ModelSettings", "RemoteModule", "TinkerStrategy"]
