"""`schedule` and `warmup` of every module: torch's rates, exact resume, and what cannot be followed raises."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any, get_type_hints

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import LearningRateFinder, ModelCheckpoint
from lightning.pytorch.tuner.tuning import Tuner
from torch.optim.lr_scheduler import ConstantLR, CosineAnnealingLR, LinearLR, LRScheduler, SequentialLR
from torch.utils.data import DataLoader

from tests.helpers.resuming import Stream, loaders
from tests.helpers.soaking import first_only
from tests.helpers.trainers import SMALL, loader, logprobs_of, new, quiet
from tinker_lightning import RemoteAdamW, RemoteModule, collate
from tinker_lightning.errors import InvalidInput
from tinker_lightning.lightning.hyperparameters import ModelSettings

if TYPE_CHECKING:
    from pathlib import Path

    from torch.optim import Optimizer

    from tinker_lightning.client import ServiceClient

pytestmark = SMALL


class Joined(RemoteModule):
    """Takes batches of several loaders."""

    def datums(self, batch: Any) -> list[Any]:
        return [datum for part in batch.values() for datum in part] if isinstance(batch, dict) else batch


STEPS, WARMUP, PEAK = 10, 3, 1e-3


class Rates(pl.Callback):
    """Keeps the learning rate of each step."""

    def __init__(self) -> None:
        self.rates: list[float] = []

    def on_before_optimizer_step(self, *args: Any) -> None:
        self.rates.append(args[-1].param_groups[0]["lr"])


def of_torch(schedule: str, optimizer: Optimizer) -> LRScheduler:
    rise = LinearLR(optimizer, 1 / WARMUP, 1.0, WARMUP - 1)
    left = STEPS - WARMUP
    parts: dict[str, list[LRScheduler]] = {
        "constant": [ConstantLR(optimizer, 1.0)],
        "linear": [LinearLR(optimizer, 1.0, 0.0, left)],
        "cosine": [CosineAnnealingLR(optimizer, left)],
        "wsd": [ConstantLR(optimizer, 1.0), LinearLR(optimizer, 1.0, 0.0, STEPS // 5)],
    }
    ends = [WARMUP, STEPS - STEPS // 5][: len(parts[schedule])]
    return SequentialLR(optimizer, [rise, *parts[schedule]], ends)


@pytest.mark.filterwarnings("ignore:.*To get the last learning rate")  # of torch, by its own SequentialLR
@pytest.mark.parametrize(("schedule", "warmup"), [("constant", 3), ("linear", 3), ("cosine", 0.3), ("wsd", 0.25)])
def test_the_rates_are_those_of_torch(schedule: Any, warmup: float, service: ServiceClient) -> None:
    used = Rates()
    module = new(service, RemoteModule, schedule=schedule, warmup=warmup, learning_rate=PEAK)
    trainer = quiet(max_steps=-1, max_epochs=5, accumulate_grad_batches=2, callbacks=[used])  # 10 steps of 2 batches
    trainer.fit(module, loader())
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(()))], lr=PEAK)
    scheduler, expected = of_torch(schedule, optimizer), []
    for _ in range(STEPS):
        expected.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    assert used.rates == pytest.approx(expected)
    assert used.rates[0] == pytest.approx(PEAK / 3)


def test_without_a_schedule_there_is_no_scheduler(service: ServiceClient) -> None:
    assert type(new(service, RemoteModule).configure_optimizers()) is RemoteAdamW


def test_configure_optimizers_wins(service: ServiceClient) -> None:
    class Own(RemoteModule):
        def configure_optimizers(self) -> Any:
            return RemoteAdamW(self.parameters(), lr=3e-3)

    used = Rates()
    quiet(max_steps=2, callbacks=[used]).fit(new(service, Own, schedule="linear"), loader())
    assert used.rates == [3e-3, 3e-3]


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")  # by torchdata
@pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`")  # without the callback that saved
@pytest.mark.parametrize(
    ("schedule", "kind"),
    first_only([("cosine", "shuffled"), ("wsd", "unsized"), ("linear", "stateful"), ("constant", "several")]),
)
def test_a_fit_resumes_in_the_middle_of_a_schedule(
    schedule: Any, kind: str, service: ServiceClient, tmp_path: Path
) -> None:
    def fit(seed: int, *callbacks: pl.Callback, file: Path | None = None) -> tuple[torch.Tensor, list[float]]:
        pl.seed_everything(seed, verbose=False)
        used = Rates()
        module = new(service, Joined, schedule=schedule, warmup=0.4)
        checkpoints = bool(callbacks)
        trainer = quiet(max_steps=10, callbacks=[used, *callbacks], enable_checkpointing=checkpoints)
        trainer.fit(module, loaders(kind), ckpt_path=file)
        return logprobs_of(module), used.rates

    trained, rates = fit(1, ModelCheckpoint(tmp_path, "{step}", every_n_train_steps=1, save_top_k=-1))
    assert len(set(rates)) >= 4
    for step in (2, 7):  # in the warmup and in the first epoch of five steps, and after both
        resumed, left = fit(99, file=tmp_path / f"step={step}.ckpt")
        assert left == rates[step:]
        assert torch.equal(resumed, trained)


@pytest.mark.parametrize("settings", [{"schedule": "cosine"}, {"warmup": 0.1}])
def test_an_unknown_number_of_steps_raises(settings: Any, service: ServiceClient) -> None:
    endless = DataLoader(Stream(), batch_size=2, collate_fn=collate)
    with pytest.raises(InvalidInput, match=r"needs the number of steps.*Set max_steps of the Trainer"):
        quiet(max_epochs=1).fit(new(service, RemoteModule, **settings), endless)
    quiet(max_steps=2).fit(new(service, RemoteModule, **settings), endless)
    quiet(max_epochs=1).fit(new(service, RemoteModule, warmup=2), endless)  # which needs no number


def test_a_schedule_that_nothing_would_step_raises(service: ServiceClient) -> None:
    class Manual(RemoteModule):
        def __init__(self, *args: Any, **settings: Any) -> None:
            super().__init__(*args, **settings)
            self.automatic_optimization = False

    with pytest.raises(InvalidInput, match="with manual optimization, nothing steps the schedule"):
        quiet().fit(new(service, Manual, schedule="linear"), loader())


def test_a_warmup_longer_than_the_fit_warns(service: ServiceClient) -> None:
    with pytest.warns(UserWarning, match="the fit has 1 steps, and ends before the learning rate has reached 0.01"):
        quiet(max_steps=1).fit(new(service, RemoteModule, warmup=1), loader())
    quiet(fast_dev_run=True).fit(new(service, RemoteModule, warmup=5), loader())


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"schedule": "cos"}, "schedule must be one of constant, linear, cosine, wsd, got 'cos'"),
        ({"warmup": -1}, "warmup must be a share of the steps"),
        ({"warmup": 1.5}, "or a whole number of steps, got 1.5"),
    ],
)
def test_wrong_settings_raise(settings: Any, message: str) -> None:
    with pytest.raises(InvalidInput, match=message):
        RemoteModule("tiny", **settings)


def test_a_search_for_a_rate_does_not_fight_the_schedule(service: ServiceClient, tmp_path: Path) -> None:
    search: dict[str, Any] = {"min_lr": 1e-4, "early_stop_threshold": None}
    module = new(service, RemoteModule, schedule="linear")
    finder = LearningRateFinder(num_training_steps=10, **search)
    with pytest.raises(InvalidInput, match=r"Search first: Tuner\(trainer\)\.lr_find"):
        quiet(callbacks=[finder], default_root_dir=tmp_path).fit(module, loader())
    used = Rates()
    trainer = quiet(max_steps=2, callbacks=[used], default_root_dir=tmp_path)
    found = Tuner(trainer).lr_find(module, loader(), num_training=15, **search)
    assert found is not None
    used.rates.clear()
    trainer.fit(module, loader())
    assert used.rates == [found.suggestion(), found.suggestion() / 2]  # type: ignore[operator]


def test_the_settings_of_recipes_are_the_arguments_of_a_module() -> None:
    arguments = inspect.signature(RemoteModule.__init__).parameters
    named = {name: each.annotation for name, each in arguments.items() if each.kind is each.KEYWORD_ONLY}
    assert {name: each.__forward_arg__ for name, each in ModelSettings.__annotations__.items()} == named
    assert get_type_hints(ModelSettings).keys() == named.keys()  # as a command line reads them
