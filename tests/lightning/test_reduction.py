"""One meaning of a loss wherever it runs: the same update, the same value, the same metrics."""

from __future__ import annotations

import csv
import functools
import itertools
from collections import defaultdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.loggers import CSVLogger
from torch.utils.data import DataLoader

from tests.helpers.loss_cases import batch, distillation
from tests.helpers.soaking import first_only, mostly_soak
from tinker_lightning import Datum, RemoteModule, collate, losses
from tinker_lightning.errors import InvalidDatum, InvalidInput
from tinker_lightning.server import EmbeddedTrainer
from tinker_lightning.testing import embedded_service

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tinker_lightning.client import ServiceClient

pytestmark = [
    pytest.mark.filterwarnings("ignore:You defined a `validation_step` but have no `val_dataloader`"),
    pytest.mark.filterwarnings("ignore:.*LeafSpec.* is deprecated"),
]

Stage = tuple[EmbeddedTrainer, "ServiceClient"]
Rows = dict[int, dict[str, float]]


@pytest.fixture(scope="module")
def stage(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage]:
    trainer = EmbeddedTrainer(["tiny"], data_dir=tmp_path_factory.mktemp("data"), dtype=torch.float64)
    with embedded_service(trainer) as service:
        yield trainer, service
    trainer.close()


