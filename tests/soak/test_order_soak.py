"""Three hundred different fits: each trains every datum as often as it should, and keeps the order of its requests."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.helpers.backends import recording
from tests.helpers.random_fits import WARNINGS, check
from tinker_lightning.server import EmbeddedTrainer, create_app

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.helpers.backends import Recorded

pytestmark = [pytest.mark.soak, *(pytest.mark.filterwarnings(each) for each in WARNINGS)]


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Recorded]:
    trainer = EmbeddedTrainer(["tiny"], data_dir=tmp_path_factory.mktemp("data"))
    with recording(create_app(trainer)) as recorded:
        yield recorded
    trainer.close()


@pytest.mark.parametrize("seed", range(300))
def test_every_fit_keeps_the_order(seed: int, recorded: Recorded, tmp_path: Path) -> None:  # R0.4, R1.8, R5.6
    check(seed, recorded, tmp_path)
