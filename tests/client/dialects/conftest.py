"""One trainer behind all imitated servers."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch

from tinker_lightning.server import EmbeddedTrainer

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture(scope="session")
def trainer(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedTrainer]:
    """One in float64, where gradients can be compared to many digits."""
    trainer = EmbeddedTrainer(["tiny"], data_dir=tmp_path_factory.mktemp("dialects"), dtype=torch.float64)
    yield trainer
    trainer.close()
