"""A window that was not stepped on leaves nothing behind: a fit after it equals one that never saw it, to the bit."""

from __future__ import annotations

import asyncio
import itertools
import os
import signal
import threading
import time
from typing import TYPE_CHECKING, Any

import httpx
import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint, OnExceptionCheckpoint
from lightning.pytorch.utilities.exceptions import SIGTERMException
from packaging.version import Version
from torch.utils.data import DataLoader

from tests.helpers.aborting import LATER, STRATEGIES, Interrupted, N, Server, fit
from tests.helpers.checkpoints import records_in
from tests.helpers.soaking import first_only, mostly_soak
from tests.helpers.trainers import LIGHTNING, SMALL
from tinker_lightning import RemoteAdamW, RemoteModule, collate
from tinker_lightning.client import ServiceClient
from tinker_lightning.errors import LossNotFinite, TinkerLightningError
from tinker_lightning.server import EmbeddedTrainer, create_app
from tinker_lightning.testing import embedded_service
from tinker_lightning.types import OptimStepResponse
from tinker_lightning.types.requests import OptimStepRequest

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from torch import Tensor

pytestmark = [
    *SMALL,
    # Lightning looks for a file of an `OnExceptionCheckpoint` at every start.
    pytest.mark.filterwarnings("ignore:`.fit.ckpt_path=None.` was called without a model"),
    pytest.mark.filterwarnings("ignore:.*there is no last checkpoint available"),
    pytest.mark.filterwarnings("ignore:.*callbacks used to create the checkpoint need to be provided"),
]


class Aborted(Exception):
    """What a user's code raises."""


class Hook(pl.Callback):
    """Fails in one hook of a certain micro-batch."""

    def __init__(self, name: str, at: int) -> None:
        def fail(trainer: pl.Trainer, *_: Any) -> None:
            if trainer.fit_loop.total_batch_idx == at:
                raise Aborted

        setattr(self, name, fail)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    trainer = EmbeddedTrainer(["tiny"], data_dir=tmp_path_factory.mktemp("data"))
    with embedded_service(trainer) as service:
        yield Server(trainer, service)
    trainer.close()


@pytest.fixture(scope="module")
def expected(server: Server) -> dict[int, tuple[dict[str, bytes], dict[str, bytes]]]:
    return {steps: server.expected(steps) for steps in (1, 2)}


@pytest.fixture(autouse=True)
def _handlers() -> Iterator[None]:
    """Whatever Lightning leaves behind."""
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    yield
    for number, handler in handlers.items():
        signal.signal(number, handler)


def fail(*_: Any) -> None:
    raise Aborted


def should_stop(module: Interrupted, _: Tensor) -> None:
    module.trainer.should_stop = True


def ctrl_c(*_: Any) -> None:
    os.kill(os.getpid(), signal.SIGINT)


def sigterm(*_: Any) -> None:
    os.kill(os.getpid(), signal.SIGTERM)


def not_a_number(_: Interrupted, loss: Tensor) -> Tensor:
    return loss * torch.nan


def without_a_slope(_: Interrupted, loss: Tensor) -> Tensor:
    return (loss - loss).sqrt()  # 0, but its gradient is not finite


# What happens, what `fit` raises, and whether Lightning still takes the step if it was the window's last micro-batch.
WAYS: dict[str, tuple[Callable[..., Any], type[BaseException] | None, bool]] = {
    "the loss raises": (fail, Aborted, False),
    "should_stop": (should_stop, None, True),
    "Ctrl-C": (ctrl_c, SystemExit, False),
    "SIGTERM": (sigterm, SIGTERMException, True),
    "the loss is NaN": (not_a_number, LossNotFinite, False),
    "the gradient is NaN": (without_a_slope, LossNotFinite, False),
}


# Each way once: in the middle of a window or at its last micro-batch, with one strategy or the other.
KEPT = [(way, i % N, STRATEGIES[i % 2]) for i, way in enumerate(WAYS)]


