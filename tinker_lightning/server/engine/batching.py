"""Groups sequences into model calls with little padding and within a token budget.

The grouping decides how products are rounded, so it depends on the lengths and the budget alone, and the budget is
never measured.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

# Number of positions, including padding, per model call on a CPU. Activations take about 2 MB per position for a model
# with 135M parameters, and matrix products get no faster beyond 512. Changing a number changes the bits of new runs;
# checkpoints record the number that their run was started with.
TOKEN_BUDGET = 512
TOKEN_BUDGETS: Mapping[str, int] = {"tiny": 512, "smollm2-135m": 512}
# What a model call costs apart from its positions, in positions: reading the weights, and Python between kernels.
CALL_COST = 16


def default_token_budget(name: str) -> int:
    """Returns the token budget of a base model."""
    return TOKEN_BUDGETS.get(name, TOKEN_BUDGET)


def group_by_length(lengths: Sequence[int], token_budget: int) -> list[list[int]]:
    """Splits indices into batches of at most `token_budget` tokens including padding, longest sequences first.

    Among all splits of the sorted sequences, it is the one with the least padding, where a batch counts as much as
    `CALL_COST` tokens of padding. A sequence that exceeds the budget gets its own batch. Sequences of equal length keep
    their order, so the result is deterministic.

    >>> group_by_length([30, 200, 40, 30], token_budget=200)
    [[1], [2, 0, 3]]
    """
    order = sorted(range(len(lengths)), key=lambda i: -lengths[i])
    # best[k] is the lowest cost of the sequences from k on, and ends[k] where their first batch ends.
    best, ends = [0] * (len(order) + 1), [0] * len(order)
    for start in reversed(range(len(order))):
        longest = lengths[order[start]]
        most = max(1, token_budget // max(1, longest))
        cost, end = min(
            ((end - start) * longest + CALL_COST + best[end], -end)
            for end in range(start + 1, min(len(order), start + most) + 1)
        )
        best[start], ends[start] = cost, -end
    batches, start = [], 0
    while start < len(order):
        batches.append(order[start : ends[start]])
        start = ends[start]
    return batches
