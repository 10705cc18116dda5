"""What each kind of server speaks, and how to find out which kind a server is."""

from tinker_lightning.client.dialects.dialect import Dialect
from tinker_lightning.client.dialects.servers import dialect_named
from tinker_lightning.client.dialects.surrogate import Surrogate

__all__ = ["Dialect", "Surrogate", "dialect_named"]
