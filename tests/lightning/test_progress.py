"""The bar of a fit counts the steps that the server has finished; bars of the user are left alone."""

from __future__ import annotations

import io
import math
import re
import sys
import time
from concurrent.futures import Future
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint, RichProgressBar, TQDMProgressBar
from lightning.pytorch.demos.boring_classes import BoringModel
from lightning.pytorch.trainer.connectors import callback_connector

from tests.helpers.trainers import SMALL, OnServer, loader, new, quiet
from tests.helpers.waits import Distant
from tinker_lightning import RemoteModule
from tinker_lightning.client.futures import TinkerFuture
from tinker_lightning.lightning.progress import StepBar, StepCount, StepRichProgressBar, StepTQDMProgressBar
from tinker_lightning.testing import embedded_service

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tinker_lightning.client import ServiceClient

pytestmark = SMALL

BARS = [(True, StepRichProgressBar), (False, StepTQDMProgressBar)]


@pytest.fixture
def rich(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether Lightning finds the package rich, and would show its bar by default."""
    if hasattr(callback_connector, "_RICH_AVAILABLE"):
        monkeypatch.setattr(callback_connector, "_RICH_AVAILABLE", request.param)
    elif request.param:
        pytest.skip("this Lightning's default bar is never a Rich one")
    monkeypatch.setenv("COLUMNS", "140")


@pytest.fixture(scope="module")
def distant() -> Iterator[tuple[ServiceClient, Distant]]:
    """A client of a server that can be so far away that nothing comes back."""
    transports: list[Distant] = []

    def wrap(inner: Any) -> Distant:
        transports.append(Distant(inner))
        return transports[0]

    with embedded_service(wrap=wrap) as service:
        yield service, transports[0]


class FarAway(pl.Callback):
    """Keeps answers back until four steps are sent; sees what is counted after each."""

    def __init__(self, transport: Distant) -> None:
        self.seen: list[tuple[int, int]] = []
        self.metrics: list[dict[str, float]] = []
        self._transport = transport

    def on_train_batch_start(self, *_: Any) -> None:
        self._transport.is_far = True

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        bar = trainer.progress_bar_callback
        if isinstance(bar, StepBar) and bar.steps is not None:
            self.seen.append((bar.steps.finished, bar.steps.in_flight))
        self.metrics.append(dict(trainer.progress_bar_metrics))
        self._transport.is_far = trainer.global_step < 4


@pytest.mark.parametrize("strategy", ["tinker", "auto"])
@pytest.mark.parametrize(("rich", "kind"), BARS, indirect=["rich"])
def test_the_default_bar_counts_what_the_server_has_finished(
    rich: None,
    kind: type[StepBar],
    strategy: str,
    distant: tuple[ServiceClient, Distant],
    capsys: pytest.CaptureFixture[str],
) -> None:
    service, transport = distant
    far = FarAway(transport)
    trainer = quiet(max_steps=4, strategy=strategy, accelerator="cpu", enable_progress_bar=True, callbacks=[far])
    trainer.fit(new(service, OnServer), loader())
    assert type(trainer.progress_bar_callback) is kind
    assert far.seen == [(0, 1), (0, 2), (0, 3), (0, 4)]
    shown = capsys.readouterr().out
    assert re.search(r"4/4 steps.*\d tok/s.*train_loss", shown)
    assert "steps_done" not in shown
    if kind is StepTQDMProgressBar:  # the other one prints its last state only, because this is no terminal
        assert "0/4 steps, 3 in flight" in shown


@pytest.mark.parametrize("bar", [RichProgressBar, TQDMProgressBar])
def test_a_bar_of_the_user_stays_and_gets_the_counts_as_metrics(
    bar: Any, distant: tuple[ServiceClient, Distant]
) -> None:
    service, transport = distant
    own, far = bar(), FarAway(transport)
    trainer = quiet(max_steps=4, enable_progress_bar=True, callbacks=[far, own])
    trainer.fit(new(service, OnServer), loader())
    assert trainer.progress_bar_callback is own
    assert [(each["steps_done"], each["in_flight"]) for each in far.metrics] == [(0, 1), (0, 2), (0, 3), (0, 4)]
    assert (trainer.progress_bar_metrics["steps_done"], trainer.progress_bar_metrics["in_flight"]) == (4, 0)
    assert not {"steps_done", "in_flight"} & (trainer.logged_metrics.keys() | trainer.callback_metrics.keys())


def test_without_a_bar_nothing_is_added(distant: tuple[ServiceClient, Distant]) -> None:
    trainer = quiet()
    trainer.fit(new(distant[0], OnServer), loader())
    assert trainer.progress_bar_callback is None
    assert "steps_done" not in trainer.progress_bar_metrics


@pytest.mark.parametrize(("rich", "kind"), BARS, indirect=["rich"])
def test_the_bar_of_another_module_and_other_stages_are_lightnings_own(
    rich: None,
    kind: type[StepBar],
    distant: tuple[ServiceClient, Distant],
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    module = new(distant[0], OnServer)
    trainer = quiet(max_steps=2, enable_progress_bar=True, default_root_dir=tmp_path)
    trainer.fit(module, loader())
    trainer.validate(module, loader())
    trainer.test(module, loader())
    capsys.readouterr()
    trainer.fit_loop.epoch_loop.max_steps = 4
    trainer.fit(BoringModel())
    assert type(trainer.progress_bar_callback) is kind
    assert "steps" not in capsys.readouterr().out


def test_a_checkpoint_does_not_depend_on_the_bar(distant: tuple[ServiceClient, Distant], tmp_path: Path) -> None:
    def keys(*, bar: bool) -> Any:
        files = ModelCheckpoint(tmp_path / str(bar), "file", every_n_train_steps=2)
        trainer = quiet(max_steps=2, enable_progress_bar=bar, callbacks=[files], enable_checkpointing=True)
        trainer.fit(new(distant[0], RemoteModule), loader())
        checkpoint = torch.load(tmp_path / str(bar) / "file.ckpt", weights_only=True)
        return checkpoint["callbacks"].keys(), checkpoint["loops"]["fit_loop"]["state_dict"].keys(), checkpoint.keys()

    with_bar, without = keys(bar=True), keys(bar=False)
    assert [len(each) for each in with_bar] == [len(each) for each in without]
    assert with_bar[1:] == without[1:]


def test_the_pace_is_that_of_finished_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, trainer = [0.0], SimpleNamespace(global_step=100, max_steps=120, estimated_stepping_batches=120)
    monkeypatch.setattr(time, "monotonic", lambda: clock[0])
    sent: list[Future[None]] = [Future() for _ in range(8)]
    steps = StepCount(trainer, tokens=1000)  # type: ignore[arg-type]

    def pace() -> float | None:
        return steps.seconds_per_step

    for i, each in enumerate(sent, 1):
        steps.add(TinkerFuture(each, "optim_step"), 1000 + 50 * i)
        trainer.global_step += 1
    steps.update()
    assert (steps.describe_steps(), steps.describe_speed()) == ("100/120 steps, 8 in flight", "")
    assert pace() is None
    for i in range(4):
        clock[0] += 2
        sent[i].set_result(None)
        steps.update()
    assert (steps.describe_steps(), steps.describe_speed()) == ("104/120 steps, 4 in flight", "25 tok/s")
    assert pace() == 2
    clock[0] += 22  # the next step is late, and the time that is left grows
    assert pace() == 30 / 5
    trainer.global_step = 90  # a search for a learning rate has ended
    steps.update()
    assert pace() is None
    trainer.estimated_stepping_batches = -1  # a stream without a limit of steps
    assert steps.total == math.inf
    assert steps.describe_steps() == "86 steps, 4 in flight"


@pytest.mark.parametrize(("rich", "kind"), BARS, indirect=["rich"])
def test_the_bar_is_drawn_while_the_fit_waits(
    rich: None, kind: type[StepBar], distant: tuple[ServiceClient, Distant], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a terminal, every second; in a file, only if a step was finished meanwhile."""
    drawn: list[tuple[bool, int]] = []

    class Waits(pl.Callback):
        def on_train_batch_end(self, trainer: pl.Trainer, pl_module: Any, *_: Any) -> None:
            bar: Any = trainer.progress_bar_callback
            bar.waiting_for = "a test"
            monkeypatch.setattr(bar, "_draw", lambda steps, *_, with_metrics: drawn.append((with_metrics, steps.taken)))
            for is_terminal in (False, True):
                monkeypatch.setattr(sys.stdout, "isatty", lambda is_terminal=is_terminal: is_terminal)
                monkeypatch.setattr(bar, "_drawn", (1, -10.0))
                pl_module.lm.handle.remote.while_waiting()

    monkeypatch.setattr(sys, "stdout", io.StringIO())
    trainer = quiet(max_steps=1, enable_progress_bar=True, callbacks=[Waits()])
    trainer.fit(new(distant[0], RemoteModule), loader())
    assert [taken for with_metrics, taken in drawn if not with_metrics] in ([1], [0])


@pytest.mark.parametrize(("rich", "kind"), BARS, indirect=["rich"])
@pytest.mark.usefixtures("rich")
def test_the_bar_shows_that_a_checkpoint_is_saved(
    service: ServiceClient, kind: type[StepBar], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    draw, shown = StepBar.draw, list[str]()

    def spy(bar: StepBar, *args: Any, **kwargs: Any) -> None:
        shown.append(bar.waiting_for)
        draw(bar, *args, **kwargs)

    monkeypatch.setattr(StepBar, "draw", spy)
    callbacks = [ModelCheckpoint(tmp_path, every_n_train_steps=2)]
    trainer = quiet(callbacks=callbacks, enable_checkpointing=True, enable_progress_bar=True)
    trainer.fit(new(service, RemoteModule), loader())
    assert isinstance(trainer.progress_bar_callback, kind)
    assert "saving on the server" in shown
    assert shown[-1] == ""
