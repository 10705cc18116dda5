"""A fit through a bad network, with the patience of users' clients; and the official SDK through one like it."""

from __future__ import annotations

import itertools
import threading
import time
from typing import TYPE_CHECKING, Any

import pytest
import tinker
import torch

from tests.helpers.backends import SDK_KEY
from tests.helpers.executions import logged_trainer
from tests.helpers.fault_proxy import KINDS, FaultProxy, Kind
from tests.helpers.reference import bits
from tests.helpers.soaking import size
from tests.helpers.trainers import SMALL, loader, quiet
from tinker_lightning import RemoteModule
from tinker_lightning.client import ServiceClient
from tinker_lightning.server import create_app

if TYPE_CHECKING:
    from pathlib import Path

    from tests.helpers.backends import Running
    from tests.helpers.executions import ExecutionLog
    from tinker_lightning.server import EmbeddedTrainer

pytestmark = [pytest.mark.soak, *SMALL]

STEPS = size("STEPS", 2000)
RATE, SEED = 0.1, 27
A_STEP = ["forward"] * 2 + ["forward_backward"] * 2 + ["optim_step"]


class Squares(RemoteModule):
    """Keeps when each loss was computed: between two of them, a fit does little but wait."""

    times: list[float]

    def loss(self, _: list[Any], logprobs: list[torch.Tensor]) -> Any:
        self.times.append(time.monotonic())
        return torch.cat(logprobs).square().mean(), {}


def fit(proxy: FaultProxy, trainer: EmbeddedTrainer, log: ExecutionLog, rate: float) -> tuple[Any, Any, float]:
    """What the server ran, the bits it ended with, and the longest wait of the fit in seconds."""
    with ServiceClient(base_url=proxy.url) as service:
        model = service.create_lora_training_client("tiny", rank=4, seed=1)
        proxy.rate = rate
        module = Squares(model, learning_rate=1e-3)
        module.times = []
        quiet(max_steps=STEPS, max_epochs=-1, accumulate_grad_batches=2).fit(module, loader())
        module.drain()
        proxy.rate = 0.0
        slowest = max(after - before for before, after in itertools.pairwise(module.times))
        return log.of(model.model_id, len(A_STEP) * STEPS), bits(trainer, model.model_id), slowest


def test_a_long_fit_under_mixed_faults_changes_no_bit(tmp_path: Path, running: Running) -> None:
    ends = []
    with logged_trainer(tmp_path) as (trainer, log), running(create_app(trainer)) as url:
        for rate in (0.0, RATE):
            started = time.monotonic()
            with FaultProxy(url, seed=SEED) as proxy:
                ends.append(fit(proxy, trainer, log, rate))
            print(f"{STEPS} steps, {proxy.requests} requests, {len(proxy.injected)} faults {dict(proxy.counts)}:")
            print(f"  {time.monotonic() - started:.0f} s, slowest wait {ends[-1][2]:.2f} s")
    executed, _, _ = ends[1]
    assert executed == [(number + 1, kind) for number, kind in enumerate(A_STEP * STEPS)]
    assert ends[0][:2] == ends[1][:2]
    assert len(proxy.counts) == len(KINDS) or STEPS < 200


class Sdk:
    """Trains with the official SDK as its guide does, and keeps the loss of each step and the error that ended it."""

    def __init__(self, proxy: FaultProxy, rate: float) -> None:
        self.losses: list[float] = []
        self.error: BaseException | None = None
        self.slowest = 0.0
        self.model_id = ""
        self._proxy, self._rate = proxy, rate
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()

    def _run(self) -> None:
        try:
            service = tinker.ServiceClient(base_url=self._proxy.url, api_key=SDK_KEY)
            model: Any = service.create_lora_training_client("tiny", rank=4, seed=1)
            self.model_id = model.model_id
            self._proxy.rate = self._rate
            for _ in range(STEPS):
                started = time.monotonic()
                passes = [model.forward_backward_custom([_datum(i)], _squares) for i in range(2)]
                model.optim_step(tinker.AdamParams(learning_rate=1e-3)).result()
                self.losses += [each.result().metrics["squares"] for each in passes]
                self.slowest = max(self.slowest, time.monotonic() - started)
        except BaseException as error:
            self.error = error


def _datum(i: int) -> tinker.Datum:
    ids = list(f"text {i}: hello".encode())
    return tinker.Datum(
        model_input=tinker.ModelInput.from_ints(ids[:-1]),
        loss_fn_inputs={"target_tokens": ids[1:]},  # type: ignore[dict-item]
    )


def _squares(_: Any, logprobs: list[torch.Tensor]) -> tuple[torch.Tensor, dict[str, float]]:
    loss = torch.cat(logprobs).square().mean() / 2
    return loss, {"squares": float(loss.detach())}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "kinds", [KINDS, [kind for kind in KINDS if kind != "garbage body"]], ids=["all", "no garbage"]
)
def test_how_far_the_official_sdk_comes(kinds: list[Kind], tmp_path: Path, running: Running) -> None:
    """Only reports: what the SDK does about faults is not ours to test."""
    with logged_trainer(tmp_path) as (trainer, log), running(create_app(trainer)) as url:
        with FaultProxy(url, seed=SEED) as proxy:
            clean = Sdk(proxy, 0.0)
            clean.thread.join()
        assert clean.error is None, clean.error
        with FaultProxy(url, seed=SEED, kinds=kinds) as proxy:
            sdk = Sdk(proxy, RATE)
            sdk.thread.join(size("SDK_SECONDS", 600))
            stuck = sdk.thread.is_alive()
            steps = len(sdk.losses) // 2
            same = sdk.losses == clean.losses[: len(sdk.losses)]
            updates = sum(kind == "optim_step" for _, kind in log.executed(sdk.model_id))
            print(
                f"official SDK {tinker.__version__}: {steps} of {STEPS} steps, {updates} updates, same losses: {same}"
            )
            print(
                f"  slowest step {sdk.slowest:.1f} s, after {proxy.requests} requests and {len(proxy.injected)} faults"
            )
            print(f"  {'still waiting' if stuck else 'ended'}: {sdk.error!r:.500}; last faults {proxy.injected[-4:]}")
