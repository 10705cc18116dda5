"""`strategy="tinker"` trains on the CPU of every machine, also where Lightning finds GPUs to use."""

from __future__ import annotations

import itertools
import multiprocessing
from typing import TYPE_CHECKING, Any

import pytest
import torch
from lightning.fabric.accelerators.cuda import CUDAAccelerator as FabricCUDAAccelerator
from lightning.fabric.accelerators.mps import MPSAccelerator as FabricMPSAccelerator
from lightning.pytorch.accelerators import CPUAccelerator, CUDAAccelerator, MPSAccelerator
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.strategies.launchers import _SubprocessScriptLauncher
from torch.utils.data import DataLoader

from tests.helpers.soaking import mostly_soak
from tests.helpers.trainers import SMALL, Hybrid, loader, new, quiet
from tinker_lightning import RemoteModule
from tinker_lightning.errors import InvalidInput

if TYPE_CHECKING:
    from tinker_lightning.client import ServiceClient

pytestmark = [*SMALL, pytest.mark.filterwarnings("ignore:GPU available but not used")]


@pytest.fixture
def machine(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """A machine with four CUDA devices or a Mac's GPU; using one of them fails, for there is none."""
    kind = str(request.param)
    is_cuda = kind == "cuda"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: is_cuda)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4 if is_cuda else 0)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: not is_cuda)
    # Every torch optimizer asks whether the device captures a graph; builds with CUDA would look for the driver.
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda *_, **__: None)
    for cuda in (CUDAAccelerator, FabricCUDAAccelerator):
        monkeypatch.setattr(cuda, "is_available", staticmethod(lambda: is_cuda))
        monkeypatch.setattr(cuda, "auto_device_count", staticmethod(lambda: 4))
    for mps in (MPSAccelerator, FabricMPSAccelerator):
        monkeypatch.setattr(mps, "is_available", staticmethod(lambda: not is_cuda))
        monkeypatch.setattr(mps, "auto_device_count", staticmethod(lambda: 1))
    return kind


@pytest.mark.parametrize(
    ("machine", "accelerator"),
    mostly_soak(
        itertools.product(["cuda", "mps"], ["auto", "gpu", "cpu"]),
        but=[("cuda", "auto"), ("cuda", "cpu"), ("mps", "gpu")],
    ),
    indirect=["machine"],
)
def test_gpus_are_left_alone(service: ServiceClient, machine: str, accelerator: str) -> None:
    module = new(service, Hybrid)
    trainer = quiet(accelerator=accelerator, **({"devices": 1} if accelerator == "cpu" else {}))
    trainer.fit(module, loader(), loader(2, 2))
    (score,) = trainer.validate(module, loader(2, 2), verbose=False)
    trainer.predict(module, DataLoader(["text"], batch_size=1, collate_fn=list))  # type: ignore[arg-type]
    assert isinstance(trainer.accelerator, CPUAccelerator)
    assert module.device == module.head.weight.device == trainer.strategy.root_device == torch.device("cpu")
    assert module.lm.handle.remote.steps == 3
    assert score["val_loss"] > 0


@pytest.mark.parametrize("machine", ["cuda", "mps"], indirect=True)
def test_mixed_precision_is_the_cpu_s(service: ServiceClient, machine: str) -> None:
    class Looks(Hybrid):
        seen: tuple[Any, ...] = ()

        def loss(self, data: list[Any], logprobs: list[torch.Tensor]) -> torch.Tensor:
            self.seen += (self.head(torch.ones(1, 1)).dtype,)
            return super().loss(data, logprobs)

    module = new(service, Looks)
    quiet(precision="bf16-mixed").fit(module, loader())
    assert module.seen == (torch.bfloat16,) * 3


@pytest.mark.parametrize("machine", ["cuda"], indirect=True)
def test_half_precision_with_a_scaled_loss_raises(service: ServiceClient, machine: str) -> None:
    with pytest.raises(InvalidInput, match="MixedPrecision scales the loss"):
        quiet(precision="16-mixed").fit(new(service, RemoteModule), loader())


@pytest.mark.parametrize("asked", [{"devices": 2}, {"num_nodes": 2}], ids=["devices", "nodes"])
def test_several_processes_raise(service: ServiceClient, asked: dict[str, int]) -> None:
    with pytest.raises(InvalidInput, match=r"would run 2 processes.*devices=1, num_nodes=1"):
        quiet(accelerator="cpu", **{"devices": 1, **asked}).fit(new(service, RemoteModule), loader())


@pytest.mark.parametrize("asked", [{"devices": 2}, {"num_nodes": 2}], ids=["devices", "nodes"])
def test_several_processes_raise_without_the_strategy(
    service: ServiceClient, asked: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before a process is started."""
    started: list[Any] = []
    monkeypatch.setattr(_SubprocessScriptLauncher, "_call_children_scripts", started.append)
    trainer = quiet(strategy="auto", accelerator="cpu", **{"devices": 1, **asked})
    assert isinstance(trainer.strategy, DDPStrategy)
    with pytest.raises(InvalidInput, match=r"would run 2 processes.*devices=1, num_nodes=1"):
        trainer.fit(new(service, RemoteModule), loader())
    assert started == []


@pytest.mark.parametrize("strategy", ["ddp_spawn", "ddp_fork"])
def test_processes_that_would_be_spawned_raise(
    strategy: str, service: ServiceClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[Any] = []
    monkeypatch.setattr(multiprocessing.Process, "start", started.append)
    with pytest.raises(InvalidInput, match="would run 2 processes"):
        quiet(strategy=strategy, accelerator="cpu", devices=2).fit(new(service, RemoteModule), loader())
    assert started == []
