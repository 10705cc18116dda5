"""Base models, adapters, passes and sampling, behind the Protocols of `interface`. Knows torch, not HTTP."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tinker_lightning.server.engine.catalog import Catalog

if TYPE_CHECKING:
    from tinker_lightning.server.engine.interface import Engine

DEFAULT_ENGINE: Engine = Catalog
