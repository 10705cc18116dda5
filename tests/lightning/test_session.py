"""Saved states that a module continues from, and those that it rejects."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch

from tests.helpers.checkpoints import state_in
from tests.helpers.soaking import first_only
from tests.helpers.trainers import SMALL, loader, logprobs_of, new, quiet
from tinker_lightning import RemoteModule
from tinker_lightning.errors import InvalidInput, NotFound, TinkerLightningError

if TYPE_CHECKING:
    from pathlib import Path

    from tinker_lightning.client import ServiceClient

pytestmark = SMALL


@pytest.fixture(autouse=True)
def _own_states(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """States outlive the embedded trainer of a module, so that the next module finds them."""
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))


def own(**settings: Any) -> RemoteModule:
    """A module that creates its own training client."""
    return RemoteModule(**{"model": "tiny", "rank": 4, "base_url": "embedded", "learning_rate": 1e-2, **settings})


def written(module: RemoteModule, tmp_path: Path) -> Path:
    trainer = quiet(max_steps=1)
    trainer.fit(module, loader())
    trainer.save_checkpoint(tmp_path / "file.ckpt")
    return tmp_path / "file.ckpt"


def resumed(module: RemoteModule, file: Path) -> None:
    quiet(max_steps=2).fit(module, loader(), ckpt_path=str(file))


def test_a_file_of_another_rank_than_the_clients_is_rejected(service: ServiceClient, tmp_path: Path) -> None:
    file = written(new(service, RemoteModule), tmp_path)
    module = RemoteModule(service.create_lora_training_client("tiny", rank=8))
    with pytest.raises(InvalidInput, match="the checkpoint has rank 4, but this module has rank 8"):
        resumed(module, file)
    resumed(new(service, RemoteModule), file)


@pytest.mark.parametrize("is_created", first_only([True, False]))
def test_a_file_of_another_adapter_is_rejected(is_created: bool, tmp_path: Path) -> None:
    with own(train_unembed=False) as module:
        file = written(module, tmp_path)
    with own(train_mlp=False, train_unembed=False) as module:
        if is_created:
            logprobs_of(module)
        with pytest.raises(InvalidInput, match=r"has train_mlp=True, but this .* has (train_mlp=)?False"):
            resumed(module, file)
        assert module.lm.handle.remote.is_created == is_created
    with own(train_unembed=False) as module:
        resumed(module, file)
        assert module.lm.handle.remote.steps == 2


@pytest.mark.parametrize("is_created", [False, True])
def test_a_missing_state_is_reported_with_its_path_and_folders(
    is_created: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "first"))
    with own() as module:
        file = written(module, tmp_path)
        path = state_in(file)
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "second"))
    first, second = (tmp_path / name / "tinker_lightning" / "checkpoints" for name in ("first", "second"))
    with own() as module:
        if is_created:
            logprobs_of(module)
        missing = f"{path} that the checkpoint names is not on the server.* saved in {first}, and {second} was searched"
        with pytest.raises(NotFound, match=missing):
            resumed(module, file)


@pytest.mark.parametrize(("refusal", "seen"), [(NotFound, NotFound), (InvalidInput, InvalidInput)])
def test_without_checkpoint_exists_the_error_of_the_load_decides(
    refusal: type[TinkerLightningError],
    seen: type[TinkerLightningError],
    service: ServiceClient,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    file = written(new(service, RemoteModule), tmp_path)
    module = new(service, RemoteModule)

    def refuse(*_: Any) -> Any:
        raise refusal("not for you")

    monkeypatch.setattr(module.lm.backend, "load_state_with_optimizer", refuse)
    monkeypatch.setattr(module.lm.backend, "checkpoint_exists", refuse)  # as a server without a listing
    with pytest.raises(seen, match="not for you") as caught:
        resumed(module, file)
    assert ("not on the server" in str(caught.value)) == (seen is NotFound)


def test_a_module_without_a_base_model_takes_that_of_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TINKER_BASE_MODEL", "tiny")
    with own(model=None) as module:
        file = written(module, tmp_path)
        expected = logprobs_of(module)
    monkeypatch.delenv("TINKER_BASE_MODEL")
    with RemoteModule.load_from_checkpoint(file) as loaded:
        assert torch.equal(logprobs_of(loaded), expected)
    with own(model=None, rank=8) as module, pytest.raises(InvalidInput, match="has rank 4, but this module has rank 8"):
        resumed(module, file)
    monkeypatch.setenv("TINKER_BASE_MODEL", "another")
    with pytest.raises(InvalidInput, match="has base model tiny, but this module has base model another"):
        RemoteModule.load_from_checkpoint(file)
