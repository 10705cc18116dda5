"""Fits with random data, loaders, windows, validations and checkpoints, and what each of them should have trained.

What is expected is not computed here: the same loaders and the same trainer, with a model on this machine, say it.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import GradientAccumulationScheduler, ModelCheckpoint
from lightning.pytorch.utilities import CombinedLoader
from torch.utils.data import DataLoader, Dataset, IterableDataset

from tinker_lightning import Datum, RemoteModule, collate

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from pathlib import Path

    from torch import Tensor

    from tests.helpers.backends import Recorded
    from tinker_lightning.testing import RecordedRequest
    from tinker_lightning.types.requests import ForwardBackwardRequest

WARNINGS = [
    "ignore::lightning.fabric.utilities.warnings.PossibleUserWarning",
    "ignore:You defined a `validation_step` but have no `val_dataloader`",
    "ignore:Your `IterableDataset` has `__len__` defined",
    "ignore:.*could not find the monitored key",
    "ignore:.*LeafSpec.* is deprecated",
]
_VALIDATION = 200  # the first token of datums that are only scored
QUIET: dict[str, Any] = {
    "accelerator": "cpu",
    "devices": 1,
    "logger": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
}


@dataclass(frozen=True)
class Plan:
    """A fit: how to make its loaders, and the arguments of its trainer."""

    seed: int
    kind: str
    sizes: tuple[int, ...]
    batch_size: int
    shuffle: bool
    drop_last: bool
    workers: int
    accumulate: int | dict[int, int]
    validated: int
    checkpoint: dict[str, Any] | None
    strategy: str
    trainer: dict[str, Any]

    def loaders(self) -> Any:
        """New training loaders, whose order is always the same."""
        made = []
        for i, size in enumerate(self.sizes):
            ids = [1000 * i + number for number in range(size)]
            generator = torch.Generator().manual_seed(self.seed + i)
            data: Any = _Stream(ids, self.kind) if self.kind in _STREAMS else _Ids(ids)
            options: Any = {"collate_fn": collate, "num_workers": self.workers, "generator": generator}
            made.append(DataLoader(data, self.batch_size, self.shuffle, drop_last=self.drop_last, **options))
        if self.kind == "batches":
            return _Batches(made[0])
        if self.kind == "dict":
            return {f"loader {i}": loader for i, loader in enumerate(made)}
        if self.kind == "list":
            return made
        return CombinedLoader(made, self.kind) if self.kind in _MODES else made[0]  # type: ignore[arg-type]

    def fit(self, module: pl.LightningModule, folder: Path | None = None) -> None:
        """Runs it; with a folder with its strategy and checkpoints, else as Lightning alone would."""
        options: dict[str, Any] = {**QUIET, **self.trainer, "callbacks": [], "enable_checkpointing": False}
        if isinstance(self.accumulate, dict):
            options["callbacks"].append(GradientAccumulationScheduler(self.accumulate))
        else:
            options["accumulate_grad_batches"] = self.accumulate
        if folder is not None:
            options["strategy"] = self.strategy
            if self.checkpoint is not None:
                options["callbacks"].append(ModelCheckpoint(folder, **self.checkpoint))
                options["enable_checkpointing"] = True
        scored = [_datum(_VALIDATION + number) for number in range(self.validated)]
        validation: Any = DataLoader(scored, 2, collate_fn=collate) if scored else None  # type: ignore[arg-type]
        pl.Trainer(**options).fit(module, self.loaders(), validation)


_STREAMS = ("stream", "sized stream", "endless")
_MODES = ("min_size", "max_size", "max_size_cycle")
_SEVERAL = ("dict", "list", *_MODES)
_KINDS = ("sized", "sized", "sized", "stream", "stream", "sized stream", "endless", "batches", *_SEVERAL)


def draw(seed: int) -> Plan:
    """A plan; the same for the same seed."""
    dice = random.Random(seed)  # noqa: S311  # repeatable, not secret

    def chance(share: float) -> bool:
        return dice.random() < share

    kind = dice.choice(_KINDS)
    sizes = tuple(dice.randint(1, 14) for _ in range(dice.randint(1, 3) if kind in _SEVERAL else 1))
    batch_size = dice.choice((1, 1, 2, 3))
    validated = dice.choice((0, 1, 2, 5))
    shuffle = kind not in _STREAMS and chance(0.5)
    has_length = kind not in ("stream", "endless", "batches")
    trainer: dict[str, Any] = {"max_epochs": dice.randint(1, 3), "num_sanity_val_steps": dice.randint(0, 2)}
    if kind == "endless" or chance(0.3):
        trainer["max_steps"] = dice.randint(1, 6)
    if chance(0.4):
        trainer["limit_train_batches"] = dice.choice((1, 2, 3, 5, 8))
        if has_length and min(sizes) >= 2 * batch_size and chance(0.3):
            trainer["limit_train_batches"] = 0.5
    if kind == "endless" or ("max_steps" in trainer and has_length):
        trainer["max_epochs"] = dice.choice((-1, 100))
    if validated and chance(0.5):
        trainer |= {"val_check_interval": dice.randint(1, 7), "check_val_every_n_epoch": None}
    elif validated and has_length and chance(0.5):
        trainer["val_check_interval"] = dice.choice((0.25, 0.5))
    elif validated:
        trainer["check_val_every_n_epoch"] = dice.randint(1, 2)
    if validated and chance(0.3):
        trainer["limit_val_batches"] = 1
    if chance(0.2) and not shuffle:  # Lightning begins reloaded loaders twice, and shuffles them twice
        trainer["reload_dataloaders_every_n_epochs"] = dice.randint(1, 2)
    checkpoints: list[dict[str, Any] | None] = [
        None,
        {"every_n_train_steps": dice.randint(1, 3), "save_top_k": -1},
        {"every_n_epochs": 1, "save_last": True},
        {"monitor": "train_loss", "save_top_k": 1, "every_n_train_steps": 1},
        {"monitor": "val_loss" if validated else None, "save_top_k": 1},
    ]
    scheduled = {epoch: dice.randint(1, 5) for epoch in range(3)}
    return Plan(
        seed=seed,
        kind=kind,
        sizes=sizes,
        batch_size=batch_size,
        shuffle=shuffle,
        drop_last=has_length and min(sizes) >= batch_size and chance(0.2),
        workers=1 if chance(0.03) else 0,
        accumulate=scheduled if chance(0.25) else dice.choice((1, 2, 3, 4, 5, 8)),
        validated=validated,
        checkpoint=dice.choice(checkpoints),
        strategy="tinker" if chance(0.8) else "auto",
        trainer=trainer,
    )


@dataclass
class Window:
    """What lies between two steps: the micro-batches that were run forward, and those whose gradient was stepped on."""

    forward: list[list[int]] = field(default_factory=list)
    backward: list[list[int]] = field(default_factory=list)


def check(seed: int, recorded: Recorded, folder: Path) -> None:
    """Fails, and shows the plan, unless a fit has trained just what Lightning has a model on this machine train."""
    plan = draw(seed)
    client = recorded.service.create_lora_training_client("tiny", rank=1)
    recorded.record.requests.clear()
    plan.fit(_Remote(client, rank=1), folder)
    assert sent(recorded.record.requests) == expected(plan), plan


def expected(plan: Plan) -> list[Window]:
    """The windows of the same fit with a model on this machine; the last one has no step, so no gradient counts."""
    local = _Local()
    plan.fit(local)
    local.windows[-1].backward = []
    return local.windows


def sent(requests: list[RecordedRequest]) -> list[Window]:
    """The windows as a fit has sent them, by the numbers of its requests; the last one has no step.

    Fails where a number is missing or was used twice, and where a forward of training follows a backward of its window.
    """
    numbered: dict[int, Any] = {}
    for request in requests:
        endpoint = request.path.rsplit("/", 1)[1]
        if request.is_pass or endpoint in ("optim_step", "save_weights"):
            message = request.message
            number = message.seq_id if request.is_pass else message["seq_id"]
            assert number not in numbered, f"request {number} was sent twice"
            numbered[number] = message if request.is_pass else endpoint
    assert sorted(numbered) == list(range(1, len(numbered) + 1))
    windows = [Window()]
    for _, message in sorted(numbered.items()):
        if message == "optim_step":
            windows.append(Window())
        elif message != "save_weights" and (ids := _ids(_data(message, numbered))) is not None:
            if message.forward_only:
                assert not windows[-1].backward, f"the forward of {ids} is behind a backward of the same window"
                windows[-1].forward.append(ids)
            else:
                windows[-1].backward.append(ids)
    return windows


def _data(message: ForwardBackwardRequest, numbered: dict[int, Any]) -> list[Any]:
    """The datums of a pass; the gradient of a retained forward has those of the forward."""
    forward = message.loss_fn_config.get("forward")
    data: list[Any] = message.data if forward is None else numbered[int(forward)].data
    return data


class _Remote(RemoteModule):
    def datums(self, batch: Any) -> list[Any]:
        return _flat(batch)

    def loss(self, _: list[Any], logprobs: list[Tensor]) -> Any:
        return -torch.cat(logprobs).mean()


class _Local(pl.LightningModule):
    """Trains a number that nobody needs, and keeps what Lightning would have it do."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(()))
        self.windows = [Window()]

    def training_step(self, batch: Any) -> Tensor:
        ids = _ids(_flat(batch))
        assert ids is not None
        self.windows[-1].forward.append(ids)
        self._current = ids
        return self.weight * 1.0

    def on_before_zero_grad(self, _: Any) -> None:
        self.windows[-1].backward = []

    def on_after_backward(self) -> None:
        self.windows[-1].backward.append(self._current)

    def validation_step(self, _: Any) -> None:
        pass

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), 0.1)
        optimizer.register_step_post_hook(lambda *_: self.windows.append(Window()))
        return optimizer


