"""Groups sequences into batches with little padding and within a token budget."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence


def group_by_length(lengths: Sequence[int], token_budget: int) -> list[list[int]]:
    """Splits indices into batches of at most `token_budget` tokens including padding, longest sequences first.

    A sequence that exceeds the budget gets its own batch. Sequences of equal length keep their order, so the result is
    deterministic.

    >>> group_by_length([3, 9, 4, 3], token_budget=9)
    [[1], [2, 0], [3]]
    """
    batches: list[list[int]] = []
    for index in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        # Lengths are descending, so all sequences of a batch are padded to its first one.
        if batches and (len(batches[-1]) + 1) * lengths[batches[-1][0]] <= token_budget:
            batches[-1].append(index)
        else:
            batches.append([index])
    return batches
