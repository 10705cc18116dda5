"""Imitated servers around one trainer.

The imports are in the fixtures, because pytest loads this file at its start, also where it only distributes tests: the
name of its folder begins with `test`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tests.helpers.imitated import Peer
    from tinker_lightning.server import EmbeddedTrainer
    from tinker_lightning.testing.imitations.serving import Kind


@pytest.fixture(scope="session")
def trainer(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedTrainer]:
    """One for all imitations, in float64, where gradients can be compared to many digits."""
    import torch

    from tinker_lightning.server import EmbeddedTrainer

    trainer = EmbeddedTrainer(["tiny"], data_dir=tmp_path_factory.mktemp("imitations"), dtype=torch.float64)
    yield trainer
    trainer.close()


@pytest.fixture
def peer(trainer: EmbeddedTrainer) -> Iterator[Callable[..., Peer]]:
    """Starts imitations that end with the test."""
    from tests.helpers.imitated import Peer
    from tinker_lightning.testing import imitate

    peers: list[Peer] = []

    def start(kind: Kind, **changes: Any) -> Peer:
        peers.append(Peer(imitate(kind, trainer=trainer, **changes), trainer))
        return peers[-1]

    yield start
    for each in peers:
        each.http.close()
        each.server.close()