class _Ids(Dataset[Datum]):
    def __init__(self, ids: list[int]) -> None:
        self._ids = ids

    def __len__(self) -> int:
        return len(self._ids)

    def __getitem__(self, index: int) -> Datum:
        return _datum(self._ids[index])


class _Stream(IterableDataset[Datum]):
    """Datums one after another: without a length, or for ever."""

    def __init__(self, ids: list[int], kind: str) -> None:
        self._ids = ids
        self._kind = kind
        if kind == "sized stream":
            self.__class__ = _SizedStream

    def __iter__(self) -> Iterator[Datum]:
        while True:
            yield from map(_datum, self._ids)
            if self._kind != "endless":
                return


class _Batches:
    """Any iterable of batches is a loader, too."""

    def __init__(self, loader: DataLoader[Datum]) -> None:
        self._loader = loader

    def __iter__(self) -> Iterator[list[Datum]]:
        return iter(self._loader)


class _SizedStream(_Stream):
    def __len__(self) -> int:
        return len(self._ids)


def _datum(number: int) -> Datum:
    """A datum that can be told from others by its first tokens."""
    return Datum.from_tokens([number % 256, number // 256, 1, 2])


def _ids(data: Iterable[Datum]) -> list[int] | None:
    """Which datums they are; None for those that are only scored."""
    tokens = [datum.model_input.tokens() for datum in data]
    ids = [int(each[0]) + 256 * int(each[1]) for each in tokens]
    return None if _VALIDATION <= ids[0] < 256 else ids


def _flat(batch: Any) -> list[Datum]:
    """The datums of one loader, or of several."""
    if isinstance(batch, Datum):
        return [batch]
    if batch is None:  # a loader that has come to its end before the others
        return []
    return [datum for part in (batch.values() if isinstance(batch, dict) else batch) for datum in _flat(part)]
