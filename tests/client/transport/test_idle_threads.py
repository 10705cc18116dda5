"""A thread that waits for a trainer in this process leaves the cores to it."""

from __future__ import annotations

import asyncio
import os
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import pytest
import torch

from tinker_lightning import Datum
from tinker_lightning.client import ServiceClient
from tinker_lightning.server import EmbeddedTrainer
from tinker_lightning.server.trainer.jobs import Job
from tinker_lightning.testing import embedded_service
from tinker_lightning.threads import background

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="counts the threads of the process")

DATA = [Datum.from_tokens([1, 2, 3, 4])] * 20


@pytest.fixture
def four_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(4)
    yield
    torch.set_num_threads(before)


def result(future: Any) -> None:
    future.result()


def awaited(future: Any) -> None:
    async def wait() -> None:
        await future

    asyncio.run(wait())


def threads() -> set[str]:
    return set(os.listdir("/proc/self/task"))


@pytest.mark.parametrize("wait", [result, awaited])
@pytest.mark.usefixtures("four_threads")
def test_openmp_threads_of_a_waiting_thread_end_and_start_again(tmp_path: Path, wait: Callable[[Any], None]) -> None:
    """R5.11."""
    trainer = EmbeddedTrainer(["tiny"], data_dir=tmp_path)
    with embedded_service(trainer) as service, ThreadPoolExecutor(1) as pool:  # a thread that torch has not seen
        if background._end_team is None:
            pytest.skip("this torch does not use GNU's OpenMP")
        client = service.create_lora_training_client("tiny", rank=2)
        client.forward(DATA, "cross_entropy").result()  # the trainer has its threads

        def use_torch() -> tuple[int, int]:
            """Returns how many threads torch starts for this one, and how many of them are left after a wait."""
            before = threads()
            numbers = torch.ones(1_000_000)
            assert float((numbers + numbers).sum()) == 2_000_000
            started = threads() - before
            trainer.scheduler.submit(Job(f"busy:{len(before)}:{time.monotonic()}", "busy", lambda: time.sleep(0.3)))
            wait(client.forward(DATA, "cross_entropy"))
            return len(started), len(started & threads())

        assert [pool.submit(use_torch).result() for _ in range(2)] == [(3, 0), (3, 0)]
    trainer.close()


def test_nothing_is_ended_for_a_server_in_another_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(background, "_end_team", None)
    ServiceClient(base_url="http://127.0.0.1:9", api_key="tml-none").close()
    assert background._end_team is None
