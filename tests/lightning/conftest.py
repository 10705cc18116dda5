"""Fixtures of the tests of routes and losses."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tinker_lightning.client import ServiceClient
    from tinker_lightning.server import EmbeddedTrainer


@pytest.fixture
def stage(tmp_path: Path) -> Iterator[tuple[EmbeddedTrainer, ServiceClient]]:
    """A trainer in double precision, where routes agree to many digits, and a client of it."""
    import torch

    from tinker_lightning.server import EmbeddedTrainer
    from tinker_lightning.testing import embedded_service

    trainer = EmbeddedTrainer(["tiny"], data_dir=tmp_path / "data", dtype=torch.float64)
    with embedded_service(trainer) as service:
        yield trainer, service
    trainer.close()
