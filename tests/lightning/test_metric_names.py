"""A loss may give its metrics any names: all but a few reserved ones are kept, and none is lost."""

from __future__ import annotations

import csv
import itertools
import math
from collections import defaultdict
from typing import TYPE_CHECKING, Any

import pytest
import torch
from lightning.pytorch.loggers import CSVLogger

from tests.helpers.soaking import diagonal, first_only, mostly_soak
from tests.helpers.trainers import DATA, SMALL, loader, new, quiet
from tinker_lightning import LossFnOutput, Regularizer, RemoteModule, custom_loss, losses
from tinker_lightning.callbacks import CostMonitor
from tinker_lightning.client.futures import TinkerFuture
from tinker_lightning.errors import MissingInput
from tinker_lightning.lightning.deferred_metrics import DeferredMetrics
from tinker_lightning.losses import regularizers
from tinker_lightning.remote.calls import ServerCall, Step
from tinker_lightning.types import ForwardBackwardOutput, OptimStepResponse

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tinker_lightning.client import ServiceClient

pytestmark = SMALL

RESERVED = ["train_loss", "val_loss", "test_loss", "loss_total", "grad_norm", "learning_rate", "epoch", "step"]
KEPT = ["perplexity", "nll", "tokens", "loss", "loss:sum", "tokens:sum"]
SUMS = ("tokens", "loss:sum", "tokens:sum")


def telling(name: str) -> Callable[..., Any]:
    """A loss with a metric of that name."""

    def told(data: Any, logprobs: Any) -> Any:
        batch = losses.Batch(data, logprobs)
        loss = -(batch.tokens("weights") * batch.logprobs).sum()
        return loss, {name: 3 * loss}

    return told


def on_logits(name: str) -> Callable[..., Any]:
    def told(model_outputs: Any, loss_fn_inputs: Any, attention_mask: Any) -> LossFnOutput:
        logprobs = model_outputs.log_softmax(-1).gather(-1, loss_fn_inputs["target_tokens"].unsqueeze(-1)).squeeze(-1)
        loss = -(logprobs * attention_mask).sum()
        return LossFnOutput(loss, logprobs, {name: 3 * loss.item()})

    return told


def registered(service: ServiceClient, name: str, *, trace: bool = True) -> Any:
    alias = f"tells_{name.replace(':', '_')}"
    return custom_loss(service, name=alias, trace=trace)(on_logits(name))


