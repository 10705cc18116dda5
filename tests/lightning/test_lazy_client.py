"""Which states a module goes on from, and what it says of those that it does not."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch

from tests.helpers.trainers import SMALL, loader, logprobs_of, new, quiet
from tinker_lightning import RemoteModule
from tinker_lightning.errors import InvalidInput, NotFound, TinkerLightningError
from tinker_lightning.testing import embedded_service

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tinker_lightning.client import ServiceClient

pytestmark = SMALL


@pytest.fixture(scope="module")
def service() -> Iterator[ServiceClient]:
    with embedded_service() as service:
        yield service


@pytest.fixture(autouse=True)
def _own_states(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a module's own server saves outlasts it, so that the next one finds it."""
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))


def own(**settings: Any) -> RemoteModule:
    """A module that makes its model itself."""
    return RemoteModule(**{"model": "tiny", "rank": 4, "base_url": "embedded", "learning_rate": 1e-2, **settings})


def written(module: RemoteModule, tmp_path: Path) -> Path:
    trainer = quiet(max_steps=1)
    trainer.fit(module, loader())
    trainer.save_checkpoint(tmp_path / "file.ckpt")
    return tmp_path / "file.ckpt"


def resumed(module: RemoteModule, file: Path) -> None:
    quiet(max_steps=2).fit(module, loader(), ckpt_path=str(file))


def test_a_file_of_another_rank_than_a_clients_is_no_state_that_is_gone(service: ServiceClient, tmp_path: Path) -> None:
    file = written(new(service, RemoteModule), tmp_path)
    module = RemoteModule(service.create_lora_training_client("tiny", rank=8))
    with pytest.raises(InvalidInput, match="the checkpoint has rank 4, but this module 8"):
        resumed(module, file)
    resumed(new(service, RemoteModule), file)


@pytest.mark.parametrize("is_made", [False, True])
def test_a_file_of_another_adapter_is_refused(is_made: bool, tmp_path: Path) -> None:
    with own(train_unembed=False) as module:
        file = written(module, tmp_path)
    with own(train_mlp=False, train_unembed=False) as module:
        if is_made:
            logprobs_of(module)
        with pytest.raises(InvalidInput, match=r"has train_mlp=True, but this .* has (train_mlp=)?False"):
            resumed(module, file)
        assert module.lm.handle.remote.is_made == is_made
    with own(train_unembed=False) as module:
        resumed(module, file)
        assert module.lm.handle.remote.steps == 2


@pytest.mark.parametrize("is_made", [False, True])
def test_a_state_that_is_gone_is_named(is_made: bool, tmp_path: Path) -> None:
    with own() as module:
        file = written(module, tmp_path)
        path = torch.load(file, weights_only=True)["tinker"]["path"]
        module.delete_state(path)
    with own() as module:
        if is_made:
            logprobs_of(module)
        with pytest.raises(NotFound, match=f"{path} that the checkpoint names is not on the server"):
            resumed(module, file)


@pytest.mark.parametrize(("refusal", "seen"), [(NotFound, NotFound), (InvalidInput, InvalidInput)])
def test_a_client_that_cannot_tell_what_is_there_is_believed(
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


def test_a_file_knows_its_base_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TINKER_BASE_MODEL", "tiny")
    with own(model=None) as module:
        file = written(module, tmp_path)
        expected = logprobs_of(module)
    monkeypatch.delenv("TINKER_BASE_MODEL")
    with RemoteModule.load_from_checkpoint(file) as loaded:
        assert torch.equal(logprobs_of(loaded), expected)
    with own(model=None, rank=8) as module, pytest.raises(InvalidInput, match="has rank 4, but this module 8"):
        resumed(module, file)
    monkeypatch.setenv("TINKER_BASE_MODEL", "another")
    with pytest.raises(InvalidInput, match="is of tiny, but this module of another"):
        RemoteModule.load_from_checkpoint(file)
