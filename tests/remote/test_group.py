"""Further remote models in a module: resumed, their states counted, and their failures raised, as the first one's."""

from __future__ import annotations

import concurrent.futures
import itertools
import threading
import time
from typing import TYPE_CHECKING, Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

from tests.helpers.checkpoints import records_in
from tests.helpers.soaking import mostly_soak
from tests.helpers.trainers import DATA, SMALL, loader, quiet
from tinker_lightning import RemoteAdamW, RemoteLM, RemoteModule
from tinker_lightning.client.futures import TinkerFuture
from tinker_lightning.errors import InvalidInput, OperationFailed, TinkerLightningError
from tinker_lightning.remote.lm import delete_state, remotes_of, wait_for_all
from tinker_lightning.server import EmbeddedTrainer
from tinker_lightning.testing import embedded_service

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

pytestmark = [*SMALL, pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`, callbacks")]


class Second(RemoteModule):
    """A module with a second remote model."""

    def __init__(self, client: Any, other: Any) -> None:
        super().__init__(client, learning_rate=1e-2)
        self.other = self.made(other)

    def made(self, client: Any) -> Any:
        return RemoteLM(client)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        del batch_idx
        data = self.datums(batch)
        return -torch.cat([*self.lm(data), *getattr(self.other, "lm", self.other)(data)]).mean()


class Nested(Second):
    """A second remote model, in a submodule."""

    def made(self, client: Any) -> Any:
        return RemoteModule(client)


class Plain(pl.LightningModule):
    """Two models in a module that is none of ours."""

    def __init__(self, client: Any, other: Any) -> None:
        super().__init__()
        self.lm, self.other = RemoteLM(client), RemoteLM(other)

    def training_step(self, batch: Any) -> torch.Tensor:
        return -torch.cat([*self.lm(batch), *self.other(batch)]).mean()

    def configure_optimizers(self) -> Any:
        return RemoteAdamW(self.parameters(), lr=1e-2)


KINDS: list[Any] = [Second, Nested, Plain]


class Server:
    """A trainer in this process."""

    def __init__(self, trainer: EmbeddedTrainer, service: Any) -> None:
        self.trainer = trainer
        self.service = service

    def client(self, seed: int) -> Any:
        return self.service.create_lora_training_client("tiny", rank=4, seed=seed)

    def module(self, kind: Any, seed: int = 1) -> Any:
        return kind(self.client(seed), self.client(seed + 1))

    def states(self) -> set[str]:
        return {summary.tinker_path for summary in self.trainer.store.listing() if summary.path.kind == "weights"}


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    trainer = EmbeddedTrainer(["tiny"], data_dir=tmp_path / "data")
    with embedded_service(trainer) as service:
        yield Server(trainer, service)
    trainer.close()


def named_by(file: Path) -> set[str]:
    """The paths of all states that a file names."""
    return {record["path"] for record in records_in(torch.load(file, weights_only=True)).values()}


def logprobs_of(module: Any) -> list[torch.Tensor]:
    with torch.no_grad():
        return [torch.cat(lm(DATA)) for lm in (module.lm, getattr(module.other, "lm", module.other))]


def assert_same(one: Any, other: Any) -> None:
    for a, b in zip(logprobs_of(one), logprobs_of(other), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize(
    ("kind", "strategy"),
    mostly_soak(itertools.product(KINDS, ["tinker", "auto"]), but=[(Nested, "tinker")]),
)
def test_a_run_resumes_with_all_its_models(kind: Any, strategy: str, server: Server, tmp_path: Path) -> None:
    options: dict[str, Any] = {"strategy": strategy, "accelerator": "cpu"}
    whole = server.module(kind)
    saves = ModelCheckpoint(tmp_path, "{epoch}", every_n_epochs=1, save_top_k=-1)
    quiet(max_epochs=2, callbacks=[saves], enable_checkpointing=True, **options).fit(whole, loader())
    resumed = server.module(kind, seed=7)
    quiet(max_epochs=2, **options).fit(resumed, loader(), ckpt_path=tmp_path / "epoch=0.ckpt")
    assert_same(resumed, whole)


class Saves(pl.Callback):
    """Writes a file after a batch, and one within the next, when its gradients are there."""

    def __init__(self, folder: Path, batch: int) -> None:
        self.folder = folder
        self.batch = batch

    def on_after_backward(self, trainer: pl.Trainer, *_: Any, **__: Any) -> None:
        if trainer.fit_loop.batch_idx == self.batch + 1:
            trainer.save_checkpoint(self.folder / "within.ckpt")

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any, **__: Any) -> None:
        if trainer.fit_loop.batch_idx == self.batch:
            trainer.save_checkpoint(self.folder / "after.ckpt")


@pytest.mark.parametrize("kind", mostly_soak([Second, Nested], but=[Second]))
def test_a_run_resumes_in_the_middle_of_the_windows_of_all_its_models(
    kind: Any, server: Server, tmp_path: Path
) -> None:
    whole = server.module(kind)
    quiet(max_epochs=1, accumulate_grad_batches=3, callbacks=[Saves(tmp_path, 0)]).fit(whole, loader())
    for file in ("after.ckpt", "within.ckpt"):
        windows = torch.load(tmp_path / file, weights_only=True)["tinker"]["windows"]
        assert [len(window) for window in windows.values()] == [1, 1], file
        resumed = server.module(kind, seed=7)
        quiet(max_epochs=1, accumulate_grad_batches=3).fit(resumed, loader(), ckpt_path=tmp_path / file)
        assert_same(resumed, whole)


@pytest.mark.parametrize("kind", mostly_soak(KINDS, but=[Nested]))
def test_a_state_dict_has_all_models(kind: Any, server: Server) -> None:
    module, other = server.module(kind), server.module(kind, seed=7)
    quiet().fit(module, loader())
    other.load_state_dict(module.state_dict())
    assert_same(other, module)


@pytest.mark.parametrize("kind", mostly_soak(KINDS, but=[Plain]))
def test_after_a_run_exactly_the_states_that_files_name_exist(kind: Any, server: Server, tmp_path: Path) -> None:
    saves = ModelCheckpoint(tmp_path, "{step}", every_n_train_steps=1, save_top_k=1)
    trainer = quiet(max_steps=4, callbacks=[saves], enable_checkpointing=True)
    trainer.fit(server.module(kind), loader())
    (file,) = tmp_path.glob("*.ckpt")
    assert server.states() == named_by(file)
    assert len(server.states()) == 2
    trainer.strategy.remove_checkpoint(file)
    assert server.states() == set()


@pytest.mark.parametrize("kind", mostly_soak(KINDS, but=[Nested]))
def test_a_file_saved_by_the_user_shares_no_state(kind: Any, server: Server, tmp_path: Path) -> None:
    saves = ModelCheckpoint(tmp_path / "callback", "{step}", every_n_train_steps=1, save_top_k=1)
    trainer = quiet(callbacks=[saves], enable_checkpointing=True)
    module = server.module(kind)
    trainer.fit(module, loader())
    trainer.save_checkpoint(tmp_path / "mine.ckpt")
    (file,) = (tmp_path / "callback").glob("*.ckpt")
    assert len(named_by(tmp_path / "mine.ckpt") | named_by(file)) == 4
    trainer.strategy.remove_checkpoint(file)
    assert server.states() == named_by(tmp_path / "mine.ckpt")
    loaded = server.module(kind, seed=7)
    quiet(max_epochs=1).fit(loaded, loader(), ckpt_path=tmp_path / "mine.ckpt")
    quiet(max_epochs=1).fit(module, loader(), ckpt_path=tmp_path / "mine.ckpt")
    assert_same(loaded, module)


def test_every_file_has_its_own_state_of_a_frozen_model(server: Server, tmp_path: Path) -> None:
    """So that a file can be moved away, and others removed."""

    class Frozen(Second):
        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            del batch_idx
            data = self.datums(batch)
            with torch.no_grad():
                reference = torch.cat(self.other(data))
            return -(torch.cat(self.lm(data)) - reference).mean()

    saves = ModelCheckpoint(tmp_path, "{step}", every_n_train_steps=1, save_top_k=-1)
    trainer = quiet(callbacks=[saves], enable_checkpointing=True)
    trainer.fit(server.module(Frozen), loader())
    files = sorted(tmp_path.glob("*.ckpt"))
    assert len(files) == 3
    assert len(server.states()) == 6
    for count, file in zip((4, 2, 0), files, strict=True):
        trainer.strategy.remove_checkpoint(file)
        assert len(server.states()) == count


class LastFails:
    """A client whose fourth step fails, when nobody asks any more."""

    def __init__(self, client: Any) -> None:
        self.client = client
        self.steps = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self.client, name)

    def optim_step(self, params: Any) -> Any:
        self.steps += 1
        if self.steps < 4:
            return self.client.optim_step(params)
        source: concurrent.futures.Future[Any] = concurrent.futures.Future()
        source.set_running_or_notify_cancel()
        threading.Timer(0.2, source.set_exception, [OperationFailed("the fourth step failed")]).start()
        return TinkerFuture(source, "optim_step 4")


@pytest.mark.parametrize(
    ("kind", "saves"),
    mostly_soak(itertools.product(KINDS, [False, True]), but=[(Second, False), (Nested, True), (Plain, False)]),
)
def test_the_failure_of_a_last_step_is_raised(kind: Any, saves: bool, server: Server, tmp_path: Path) -> None:
    module = kind(server.client(1), LastFails(server.client(2)))
    callbacks: list[Any] = [ModelCheckpoint(tmp_path, every_n_train_steps=4)] if saves else []
    with pytest.raises(OperationFailed, match="the fourth step failed"):
        quiet(max_steps=4, callbacks=callbacks, enable_checkpointing=saves).fit(module, loader())
    assert not list(tmp_path.glob("*.ckpt"))


def test_a_state_without_a_step_that_failed_is_not_saved(server: Server) -> None:
    lm = RemoteLM(LastFails(server.client(1)))
    optimizer = RemoteAdamW(lm.parameters())
    for _ in range(4):
        (-torch.cat(lm(DATA[:1])).mean()).backward()
        optimizer.step()
        optimizer.zero_grad()
    with pytest.raises(OperationFailed, match="the fourth step failed"):
        lm.state_dict()
    assert server.states() == set()


@pytest.mark.parametrize("kind", KINDS)
def test_several_processes_raise_for_every_module(kind: Any, server: Server) -> None:
    with pytest.raises(InvalidInput, match="this trainer would run 2 processes"):
        quiet(accelerator="cpu", devices=2).fit(server.module(kind), loader())


def test_what_a_nested_module_would_log_does_not_pile_up(server: Server) -> None:
    module = server.module(Nested)
    quiet().fit(module, loader())
    assert not module.other._deferred._waiting


def test_a_wait_with_a_limit_is_one_for_all(server: Server) -> None:
    module = server.module(Second)
    sources: list[concurrent.futures.Future[None]] = [concurrent.futures.Future() for _ in remotes_of(module)]
    for remote, source in zip(remotes_of(module), sources, strict=True):
        remote.backend.unread.add(TinkerFuture(source, "never"))
    began = time.monotonic()
    wait_for_all(module, 0.5)
    assert 0.5 <= time.monotonic() - began < 0.9
    for source in sources:
        source.set_result(None)


def test_a_state_is_deleted_where_it_is(server: Server, tmp_path: Path) -> None:
    elsewhere = EmbeddedTrainer(["tiny"], data_dir=tmp_path / "elsewhere")
    with embedded_service(elsewhere) as service:
        other = Server(elsewhere, service)
        module = Second(server.client(1), other.client(2))
        first, second = module.lm.save(), module.other.save()
        delete_state(module, second)
        assert (server.states(), other.states()) == ({first}, set())
        delete_state(module, second)
        assert module.other.save() != second
        delete_state(module, first)
        assert server.states() == set()
    elsewhere.close()


def test_a_server_that_cannot_delete_does_not_keep_others_from_it(server: Server) -> None:
    class Refuses(LastFails):
        def delete_checkpoint(self, *_: Any, **__: Any) -> None:
            raise TinkerLightningError("the disk is read-only")

    module = Second(Refuses(server.client(1)), server.client(2))
    module.lm.save()
    state = module.other.save()
    with pytest.raises(TinkerLightningError, match="read-only"):
        delete_state(module, state)
    assert state not in server.states()