ROUTES: dict[str, Callable[[ServiceClient, str], dict[str, Any]]] = {
    "retained": lambda _, name: {"loss": telling(name), "route": "retained"},
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


def trained(module: RemoteModule, folder: Path) -> dict[int, dict[str, float]]:
    """What two steps log, by step."""
    logger = CSVLogger(folder)
    quiet(max_steps=2, logger=logger).fit(module, loader())
    rows: dict[int, dict[str, float]] = defaultdict(dict)
    with open(f"{logger.log_dir}/metrics.csv") as file:
        for row in csv.DictReader(file):
            rows[int(row["step"])] |= {name: float(value) for name, value in row.items() if value}
    assert sorted(rows) == [0, 1]
    return rows


@pytest.mark.parametrize(
    ("name", "route"),
    mostly_soak(
        itertools.product(RESERVED, ROUTES),
        but=[("grad_norm", route) for route in ROUTES],
    ),
)
def test_a_metric_with_a_reserved_name_is_logged_under_the_loss(
    service: ServiceClient, tmp_path: Path, name: str, route: str
) -> None:
    module = made(service, **ROUTES[route](service, name))
    for step, found in trained(module, tmp_path).items():
        assert found[f"loss/{name}"] == pytest.approx(3 * found["train_loss"], rel=1e-5)
        assert found["grad_norm"] != 3 * found["train_loss"]
        assert (found["learning_rate"], found["epoch"], found["step"]) == (1e-2, 0, step)


@pytest.mark.parametrize(("name", "route"), diagonal(KEPT, list(ROUTES)))
def test_any_other_metric_keeps_its_name_in_every_stage(
    service: ServiceClient, tmp_path: Path, name: str, route: str
) -> None:  # R1.7, R5.3
    module = made(service, **ROUTES[route](service, name))
    batches = len(loader()) if name in SUMS else 1
    for stage, evaluate in (("val", quiet().validate), ("test", quiet().test)):
        (scores,) = evaluate(module, loader(), verbose=False)
        logged = f"{stage}_loss/loss" if name == "loss" else f"{stage}_{name}"
        assert scores[logged] == pytest.approx(3 * batches * scores[f"{stage}_loss"], rel=1e-5)
        others = {"nll", "perplexity"} - {name}
        assert {f"{stage}_{other}" for other in others} <= scores.keys()
    for found in trained(module, tmp_path).values():
        assert found[name] == pytest.approx(3 * found["train_loss"], rel=1e-5)
        assert not any(each.startswith("loss/") for each in found)


def test_a_metric_replaces_a_score_also_if_it_appears_late(service: ServiceClient) -> None:
    calls = itertools.count()

    def late(_: Any, logprobs: Any) -> Any:
        return -torch.cat(logprobs).mean(), {"perplexity": 7.0} if next(calls) else {}

    (scores,) = quiet().validate(made(service, loss=late), loader(), verbose=False)
    assert scores["val_perplexity"] == 7.0
    assert scores["val_nll"] != 7.0


def test_a_score_returns_if_the_loss_cannot_be_evaluated(service: ServiceClient) -> None:
    calls = itertools.count()

    def unavailable(_: Any, logprobs: Any) -> Any:
        if next(calls) == 1:
            raise MissingInput("advantages: missing")
        return -torch.cat(logprobs).mean(), {"perplexity": 7.0}

    with pytest.warns(UserWarning, match="val_loss is not logged"):
        (scores,) = quiet().validate(made(service, loss=unavailable), loader(), verbose=False)
    assert scores["val_perplexity"] == pytest.approx(math.exp(scores["val_nll"]), rel=1e-5)
    assert "val_loss" not in scores


def test_no_metric_of_the_server_replaces_one_of_the_loss() -> None:
    deferred = DeferredMetrics(lambda _: None, lambda _: {})
    response = OptimStepResponse({"kl": 1.0, "ratio": 2.0, "grad_norm": 3.0})
    trainer = quiet()
    call = ServerCall(DATA[:2], "mine", {}, [torch.tensor(1.0)])
    passed = TinkerFuture.from_result(ForwardBackwardOutput([], {"loss:sum": 4.0, "ratio": 5.0}), "forward_backward")
    deferred.add(Step([], TinkerFuture.from_result(response, "optim_step"), [(passed, call)]), trainer, 1.0, {"kl"})
    deferred.log(wait=False)
    assert trainer.callback_metrics == {"ratio": 5.0, "grad_norm": 3.0, "train_loss": 4.0}


def test_budgets_do_not_read_the_metrics_of_a_loss(service: ServiceClient) -> None:  # R5.12
    def costly(data: Any, logprobs: Any) -> Any:
        return -torch.cat(logprobs).mean(), dict.fromkeys(["tokens", "tokens:sum", "usd", "cost/tokens_trained"], 1e9)

    cost = CostMonitor({"*": {"train": 1.0, "prefill": 0.0, "sample": 0.0}}, max_usd=1.0)
    trainer = quiet(callbacks=[cost])
    trainer.fit(made(service, loss=costly), loader())
    assert trainer.global_step == 3
    assert cost.tokens.trained == sum(datum.model_input.length for datum in DATA[:6])
    assert trainer.callback_metrics["usd"] == pytest.approx(cost.usd)


@pytest.mark.parametrize("route", ["two-pass", "server"])
def test_a_base_loss_has_a_prefix_of_its_own(service: ServiceClient, route: str) -> None:
    beside = [Regularizer(regularizers.sparsity, 0.1, "sparsity")]
    for name, logged in {"grad_norm": "base_loss/grad_norm", "value": "base_loss/custom/value"}.items():
        trainer = quiet()
        trainer.fit(made(service, loss=telling(name), route=route, regularizers=beside), loader())
        found = trainer.callback_metrics
        assert found[logged] == pytest.approx(3 * float(found["base_loss/value"]), rel=1e-5)


@pytest.mark.parametrize("name", [*first_only(RESERVED, 2), "mine"])
def test_validation_names_a_metric_as_training_does(service: ServiceClient, name: str) -> None:
    (found,) = quiet().validate(made(service, loss=telling(name)), loader(), verbose=False)
    assert found["val_mine" if name == "mine" else f"val_loss/{name}"] == pytest.approx(3 * found["val_loss"])
    assert found["val_perplexity"] == pytest.approx(math.exp(found["val_nll"]), rel=1e-5)
