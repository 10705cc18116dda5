"""Imitated servers around one trainer.

The imports are in the fixtures, because pytest loads this file at its start, also where it only distributes tests: the
name of its folder begins with `test`.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tests.helpers.imitated import Peer
    from tests.helpers.imitations import Imitation
    from tests.helpers.imitations.serving import Kind
    from tinker_lightning.server import EmbeddedTrainer


@pytest.fixture(scope="session")
def trainer(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedTrainer]:
    """One for all imitations, in float64, where gradients can be compared to many digits."""
    import torch

    from tinker_lightning.server import EmbeddedTrainer

    trainer = EmbeddedTrainer(["tiny"], data_dir=tmp_path_factory.mktemp("imitations"), dtype=torch.float64)
    yield trainer
    trainer.close()


@pytest.fixture(scope="module")
def unchanged(trainer: EmbeddedTrainer) -> Iterator[Callable[[Kind], Imitation]]:
    """Imitations without changes, each started once for the tests of a file: stopping one takes a while."""
    from tests.helpers.imitations import imitate

    started: dict[Kind, Imitation] = {}

    def start(kind: Kind) -> Imitation:
        if kind not in started:
            started[kind] = imitate(kind, trainer=trainer)
        return started[kind]

    yield start
    for each in started.values():
        each.close()


@pytest.fixture
def peer(trainer: EmbeddedTrainer, unchanged: Callable[[Kind], Imitation]) -> Iterator[Callable[..., Peer]]:
    """Connects to imitations; those with changes end with the test."""
    from tests.helpers.imitated import Peer
    from tests.helpers.imitations import imitate

    with contextlib.ExitStack() as stack:

        def start(kind: Kind, **changes: Any) -> Peer:
            if changes:
                server = imitate(kind, trainer=trainer, **changes)
                stack.callback(server.close)
            else:
                server = unchanged(kind)
            peer = Peer(server, trainer)
            stack.callback(peer.http.close)
            return peer

        yield start
