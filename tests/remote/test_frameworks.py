"""Fabric and Accelerate wrap models, optimizers and loaders; a remote model behind their wrappers stays what it is."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from lightning import Fabric
from torch import Tensor, nn
from torch.utils.data import DataLoader

from tinker_lightning import Datum, RemoteAdamW, RemoteLM, collate
from tinker_lightning.errors import InvalidInput

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tinker_lightning.client import ServiceClient

DATA: Any = [Datum.from_tokens(list(text)) for text in (b"hello world, this is a text", b"a short one")]
FRAMEWORKS = ["plain torch", "Fabric", "Accelerate"]


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    """Accelerate keeps its settings for the whole process."""
    yield
    AcceleratorState._reset_state(reset_partial_state=True)


class Setup:
    """A remote model under a framework, with the framework's words for what every loop does."""

    def __init__(self, framework: str, remote: RemoteLM, adamw: RemoteAdamW) -> None:
        self.remote, self.adamw = remote, adamw
        self.model: Any = remote
        self.optimizer: Any = adamw
        self.backward: Callable[[Tensor], None] = lambda loss: loss.backward()
        self.clip: Callable[[float], Any] = lambda norm: nn.utils.clip_grad_norm_(remote.parameters(), norm)
        self.clip_value: Callable[[], object] = lambda: nn.utils.clip_grad_value_(remote.parameters(), 1.0)
        if framework == "Fabric":
            fabric = Fabric(accelerator="cpu", devices=1)
            self.model, self.optimizer = fabric.setup(remote, adamw)
            self.backward = fabric.backward
            self.clip = lambda norm: fabric.clip_gradients(self.model, self.optimizer, max_norm=norm)
            self.clip_value = lambda: fabric.clip_gradients(self.model, self.optimizer, clip_val=1.0)
        elif framework == "Accelerate":
            accelerator = Accelerator(cpu=True)
            self.model, self.optimizer = accelerator.prepare(remote, adamw)
            self.backward = accelerator.backward
            self.clip = lambda norm: accelerator.clip_grad_norm_(self.model.parameters(), norm)
            self.clip_value = lambda: accelerator.clip_grad_value_(self.model.parameters(), 1.0)

    def loss(self) -> Tensor:
        return -torch.cat(self.model(DATA)).mean()

    def logprobs(self) -> list[list[float]]:
        with torch.no_grad():
            return [logprobs.tolist() for logprobs in self.model(DATA)]


@pytest.fixture
def new(service: ServiceClient) -> Callable[..., Setup]:
    """Sets up models that begin alike."""

    def new(framework: str, **adam: Any) -> Setup:
        remote = RemoteLM(service.create_lora_training_client("tiny", rank=4, seed=1))
        return Setup(framework, remote, RemoteAdamW(remote.parameters(), lr=1e-2, **adam))

    return new


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_clipping_values_raises_and_costs_nothing(new: Callable[..., Setup], framework: str) -> None:
    """The gradient is on the server: a clip here would be one of nothing."""
    setup, untouched = new(framework), new(framework)
    for each in (setup, untouched):
        each.backward(each.loss())
    with pytest.raises(InvalidInput, match=r"that gradient is on the server .* clip_grad_norm_"):
        setup.clip_value()
    for each in (setup, untouched):
        each.optimizer.step()
    assert setup.logprobs() == untouched.logprobs()


def test_the_server_clips_the_same_whoever_asks(new: Callable[..., Setup]) -> None:
    found = {}
    cases = [*((name, 1e-3) for name in FRAMEWORKS), ("by the optimizer", 1e-3), ("unclipped", math.inf)]
    for framework, norm in cases:
        by_optimizer = norm if framework == "by the optimizer" else 0.0
        # An eps with which the size of a gradient counts.
        setup = new(framework, grad_clip_norm=by_optimizer, eps=1e-2)
        for _ in range(2):
            setup.backward(setup.loss() / 2)
            setup.backward(setup.loss() / 2)
            total = None if by_optimizer else setup.clip(norm)
            setup.optimizer.step()
            setup.optimizer.zero_grad()
        measured = (setup.adamw.sent[0].optim.result().metrics or {})["grad_norm"]
        assert measured > 0.1
        assert total is None or total.item() == float(total) == measured
        found[framework] = setup.logprobs()
    assert found.pop("unclipped") != found["plain torch"]
    assert all(logprobs == found["plain torch"] for logprobs in found.values())


@pytest.mark.parametrize("foreach", [True, False])
def test_a_norm_is_known_after_its_step(new: Callable[..., Setup], foreach: bool) -> None:
    setup = new("plain torch")
    setup.backward(setup.loss())
    norm = nn.utils.clip_grad_norm_(setup.remote.parameters(), 1.0, foreach=foreach)
    for read in (norm.item, lambda: norm > 1, lambda: torch.log(norm), lambda: f"{norm:.2f}"):
        with pytest.raises(InvalidInput, match=r"known after the step.*optimizer\.step\(\) first"):
            read()
    assert repr(norm) == "RemoteNorm(known after the step)"
    setup.optimizer.step()
    assert norm > 0
    assert torch.log(2 * norm).item() == pytest.approx(math.log(2 * norm.item()))
    assert f"{norm:.2f}" == f"{norm.item():.2f}"


