"""The state dict of a `RemoteModule` names a state on the server, in checkpoint files and elsewhere."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import lightning.pytorch as pl
import pytest
import torch
from lightning import Fabric
from lightning.pytorch.callbacks import ModelCheckpoint

from tests.helpers.checkpoints import record_of, records_in, state_in
from tests.helpers.imitations.load_first import LOADINGS_IN_SOAK, loading
from tests.helpers.soaking import diagonal
from tests.helpers.trainers import SMALL, loader, logprobs_of, new, quiet
from tinker_lightning import RemoteModule
from tinker_lightning.errors import InvalidInput
from tinker_lightning.remote.lm import delete_state
from tinker_lightning.server import EmbeddedTrainer

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tinker_lightning.client import ServiceClient

ENTRY = "lm._extra_state"

pytestmark = SMALL


@pytest.fixture
def trainer(tmp_path: Path) -> Iterator[EmbeddedTrainer]:
    trainer = EmbeddedTrainer(["tiny"], data_dir=tmp_path / "data")
    yield trainer
    trainer.close()


@pytest.fixture(params=LOADINGS_IN_SOAK)
def service(request: pytest.FixtureRequest, trainer: EmbeddedTrainer) -> Iterator[ServiceClient]:
    with loading(request.param, trainer) as service:
        yield service


def states(trainer: EmbeddedTrainer) -> set[str]:
    return {summary.tinker_path for summary in trainer.store.listing() if summary.path.kind == "weights"}


def trained(service: ServiceClient, **options: Any) -> tuple[RemoteModule, Any]:
    module, trainer = new(service, RemoteModule), quiet(**options)
    trainer.fit(module, loader())
    return module, trainer


def test_a_saved_state_dict_restores_weights_and_moments(service: ServiceClient, tmp_path: Path) -> None:
    module, _ = trained(service)
    torch.save(module.state_dict(), tmp_path / "module.pt")
    other = new(service, RemoteModule)
    other.load_state_dict(torch.load(tmp_path / "module.pt", weights_only=True))
    assert torch.equal(logprobs_of(other), logprobs_of(module))
    for each in (module, other):
        quiet().fit(each, loader())
    assert torch.equal(logprobs_of(other), logprobs_of(module))


def test_fabrics_files_have_the_weights(service: ServiceClient, tmp_path: Path) -> None:
    module, _ = trained(service)
    fabric = Fabric(accelerator="cpu", devices=1)
    fabric.save(tmp_path / "fabric.ckpt", {"model": module})
    other = new(service, RemoteModule)
    fabric.load(tmp_path / "fabric.ckpt", {"model": other})
    assert torch.equal(logprobs_of(other), logprobs_of(module))


def test_a_module_without_a_model_yet_loads_a_state_dict(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    settings: dict[str, Any] = {"rank": 4, "base_url": "embedded"}
    with RemoteModule("tiny", **settings, seed=1, learning_rate=1e-2) as module:
        quiet().fit(module, loader())
        state, expected = module.state_dict(), logprobs_of(module)
    with RemoteModule("tiny", **settings, seed=2) as other:
        other.load_state_dict(state)
        assert torch.equal(logprobs_of(other), expected)
    with RemoteModule("tiny", rank=2, base_url="embedded") as other, pytest.raises(InvalidInput, match="rank"):
        other.load_state_dict(state)


def test_a_module_that_was_loaded_and_not_used_saves_its_own_state(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    with RemoteModule("tiny", rank=4, learning_rate=1e-2, base_url="embedded") as module:
        trainer = quiet()
        trainer.fit(module, loader())
        trainer.save_checkpoint(tmp_path / "file.ckpt")
        expected = logprobs_of(module)
    with RemoteModule.load_from_checkpoint(tmp_path / "file.ckpt") as loaded:
        state = loaded.state_dict()
        file = torch.load(tmp_path / "file.ckpt", weights_only=True)
        assert record_of(state[ENTRY])["path"].startswith("tinker://")
        assert record_of(state[ENTRY])["path"] != records_in(file)["lm"]["path"]  # which goes with its file
    with RemoteModule("tiny", rank=4, base_url="embedded") as other:
        other.load_state_dict(state)
        assert torch.equal(logprobs_of(other), expected)


def test_a_module_that_was_never_used_names_nothing(service: ServiceClient) -> None:
    state = RemoteModule("tiny").state_dict()
    assert state[ENTRY].numel() == 0
    fresh = RemoteModule("tiny")
    fresh.load_state_dict(state)
    assert not fresh.lm.handle.remote.is_created
    module, _ = trained(service)
    with pytest.raises(InvalidInput, match="names no state on the server"):
        module.load_state_dict(state)


@pytest.mark.parametrize(("strategy", "weights_only"), diagonal(["tinker", "auto"], [False, True]))
def test_a_checkpoint_saves_one_state_and_names_it_once(
    strategy: str, weights_only: bool, trainer: EmbeddedTrainer, service: ServiceClient, tmp_path: Path
) -> None:
    module, fit = trained(service, strategy=strategy, accelerator="cpu")
    fit.save_checkpoint(tmp_path / "file.ckpt", weights_only=weights_only)
    content = torch.load(tmp_path / "file.ckpt", weights_only=True)
    assert states(trainer) == {records_in(content)["lm"]["path"]}
    assert "path" not in content["tinker"]
    client = service.create_lora_training_client("tiny", rank=4, seed=2)
    loaded = RemoteModule.load_from_checkpoint(tmp_path / "file.ckpt", model=client, strict=True)
    assert torch.equal(logprobs_of(loaded), logprobs_of(module))
    other = new(service, RemoteModule)
    quiet(strategy=strategy, accelerator="cpu").test(other, loader(), ckpt_path=tmp_path / "file.ckpt", verbose=False)
    assert torch.equal(logprobs_of(other), logprobs_of(module))


def test_the_state_dict_of_a_file_can_be_loaded_alone(service: ServiceClient, tmp_path: Path) -> None:
    module, fit = trained(service)
    fit.save_checkpoint(tmp_path / "file.ckpt")
    content = torch.load(tmp_path / "file.ckpt", weights_only=True)
    other = new(service, RemoteModule)
    other.load_state_dict(content["state_dict"])
    assert torch.equal(logprobs_of(other), logprobs_of(module))


@pytest.mark.parametrize("first", ["file", "state dict"])
def test_a_state_dict_outlives_the_files_of_callbacks(
    first: str, trainer: EmbeddedTrainer, service: ServiceClient, tmp_path: Path
) -> None:
    """Nothing is trained between the two, but only one of them is removed."""
    kept: dict[str, Any] = {}

    class Dumps(pl.Callback):
        def on_train_batch_end(self, trainer: pl.Trainer, module: pl.LightningModule, *_: Any) -> None:
            if first == "state dict" and trainer.global_step == 3:
                kept.update(module.state_dict())

        def on_train_end(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
            del trainer
            if first == "file":
                kept.update(module.state_dict())

    saves = ModelCheckpoint(tmp_path, "{step}", every_n_train_steps=1, save_top_k=1)
    fit = quiet(callbacks=[Dumps(), saves], enable_checkpointing=True)
    fit.fit(new(service, RemoteModule), loader())
    (file,) = tmp_path.glob("*.ckpt")
    named = state_in(file)
    assert states(trainer) == {named, record_of(kept[ENTRY])["path"]}
    fit.strategy.remove_checkpoint(file)
    assert states(trainer) == {record_of(kept[ENTRY])["path"]}
    assert named != record_of(kept[ENTRY])["path"]


def test_the_state_of_a_loaded_state_dict_is_not_deleted_with_a_file(
    trainer: EmbeddedTrainer, service: ServiceClient, tmp_path: Path
) -> None:
    module, _ = trained(service)
    state = module.state_dict()
    other, fit = new(service, RemoteModule), quiet()
    other.load_state_dict(state)
    fit.validate(other, loader(), verbose=False)
    fit.save_checkpoint(tmp_path / "file.ckpt")
    fit.strategy.remove_checkpoint(tmp_path / "file.ckpt")
    assert states(trainer) == {record_of(state[ENTRY])["path"]}


def test_a_file_saved_by_hand_shares_no_state_with_files_of_callbacks(
    trainer: EmbeddedTrainer, service: ServiceClient, tmp_path: Path
) -> None:
    class ByHand(pl.Callback):
        def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
            trainer.save_checkpoint(tmp_path / "mine.ckpt")

    saves = ModelCheckpoint(tmp_path / "callback", "{step}", every_n_train_steps=1, save_top_k=1)
    quiet(callbacks=[ByHand(), saves], enable_checkpointing=True).fit(new(service, RemoteModule), loader())
    named = [state_in(file) for file in tmp_path.rglob("*.ckpt")]
    assert len(named) == 2
    assert states(trainer) == set(named)
    assert len(set(named)) == 2


def test_the_state_of_a_state_dict_can_be_found_and_deleted(trainer: EmbeddedTrainer, service: ServiceClient) -> None:
    module, _ = trained(service)
    state = module.state_dict()
    assert module.lm.save() == record_of(state[ENTRY])["path"]
    delete_state(module, module.lm.save())
    assert states(trainer) == set()
