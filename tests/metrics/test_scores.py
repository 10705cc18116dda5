"""Metrics are those of the whole dataset, whatever the split into batches."""

from __future__ import annotations

import itertools
import math
from typing import TYPE_CHECKING, Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tinker_lightning import Datum, losses
from tinker_lightning.metrics.scores import BitsPerByte, RewardAccuracy, RewardMargin, TokenNLL, TokenPerplexity

if TYPE_CHECKING:
    from torch import Tensor

TOKENS = st.lists(
    st.tuples(st.floats(-20, 0), st.sampled_from([0.0, 0.5, 1.0]), st.integers(0, 4)), min_size=1, max_size=30
)
REWARDS = st.lists(st.tuples(st.floats(-5, 5), st.floats(-5, 5)), min_size=1, max_size=30)


def parts(rows: list[Any], data: st.DataObject) -> list[list[Any]]:
    """The rows in batches of any sizes."""
    cuts = sorted(data.draw(st.lists(st.integers(0, len(rows)), max_size=4)))
    bounds = [0, *cuts, len(rows)]
    return [rows[a:b] for a, b in itertools.pairwise(bounds)]


def columns(rows: list[Any]) -> list[Tensor]:
    return [torch.tensor(column, dtype=torch.float64) for column in zip(*rows, strict=True)]


@given(rows=TOKENS, data=st.data())
def test_likelihoods_are_those_of_all_tokens(rows: list[Any], data: st.DataObject) -> None:
    rows = [*rows, (-1.0, 1.0, 3)]  # at least one token counts
    nll, perplexity, bits = TokenNLL(), TokenPerplexity(), BitsPerByte()
    for part in parts(rows, data):
        if part:
            logprobs, weights, num_bytes = columns(part)
            nll.update(logprobs, weights)
            perplexity.update(logprobs, weights)
            bits.update(logprobs, weights, int(num_bytes.sum()))
    total = -math.fsum(logprob * weight for logprob, weight, _ in rows)
    mean = total / math.fsum(weight for _, weight, _ in rows)
    assert nll.compute().item() == pytest.approx(mean, rel=1e-6)
    assert perplexity.compute().item() == pytest.approx(math.exp(mean), rel=1e-5)
    assert bits.compute().item() == pytest.approx(total / sum(n for *_, n in rows) / math.log(2), rel=1e-6)


@given(rows=REWARDS, data=st.data())
def test_rewards_are_those_of_all_pairs(rows: list[Any], data: st.DataObject) -> None:
    accuracy, margin = RewardAccuracy(), RewardMargin()
    for part in parts(rows, data):
        if part:
            accuracy.update(*columns(part))
            margin.update(*columns(part))
    wins = sum(chosen > rejected for chosen, rejected in rows) / len(rows)
    assert accuracy.compute().item() == pytest.approx(wins, rel=1e-6)
    assert margin.compute().item() == pytest.approx(
        math.fsum(chosen - rejected for chosen, rejected in rows) / len(rows), rel=1e-6, abs=1e-6
    )


@settings(max_examples=20)
@given(lengths=st.lists(st.tuples(st.integers(1, 6), st.integers(1, 6)), min_size=1, max_size=8), data=st.data())
@pytest.mark.parametrize("loss", [losses.dpo, losses.ipo, losses.orpo])
def test_metrics_of_preferences_are_those_of_all_pairs(
    loss: Any, lengths: list[tuple[int, int]], data: st.DataObject
) -> None:
    generator = torch.Generator().manual_seed(len(lengths))

    def answer(length: int) -> tuple[Datum, Tensor]:
        reference, logprobs = -3 * torch.rand(2, length + 1, generator=generator)
        weights = [0.0] + [1.0] * length
        tokens = list(range(length + 1))
        return Datum.from_targets(tokens, tokens, weights=weights, reference_logprobs=reference), logprobs

    def metrics(pairs: list[Any]) -> dict[str, float]:
        datums, logprobs = zip(*(each for pair in pairs for each in pair), strict=True)
        value, found = loss(list(datums), list(logprobs))
        return {"loss": value.item(), **{name: number.item() for name, number in found.items()}}

    pairs = [(answer(chosen), answer(rejected)) for chosen, rejected in lengths]
    found: dict[str, float] = {}
    for part in filter(None, parts(pairs, data)):  # weighted by pairs, as validation does
        for name, value in metrics(part).items():
            found[name] = found.get(name, 0.0) + value * len(part) / len(pairs)
    assert found == pytest.approx(metrics(pairs), rel=1e-4, abs=1e-5)
