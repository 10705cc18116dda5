"""Measures by which factors a server multiplies the gradient of losses with advantages."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import numpy as np

from tinker_lightning.client.dialects.measure import LENGTHS, Call, differs, ratio
from tinker_lightning.client.dialects.surrogate import Surrogate
from tinker_lightning.errors import InvalidInput, OperationFailed

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from numpy.typing import NDArray

    from tinker_lightning.client.dialects.measure import Scratch

FAILS = "it fails"
Carrier = Literal["importance_sampling", "cispo"]


def measured_surrogate(scratch: Scratch, loss: Carrier) -> Surrogate | str:
    """Returns the surrogate that a loss is on a server, with its factors, or why it is none."""
    try:
        return _measured(scratch, loss, 1)
    except (InvalidInput, OperationFailed) as error:
        try:
            return _measured(scratch, loss, 2)  # some servers need an even number of sequences
        except (InvalidInput, OperationFailed):
            return f"{FAILS}: {error}"


def _measured(scratch: Scratch, loss: Carrier, unit: int) -> Surrogate | str:
    """Measures the factors in calls of at least `unit` sequences, of which one has an advantage: at its first token.

    The first token has the same gradient in both datums, so that only factors make a difference.
    """
    logprobs = scratch.start_logprobs
    config = Surrogate(loss).config

    def inputs(i: int, advantage: float) -> Mapping[str, NDArray[np.float32]]:
        advantages = np.zeros(LENGTHS[i], np.float32)
        advantages[0] = advantage
        return {"advantages": advantages, "logprobs": logprobs[i]}

    def call(datums: Sequence[int], advantage: float) -> Call:
        given = [inputs(i, 0.0 if k else advantage) for k, i in enumerate(datums)]
        return Call(datums, given, loss, config)

    one = [0] * unit
    base = scratch.response([call(one, 1.0)])
    if not base[0] > 0 or differs(scratch.response([call(one, -2.0)]), -2 * base):
        return "its gradient is not linear in the advantages"
    long = scratch.response([call([1, *one[1:]], 1.0)])
    # The other sequences have another length, so that a mean over the tokens is not taken for one over the sequences.
    others = [1] * unit
    wide = scratch.response([call([*one, *others], 1.0)])
    split = scratch.response([call(one, 1.0), call(others, 0.0)])
    of_length = not differs(long, base * LENGTHS[0] / LENGTHS[1])
    if not of_length and differs(long, base):
        return (
            f"a sequence of {LENGTHS[1]} instead of {LENGTHS[0]} tokens has {ratio(long, base):.3g} times the gradient"
        )
    of_batch, of_window = (not differs(found, base / 2) for found in (wide, split))
    if (differs(wide, base) and not of_batch) or (differs(split, base) and not of_window) or of_window > of_batch:
        return (
            f"with twice as many sequences, the gradient is {ratio(wide, base):.3g} times as large in one call, and "
            f"{ratio(split, base):.3g} times in two"
        )
    per_batch: Literal["no", "call", "window"] = "window" if of_window else "call" if of_batch else "no"
    return Surrogate(loss, per_length=of_length, per_batch=per_batch, even_batch=unit > 1)
