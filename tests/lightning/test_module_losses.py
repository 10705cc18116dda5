"""Losses of a `RemoteModule`: a custom loss, a server-side loss, and regularizers with either."""

from __future__ import annotations

import itertools
import math
import warnings
from typing import TYPE_CHECKING, Any

import lightning.pytorch as pl
import pytest
import torch

from tests.helpers.counting import count_passes
from tests.helpers.loss_fits import DATA, ByFunction, ByName, fit, weights_of
from tests.helpers.soaking import diagonal, first_only, mostly_soak
from tinker_lightning import Datum, Regularizer, RemoteModule, losses
from tinker_lightning.errors import InvalidLoss
from tinker_lightning.losses import custom, regularizers

if TYPE_CHECKING:
    from pathlib import Path

    from tinker_lightning.client import ServiceClient
    from tinker_lightning.server import EmbeddedTrainer

pytestmark = [
    pytest.mark.filterwarnings("ignore:You defined a `validation_step` but have no `val_dataloader`"),
    pytest.mark.filterwarnings("ignore:.*LeafSpec.* is deprecated"),
    pytest.mark.filterwarnings("ignore:.*smaller than the logging interval"),
]


@pytest.mark.parametrize("strategy", first_only(["tinker", "auto"]))
def test_a_loss_of_the_server_trains_in_one_pass_as_the_same_loss_does_here(
    stage: tuple[EmbeddedTrainer, ServiceClient], tmp_path: Path, strategy: str
) -> None:  # R1.11, R3.3, R5.7
    trainer, service = stage
    adam: dict[str, Any] = {"learning_rate": 1e-2, "eps": 1e-3}
    named, own = (
        kind(service.create_lora_training_client("tiny", rank=4, seed=1), **adam) for kind in (ByName, ByFunction)
    )
    passes = count_passes(named.lm.backend)
    by_name, by_function = fit(named, tmp_path, strategy=strategy), fit(own, tmp_path, strategy=strategy)
    assert passes == {"forward_backward": 4, "optim_step": 2}
    expected = weights_of(trainer, own)
    assert (weights_of(trainer, named) - expected).norm() <= 1e-6 * expected.norm()
    # The value comes late, under its own step, and is the mean over the window.
    first = [float(row["train_loss"]) for row in by_name.values()]
    assert sorted(by_name) == sorted(by_function) == [0, 1]
    assert all(math.isfinite(value) for value in first)
    assert by_name[1].keys() >= {"train_loss", "grad_norm"}


def test_the_late_value_is_that_of_the_loss(stage: tuple[EmbeddedTrainer, ServiceClient], tmp_path: Path) -> None:
    service = stage[1]
    module = ByName(service.create_lora_training_client("tiny", rank=4, seed=1), learning_rate=1e-2)
    before = service.create_lora_training_client("tiny", rank=4, seed=1)
    values = [before.forward(DATA[i : i + 2], "cross_entropy").result().metrics["loss:sum"] for i in (0, 2)]
    rows = fit(module, tmp_path)
    assert float(rows[0]["train_loss"]) == pytest.approx(sum(values) / 2, rel=1e-5)
    assert module.trainer.callback_metrics["train_loss"] == pytest.approx(float(rows[1]["train_loss"]))


def test_a_loss_made_of_its_value_raises(stage: tuple[EmbeddedTrainer, ServiceClient], tmp_path: Path) -> None:
    class Squared(ByName):
        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            return super().training_step(batch, batch_idx) ** 2

    module = Squared(stage[1].create_lora_training_client("tiny", rank=4, seed=1))
    with pytest.raises(InvalidLoss, match=r"pow is not a linear function .*but no other function of it has a gradient"):
        fit(module, tmp_path)
    assert module.lm.handle.remote.steps == 0


