"""Groups sequences so that a pass wastes little on padding and never holds more than its token budget."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence


def group_by_length(lengths: Sequence[int], token_budget: int) -> list[list[int]]:
    """Splits indices into batches, longest sequences first, each at most `token_budget` tokens once padded.

    A sequence that is longer than the budget gets a batch of its own. Ties keep their order, so that the same
    request is always computed in the same way.

    >>> group_by_length([3, 9, 4, 3], token_budget=9)
    [[1], [2, 0], [3]]
    """
    batches: list[list[int]] = []
    for index in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        # Lengths fall, so the first of a batch is the one that the others are padded to.
        if batches and (len(batches[-1]) + 1) * lengths[batches[-1][0]] <= token_budget:
            batches[-1].append(index)
        else:
            batches.append([index])
    return batches
