"""The names under which a `RemoteModule` logs what it knows of every step; a loss gives its metrics others."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tinker_lightning.errors import InvalidLoss

if TYPE_CHECKING:
    from collections.abc import Collection

LOSS = "train_loss"
VALUE = "value"
_OF_STEPS = (LOSS, "grad_norm", "learning_rate")


def check(names: Collection[str], prefix: str = "") -> None:
    """Refuses metrics of a loss that would be taken for something else.

    Args:
        names: What they are called.
        prefix: Under which they are logged; then only the value of the loss is beside them.

    Raises:
        InvalidLoss: Says which.
    """
    taken = (VALUE,) if prefix else _OF_STEPS
    for name in taken:
        if name in names:
            raise InvalidLoss(
                f"the loss returns a metric called {name!r}, but {prefix + name!r} is logged of every step anyway; "
                "rename the metric"
            )
