"""Scales a server-side loss through its inputs, because the protocol has no factor for a pass."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from tinker_lightning.errors import InvalidDatum, InvalidLoss
from tinker_lightning.losses.builtin import LOSSES
from tinker_lightning.types import TensorData

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from tinker_lightning.types import Datum

LINEAR_ONLY = (
    "Its value is NaN until the server has computed it: it can be multiplied by a number other than 0 and added to "
    "other losses, but no other function of it has a gradient. For those, write the loss in Python."
)


def check_factor(loss: str, factor: float) -> None:
    """Raises `InvalidLoss` if the factor of a server-side loss, the gradient that reaches it, is 0 or not finite."""
    if not math.isfinite(factor) or factor == 0:
        raise InvalidLoss(f"a gradient of {factor} reached the server-side loss {loss!r}. {LINEAR_ONLY}")


def scaled(
    data: Sequence[Datum], loss: str, config: Mapping[str, float | str], factor: float
) -> tuple[list[Datum], dict[str, float | str]]:
    """Returns datums and settings whose loss is `factor` times the loss of those given."""
    check_factor(loss, factor)
    settings = dict(config)
    if factor == 1:
        return list(data), settings
    known = LOSSES.get(loss)
    if known is None:
        raise InvalidLoss(
            f"the server-side loss {loss!r} cannot be scaled by {factor}: it is not known to be homogeneous in one of "
            "its inputs. Use it without gradient accumulation and without a factor."
        )
    if factor < 0 and not known.has_negative:
        raise InvalidLoss(f"{loss!r} cannot be multiplied by {factor}: it clips, so its negative is another loss")
    for name in known.scaled_by:
        if name in known.settings:
            settings[name] = float(settings.get(name, known.settings[name])) * factor
    needed = [name for name in known.scaled_by if name in known.inputs]
    return [_with_scaled(i, datum, known.scaled_by, needed, factor) for i, datum in enumerate(data)], settings


def _with_scaled(i: int, datum: Datum, names: Sequence[str], needed: Sequence[str], factor: float) -> Datum:
    if missing := [name for name in needed if name not in datum.loss_fn_inputs]:
        raise InvalidDatum(f"datum {i}: {missing[0]}: missing; the loss needs it")
    given = datum.loss_fn_inputs
    return datum.with_inputs(
        {name: TensorData(given[name].to_torch() * factor, copy=False) for name in names if name in given}
    )
