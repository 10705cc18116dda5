"""A remote model as a node of the local autograd graph."""

from tinker_lightning.remote.adamw import RemoteAdamW
from tinker_lightning.remote.lm import RemoteLM

__all__ = ["RemoteAdamW", "RemoteLM"]
