"""Grouping by length: every index once, within the budget, and no emptier batch than needed."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tinker_lightning.server.engine.batching import group_by_length

LENGTHS = st.lists(st.integers(1, 50), max_size=40)


@given(LENGTHS, st.integers(1, 120))
def test_every_sequence_is_in_exactly_one_batch(lengths: list[int], budget: int) -> None:
    batches = group_by_length(lengths, budget)
    assert sorted(index for batch in batches for index in batch) == list(range(len(lengths)))
    assert all(batches)


@given(LENGTHS, st.integers(1, 120))
def test_no_padded_batch_exceeds_the_budget_but_a_single_long_sequence(lengths: list[int], budget: int) -> None:
    for batch in group_by_length(lengths, budget):
        assert len(batch) == 1 or len(batch) * max(lengths[i] for i in batch) <= budget


@given(st.lists(st.integers(1, 50), min_size=1, max_size=40), st.integers(1, 120))
def test_no_batch_could_have_taken_the_next_sequence(lengths: list[int], budget: int) -> None:
    batches = group_by_length(lengths, budget)
    for batch in batches[:-1]:
        assert (len(batch) + 1) * max(lengths[i] for i in batch) > budget


def test_equal_lengths_keep_their_order() -> None:
    assert group_by_length([5] * 5, 10) == [[0, 1], [2, 3], [4]]