@pytest.mark.parametrize(
    ("way", "place", "strategy"), mostly_soak(itertools.product(WAYS, range(N), STRATEGIES), but=KEPT)
)
def test_an_aborted_window_was_never_there(
    way: str, place: int, strategy: str, server: Server, expected: Any
) -> None:  # R1.9, R5.3
    action, raised, steps_anyway = WAYS[way]
    module = server.module(N + place, action)
    if raised is None:
        fit(module, strategy)
    else:
        with pytest.raises(raised):
            fit(module, strategy)
    before, after = expected[2 if steps_anyway and place == N - 1 else 1]
    assert server.bits(module) == before
    fit(module, strategy, LATER)
    assert server.bits(module) == after


HOOKS = [
    ("on_train_batch_start", 0, 1),
    ("on_before_backward", 1, 1),
    ("on_after_backward", 2, 1),
    ("on_train_batch_end", 2, 1),
    ("on_before_optimizer_step", 3, 1),
    ("on_train_batch_end", 3, 2),
]


@pytest.mark.parametrize(
    ("hook", "place", "steps", "strategy"),
    mostly_soak(
        [(*hook, strategy) for hook in HOOKS for strategy in STRATEGIES],
        but=[(*HOOKS[i], STRATEGIES[i % 2]) for i in (1, 4, 5)],
    ),
)
def test_a_callback_that_fails_aborts_the_window(
    hook: str, place: int, steps: int, strategy: str, server: Server, expected: Any
) -> None:
    module = server.module()
    with pytest.raises(Aborted):
        fit(module, strategy, callbacks=[Hook(hook, N + place)])
    assert server.bits(module) == expected[steps][0]
    fit(module, strategy, LATER)
    assert server.bits(module) == expected[steps][1]


@pytest.mark.skipif(Version("2.6") > LIGHTNING, reason="this Lightning's trainers train nothing after a should_stop")
@pytest.mark.parametrize("strategy", first_only(STRATEGIES))
def test_the_same_trainer_can_go_on(strategy: str, server: Server, expected: Any) -> None:
    module = server.module(N + 2, should_stop)
    trainer = fit(module, strategy)
    trainer.fit_loop.max_epochs = 2
    trainer.fit(module, DataLoader(LATER, 1, collate_fn=collate))  # type: ignore[arg-type]
    assert server.bits(module) == expected[1][1]


