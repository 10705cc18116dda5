"""Hours of a bad network in minutes: whatever is lost or doubled on the way, training ends in the same bits."""

from __future__ import annotations

import contextlib
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, NamedTuple, get_args

import httpx
import pytest

from tests.helpers.executions import logged_trainer
from tinker_lightning import Datum
from tinker_lightning.client import ServiceClient
from tinker_lightning.client.transport.retries import RetryPolicy
from tinker_lightning.server import create_app
from tinker_lightning.testing import Fault, FaultyTransport, embedded_service
from tinker_lightning.types import AdamParams

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractContextManager
    from pathlib import Path

    import torch
    from starlette.applications import Starlette

    from tests.helpers.executions import ExecutionLog
    from tinker_lightning.client import TrainingClient
    from tinker_lightning.server import EmbeddedTrainer

    Running = Callable[[Starlette], AbstractContextManager[str]]

pytestmark = pytest.mark.soak

STEPS = 300
MICRO_BATCHES = 3
THREADS = 8
STEPS_PER_THREAD = 60
# As patient as users' clients are, but quicker to try again: what counts is the number of faults.
PATIENCE = RetryPolicy(120.0, first_delay=0.01, longest_delay=0.5)


class Outcome(NamedTuple):
    """What training left behind."""

    losses: list[float]
    state: dict[str, bytes]
    executed: list[tuple[int, str]]  # number and kind of each operation, in the order in which they ran


