"""Retained forwards in `Trainer.fit`: fewer bytes, and the bits of two passes whatever the server forgets (R5.6)."""

from __future__ import annotations

import contextlib
import random
from typing import TYPE_CHECKING, Any

import httpx
import lightning.pytorch as pl
import pytest
import torch
from torch.utils.data import DataLoader

from tests.helpers.backends import QUICK
from tests.helpers.reference import bits
from tests.helpers.trainers import SMALL, new, quiet
from tinker_lightning import Datum, RemoteModule, ServiceClient, collate
from tinker_lightning.errors import TinkerLightningError
from tinker_lightning.server import EmbeddedTrainer, create_app
from tinker_lightning.testing import RecordingTransport

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

pytestmark = SMALL

DATA = [Datum.from_tokens(list(range(40 + i, 140 + 3 * i))) for i in range(8)]


class Squares(RemoteModule):
    """A custom loss, and a function that is called between each forward and its backward."""

    between: Callable[[], None] = staticmethod(lambda: None)

    def loss(self, _: list[Any], logprobs: list[torch.Tensor]) -> Any:
        self.between()
        return torch.cat(logprobs).square().mean(), {}


class Swappable(RecordingTransport):
    """Leads to a server that can be replaced by another one, as at the same address after a restart."""

    def lead_to(self, trainer: EmbeddedTrainer) -> None:
        self._inner = httpx.ASGITransport(create_app(trainer))


@contextlib.contextmanager
def serving(trainer: EmbeddedTrainer) -> Iterator[tuple[ServiceClient, Swappable]]:
    transport = Swappable(httpx.ASGITransport(create_app(trainer)))
    with ServiceClient(base_url="http://embedded", transport=transport, retry_policy=QUICK) as service:
        yield service, transport


def fitted(module: Squares, resume: Path | None = None, **settings: Any) -> Squares:
    """Two epochs of four batches, in windows of three, with look-ahead."""
    trainer = quiet(max_epochs=2, accumulate_grad_batches=3, **settings)
    data: DataLoader[Datum] = DataLoader(DATA, batch_size=2, collate_fn=collate)  # type: ignore[arg-type]
    trainer.fit(module, data, ckpt_path=resume)
    return module


def bits_of(trainer: EmbeddedTrainer, module: Squares) -> dict[str, bytes]:
    return bits(trainer, module.lm.backend.model_id)  # type: ignore[attr-defined]


@pytest.fixture
def trainer(tmp_path: Path) -> Iterator[EmbeddedTrainer]:
    trainer = EmbeddedTrainer(["tiny"], data_dir=tmp_path / "data")
    yield trainer
    trainer.close()


def test_a_step_sends_about_half_of_the_bytes_of_two_passes(trainer: EmbeddedTrainer) -> None:
    sent = {}
    with serving(trainer) as (service, transport):
        for route in ("retained", "two-pass"):
            module = new(service, Squares)
            module.route = route
            transport.requests.clear()
            fitted(module)
            sent[route] = sum(len(each.body) for each in transport.requests if each.is_pass)
    assert sent["retained"] <= 0.55 * sent["two-pass"]


def test_random_eviction_changes_no_bit(trainer: EmbeddedTrainer) -> None:
    with serving(trainer) as (service, transport):
        expected = bits_of(trainer, fitted(new(service, Squares)))
        transport.requests.clear()
        draw = random.Random(0)  # noqa: S311

        def evict() -> None:
            for key, forward in list(trainer.retained._forwards.items()):
                match draw.randrange(3):
                    case 0:
                        forward.take()  # the activations only
                    case 1:
                        trainer.retained._forwards.pop(key, None)  # the datums, too

        module = new(service, Squares)
        module.between = evict
        assert bits_of(trainer, fitted(module)) == expected
    kinds = [each.path.rsplit("/", 1)[1] for each in transport.requests if each.is_pass]
    assert kinds.count("forward_backward") > 0, "some backwards were sent again with their datums"
    assert kinds.count("retained_backward") == 8


class Saves(pl.Callback):
    """Writes a checkpoint after each epoch."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        if trainer.fit_loop.epoch_loop.batch_idx == 3:
            trainer.save_checkpoint(self.path)


def test_a_restart_between_forward_and_backward_is_reported_and_the_run_resumes(
    trainer: EmbeddedTrainer, tmp_path: Path
) -> None:
    """Models live in the server's memory, so the fit fails; from its last checkpoint it ends with the same bits."""
    with serving(trainer) as (service, _):
        expected = bits_of(trainer, fitted(new(service, Squares)))
    restarted = EmbeddedTrainer(["tiny"], data_dir=tmp_path / "data")
    calls = iter(range(100))
    with contextlib.closing(restarted):
        with contextlib.suppress(TinkerLightningError), serving(trainer) as (service, transport):
            module = new(service, Squares)
            module.between = lambda: transport.lead_to(restarted) if next(calls) == 5 else None
            with pytest.raises(TinkerLightningError, match="was restarted") as raised:
                fitted(module, callbacks=[Saves(tmp_path / "last.ckpt")])
        assert raised.value.operation in ("forward", "forward_backward")
        with serving(restarted) as (service, _):
            resumed = fitted(new(service, Squares), tmp_path / "last.ckpt")
            assert bits_of(restarted, resumed) == expected


def test_activations_are_freed_after_a_failed_loss_and_by_the_end_of_the_session(trainer: EmbeddedTrainer) -> None:
    with serving(trainer) as (service, _):
        module = new(service, Squares)

        def fail() -> None:
            raise ValueError("a bug in the loss")

        module.between = fail
        with pytest.raises(ValueError, match="a bug in the loss"):
            fitted(module)
        module.between = lambda: None
        fitted(module)
        assert not trainer.retained._forwards
        module.between = fail
        with pytest.raises(ValueError, match="a bug in the loss"):
            fitted(module)
        assert trainer.retained._forwards
        session_id = service.session.session_id
    trainer.scheduler.find(f"{session_id}:finish").future.result(60)
    assert not trainer.retained._forwards
