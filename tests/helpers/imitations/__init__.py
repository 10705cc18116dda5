"""Servers that imitate other Tinker-API servers, for tests of clients."""

from tests.helpers.imitations.behavior import Behavior
from tests.helpers.imitations.serving import Imitation, imitate

__all__ = ["Behavior", "Imitation", "imitate"]
