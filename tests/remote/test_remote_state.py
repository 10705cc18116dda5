"""A remote model with torch's own tools: state dicts, zeroed gradients, other optimizers."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch

from tests.helpers.checkpoints import record_of
from tests.helpers.imitations.load_first import LOADINGS, loading
from tinker_lightning import Datum, RemoteAdamW, RemoteLM
from tinker_lightning.errors import InvalidInput, NotFound
from tinker_lightning.remote.saved_state import SavedState

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tinker_lightning.client import ServiceClient

DATA = [Datum.from_tokens(list(b"All happy families are alike"))]


@pytest.fixture(params=LOADINGS)
def service(request: pytest.FixtureRequest) -> Iterator[ServiceClient]:
    with loading(request.param) as service:
        yield service


def step(lm: RemoteLM, optimizer: RemoteAdamW) -> None:
    (-torch.cat(lm(DATA)).mean()).backward()
    optimizer.step()
    optimizer.zero_grad()


def logprobs(lm: RemoteLM) -> torch.Tensor:
    with torch.no_grad():
        return torch.cat(lm(DATA))


def test_a_state_dict_names_a_state_on_the_server_and_restores_it(service: ServiceClient, tmp_path: Path) -> None:
    lm = RemoteLM(service.create_lora_training_client("tiny", rank=4, seed=1))
    optimizer = RemoteAdamW(lm.parameters(), lr=1e-2)
    step(lm, optimizer)
    torch.save({"model": lm.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "both.pt")
    trained = logprobs(lm)
    step(lm, optimizer)
    twice = logprobs(lm)

    saved = torch.load(tmp_path / "both.pt", weights_only=True)
    other = RemoteLM(service.create_lora_training_client("tiny", rank=4, seed=2))
    other.load_state_dict(saved["model"])
    assert torch.equal(logprobs(other), trained)
    again = RemoteAdamW(other.parameters(), lr=1e-2)
    again.load_state_dict(saved["optimizer"])
    step(other, again)
    assert torch.equal(logprobs(other), twice)  # with Adam's moments


def test_a_state_is_saved_once_while_nothing_is_trained(service: ServiceClient) -> None:
    lm = RemoteLM(service.create_lora_training_client("tiny", rank=4))
    optimizer = RemoteAdamW(lm.parameters())
    step(lm, optimizer)
    first, second = record_of(lm.state_dict()["_extra_state"])["path"], lm.save()
    assert first == second
    step(lm, optimizer)
    assert lm.save() != first


def test_a_model_that_was_never_used_saves_nothing() -> None:
    def never() -> None:
        raise AssertionError("a state dict must not open a session")

    assert RemoteLM(never).state_dict()["_extra_state"].numel() == 0


def test_a_missing_state_is_reported_with_its_path(service: ServiceClient) -> None:
    lm = RemoteLM(service.create_lora_training_client("tiny", rank=4))
    state = SavedState("tinker://nobody/weights/never-saved", "tiny", 4, 0)
    with pytest.raises(NotFound, match="never-saved: there is no such checkpoint"):
        lm.load_state_dict({"handle": torch.zeros(()), "_extra_state": state.to_tensor()})


@pytest.mark.parametrize("foreach", [None, True, False])
def test_zeroing_a_gradient_in_place_drops_the_window(service: ServiceClient, foreach: bool | None) -> None:
    lm = RemoteLM(service.create_lora_training_client("tiny", rank=4))
    local = torch.nn.Parameter(torch.ones(2))
    optimizer = RemoteAdamW([lm.handle, local], lr=1e-2)
    optimizer.defaults["foreach"] = foreach
    (-torch.cat(lm(DATA)).mean() * local.sum()).backward()
    optimizer.zero_grad(set_to_none=False)
    assert lm.handle.grad is None
    assert local.grad is not None
    assert not local.grad.any()


def test_another_optimizer_raises_and_names_remote_adamw(service: ServiceClient) -> None:
    lm = RemoteLM(service.create_lora_training_client("tiny", rank=4))
    (-torch.cat(lm(DATA)).mean()).backward()
    with pytest.raises(InvalidInput, match="Step with RemoteAdamW"):
        torch.optim.SGD(lm.parameters(), lr=1.0).step()
    assert lm.handle.grad is not None
    assert repr(lm.handle.grad) == "RemoteGradient(on the server)"
