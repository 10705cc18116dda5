"""Servers that imitate other Tinker-API servers, for tests of clients."""

from tinker_lightning.testing.imitations.behaviour import Behaviour
from tinker_lightning.testing.imitations.serving import Imitation, imitate

__all__ = ["Behaviour", "Imitation", "imitate"]
