"""Servers that imitate other Tinker-API servers, for tests of clients."""

from tests.helpers.imitations.behaviour import Behaviour
from tests.helpers.imitations.serving import Imitation, imitate

__all__ = ["Behaviour", "Imitation", "imitate"]
