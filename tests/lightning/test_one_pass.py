"""The default loss takes one pass: the same training and metrics as on two, with a value that arrives later (R5.7)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import EarlyStopping
from lightning.pytorch.loggers import CSVLogger

from tests.helpers.counting import count_passes
from tests.helpers.imitations import imitate
from tests.helpers.reference import bits
from tests.helpers.trainers import DATA, SMALL, loader, logprobs_of, new, quiet
from tinker_lightning import RemoteModule, ServiceClient, losses
from tinker_lightning.errors import Unsupported
from tinker_lightning.server import EmbeddedTrainer
from tinker_lightning.testing import embedded_service

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.helpers.imitations.serving import Kind

pytestmark = SMALL


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedTrainer]:
    server = EmbeddedTrainer(["tiny"], data_dir=tmp_path_factory.mktemp("data"), dtype=torch.float64)
    yield server
    server.close()


@pytest.fixture(scope="module")
def service(server: EmbeddedTrainer) -> Iterator[ServiceClient]:
    with embedded_service(server) as service:
        yield service


class Rows(CSVLogger):
    """Keeps what is logged, by step."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.rows: dict[int, dict[str, float]] = {}

    def log_metrics(self, metrics: dict[str, Any], step: int | None = None) -> None:
        self.rows.setdefault(step or 0, {}).update(metrics)


class Outputs(pl.Callback):
    """Reads the loss of each step."""

    def __init__(self) -> None:
        self.losses: list[float] = []

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, *_: Any) -> None:
        del trainer, pl_module
        self.losses.append(float(outputs["loss"]))


def test_metrics_and_weights_are_those_of_two_passes(service: ServiceClient, tmp_path: Path) -> None:  # R5.7, R0.4
    """With accumulation, a window that is shorter than the others, and validation."""
    rows, weights = [], []
    for route, passes in ("auto", {"forward_backward": 8}), ("two-pass", {"forward": 8, "forward_backward": 8}):
        module = new(service, RemoteModule, eps=1e-3)
        module.route = route  # type: ignore[assignment]
        sent = count_passes(module.lm.backend)
        logger, outputs = Rows(tmp_path), Outputs()
        trainer = quiet(max_epochs=2, accumulate_grad_batches=3, logger=logger, callbacks=[outputs])
        trainer.fit(module, loader(), loader(4))
        expected = {"forward": 0, "optim_step": 4, **passes}
        assert sent == {**expected, "forward": expected["forward"] + 2 * 2 + 2}  # and the validations
        assert torch.tensor(outputs.losses).isnan().all() == (route == "auto")
        rows.append(logger.rows)
        weights.append(logprobs_of(module))
    assert rows[0].keys() == rows[1].keys() >= {0, 1, 2, 3}
    for step, row in rows[1].items():
        assert rows[0][step] == pytest.approx(row, rel=1e-4), step
    assert rows[0][0].keys() >= {"train_loss", "nll", "perplexity", "tokens", "grad_norm"}
    assert torch.allclose(weights[0], weights[1], rtol=1e-4)


def test_early_stopping_sees_the_value_and_not_nan(service: ServiceClient) -> None:  # R5.3
    module = new(service, RemoteModule)
    stopping = EarlyStopping("train_loss", check_finite=True, check_on_train_epoch_end=True)
    quiet(max_epochs=2, callbacks=[stopping]).fit(module, loader())
    assert module.chosen_route().route == "builtin"
    assert stopping.stopped_epoch == 0  # where it is not for a value that is not finite
    assert 0 < stopping.best_score < 20


class Squared(RemoteModule):
    """A step that reads the value of the loss."""

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = super().training_step(batch, batch_idx)
        assert torch.isfinite(loss)
        return loss.square()


def test_a_training_step_that_calls_super_gets_the_value(service: ServiceClient) -> None:
    outputs, module = Outputs(), new(service, Squared)
    quiet(callbacks=[outputs]).fit(module, loader())
    assert module.chosen_route().route == "retained"
    assert torch.tensor(outputs.losses).isfinite().all()


@pytest.mark.parametrize("route", ["retained", "two-pass"])
def test_a_route_brings_the_value_back(service: ServiceClient, route: Any) -> None:
    outputs, module = Outputs(), new(service, RemoteModule)
    module.route = route
    quiet(callbacks=[outputs]).fit(module, loader())
    assert torch.tensor(outputs.losses).isfinite().all()


