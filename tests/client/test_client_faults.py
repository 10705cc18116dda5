"""Network faults do not change the trained weights."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import pytest
import torch

from tests.helpers.backends import QUICK
from tests.helpers.client_data import DATA
from tests.helpers.fault_proxy import KINDS, FaultProxy, Kind
from tests.helpers.reference import bits
from tests.helpers.trainers import SMALL, loader, quiet
from tinker_lightning import AdamParams, RemoteModule
from tinker_lightning.client import ServiceClient
from tinker_lightning.server import EmbeddedTrainer, create_app
from tinker_lightning.testing import FaultyTransport, embedded_service

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    import httpx

    from tests.helpers.backends import Running
    from tinker_lightning.client import TrainingClient

    Train = Callable[[TrainingClient], None]

pytestmark = SMALL
STEPS = 8
A_STEP = ["forward"] * 3 + ["forward_backward"] * 3 + ["optim_step"]


def train(model: TrainingClient, steps: int) -> list[float]:
    def loss(_: list[Any], logprobs: list[torch.Tensor]) -> tuple[torch.Tensor, dict[str, float]]:
        return -torch.cat(logprobs).mean() / 3, {}

    norms = []
    for _ in range(steps):
        for datum in DATA:
            model.forward_backward_custom([datum], loss)
        norms.append((model.optim_step(AdamParams(learning_rate=1e-3)).result().metrics or {})["grad_norm"])
    return norms


def executed(trainer: EmbeddedTrainer, model: TrainingClient) -> list[str]:
    """What the server ran for a model, by number."""
    kinds: list[str] = []
    with contextlib.suppress(LookupError):
        while True:
            kinds.append(trainer.scheduler.find(f"{model.model_id}:{len(kinds) + 1}").kind)
    return kinds


def test_faults_change_nothing(tmp_path: Path) -> None:  # DESIGN §4.2
    """With a fault in almost a third of its requests, a run ends as a clean one does, to the bit."""
    faulty: list[FaultyTransport] = []

    def wrap(inner: httpx.AsyncBaseTransport) -> httpx.AsyncBaseTransport:
        faulty.append(FaultyTransport(inner, rate=0.3, seed=4))
        return faulty[0]

    trainer = EmbeddedTrainer(["tiny"], data_dir=tmp_path)
    ends = []
    for transport in (None, wrap):
        with embedded_service(trainer, wrap=transport, retry_policy=QUICK) as service:
            model = service.create_lora_training_client("tiny", rank=4, seed=1)
            norms = train(model, STEPS)
            assert executed(trainer, model) == A_STEP * STEPS
            ends.append((norms, bits(trainer, model.model_id)))
    trainer.close()
    assert ends[0] == ends[1]
    met = {fault for fault, _ in faulty[0].injected}
    assert met == {"reset", "500", "429", "408", "lost answer", "duplicate"}
    assert len(faulty[0].injected) >= 20


# Over TCP.


@pytest.fixture(scope="module")
def served(shared: EmbeddedTrainer, running: Running) -> Iterator[str]:
    with running(create_app(shared)) as url:
        yield url


def through(
    proxy: FaultProxy, trainer: EmbeddedTrainer, train: Train, rate: float = 0.0
) -> tuple[list[str], dict[str, bytes]]:
    """What the server ran for a model that was trained on the other side of a proxy, and the model's bits."""
    with ServiceClient(base_url=proxy.url, retry_policy=QUICK) as service:
        model = service.create_lora_training_client("tiny", rank=4, seed=1)
        proxy.rate = rate  # from now on; what answers the first request with garbage is not taken for a server
        train(model)
        proxy.rate = 0.0
        return executed(trainer, model), bits(trainer, model.model_id)


def four_steps(model: TrainingClient) -> None:
    train(model, 4)


@pytest.fixture(scope="module")
def undisturbed(shared: EmbeddedTrainer, served: str) -> dict[str, bytes]:
    with FaultProxy(served) as proxy:
        return through(proxy, shared, four_steps)[1]


@pytest.mark.parametrize("kind", KINDS)
def test_no_kind_of_fault_changes_a_bit(  # DESIGN §4.2
    kind: Kind, shared: EmbeddedTrainer, served: str, undisturbed: dict[str, bytes]
) -> None:
    with FaultProxy(served, seed=4, kinds=[kind], seconds=0.02) as proxy:
        kinds, ended = through(proxy, shared, four_steps, rate=0.3)
    assert proxy.counts[kind] >= 4
    assert kinds == A_STEP * 4
    assert ended == undisturbed


def test_a_server_that_was_silent_is_waited_for(
    shared: EmbeddedTrainer, served: str, undisturbed: dict[str, bytes]
) -> None:
    def with_a_silence(model: TrainingClient) -> None:
        proxy.silence(on=True)
        first = model.forward([DATA[0]], "cross_entropy")
        with pytest.raises(TimeoutError):
            first.result(timeout=0.2)
        proxy.silence(on=False)
        train(model, 4)

    with FaultProxy(served) as proxy:
        kinds, ended = through(proxy, shared, with_a_silence)
    assert kinds == ["forward"] + A_STEP * 4
    assert ended == undisturbed


class Squares(RemoteModule):
    def loss(self, _: list[Any], logprobs: list[torch.Tensor]) -> Any:
        return torch.cat(logprobs).square().mean(), {}


def test_a_fit_under_all_of_them_changes_no_bit(shared: EmbeddedTrainer, served: str) -> None:  # R0.2, R0.4
    def fit(model: TrainingClient) -> None:
        module = Squares(model, learning_rate=1e-2)
        quiet(max_steps=50, max_epochs=-1, accumulate_grad_batches=2).fit(module, loader())
        module.drain()

    ends = []
    for rate in (0.0, 0.1):
        with FaultProxy(served, seed=1, seconds=0.02) as proxy:
            ends.append(through(proxy, shared, fit, rate))
    assert ends[0] == ends[1]
    assert ends[0][0].count("optim_step") == 50
    assert len(proxy.counts) >= 8, proxy.counts
