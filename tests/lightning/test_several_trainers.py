"""One module in several trainers, also on threads."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

import pytest
from lightning.pytorch.callbacks import Callback

from tests.helpers.soaking import diagonal
from tests.helpers.trainers import SMALL, loader, new, quiet
from tinker_lightning import RemoteModule
from tinker_lightning.errors import InvalidInput

if TYPE_CHECKING:
    import lightning.pytorch as pl
    import torch

    from tinker_lightning.client import ServiceClient

pytestmark = SMALL


def test_one_module_in_two_trainers(service: ServiceClient) -> None:
    class Inner(Callback):
        def __init__(self, method: str) -> None:
            self.method = method

        def on_train_batch_start(self, _: Any, pl_module: pl.LightningModule, *__: Any) -> None:
            getattr(quiet(), self.method)(pl_module, loader())

    module = new(service, RemoteModule)
    quiet().fit(module, loader())
    quiet(max_steps=2).fit(module, loader())
    assert module.lm.handle.remote.steps == 5
    for method in ("fit", "validate"):
        with pytest.raises(InvalidInput, match="being run by another trainer"):
            quiet(callbacks=[Inner(method)]).fit(new(service, RemoteModule), loader())
    with pytest.raises(InvalidInput, match="being run by another trainer"):
        quiet(callbacks=[Inner("fit")]).fit(module, loader())
    quiet(max_steps=1).fit(module, loader())  # nothing is left of the trainer that failed
    assert module.lm.handle.remote.steps == 6

    class Catches(Inner):
        def on_train_batch_start(self, *args: Any) -> None:
            with pytest.raises(InvalidInput, match="being run by another trainer"):
                super().on_train_batch_start(*args)

    quiet(max_steps=2, callbacks=[Catches("validate")]).fit(module, loader())  # the first trainer's work goes on
    assert module.lm.handle.remote.steps == 8


class Lingers(Callback):
    """Is long at the end of a trainer that fails."""

    def __init__(self) -> None:
        self.is_there, self.may_go = threading.Event(), threading.Event()
        self.module: Any = self

    def on_exception(self, _: Any, pl_module: pl.LightningModule, *__: Any) -> None:
        self.module = pl_module
        self.is_there.set()
        assert self.may_go.wait(60)


@pytest.mark.parametrize(("method", "strategy"), diagonal(["fit", "validate"], ["tinker", "auto"]))
def test_a_trainer_that_comes_second_on_another_thread(service: ServiceClient, method: str, strategy: str) -> None:
    lingers = Lingers()
    refused: list[str] = []

    def second() -> None:
        plain = {"accelerator": "cpu", "devices": 1} if strategy == "auto" else {}
        try:
            getattr(quiet(strategy=strategy, callbacks=[lingers], **plain), method)(module, loader())
        except InvalidInput as error:
            refused.append(str(error))

    class Logs(RemoteModule):
        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            if batch_idx == 1:
                thread.start()
                assert lingers.is_there.wait(60)
                self.log("meanwhile", 1.0)
                assert self.trainer is first
            return super().training_step(batch, batch_idx)

        def on_train_batch_end(self, *_: Any) -> None:
            lingers.may_go.set()

    thread = threading.Thread(target=second)
    module, first = new(service, Logs), quiet()
    first.fit(module, loader())
    thread.join(60)
    assert "being run by another trainer" in refused[0]
    assert lingers.module is None
    assert module.lm.handle.remote.steps == 3
    quiet(max_steps=1).fit(module, loader())
    assert module.lm.handle.remote.steps == 4
