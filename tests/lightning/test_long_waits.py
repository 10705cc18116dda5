"""A fit whose server is silent, has restarted or has ended its session says so, and ends within bounds."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import lightning.pytorch as pl
import pytest
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.utilities.exceptions import SIGTERMException

from tests.helpers.fault_proxy import FaultProxy
from tests.helpers.trainers import SMALL, loader, quiet
from tinker_lightning import RemoteModule, TinkerStrategy
from tinker_lightning.client.transport import retries
from tinker_lightning.errors import InvalidInput, ResultTimeout, SessionLost
from tinker_lightning.lightning import hooks
from tinker_lightning.lightning.progress import StepBar
from tinker_lightning.remote.window import RemoteModel
from tinker_lightning.server import EmbeddedTrainer, create_app

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from contextlib import AbstractContextManager
    from pathlib import Path

    from starlette.types import ASGIApp

pytestmark = SMALL


@pytest.fixture(autouse=True)
def _soon(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Waits are shown and logged within tenths of a second; handlers of signals are those of before."""
    times = {"_SHOWN_SECONDS": 0.2, "_UPDATE_SECONDS": 0.05, "_LOG_SECONDS": (0.5, 60.0)}
    for name, value in times.items():
        monkeypatch.setattr(retries, name, value)
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    yield
    for number, handler in handlers.items():
        signal.signal(number, handler)


@pytest.fixture
def proxy(trainer: EmbeddedTrainer, running: Callable[[ASGIApp], AbstractContextManager[str]]) -> Iterator[FaultProxy]:
    with running(create_app(trainer)) as url, FaultProxy(url) as proxy:
        yield proxy
        proxy.silence(on=False)


class AtStep(pl.Callback):
    """Does something at the start of the third step."""

    def __init__(self, action: Callable[[Any], Any]) -> None:
        self._action = action

    def on_train_batch_start(self, trainer: pl.Trainer, module: pl.LightningModule, *_: Any) -> None:
        if trainer.global_step == 2:
            self._action(module)


def fit(proxy: FaultProxy, folder: Path, action: Callable[[Any], Any], **options: Any) -> None:
    files = ModelCheckpoint(folder, "{step}", every_n_train_steps=1)
    trainer = quiet(
        strategy=options.pop("strategy", "tinker"),
        max_steps=4,
        enable_checkpointing=True,
        callbacks=[files, AtStep(action)],
        **options,
    )
    with RemoteModule("tiny", rank=2, base_url=proxy.url) as module:
        trainer.fit(module, loader())


