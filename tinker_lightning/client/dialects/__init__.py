"""Dialects of the Tinker API: one for each kind of server, and their detection."""

from tinker_lightning.client.dialects.dialect import Dialect
from tinker_lightning.client.dialects.servers import dialect_named
from tinker_lightning.client.dialects.surrogate import Surrogate

__all__ = ["Dialect", "Surrogate", "dialect_named"]
