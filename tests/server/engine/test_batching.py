"""Grouping by length: every index once, within the budget, and as little padding as possible."""

from __future__ import annotations

from itertools import combinations, pairwise

from hypothesis import given
from hypothesis import strategies as st

from tinker_lightning.server.engine.causal_lm import CallSize, group_by_length

LENGTHS = st.lists(st.integers(1, 50), max_size=40)


@given(LENGTHS, st.integers(1, 120))
def test_every_sequence_is_in_exactly_one_batch(lengths: list[int], budget: int) -> None:
    batches = group_by_length(lengths, CallSize(budget))
    assert sorted(index for batch in batches for index in batch) == list(range(len(lengths)))
    assert all(batches)


@given(LENGTHS, st.integers(1, 120))
def test_no_padded_batch_exceeds_the_budget_but_a_single_long_sequence(lengths: list[int], budget: int) -> None:
    for batch in group_by_length(lengths, CallSize(budget)):
        assert len(batch) == 1 or len(batch) * max(lengths[i] for i in batch) <= budget


@given(st.lists(st.integers(1, 50), min_size=1, max_size=9), st.integers(1, 120))
def test_no_other_split_of_the_sorted_sequences_costs_less(lengths: list[int], budget: int) -> None:
    def cost(batches: list[list[int]]) -> int:
        return sum(16 + len(batch) * max(batch) for batch in batches)

    ordered = sorted(lengths, reverse=True)
    places = range(1, len(ordered))
    splits = [
        [ordered[a:b] for a, b in pairwise([0, *cuts, len(ordered)])]
        for count in range(len(ordered))
        for cuts in combinations(places, count)
    ]
    allowed = [split for split in splits if all(len(batch) == 1 or len(batch) * batch[0] <= budget for batch in split)]
    found = [[lengths[i] for i in batch] for batch in group_by_length(lengths, CallSize(budget))]
    assert cost(found) == min(map(cost, allowed))


def test_equal_lengths_keep_their_order() -> None:
    assert group_by_length([5] * 5, CallSize(10)) == [[0, 1], [2, 3], [4]]
