"""A remote model as a node of the local autograd graph."""

from tinker_lightning.remote.lm import RemoteLM
from tinker_lightning.remote.optimizers import RemoteAdamW, RemoteDiMuon, RemoteOptimizer

__all__ = ["RemoteAdamW", "RemoteDiMuon", "RemoteLM", "RemoteOptimizer"]
