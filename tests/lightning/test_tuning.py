"""Searches for a learning rate leave nothing behind; those for a batch size are refused."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from lightning.pytorch.callbacks import BatchSizeFinder, LearningRateFinder
from lightning.pytorch.tuner.tuning import Tuner
from packaging.version import Version

from tests.helpers.soaking import first_only
from tests.helpers.trainers import LIGHTNING, SMALL, OnServer, loader, logprobs_of, new, quiet
from tinker_lightning import RemoteModule
from tinker_lightning.errors import InvalidInput

if TYPE_CHECKING:
    from pathlib import Path

    from tinker_lightning.client import ServiceClient

pytestmark = SMALL


@pytest.mark.parametrize("strategy", first_only(["tinker", "auto"]))
def test_learning_rate_finder(service: ServiceClient, tmp_path: Path, strategy: str) -> None:
    settings: dict[str, Any] = {"default_root_dir": tmp_path, "strategy": strategy, "accelerator": "cpu", "devices": 1}
    finder = LearningRateFinder(min_lr=1e-4, max_lr=1.0, num_training_steps=15, early_stop_threshold=None)
    module = new(service, RemoteModule)
    trainer = quiet(callbacks=[finder], **settings)
    trainer.fit(module, loader())
    assert finder.optimal_lr is not None
    found = finder.optimal_lr.suggestion()
    rate = trainer.optimizers[0].param_groups[0]["lr"]
    assert module.hparams["learning_rate"] == module.learning_rate == found != 1e-2
    if Version("2.6") <= LIGHTNING:  # before, the rate was for the next fit, and a batch of the search was left over
        assert rate == found
        plain = new(service, RemoteModule, learning_rate=rate)
        plain.route = "retained"  # as the finder needs the value of the default loss
        quiet(**settings).fit(plain, loader())
        assert torch.equal(logprobs_of(module), logprobs_of(plain))  # the search has left nothing behind
    assert list(tmp_path.iterdir()) == []


class Again(LearningRateFinder):
    """Searches at the start of the fit and of two epochs."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.counts: list[int] = []

    def on_train_epoch_start(self, trainer: Any, module: Any) -> None:
        if trainer.current_epoch in (1, 2):
            self.lr_find(trainer, module)
            assert self.optimal_lr is not None
            self.counts.append(len(self.optimal_lr.results["lr"]))


@pytest.mark.skipif(Version("2.6") > LIGHTNING, reason="this Lightning's searches leave a batch over")
@pytest.mark.parametrize("strategy", ["tinker", "auto"])
def test_searches_in_the_middle_of_a_fit_end(service: ServiceClient, tmp_path: Path, strategy: str) -> None:
    settings: dict[str, Any] = {"default_root_dir": tmp_path, "strategy": strategy, "accelerator": "cpu", "devices": 1}
    search: dict[str, Any] = {"num_training_steps": 3, "early_stop_threshold": None, "update_attr": False}
    finder, module, plain = Again(**search), new(service, RemoteModule), new(service, RemoteModule)
    trainer = quiet(callbacks=[finder], max_epochs=4, **settings)
    trainer.fit(module, loader())
    assert finder.counts == [3, 3]
    assert (trainer.global_step, trainer.current_epoch) == (16, 4)
    plain.route = "retained"  # as the finder needs the value of the default loss
    quiet(max_epochs=4, **settings).fit(plain, loader())
    assert torch.equal(logprobs_of(module), logprobs_of(plain))  # the searches have left nothing behind


def test_a_tuned_learning_rate_is_the_next_fit_s(service: ServiceClient, tmp_path: Path) -> None:
    module = new(service, RemoteModule)
    trainer = quiet(default_root_dir=tmp_path)
    found = Tuner(trainer).lr_find(module, loader(), min_lr=1e-4, num_training=15, early_stop_threshold=None)
    assert found is not None
    trainer.fit(module, loader())
    assert trainer.optimizers[0].param_groups[0]["lr"] == found.suggestion() != 1e-2


def test_batch_size_finder_raises(service: ServiceClient) -> None:
    class Sized(RemoteModule):
        batch_size = 1

        def train_dataloader(self) -> Any:
            return loader(self.batch_size)

    with pytest.raises(InvalidInput, match="Choose a batch size"):
        quiet(callbacks=[BatchSizeFinder()]).fit(new(service, Sized))
    with pytest.raises(InvalidInput, match="Choose a batch size"):
        Tuner(quiet()).scale_batch_size(new(service, Sized))


def test_learning_rate_finder_without_a_loss_here_raises(service: ServiceClient) -> None:
    with pytest.raises(InvalidInput, match="route = 'two-pass'"):
        quiet(callbacks=[LearningRateFinder()]).fit(new(service, OnServer), loader())