def test_the_bar_and_the_log_name_a_silent_server(
    proxy: FaultProxy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    shown: list[str] = []

    def logged() -> list[str]:
        return [each.getMessage() for each in caplog.records if each.name == retries.logger.name]

    def draw(bar: StepBar, *_: Any, **__: Any) -> None:
        shown.append(bar.pause)
        if logged() and "is silent" in bar.pause:
            proxy.silence(on=False)

    monkeypatch.setattr(StepBar, "draw", draw)
    fit(proxy, tmp_path, lambda _: proxy.silence(on=True), enable_progress_bar=True)
    assert any("the server is silent, gives up at " in each for each in shown)
    assert shown[-1] == ""
    waiting, continuing = logged()
    assert waiting.startswith(f"{proxy.url}: waiting for ")
    assert continuing.startswith(f"{proxy.url}: continuing after ")


def test_a_pause_that_is_too_long_ends_the_fit_and_names_the_newest_checkpoint(
    proxy: FaultProxy, tmp_path: Path
) -> None:
    message = (
        r"TinkerStrategy\(max_wait=0.7\) .*: the server is silent\. Resume with ckpt_path \S+step=2\.ckpt, from step 2"
    )
    strategy = TinkerStrategy()

    def fall_silent(_: RemoteModule) -> None:
        strategy.max_wait = 0.7  # not for the first steps, which may take longer
        proxy.silence(on=True)

    with pytest.raises(ResultTimeout, match=message):
        fit(proxy, tmp_path, fall_silent, strategy=strategy)


@pytest.mark.parametrize("max_wait", [0, -1.0, float("nan"), float("inf"), "600", True])
def test_max_wait_is_a_positive_number(max_wait: Any) -> None:
    with pytest.raises(InvalidInput, match="max_wait must be a positive number of seconds, or None, got"):
        TinkerStrategy(max_wait=max_wait)


def test_max_wait_counts_the_time_without_a_result_not_that_of_a_fault(
    proxy: FaultProxy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hooks, "_ASK_SECONDS", 0.0)
    pause = retries.Pause(20.0, "the server answers HTTP 502", is_fault=True, waited=599.0)

    def wait(module: RemoteModule) -> None:
        tick = module.lm.handle.remote.while_waiting
        assert tick is not None
        for each in (pause, replace(pause, waited=601.0)):
            monkeypatch.setattr(RemoteModel, "pause", each)
            tick()

    with pytest.raises(ResultTimeout, match=r"has waited for 601 s .* HTTP 502"):
        fit(proxy, tmp_path, wait, strategy=TinkerStrategy(max_wait=600))


def test_what_a_wait_is_for_is_asked_only_if_it_lasts(
    proxy: FaultProxy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[object] = []
    monkeypatch.setattr(RemoteModel, "pause", property(asked.append))
    monkeypatch.setattr(hooks, "_ASK_SECONDS", 1e9, raising=False)

    def wait(module: RemoteModule) -> None:
        tick = module.lm.handle.remote.while_waiting
        assert tick is not None
        tick()
        assert not asked
        monkeypatch.setattr(hooks, "_ASK_SECONDS", 0.0)
        tick()
        assert asked

    fit(proxy, tmp_path, wait)


def test_a_server_that_was_restarted_is_named_with_the_checkpoint_to_resume_from(
    proxy: FaultProxy, trainer: EmbeddedTrainer, running: Any, tmp_path: Path
) -> None:
    again = EmbeddedTrainer(["tiny"], data_dir=trainer.store.root)
    message = r"was restarted, and no longer has session-\w+\. .* Resume with ckpt_path \S+step=2\.ckpt, from step 2"
    with running(create_app(again)) as url:

        def restart(module: RemoteModule) -> None:
            session = module.lm.backend._sender.session  # type: ignore[attr-defined]
            asyncio.run_coroutine_threadsafe(session.check(), session._heart.get_loop()).result()  # has been known
            proxy.target = url

        with pytest.raises(SessionLost, match=message) as caught:
            fit(proxy, tmp_path, restart)
    assert not getattr(caught.value, "__notes__", [])  # one reason, however many requests it has ended
    again.close()


def test_a_session_that_was_ended_fails_at_once_also_what_waits_for_an_answer(
    proxy: FaultProxy, trainer: EmbeddedTrainer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def end(_: RemoteModule) -> None:
        (session,) = (each for each in trainer.registry.sessions() if not each.finished)
        monkeypatch.setattr(trainer.scheduler, "submit", lambda job, *_, **__: job)  # the server never answers again
        session.finished = True

    started = time.monotonic()
    with pytest.raises(SessionLost, match=r"session-\w+ was ended on http\S+: by another client"):
        fit(proxy, tmp_path, end)
    assert time.monotonic() - started < 20


@pytest.mark.parametrize(("number", "raised"), [(signal.SIGINT, SystemExit), (signal.SIGTERM, SIGTERMException)])
def test_a_signal_ends_a_fit_within_five_seconds_although_the_server_is_silent(
    number: signal.Signals,
    raised: type[BaseException],
    proxy: FaultProxy,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    sent: list[float] = []

    def send() -> None:
        sent.append(time.monotonic())
        os.kill(os.getpid(), number)

    def fall_silent(_: RemoteModule) -> None:
        proxy.silence(on=True)
        threading.Timer(0.5, send).start()

    with caplog.at_level("INFO", "tinker_lightning"), pytest.raises(raised):
        fit(proxy, tmp_path, fall_silent)
    assert time.monotonic() - sent[0] < 5
    name = {signal.SIGINT: "Ctrl-C", signal.SIGTERM: "SIGTERM"}[number]
    assert f"Stopped  by {name} after step " in caplog.text
