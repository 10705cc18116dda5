"""Ctrl-C at any moment of a fit: the model has taken whole steps, and a later fit knows of nothing else."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import threading
import time
from typing import TYPE_CHECKING

import pytest

from tests.helpers.aborting import LATER, STRATEGIES, Server, fit
from tests.helpers.trainers import SMALL
from tinker_lightning import Datum
from tinker_lightning.server import EmbeddedTrainer
from tinker_lightning.testing import embedded_service

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = [
    pytest.mark.soak,
    *SMALL,
    # One that comes while Python cleans up is printed, and lost.
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]

INTERRUPTS = 60
DATA = [Datum.from_tokens(list(f"text {i}: {'hello world ' * 8}".encode())) for i in range(24)]


@pytest.fixture
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    trainer = EmbeddedTrainer(["tiny"], data_dir=tmp_path_factory.mktemp("data"))
    with embedded_service(trainer) as service:
        yield Server(trainer, service)
    trainer.close()


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_ctrl_c_at_any_moment_leaves_whole_steps(strategy: str, server: Server) -> None:
    expected = {steps: server.expected(steps, DATA) for steps in range(7)}
    started = time.monotonic()
    fit(server.module(), strategy, DATA)
    seconds = time.monotonic() - started
    dice = random.Random(1)  # noqa: S311  # repeatable, not secret
    seen = []
    for _ in range(INTERRUPTS):
        module = server.module()
        ctrl_c = threading.Timer(dice.random() * seconds, os.kill, (os.getpid(), signal.SIGINT))
        with contextlib.suppress(SystemExit, KeyboardInterrupt):  # it may come just before or after Lightning's part
            ctrl_c.start()
            fit(module, strategy, DATA)
            ctrl_c.join()
            time.sleep(0.01)
        signal.signal(signal.SIGINT, signal.default_int_handler)  # which Lightning has switched off
        seen.append(module.lm.handle.remote.steps)
        assert server.bits(module) == expected[seen[-1]][0]
        fit(module, strategy, LATER)
        assert server.bits(module) == expected[seen[-1]][1]
    assert len(set(seen)) > 3