class Tempered(torch.nn.Module):
    """A loss with a parameter of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = torch.nn.Parameter(torch.ones(()))
        self.calls = 0

    def forward(self, _: list[Any], logprobs: list[torch.Tensor]) -> torch.Tensor:
        self.calls += 1
        return -torch.cat(logprobs).mean() * self.scale


def test_a_loss_may_be_a_module(stage: tuple[EmbeddedTrainer, ServiceClient], tmp_path: Path) -> None:  # R5.2
    class Learned(RemoteModule):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self.loss = Tempered()  # type: ignore[method-assign]

    module = Learned(stage[1].create_lora_training_client("tiny", rank=4), learning_rate=1e-2)
    fit(module, tmp_path)
    used: Any = module._modules["loss"]
    assert used.calls >= 2
    assert float(used.scale.detach()) != 1


@pytest.mark.parametrize("route", first_only(["server", "auto"]))
def test_every_route_logs_the_same_names_and_values(
    stage: tuple[EmbeddedTrainer, ServiceClient], tmp_path: Path, route: Any
) -> None:  # R2.4
    class Here(RemoteModule):
        loss = staticmethod(losses.cross_entropy)
        regularizers = (
            Regularizer(regularizers.sparsity, 5.0, "sparsity"),
            Regularizer(regularizers.entropy, lambda step: 0.5 * step, "entropy"),
        )

    class There(Here):
        pass

    Here.route, There.route = "two-pass", route
    adam: dict[str, Any] = {"learning_rate": 1e-2, "eps": 1e-3}
    here, there = (
        fit(kind(stage[1].create_lora_training_client("tiny", rank=4, seed=1), **adam), tmp_path, n=1)
        for kind in (Here, There)
    )
    assert here.keys() == there.keys() == {0, 1, 2, 3}
    for step, row in here.items():
        assert row.keys() >= {"train_loss", "loss_total", "base_loss/value", "base_loss/nll", "regularizer_total"}
        assert there[step].keys() == row.keys()
        for name, value in row.items():
            assert float(there[step][name]) == pytest.approx(float(value), rel=1e-5), name


def test_the_total_with_a_server_side_loss_is_the_mean_over_the_window(
    stage: tuple[EmbeddedTrainer, ServiceClient], tmp_path: Path
) -> None:
    seen: list[float] = []

    def recorded(data: list[Any], logprobs: list[torch.Tensor]) -> Any:
        value, metrics = regularizers.sparsity(data, logprobs)
        seen.append(value.item())
        return value, metrics

    class Both(ByName):
        route = "builtin"
        regularizers = (Regularizer(recorded, 5.0, "sparsity"),)

    client, before = (stage[1].create_lora_training_client("tiny", rank=4, seed=1) for _ in range(2))
    values = [before.forward(DATA[i : i + 2], "cross_entropy").result().metrics["loss:sum"] for i in (0, 2)]
    module = Both(client, learning_rate=1e-2)
    row = fit(module, tmp_path)[0]
    base, added = sum(values) / 2, 5.0 * sum(seen[:2]) / 2
    assert float(row["base_loss/value"]) == pytest.approx(base, rel=1e-5)
    assert float(row["loss_total"]) == float(row["train_loss"]) == pytest.approx(base + added, rel=1e-5)
    assert float(row["regularizer_total"]) == pytest.approx(added)
    assert "tokens:sum" not in row
    assert module.trainer.callback_metrics["loss_total"] == module.trainer.callback_metrics["train_loss"]


@pytest.mark.parametrize("where", first_only(["two-pass", "builtin"]))
def test_the_total_of_a_window_that_a_file_has_kept_is_whole(
    stage: tuple[EmbeddedTrainer, ServiceClient], tmp_path: Path, where: Any
) -> None:
    class Both(ByName):
        route = where
        regularizers = (Regularizer(regularizers.sparsity, 5.0, "sparsity"),)

    class SavesInTheMiddle(pl.Callback):
        def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
            if trainer.fit_loop.total_batch_idx == 0:
                trainer.save_checkpoint(tmp_path / "midst.ckpt")

    whole, resumed = (Both(stage[1].create_lora_training_client("tiny", rank=4, seed=1)) for _ in range(2))
    rows = fit(whole, tmp_path / "whole", callbacks=[SavesInTheMiddle()])
    assert fit(resumed, tmp_path / "resumed", ckpt_path=tmp_path / "midst.ckpt") == rows


def test_diagnostics_of_the_server_are_those_of_the_whole_window(
    stage: tuple[EmbeddedTrainer, ServiceClient], tmp_path: Path
) -> None:  # R4.5
    class OfLibrary(RemoteModule):
        loss = losses.cross_entropy  # type: ignore[assignment]

    module = OfLibrary(stage[1].create_lora_training_client("tiny", rank=4, seed=1))
    before = stage[1].create_lora_training_client("tiny", rank=4, seed=1)
    parts = [DATA[0:3], DATA[3:6], DATA[6:8]]
    told = [before.forward_backward_custom(part, losses.cross_entropy).result().metrics for part in parts]
    row = fit(module, tmp_path, n=3, size=3)[0]
    assert row.keys() == {"epoch", "step", "train_loss", "nll", "perplexity", "tokens", "grad_norm", "learning_rate"}
    for name in ("nll", "perplexity"):
        assert float(row[name]) == pytest.approx(sum(metrics[name] for metrics in told) / 3, rel=1e-5)
    assert float(row["tokens"]) == sum(metrics["tokens"] for metrics in told)


@pytest.mark.filterwarnings("ignore:`training_step` returned `None`")
@pytest.mark.parametrize(
    ("route", "skipped"),
    mostly_soak(
        itertools.product(["builtin", "two-pass"], [{0}, {1}, {2, 3}, {0, 4}]),
        but=[("builtin", {0, 4}), ("two-pass", {2, 3})],
    ),
)
def test_a_step_that_returns_none_is_not_part_of_the_mean(
    stage: tuple[EmbeddedTrainer, ServiceClient], tmp_path: Path, route: Any, skipped: set[int]
) -> None:
    class Skips(RemoteModule):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return None if batch_idx in skipped else super().training_step(batch, batch_idx)

    Skips.loss, Skips.route = "cross_entropy", route  # type: ignore[assignment]
    client = stage[1].create_lora_training_client("tiny", rank=4, seed=1)
    outputs = client.forward(DATA, "cross_entropy").result().loss_fn_outputs
    means = [-output["logprobs"].to_torch().mean().item() for output in outputs]
    # Learns next to nothing, so that the second window has the same weights.
    rows = fit(Skips(client, learning_rate=1e-12), tmp_path, n=4, size=1)
    for step in range(2):
        trained = [means[i] for i in range(4 * step, 4 * step + 4) if i not in skipped]
        assert float(rows[step]["train_loss"]) == pytest.approx(sum(trained) / len(trained), rel=1e-5)


@pytest.mark.parametrize(("strict", "route"), diagonal([False, True], ["two-pass", "server"]))
def test_a_zero_gradient_warns_once_with_the_name_of_the_loss(
    stage: tuple[EmbeddedTrainer, ServiceClient], tmp_path: Path, route: str, strict: bool
) -> None:
    def rounded(data: Any, logprobs: Any) -> Any:
        return losses.Batch(data, logprobs).logprobs.round().sum()

    rounded.__name__ = name = f"rounded_{route}_{strict}".replace("-", "_")
    kind: type[RemoteModule] = type("Module", (RemoteModule,), {"loss": staticmethod(rounded), "route": route})
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always" if strict else "default")
        fit(kind(stage[1].create_lora_training_client("tiny", rank=4, seed=1)), tmp_path)
    messages = [str(each.message) for each in caught if "the gradient of the loss" in str(each.message)]
    assert len(messages) == 1
    assert messages[0].startswith(f"the gradient of the loss {name} is zero")


@pytest.mark.parametrize("route", ["two-pass", "builtin"])
def test_a_zero_gradient_of_a_built_in_loss_warns_with_its_name(
    stage: tuple[EmbeddedTrainer, ServiceClient], tmp_path: Path, route: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(custom, "_WARNED_OF_ZERO", set())

    class Policy(RemoteModule):
        loss = "importance_sampling"  # type: ignore[assignment]

        def datums(self, batch: Any) -> Any:
            return [_sampled(datum).with_inputs(advantages=torch.zeros(datum.model_input.length)) for datum in batch]

    Policy.route = route  # type: ignore[assignment]
    with pytest.warns(UserWarning, match="the gradient of the loss importance_sampling is zero"):
        fit(Policy(stage[1].create_lora_training_client("tiny", rank=4, seed=1)), tmp_path)


class Mixed(RemoteModule):
    """Three losses of the server in each step, two of them one with other settings."""

    def training_step(self, batch: Any, _: int) -> torch.Tensor:
        sampled = [_sampled(datum) for datum in batch]
        clipped = [self.lm.server_loss(sampled, "ppo", {"clip_low_threshold": low}) for low in (0.1, 0.9)]
        return torch.stack([*clipped, self.lm.server_loss(batch, "cross_entropy")]).sum() / 2


def test_different_losses_of_a_step_keep_their_diagnostics_apart(
    stage: tuple[EmbeddedTrainer, ServiceClient], tmp_path: Path
) -> None:
    row = fit(Mixed(stage[1].create_lora_training_client("tiny", rank=4, seed=1)), tmp_path)[0]
    kinds = ("cross_entropy", "ppo", "ppo_2")
    assert sum(float(row[f"{kind}/value"]) for kind in kinds) == pytest.approx(float(row["train_loss"]))
    lengths = sum(datum.model_input.length for datum in DATA[:4])
    assert [float(row[f"{kind}/action_tokens"]) for kind in kinds[1:]] == [lengths] * 2
    assert float(row["cross_entropy/tokens"]) == lengths
    assert float(row["ppo/clip_fraction"]) < float(row["ppo_2/clip_fraction"])
    assert not [name for name in row if ":" in name or name == "loss_total"]


def _sampled(datum: Datum) -> Datum:
    """A datum as the policy losses want it, of tokens that were a little likelier when they were sampled."""
    ones = torch.ones(datum.model_input.length)
    inputs: dict[str, Any] = {
        "target_tokens": datum.loss_fn_inputs["target_tokens"],
        "logprobs": -5 * ones,
        "advantages": ones,
    }
    return Datum(datum.model_input, inputs)
