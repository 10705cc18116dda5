"""Quiet trainers, small modules and loaders, for tests of what Lightning does with a remote model."""

from __future__ import annotations

from importlib.metadata import version
from typing import TYPE_CHECKING, Any, TypeVar

import lightning.pytorch as pl
import pytest
import torch
from packaging.version import Version
from torch.utils.data import DataLoader

from tinker_lightning import Datum, RemoteAdamW, RemoteModule, SamplingParams, collate

if TYPE_CHECKING:
    from tinker_lightning.client import ServiceClient

M = TypeVar("M", bound=RemoteModule)

LIGHTNING = Version(version("lightning"))

DATA = [Datum.from_tokens(list(f"text {i}: hello".encode())) for i in range(8)]

# Lightning's advice for runs as small as these, and its use of a name that torch calls deprecated.
SMALL = [
    pytest.mark.filterwarnings("ignore:.*does not have many workers"),
    pytest.mark.filterwarnings("ignore:You defined a `validation_step` but have no `val_dataloader`"),
    pytest.mark.filterwarnings("ignore:.*LeafSpec.* is deprecated"),
    pytest.mark.filterwarnings("ignore:.*smaller than the logging interval"),
    pytest.mark.filterwarnings("ignore:.*exists and is not empty"),
]


def loader(batch_size: int = 2, count: int = len(DATA), **kwargs: Any) -> DataLoader[Datum]:
    """Four batches of two datums, if nothing else is said."""
    return DataLoader(DATA[:count], batch_size=batch_size, collate_fn=collate, **kwargs)  # type: ignore[arg-type]


def quiet(**kwargs: Any) -> pl.Trainer:
    """A trainer of three steps that says and writes nothing, if nothing else is said."""
    defaults: dict[str, Any] = {
        "strategy": "tinker",
        "max_steps": -1 if "max_epochs" in kwargs or "max_time" in kwargs else 3,
        "log_every_n_steps": 1,
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }
    return pl.Trainer(**{**defaults, **kwargs})


def new(service: ServiceClient, kind: type[M], **settings: Any) -> M:
    """A module on a new model, the same for each call."""
    client = service.create_lora_training_client("tiny", rank=4, seed=1)
    return kind(client, **{"learning_rate": 1e-2, **settings})


def logprobs_of(module: RemoteModule) -> torch.Tensor:
    """What the model says now."""
    with torch.no_grad():
        return torch.cat(module.lm(DATA))


class OnServer(RemoteModule):
    """A module whose loss runs on the server, so that its value comes late."""

    loss = "cross_entropy"  # type: ignore[assignment]


class Terse(RemoteModule):
    """A module that predicts a few tokens only."""

    def sampling_params(self) -> SamplingParams:
        return SamplingParams(max_tokens=4)


class Hybrid(Terse):
    """A remote model and two local layers behind it."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.backbone = torch.nn.Linear(1, 1)
        self.head = torch.nn.Linear(1, 1)

    def loss(self, _: list[Any], logprobs: list[torch.Tensor]) -> torch.Tensor:
        features = -torch.cat(logprobs)[:, None].to(self.head.weight.dtype)
        return torch.as_tensor(self.head(self.backbone(features)).square().mean())

    def configure_optimizers(self) -> Any:
        return RemoteAdamW([parameter for parameter in self.parameters() if parameter.requires_grad], lr=1e-2)