def fitted(
    stage: Stage,
    folder: Path,
    data: list[Datum],
    *,
    size: int = 2,
    n: int = 2,
    clip: float | None = None,
    **attributes: Any,
) -> tuple[torch.Tensor, Rows]:
    """Fits a module with these class attributes; returns the weights and what was logged, by step."""
    trainer, service = stage
    kind: type[RemoteModule] = type("Module", (RemoteModule,), attributes)
    module = kind(service.create_lora_training_client("tiny", rank=4, seed=1), learning_rate=1e-2, eps=1e-3)
    logger = CSVLogger(folder, version=len(list(folder.glob("*/*"))))
    quiet: dict[str, Any] = {"enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False}
    fit = pl.Trainer(
        strategy="tinker",
        max_epochs=1,
        accumulate_grad_batches=n,
        gradient_clip_val=clip,
        logger=logger,
        log_every_n_steps=1,
        **quiet,
    )
    fit.fit(module, DataLoader(data, batch_size=size, collate_fn=collate))  # type: ignore[arg-type]
    rows: Rows = defaultdict(dict)
    with open(f"{logger.log_dir}/metrics.csv") as file:
        for row in csv.DictReader(file):
            rows[int(row["step"])] |= {name: float(value) for name, value in row.items() if value}
    _, adapter = trainer.registry.model(module.lm.backend.model_id).ready()  # type: ignore[attr-defined]
    return torch.cat([tensor.flatten() for tensor in adapter.weights.tensors.values()]), rows


@pytest.fixture(scope="module")
def defaults(
    stage: Stage, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[float | None, str], tuple[torch.Tensor, Rows]]:
    """What a module without a loss of its own gives, once for each setting."""

    @functools.cache
    def fit(clip: float | None, reduction: str) -> tuple[torch.Tensor, Rows]:
        return fitted(stage, tmp_path_factory.mktemp("default"), TEXTS, clip=clip, reduction=reduction)

    return fit


def assert_alike(got: tuple[torch.Tensor, Rows], expected: tuple[torch.Tensor, Rows]) -> None:
    assert (got[0] - expected[0]).norm() <= 1e-5 * expected[0].norm()
    assert got[1].keys() == expected[1].keys()
    for step, row in expected[1].items():
        assert got[1][step] == pytest.approx(row, rel=1e-4), step


# Texts of very different lengths, so that a sum and a mean differ, and micro-batches too.
TEXTS = [Datum.from_tokens(list(f"text {i}: {'hello world, ' * (i % 3)}".encode())) for i in range(5)]
SAME: dict[str, dict[str, Any]] = {
    "by name": {"loss": "cross_entropy"},
    "by name, two-pass": {"loss": "cross_entropy", "route": "two-pass"},
    "library": {"loss": losses.cross_entropy},
    "library, two-pass": {"loss": losses.cross_entropy, "route": "two-pass"},
}


# One for each kind in the ordinary run, all of them in tox -e soak.
SETTINGS = [(None, "mean"), (0.1, "sum"), (0.1, "mean"), (None, "sum")]


@pytest.mark.parametrize(
    ("kind", "clip", "reduction"),
    mostly_soak(
        itertools.product(SAME, [None, 0.1], ["mean", "sum"]),
        but=[(kind, *setting) for kind, setting in zip(SAME, SETTINGS, strict=True)],
    ),
)
def test_the_default_a_name_and_the_library_train_alike(
    stage: Stage, tmp_path: Path, defaults: Any, kind: str, clip: float | None, reduction: str
) -> None:  # R1.11, R5.7; the second window is short
    assert_alike(
        fitted(stage, tmp_path, TEXTS, clip=clip, reduction=reduction, **SAME[kind]), defaults(clip, reduction)
    )


def test_the_mean_is_that_of_torch(stage: Stage, tmp_path: Path) -> None:
    _, rows = fitted(stage, tmp_path, TEXTS, loss="cross_entropy")
    client = stage[1].create_lora_training_client("tiny", rank=4, seed=1)
    outputs = client.forward(TEXTS, "cross_entropy").result().loss_fn_outputs
    logprobs = [output["logprobs"].to_torch() for output in outputs]
    means = [-torch.cat(logprobs[i : i + 2]).mean().item() for i in (0, 2)]
    assert rows[0]["train_loss"] == pytest.approx(sum(means) / 2, rel=1e-5)
    _, rows = fitted(stage, tmp_path, TEXTS, loss="cross_entropy", reduction="sum")
    sums = [-torch.cat(logprobs[i : i + 2]).sum().item() for i in (0, 2)]
    assert rows[0]["train_loss"] == pytest.approx(sum(sums) / 2, rel=1e-5)


LIKELIHOOD = {"nll", "perplexity", "tokens"}
POLICY = {"ratio", "kl_old_new", "action_tokens"}
REWARDS = {"rewards/chosen", "rewards/rejected", "rewards/margins", "rewards/accuracies", "chosen_nll"}
CLIPPED = POLICY | {"clip_fraction"}
METRICS = {
    "cross_entropy": LIKELIHOOD,
    "topk_distillation": {"teacher_mass", "student_mass", "agreement"},
    "importance_sampling": POLICY,
    "ppo": CLIPPED,
    "cispo": CLIPPED,
    "dro": POLICY,
    "gspo": CLIPPED,
    "grpo": CLIPPED | {"kl"},
    "reinforce": {"reward", "advantage_rms", "action_nll"},
    "kl_regularized": LIKELIHOOD | {"kl"},
    **dict.fromkeys(("dpo", "ipo", "orpo"), REWARDS),
    "kto": REWARDS | {"kl"},
    "contrastive": {"accuracy", "score_margin"},
}
PROTOCOL = ("cross_entropy", "importance_sampling", "ppo", "cispo", "dro", "gspo")
EVERY_STEP = {"epoch", "step", "train_loss", "grad_norm", "learning_rate"}


@functools.cache
def data_for(name: str) -> list[Datum]:
    made = [(distillation if name == "topk_distillation" else batch)(seed)[0] for seed in range(2)]
    return [datum for part in made for datum in part][: 8 if name == "topk_distillation" else 4]


@pytest.mark.parametrize("name", mostly_soak(METRICS, but=["cross_entropy", "dro", "contrastive"]))
def test_every_route_logs_the_same_metrics(stage: Stage, tmp_path: Path, name: str) -> None:
    """The names are those of the table in docs/losses.md."""
    data = data_for(name)
    size = 4 if name == "kto" else 2  # two answers of KTO, one with each label
    here = fitted(stage, tmp_path, data, n=1, size=size, loss=getattr(losses, name), route="two-pass")
    for row in here[1].values():
        assert row.keys() == METRICS[name] | EVERY_STEP
    assert_alike(fitted(stage, tmp_path, data, n=1, size=size, loss=getattr(losses, name), route="server"), here)
    if name in PROTOCOL:
        assert_alike(fitted(stage, tmp_path, data, n=1, loss=name, route="builtin"), here)


def test_the_table_in_the_docs_names_the_metrics() -> None:
    lines = (Path(__file__).parents[2] / "docs" / "losses.md").read_text(encoding="utf-8").splitlines()
    table = {line.split("|")[1].strip(" `"): line.split("|")[4] for line in lines if line.startswith("| `")}
    for name, metrics in METRICS.items():
        assert {each.strip(" `") for each in table[name].split(",")} == metrics, name


@pytest.mark.filterwarnings("ignore:the gradient of the loss ppo is zero")
@pytest.mark.parametrize("route", ["two-pass", "server", "builtin"])
def test_a_metric_without_a_value_is_absent(stage: Stage, tmp_path: Path, route: str) -> None:
    def sampled(advantage: float) -> Datum:
        inputs: dict[str, Any] = {"logprobs": [-5.0, -5.0], "advantages": [0.0, advantage]}
        return Datum.from_targets([5, 6], [6, 7], **inputs)

    loss = "ppo" if route == "builtin" else losses.ppo
    data = [sampled(advantage) for advantage in (1.0, 0.0, 2.0)]
    _, rows = fitted(stage, tmp_path, data, n=1, size=1, loss=loss, route=route)
    assert [set(rows[step]) - EVERY_STEP for step in range(3)] == [CLIPPED, {"action_tokens"}, CLIPPED]


@pytest.mark.parametrize("weights", first_only([[1.0, -2.0], [0.0, 0.0]]))
@pytest.mark.parametrize(
    "attributes", [{}, *SAME.values(), {"loss": losses.kl_regularized}], ids=["default", *SAME, "kl_regularized"]
)
def test_weights_without_a_mean_raise_and_name_the_sum(
    stage: Stage, tmp_path: Path, attributes: dict[str, Any], weights: list[float]
) -> None:
    data = [Datum.from_targets([5, 6], [6, 7], weights=weights, reference_logprobs=[-1.0, -1.0])]
    # Where no token has a weight, `kl_regularized` raises by itself.
    with pytest.raises(InvalidDatum, match=r'none of the tokens|reduction = "sum"'):
        fitted(stage, tmp_path, data, **attributes)
    if any(weights):
        fitted(stage, tmp_path, data, reduction="sum", **attributes)


def test_a_reduction_that_does_not_exist_raises(stage: Stage, tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match="reduction must be 'mean' or 'sum', got 'average'"):
        fitted(stage, tmp_path, TEXTS, reduction="average")


def test_losses_that_are_means_and_custom_ones_are_left_alone(stage: Stage, tmp_path: Path) -> None:
    def custom(_: Any, data: Any, logprobs: Any) -> Any:
        return losses.cross_entropy(data, logprobs)

    for loss in (losses.dpo, custom):
        mean, total = (fitted(stage, tmp_path, data_for("dpo"), loss=loss, reduction=one) for one in ("mean", "sum"))
        assert torch.equal(mean[0], total[0])
        assert mean[1] == total[1]
