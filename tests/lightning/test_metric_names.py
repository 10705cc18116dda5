"""A loss may give its metrics any names: none is refused, and none is overwritten."""

from __future__ import annotations

import csv
import itertools
import math
from collections import defaultdict
from typing import TYPE_CHECKING, Any

import pytest
from lightning.pytorch.loggers import CSVLogger

from tests.helpers.soaking import diagonal, mostly_soak
from tests.helpers.trainers import SMALL, loader, new, quiet
from tinker_lightning import LossFnOutput, Regularizer, RemoteModule, custom_loss, losses
from tinker_lightning.losses import regularizers

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tinker_lightning.client import ServiceClient

pytestmark = SMALL

NAMES = ["train_loss", "loss", "nll", "perplexity", "grad_norm", "learning_rate", "epoch", "step"]


def telling(name: str) -> Callable[..., Any]:
    """A loss with a metric of that name."""

    def told(data: Any, logprobs: Any) -> Any:
        batch = losses.Batch(data, logprobs)
        loss = -(batch.tokens("weights") * batch.logprobs).sum()
        return loss, {name: loss}

    return told


def on_logits(name: str) -> Callable[..., Any]:
    def told(model_outputs: Any, loss_fn_inputs: Any, attention_mask: Any) -> LossFnOutput:
        logprobs = model_outputs.log_softmax(-1).gather(-1, loss_fn_inputs["target_tokens"].unsqueeze(-1)).squeeze(-1)
        loss = -(logprobs * attention_mask).sum()
        return LossFnOutput(loss, logprobs, {name: loss.item()})

    return told


def registered(service: ServiceClient, name: str, *, trace: bool = True) -> Any:
    return custom_loss(service, name=f"tells_{name}", trace=trace)(on_logits(name))


ROUTES: dict[str, Callable[[ServiceClient, str], dict[str, Any]]] = {
    "two-pass": lambda _, name: {"loss": telling(name), "route": "two-pass"},
    "server": lambda _, name: {"loss": telling(name), "route": "server"},
    "registered": lambda service, name: {"loss": registered(service, name)},
    "by name": lambda service, name: {"loss": registered(service, name).name},
    "not traced": lambda service, name: {"loss": registered(service, name, trace=False)},
}


def made(service: ServiceClient, **attributes: Any) -> RemoteModule:
    module = new(service, RemoteModule)
    for name, value in attributes.items():
        setattr(module, name, value)
    return module


@pytest.mark.parametrize(
    ("name", "route"),
    mostly_soak(
        itertools.product(NAMES, ROUTES),
        but=[(NAMES[0], route) for route in ROUTES],
    ),
)
def test_a_metric_with_a_name_that_every_step_has_is_logged_under_the_loss(
    service: ServiceClient, tmp_path: Path, name: str, route: str
) -> None:
    module, logger = made(service, **ROUTES[route](service, name)), CSVLogger(tmp_path)
    quiet(max_steps=2, logger=logger).fit(module, loader())
    rows: dict[int, dict[str, float]] = defaultdict(dict)
    with open(f"{logger.log_dir}/metrics.csv") as file:
        for row in csv.DictReader(file):
            rows[int(row["step"])] |= {name: float(value) for name, value in row.items() if value}
    assert sorted(rows) == [0, 1]
    for step, found in rows.items():
        assert found[f"loss/{name}"] == pytest.approx(found["train_loss"], rel=1e-5)
        assert found["grad_norm"] != found["train_loss"]
        assert (found["learning_rate"], found["epoch"], found["step"]) == (1e-2, 0, step)


@pytest.mark.parametrize("route", ["two-pass", "server"])
def test_a_base_loss_has_a_prefix_of_its_own(service: ServiceClient, route: str) -> None:
    beside = [Regularizer(regularizers.sparsity, 0.1, "sparsity")]
    for name, logged in {"grad_norm": "base_loss/grad_norm", "value": "base_loss/custom/value"}.items():
        trainer = quiet()
        trainer.fit(made(service, loss=telling(name), route=route, regularizers=beside), loader())
        found = trainer.callback_metrics
        assert found[logged] == pytest.approx(float(found["base_loss/value"]), rel=1e-5)


@pytest.mark.parametrize("name", [*NAMES, "mine"])
def test_validation_names_a_metric_as_training_does(service: ServiceClient, name: str) -> None:
    (found,) = quiet().validate(made(service, loss=telling(name)), loader(), verbose=False)
    assert found["val_mine" if name == "mine" else f"val_loss/{name}"] == pytest.approx(found["val_loss"])
    assert found["val_perplexity"] == pytest.approx(math.exp(found["val_nll"]), rel=1e-5)


@pytest.mark.parametrize(("route", "name"), diagonal(["two-pass", "server"], ["loss:sum", "tokens:sum"]))
def test_a_metric_with_a_name_of_the_protocol_does_not_replace_the_loss(
    service: ServiceClient, name: str, route: str
) -> None:
    def told(data: Any, logprobs: Any) -> Any:
        batch = losses.Batch(data, logprobs)
        loss = -(batch.tokens("weights") * batch.logprobs).sum()
        return loss, {name: 3 * loss}

    trainer = quiet(max_steps=1)
    module = made(service, loss=told, route=route)
    (scores,) = trainer.validate(module, loader(), verbose=False)
    assert scores[f"val_loss/{name}"] == pytest.approx(4 * 3 * scores["val_loss"], rel=1e-5)  # a sum, and a mean
    trainer.fit(module, loader())
    found = trainer.callback_metrics
    assert found[f"loss/{name}"] == pytest.approx(3 * float(found["train_loss"]), rel=1e-5)
