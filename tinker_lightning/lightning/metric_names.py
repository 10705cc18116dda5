"""The names of the metrics that a `RemoteModule` logs, and how their values are combined over batches."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from tinker_lightning.losses.surrogate import OF_PASSES, set_apart

if TYPE_CHECKING:
    from collections.abc import Mapping

LOSS = "train_loss"
VALUE = "value"
TOTAL = "loss_total"
SCORES = frozenset({"nll", "perplexity"})
COUNTS = frozenset({"tokens", "action_tokens"})
# Logged by the module, the server or Lightning in some stage; "step" would even set the step of a logger's row.
_RESERVED = OF_PASSES | SCORES | {LOSS, "loss", "grad_norm", "learning_rate", "epoch", "step"}


def of_loss(metrics: Mapping[str, float], *, is_of_library: bool) -> dict[str, float]:
    """Returns the metrics of a loss with reserved names prefixed: `grad_norm` becomes `loss/grad_norm`.

    `nll` and `perplexity` of a library loss keep their names, because they are what the module logs itself.
    """
    return set_apart(metrics, _RESERVED - SCORES if is_of_library else _RESERVED, "loss")


def of_part(metrics: Mapping[str, float], prefix: str) -> dict[str, float]:
    """Returns the metrics of one of several losses with its prefix; `value` is reserved for that of the loss."""
    return {prefix + name: number for name, number in set_apart(metrics, {VALUE}, "custom").items()}


def reduction(name: str) -> Literal["sum", "min", "max", "mean"]:
    """Returns how a metric is combined over batches: counts are summed, others combined as their suffix says."""
    if name.rpartition("/")[2] in COUNTS or name.endswith(":sum"):
        return "sum"
    if name.endswith(":min"):
        return "min"
    return "max" if name.endswith(":max") else "mean"
