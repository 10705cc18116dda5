"""Groups sequences into model calls with little padding and within a token budget.

The grouping decides how products are rounded, so it depends on the lengths and the budget alone, and the budget is
never measured.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


@dataclass(frozen=True, slots=True)
class CallSize:
    """How large the calls of a model are on a CPU. Other numbers give other bits.

    Args:
        tokens: The token budget: the number of positions per call, including padding. Activations take about 2 MB per
            position for a model with 135M parameters, and matrix products get no faster beyond 512. Checkpoints record
            it.
        overhead: What a call costs apart from its positions, in positions: reading the weights, and Python between
            kernels.
    """

    tokens: int = 512
    overhead: int = 16


# By base model; others have the default.
CALL_SIZES: Mapping[str, CallSize] = {"tiny": CallSize(overhead=512), "smollm2-135m": CallSize()}


def group_by_length(lengths: Sequence[int], size: CallSize) -> list[list[int]]:
    """Splits indices into batches within the token budget including padding, longest sequences first.

    Among all splits of the sorted sequences, it is the one with the least padding, where a batch counts as much as its
    overhead. A sequence that exceeds the budget gets its own batch. Sequences of equal length keep their order, so the
    result is deterministic.

    >>> group_by_length([36, 200, 40, 36], CallSize(tokens=400, overhead=16))
    [[1], [2, 0, 3]]
    """
    order = sorted(range(len(lengths)), key=lambda i: -lengths[i])
    # best[k] is the lowest cost of the sequences from k on, and ends[k] where their first batch ends.
    best, ends = [0] * (len(order) + 1), [0] * len(order)
    for start in reversed(range(len(order))):
        longest = lengths[order[start]]
        most = max(1, size.tokens // max(1, longest))
        cost, end = min(
            ((end - start) * longest + size.overhead + best[end], -end)
            for end in range(start + 1, min(len(order), start + most) + 1)
        )
        best[start], ends[start] = cost, -end
    batches, start = [], 0
    while start < len(order):
        batches.append(order[start : ends[start]])
        start = ends[start]
    return batches