@pytest.mark.parametrize("strategy", first_only(STRATEGIES))
def test_ctrl_c_between_the_requests_of_a_step_waits_for_the_last_of_them(
    strategy: str, server: Server, expected: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Half a window on the server could not be taken back, and would be part of the next step."""
    module = server.module()
    client: Any = module.lm.backend
    send, sent = client.send, []

    def send_backward(request: Any) -> Any:
        sent.append(send(request))
        if len(sent) == N + 2:
            ctrl_c()
        return sent[-1]

    monkeypatch.setattr(client, "send", send_backward)
    with pytest.raises(SystemExit):
        fit(module, strategy)
    assert len(sent) == 2 * N
    assert server.bits(module) == expected[2][0]
    fit(module, strategy, LATER)
    assert server.bits(module) == expected[2][1]


@pytest.mark.parametrize("way", mostly_soak([way for way in WAYS if way != "should_stop"], but=["Ctrl-C", "SIGTERM"]))
def test_a_checkpoint_on_the_way_out_has_the_unfinished_window(
    way: str, server: Server, tmp_path: Path
) -> None:  # R5.3
    action, raised, _ = WAYS[way]
    whole = server.module()
    fit(whole, "tinker")
    stopped = server.module(N + 2, action)
    with pytest.raises(raised or ()):
        fit(stopped, "tinker", callbacks=[OnExceptionCheckpoint(tmp_path)], enable_checkpointing=True)
    file = tmp_path / "on_exception.ckpt"
    waiting = torch.load(file, weights_only=True)["tinker"]["windows"]["lm.handle"]
    assert len(waiting) == (3 if way == "SIGTERM" else 2)  # the others stop before the gradient is there
    resumed = server.module()
    fit(resumed, "tinker", ckpt_path=file)
    assert server.bits(resumed) == server.bits(whole)


@pytest.mark.parametrize(
    ("way", "strategy", "at"),
    mostly_soak(
        [("Ctrl-C", "auto", N), ("SIGTERM", "tinker", N), ("Ctrl-C", "tinker", N - 1), ("SIGTERM", "auto", N - 1)],
        but=[("Ctrl-C", "tinker", N - 1)],
    ),
)
def test_a_server_that_does_not_answer_does_not_keep_a_run_alive(
    way: str, strategy: str, at: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither at a forward pass, nor at the end of a step whose metrics a callback looks at."""
    for file in ("deferred_metrics", "hooks", "strategy"):
        monkeypatch.setattr(f"tinker_lightning.lightning.{file}.LAST_WAIT", 0.3)
    trainer = EmbeddedTrainer(["tiny"], data_dir=tmp_path)
    transport = Stalling(httpx.ASGITransport(create_app(trainer)))
    service = ServiceClient(base_url="http://embedded", transport=transport)
    monkeypatch.setattr("tinker_lightning.lightning.session.connect", lambda *_, **__: service)
    action, raised, _ = WAYS[way]
    signals = threading.Timer(0.5, action)

    started = 0.0

    def stall(*_: Any) -> None:
        nonlocal started
        started = time.monotonic()
        transport.stalls = True
        signals.start()

    looks = ModelCheckpoint(tmp_path, monitor="grad_norm", every_n_train_steps=1)
    with pytest.raises(raised or ()), Interrupted("tiny", at, stall) as module:
        fit(module, strategy, callbacks=[looks], enable_checkpointing=True)
    assert time.monotonic() - started < 60  # and not for ever, also on a busy machine
    transport.stalls = False
    trainer.close()


class Stalling(httpx.AsyncBaseTransport):
    """Passes requests on, and keeps the answers back while it stalls."""

    def __init__(self, inner: httpx.AsyncBaseTransport) -> None:
        self.stalls = False
        self._inner = inner

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        response = await self._inner.handle_async_request(request)
        while self.stalls:
            await asyncio.sleep(0.05)
        return response

    async def aclose(self) -> None:
        await self._inner.aclose()


class Hybrid(Interrupted):
    """Beside the remote model trains a parameter of its own."""

    def __init__(self, model: Any) -> None:
        super().__init__(model)
        self.scale = torch.nn.Parameter(torch.ones(()))

    def loss(self, data: list[Any], logprobs: list[Tensor]) -> Tensor:
        return self.scale * super().loss(data, logprobs)


def ctrl_c_in_the_sending(module: RemoteModule, monkeypatch: pytest.MonkeyPatch) -> None:
    client: Any = module.lm.backend
    send, steps = client.optim_step, []

    def optim_step(*args: Any) -> Any:
        steps.append(args)
        if len(steps) == 2:
            ctrl_c()
        return send(*args)

    monkeypatch.setattr(client, "optim_step", optim_step)


def ctrl_c_in_the_local_step(module: RemoteModule, monkeypatch: pytest.MonkeyPatch) -> None:
    step = RemoteAdamW._step_local

    def step_local(optimizer: Any) -> None:
        if module.lm.handle.remote.steps == 2:
            ctrl_c()
        step(optimizer)

    monkeypatch.setattr(RemoteAdamW, "_step_local", step_local)


def ctrl_c_before_the_step_is_counted(module: RemoteModule, monkeypatch: pytest.MonkeyPatch) -> None:
    step = module.optimizer_step

    def optimizer_step(*args: Any) -> None:
        step(*args)
        if module.lm.handle.remote.steps == 2:
            ctrl_c()

    monkeypatch.setattr(module, "optimizer_step", optimizer_step)


def ctrl_c_while_a_metric_is_waited_for(module: RemoteModule, monkeypatch: pytest.MonkeyPatch) -> None:
    wait = module._deferred._wait

    def interrupted(future: Any) -> None:
        if module.lm.handle.remote.steps == 2:
            ctrl_c()
        wait(future)

    monkeypatch.setattr(module._deferred, "_wait", interrupted)


MOMENTS = [
    ctrl_c_in_the_sending,
    ctrl_c_in_the_local_step,
    ctrl_c_before_the_step_is_counted,
    ctrl_c_while_a_metric_is_waited_for,
]


@pytest.mark.parametrize(
    ("when", "n"),
    mostly_soak(itertools.product(MOMENTS, (1, N)), but=[(MOMENTS[0], 1), (MOMENTS[2], N)]),
)
def test_a_file_of_a_run_that_is_stopped_in_its_step_knows_of_the_step(
    when: Any, n: int, server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:  # R5.3
    def hybrid() -> Hybrid:
        return Hybrid(server.service.create_lora_training_client("tiny", rank=2, seed=1))

    options: dict[str, Any] = {"accumulate_grad_batches": n, "max_steps": 3, "max_epochs": -1}
    whole, stopped, resumed = hybrid(), hybrid(), hybrid()
    fit(whole, "tinker", **options)
    with monkeypatch.context() as patch:
        when(stopped, patch)
        best = ModelCheckpoint(tmp_path, monitor="grad_norm", every_n_train_steps=1)
        callbacks = [OnExceptionCheckpoint(tmp_path), best]
        with pytest.raises(SystemExit):
            fit(stopped, "tinker", callbacks=callbacks, enable_checkpointing=True, **options)
    content = torch.load(tmp_path / "on_exception.ckpt", weights_only=True)
    assert records_in(content)["lm"]["steps"] == content["global_step"] == 2
    trainer = fit(resumed, "tinker", ckpt_path=tmp_path / "on_exception.ckpt", **options)
    assert resumed.lm.handle.remote.steps == trainer.global_step == 3
    assert server.bits(resumed) == server.bits(whole)
    assert torch.equal(resumed.scale, whole.scale)


class Settles(pl.Callback):
    """Waits after each batch until the server has answered all that was sent."""

    def on_train_batch_end(self, trainer: Any, *_: Any, **__: Any) -> None:
        trainer.lightning_module.lm.handle.remote.wait_for_all()


FAILING = [
    (n, failing, strategy)
    for n in (1, 2, 4)
    for failing in ("optim_step", "forward_backward")
    for strategy in STRATEGIES
]


@pytest.mark.parametrize(
    ("n", "failing", "strategy"),
    mostly_soak(
        FAILING, but=[(1, "optim_step", "tinker"), (2, "forward_backward", "tinker"), (4, "forward_backward", "auto")]
    ),
)
def test_a_request_that_fails_between_windows_is_not_lost(
    n: int, failing: str, strategy: str, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:  # R4.5
    module = server.module()
    client: Any = module.lm.backend
    method = "send" if failing == "forward_backward" else failing
    send, sent = getattr(client, method), []

    def fails_once(*args: Any, **kwargs: Any) -> Any:
        sent.append(args)
        if len(sent) == 1:
            unknown = {"type": "no such optimizer"}
            return client._submit(failing, failing, OptimStepResponse, OptimStepRequest, optimizer_params=unknown)
        return send(*args, **kwargs)

    monkeypatch.setattr(client, method, fails_once)
    with pytest.raises(TinkerLightningError, match=f"{failing} .* of {client.model_id}"):
        fit(module, strategy, accumulate_grad_batches=n, callbacks=[Settles()])
    assert module.lm.handle.remote.steps == 1
