"""The names under which a `RemoteModule` logs the loss, and how metrics of the same names are renamed."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tinker_lightning.losses.regularizers.composition import set_apart

if TYPE_CHECKING:
    from collections.abc import Mapping

LOSS = "train_loss"
VALUE = "value"
TOTAL = "loss_total"
# Logged with every step, by the server or by Lightning; "step" would even set the step of the row.
_OF_STEPS = frozenset({LOSS, "grad_norm", "learning_rate", "epoch", "step"})
_OF_STAGES = frozenset({"loss", "nll", "perplexity"})
# What the protocol counts in every pass.
_OF_PASSES = frozenset({"loss:sum", "tokens:sum"})


def of_step(metrics: Mapping[str, float]) -> dict[str, float]:
    """Names the metrics of a loss in training; one called `grad_norm`, for example, is logged as `loss/grad_norm`."""
    return set_apart(metrics, _OF_STEPS, "loss")


def of_part(metrics: Mapping[str, float], prefix: str) -> dict[str, float]:
    """Names the metrics of one of several losses, which are logged next to its value."""
    return {prefix + name: number for name, number in set_apart(metrics, {VALUE}, "custom").items()}


def of_stage(metrics: Mapping[str, float]) -> dict[str, float]:
    """Names the metrics of a loss in validation and test, before `val_` or `test_` is put in front of them."""
    return set_apart(metrics, _OF_STAGES, "loss")


def without_counts(metrics: Mapping[str, float], own: frozenset[str]) -> dict[str, float]:
    """Leaves out what the protocol counts in every pass, unless the loss itself returns a metric of that name."""
    return {name: float(number) for name, number in metrics.items() if name in own or name not in _OF_PASSES}