@pytest.fixture(scope="module")
def clean(tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    """What the same training gives where nothing goes wrong."""
    with logged_trainer(tmp_path_factory.mktemp("clean")) as (trainer, log), embedded_service(trainer) as service:
        return train(service, trainer, log, STEPS)


def test_faults_in_process_change_no_bit(clean: Outcome, tmp_path: Path) -> None:
    with logged_trainer(tmp_path) as (trainer, log):
        faulty: list[FaultyTransport] = []

        def wrap(inner: httpx.AsyncBaseTransport) -> httpx.AsyncBaseTransport:
            faulty.append(FaultyTransport(inner, rate=0.1, seed=1))
            return faulty[0]

        with embedded_service(trainer, wrap=wrap, retry_policy=PATIENCE) as service:
            outcome = train(service, trainer, log, STEPS)
    assert_many_faults(faulty[0])
    assert outcome == clean
    assert_one_step_each(outcome, STEPS)


def test_faults_over_tcp_without_extensions_change_no_bit(clean: Outcome, tmp_path: Path, running: Running) -> None:
    with logged_trainer(tmp_path) as (trainer, log), running(create_app(trainer, extended=False)) as url:
        transport = FaultyTransport(httpx.AsyncHTTPTransport(), rate=0.1, seed=2)
        with ServiceClient(base_url=url, transport=transport, retry_policy=PATIENCE) as service:
            outcome = train(service, trainer, log, STEPS)
    assert_many_faults(transport)
    assert outcome == clean
    assert_one_step_each(outcome, STEPS)


@pytest.mark.parametrize("extended", [True, False], ids=["our server", "without extensions"])
def test_a_second_in_which_every_answer_to_a_submission_is_lost(
    extended: bool, clean: Outcome, tmp_path: Path, running: Running
) -> None:
    with logged_trainer(tmp_path) as (trainer, log), running(create_app(trainer, extended=extended)) as url:
        transport = LosesAnswers(httpx.AsyncHTTPTransport())
        with ServiceClient(base_url=url, transport=transport, retry_policy=PATIENCE) as service:
            outcome = train(service, trainer, log, STEPS, at_step={STEPS // 2: transport.begin})
    assert len(transport.lost) >= 2 * MICRO_BATCHES
    assert "optim_step" in {path.rpartition("/")[2] for path in transport.lost}
    assert outcome == clean
    assert_one_step_each(outcome, STEPS)


@pytest.mark.parametrize("over_tcp", [False, True], ids=["in process", "over TCP without extensions"])
def test_threads_with_models_of_their_own_share_one_client(over_tcp: bool, tmp_path: Path, running: Running) -> None:
    with logged_trainer(tmp_path / "clean") as (trainer, log), embedded_service(trainer) as service:
        alone = [train(service, trainer, log, STEPS_PER_THREAD, seed) for seed in range(THREADS)]

    with contextlib.ExitStack() as stack:
        trainer, log = stack.enter_context(logged_trainer(tmp_path / "faulty"))
        inner: httpx.AsyncBaseTransport
        url, inner = "http://embedded", httpx.ASGITransport(create_app(trainer))
        if over_tcp:
            url, inner = stack.enter_context(running(create_app(trainer, extended=False))), httpx.AsyncHTTPTransport()
        transport = FaultyTransport(inner, rate=0.1, seed=3)
        service = stack.enter_context(ServiceClient(base_url=url, transport=transport, retry_policy=PATIENCE))
        with ThreadPoolExecutor(THREADS) as pool:
            together = list(pool.map(lambda seed: train(service, trainer, log, STEPS_PER_THREAD, seed), range(THREADS)))
    assert_many_faults(transport)
    for outcome, expected in zip(together, alone, strict=True):
        assert outcome == expected
        assert_one_step_each(outcome, STEPS_PER_THREAD)


def train(
    service: ServiceClient,
    trainer: EmbeddedTrainer,
    log: ExecutionLog,
    steps: int,
    seed: int = 1,
    at_step: dict[int, Callable[[], None]] | None = None,
) -> Outcome:
    """Trains a new model as users do: results of a step are read after the next one was sent."""
    client = service.create_lora_training_client("tiny", rank=2, seed=seed)
    losses: list[float] = []
    before: list[Any] = []
    for step in range(steps):
        if at_step and step in at_step:
            at_step[step]()
        futures = [_submit(client, seed, step, i) for i in range(MICRO_BATCHES)]
        optim = client.optim_step(AdamParams(learning_rate=1e-3, grad_clip_norm=1.0))
        losses += [future.result().metrics["loss:sum"] for future in before[:-1]]
        before = [*futures, optim]
    losses += [future.result().metrics["loss:sum"] for future in before[:-1]]
    before[-1].result()
    _, adapter = trainer.registry.model(client.model_id).ready()
    tensors = {**adapter.weights.tensors, **adapter.training_state()}
    state = {name: tensor.detach().numpy().tobytes() for name, tensor in tensors.items()}
    return Outcome(losses, state, log.of(client.model_id, steps * (2 * MICRO_BATCHES + 1)))


def _submit(client: TrainingClient, seed: int, step: int, i: int) -> Any:
    """A loss that no built-in one is, on data of its own for each step."""
    ids = [(7 * seed + 31 * step + 11 * i + k * k) % 256 for k in range(8)]

    def loss_fn(_: list[Any], logprobs: list[torch.Tensor]) -> tuple[torch.Tensor, dict[str, float]]:
        return (-logprobs[0].mean() + 0.01 * (logprobs[0] ** 2).sum()) / MICRO_BATCHES, {"step": float(step)}

    return client.forward_backward_custom([Datum.from_tokens(ids)], loss_fn)


def assert_one_step_each(outcome: Outcome, steps: int) -> None:
    """No number was used twice or left out, and every step is its forwards, its backwards and one update."""
    a_step = ["forward"] * MICRO_BATCHES + ["forward_backward"] * MICRO_BATCHES + ["optim_step"]
    assert [number for number, _ in outcome.executed] == list(range(1, len(a_step) * steps + 1))
    assert [kind for _, kind in outcome.executed] == a_step * steps


def assert_many_faults(transport: FaultyTransport) -> None:
    """The run met what it was to survive: every kind of fault, on submissions too."""
    kinds = Counter(fault for fault, path in transport.injected if not path.endswith("retrieve_future"))
    assert set(kinds) == set(get_args(Fault))
    assert min(kinds.values()) >= 10


class LosesAnswers(httpx.AsyncBaseTransport):
    """Carries out every submission, but for a second after `begin()` loses the answers."""

    def __init__(self, inner: httpx.AsyncBaseTransport) -> None:
        self.lost: list[str] = []
        self._inner = inner
        self._until = 0.0

    def begin(self) -> None:
        self._until = time.monotonic() + 1.0

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        response = await self._inner.handle_async_request(request)
        path = request.url.path
        if time.monotonic() < self._until and path.rpartition("/")[2] in ("forward_backward", "optim_step"):
            await response.aread()
            await response.aclose()
            self.lost.append(path)
            raise httpx.ReadError("injected: the answer was lost", request=request)
        return response

    async def aclose(self) -> None:
        await self._inner.aclose()