def test_without_a_trainer_that_logs_it_the_value_is_there(service: ServiceClient) -> None:
    module = new(service, RemoteModule)
    assert module.chosen_route().route == "retained"
    loss = module.chosen_route().loss(DATA, logprobs := module.lm(DATA))[0]
    assert torch.allclose(loss, -torch.cat(logprobs).mean())


class Stops(pl.Callback):
    """Writes a checkpoint in the middle of the second window."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        if trainer.fit_loop.epoch_loop.total_batch_idx == 3:
            trainer.save_checkpoint(self.path)


def test_a_run_resumes_within_a_window(server: EmbeddedTrainer, service: ServiceClient, tmp_path: Path) -> None:
    ends = []
    for resumed in (False, True):
        torch.manual_seed(0)
        module = new(service, RemoteModule)
        stops = [] if resumed else [Stops(tmp_path / "middle.ckpt")]
        trainer = quiet(max_epochs=2, accumulate_grad_batches=3, callbacks=stops)
        trainer.fit(module, loader(shuffle=True), ckpt_path=tmp_path / "middle.ckpt" if resumed else None)
        assert module.chosen_route().route == "builtin"
        ends.append((bits(server, module.lm.backend.model_id), trainer.callback_metrics["train_loss"]))  # type: ignore[attr-defined]
    assert ends[0] == ends[1]


@pytest.mark.parametrize("name", ["cross_entropy", "importance_sampling", "ppo", "cispo", "dro", "gspo"])
def test_functions_of_the_library_that_servers_know_need_no_upload(service: ServiceClient, name: str) -> None:
    module = new(service, RemoteModule)
    module.loss = getattr(losses, name)  # type: ignore[method-assign]
    assert module.chosen_route().route == "server"  # without a trainer, as before an overridden training_step
    module.trainer = quiet()
    chosen = module.chosen_route()
    assert (chosen.route, chosen.loss, chosen.is_of_library) == ("builtin", name, True)


@pytest.mark.parametrize("kind", ["skyrl", "tuft", "twinkle"])
def test_other_servers_take_one_pass_where_it_is_exact(kind: Kind, server: EmbeddedTrainer) -> None:  # R5.8
    """And the same change of the weights as with two passes; Twinkle's own loss is another one."""
    changes = []
    with imitate(kind, trainer=server) as imitation:
        settings: dict[str, Any] = {"api_key": imitation.behavior.api_key, "transport": imitation.transport}
        with ServiceClient(base_url="http://imitated", **settings) as service:
            client = service.create_lora_training_client("tiny", rank=4)
            start = client.save_state("start").result().path
            for route in ("auto", "two-pass"):
                client.load_state(start).result()
                module = RemoteModule(client, learning_rate=1e-2, eps=1e-3)
                module.route = route
                sent, before = count_passes(client), logprobs_of(module)
                quiet(max_steps=1, accumulate_grad_batches=2).fit(module, loader())
                assert sent["forward"] == 1 + (2 if route == "two-pass" or kind == "twinkle" else 0)
                changes.append(logprobs_of(module) - before)
    assert torch.allclose(changes[0], changes[1], atol=1e-4 * float(changes[1].abs().max()))


def test_a_server_of_an_unknown_kind_is_measured_first(server: EmbeddedTrainer) -> None:  # R5.8
    for kind, is_exact in ("together", True), ("skyrl", False):
        with imitate(kind, trainer=server) as imitation:  # type: ignore[arg-type]
            settings: dict[str, Any] = {"api_key": imitation.behavior.api_key, "transport": imitation.transport}
            with ServiceClient(base_url="http://imitated", dialect="json", **settings) as service:
                module = new(service, RemoteModule)
                module.trainer = quiet()
                if is_exact:
                    assert module.chosen_route().route == "builtin"
                    module.loss = losses.importance_sampling  # type: ignore[method-assign]  # is not measured
                    assert module.chosen_route().route == "two-pass"
                    module.route = "builtin"
                    assert module.chosen_route().route == "builtin"
                else:
                    with pytest.raises(Unsupported, match="would train wrong"):
                        module.chosen_route()
