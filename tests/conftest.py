"""What many tests share: a tiny model, and trainers that stop by themselves."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest
import torch

from tinker_lightning.server import EmbeddedTrainer
from tinker_lightning.server.engine.catalog import Catalog

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tinker_lightning.server.engine.base import BaseModel


@pytest.fixture(scope="session", autouse=True)
def _model_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Models are prepared in a folder of the tests' own, unless the environment names one to keep."""
    with pytest.MonkeyPatch.context() as patch:
        if "TINKER_LIGHTNING_CACHE" not in os.environ:
            patch.setenv("TINKER_LIGHTNING_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(scope="session")
def tiny64() -> BaseModel:
    """`tiny` in float64, where numerics can be compared to many digits."""
    return Catalog(["tiny"], dtype=torch.float64).get("tiny")


@pytest.fixture(scope="session")
def tiny() -> BaseModel:
    """`tiny` as users get it, in float32."""
    return Catalog(["tiny"]).get("tiny")


@pytest.fixture
def trainer(tmp_path: Path) -> Iterator[EmbeddedTrainer]:
    """A trainer of its own for a test."""
    trainer = EmbeddedTrainer(["tiny"], data_dir=tmp_path, gap_timeout=0.5)
    yield trainer
    trainer.close()