def test_clips_that_the_server_cannot_do_raise_and_cost_nothing(new: Callable[..., Setup]) -> None:
    setup, untouched = new("plain torch"), new("plain torch")
    local = nn.Linear(1, 1)
    for each in (setup, untouched):
        each.backward(each.loss() + 0 * local(torch.ones(1)).sum())
    remote = list(setup.remote.parameters())
    cases: list[tuple[Any, dict[str, Any], str]] = [
        ([*remote, *local.parameters()], {"max_norm": 1.0}, "over a remote model and local parameters"),
        ([*remote, *untouched.remote.parameters()], {"max_norm": 1.0}, "over several models"),
        (remote, {"max_norm": 1.0, "norm_type": 1.0}, "norm_type must be 2"),
        (remote, {"max_norm": 0.0}, "max_norm must be positive"),
    ]
    for parameters, options, message in cases:
        with pytest.raises(InvalidInput, match=message):
            nn.utils.clip_grad_norm_(parameters, **options)
    for each in (setup, untouched):
        each.optimizer.step()
    assert setup.logprobs() == untouched.logprobs()


def test_a_gradient_after_the_clip_raises(new: Callable[..., Setup]) -> None:
    """In torch only the gradients before it would be clipped; Accelerate's users forget `sync_gradients`."""
    setup = new("plain torch")
    setup.backward(setup.loss())
    setup.clip(1.0)
    setup.clip(0.5)  # again is fine
    setup.backward(setup.loss())
    for act in (lambda: setup.clip(1.0), setup.optimizer.step):
        with pytest.raises(InvalidInput, match=r"Clip once, right before optimizer\.step\(\)"):
            act()
    setup.optimizer.zero_grad()
    setup.backward(setup.loss())
    setup.optimizer.step()  # and the clip is gone with the window
    assert len(setup.adamw.sent) == 1


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_zero_grad_drops_the_window(new: Callable[..., Setup], framework: str) -> None:
    setup = new(framework)
    before = setup.logprobs()
    setup.backward(setup.loss())
    setup.optimizer.zero_grad()
    setup.optimizer.step()
    assert not setup.adamw.sent
    assert setup.logprobs() == before


def test_what_is_behind_the_wrappers_can_be_reached(new: Callable[..., Setup]) -> None:
    fabric = new("Fabric")
    assert isinstance(fabric.optimizer, RemoteAdamW)
    assert fabric.model.backend is fabric.remote.backend
    assert [p.tolist() for p in fabric.model(fabric.model.send(DATA))] == fabric.logprobs()
    accelerate = new("Accelerate")
    assert accelerate.model is accelerate.remote
    assert accelerate.optimizer.optimizer is accelerate.adamw


def test_loaders_give_the_very_datums() -> None:
    loader = DataLoader(DATA, batch_size=2, collate_fn=collate)
    for prepared in (
        Fabric(accelerator="cpu", devices=1).setup_dataloaders(loader),
        Accelerator(cpu=True).prepare(loader),
    ):
        (batch,) = list(prepared)
        assert all(given is got for given, got in zip(DATA, batch, strict=True))


@pytest.mark.parametrize("precision", ["bf16-mixed", "bf16-true", "32-true"])
def test_precision_is_of_what_runs_here(new: Callable[..., Setup], precision: Any) -> None:
    """The server computes in its own; what comes from it is not rounded."""
    setup = new("plain torch")
    fabric = Fabric(accelerator="cpu", devices=1, precision=precision)
    model, optimizer = fabric.setup(setup.remote, setup.adamw)
    logprobs = model(DATA)
    assert {p.dtype for p in logprobs} == {torch.float32}
    assert [p.tolist() for p in logprobs] == setup.logprobs()
    fabric.backward(-torch.cat(logprobs).mean())
    optimizer.step()
    assert (setup.adamw.sent[0].optim.result().metrics or {})["grad_norm"] > 0


def test_a_loss_scaled_for_half_precision_raises(new: Callable[..., Setup]) -> None:
    setup = new("plain torch")
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(setup.loss()).backward()
    with pytest.raises(InvalidInput, match="that gradient is on the server"):
        scaler.step(setup.optimizer)
    assert not setup.adamw.sent


@pytest.mark.parametrize("framework", ["Fabric", "Accelerate"])
def test_local_parameters_in_separate_groups_are_clipped_locally(service: ServiceClient, framework: str) -> None:
    """R5.2: each side is clipped where its gradient is."""
    remote = RemoteLM(service.create_lora_training_client("tiny", rank=4, seed=1))
    local = nn.Linear(1, 1)
    groups = [{"params": remote.parameters(), "grad_clip_norm": 0.5}, {"params": local.parameters()}]
    adamw = RemoteAdamW(groups, lr=1e-2)
    setup = Setup(framework, remote, adamw)
    setup.backward(setup.loss() + 100 * local(torch.ones(1)).sum())
    norm = nn.utils.clip_grad_norm_(local.parameters(), 1.0)
    assert norm > 100
    assert torch.stack([p.grad.norm() for p in local.parameters() if p.grad is not None]).norm() == pytest.approx(1.0)
    before = local.weight.item()
    setup.optimizer.step()
    assert len(adamw.sent) == 1
    assert local.weight.item() != before
