"""The random numbers of torch, numpy and Python are kept, saved and set together."""

from __future__ import annotations

import io
import random
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.helpers.fuzzing import examples
from tinker_lightning import AdamParams, Datum, SamplingParams
from tinker_lightning.lightning.checkpoint.loaders import capture_rng, isolated_rng, pass_seed, restore_rng, seeded_rng
from tinker_lightning.testing import embedded_service

seeds = st.integers(0, 2**31)
draws = st.integers(0, 5)


def draw() -> tuple[Any, ...]:
    """One of each kind; those that keep a second normal number for the next call among them."""
    return (
        torch.rand(3).tolist(),
        torch.randn(()).item(),
        np.random.rand(3).tolist(),  # the one that users' datasets use
        np.random.standard_normal(),
        random.random(),  # noqa: S311
        random.gauss(0, 1),
    )


def seed(number: int, drawn: int = 0) -> None:
    torch.manual_seed(number)
    np.random.seed(number % 2**32)
    random.seed(number)
    for _ in range(drawn):
        draw()


def current_seed() -> int:
    """The seed of a pass over a loader without generators of its own."""
    return pass_seed({"rng": capture_rng(), "generators": []})


@examples(10, 200)
@given(seeds, draws)
def test_what_is_captured_comes_back_from_a_file(number: int, drawn: int) -> None:
    seed(number, drawn)
    file = io.BytesIO()
    torch.save(capture_rng(), file)
    expected = [draw() for _ in range(3)]
    seed(number + 1)
    restore_rng(torch.load(io.BytesIO(file.getvalue()), weights_only=True))
    assert [draw() for _ in range(3)] == expected


@examples(10, 200)
@given(seeds, draws)
def test_a_capture_draws_nothing(number: int, drawn: int) -> None:
    seed(number)
    expected = draw()
    seed(number)
    capture_rng()
    assert draw() == expected


@examples(10, 200)
@given(seeds, seeds, draws)
def test_what_is_drawn_or_seeded_inside_is_not_seen_outside(number: int, other: int, drawn: int) -> None:
    seed(number)
    expected = draw()
    seed(number)
    with isolated_rng():
        seed(other, drawn)
    assert draw() == expected


def test_generators_are_kept_also_when_something_is_raised() -> None:
    seed(1)
    expected = draw()
    seed(1)
    for inside in (isolated_rng(), seeded_rng(3)):
        with pytest.raises(KeyError), inside:
            raise KeyError(draw())
    assert draw() == expected


@examples(10, 200)
@given(seeds, seeds)
def test_seeded_numbers_depend_on_their_seed_alone(number: int, inner: int) -> None:
    seen = []
    for outside in (number, number + 1):
        seed(outside)
        with seeded_rng(inner):
            seen.append(draw())
    with seeded_rng(inner + 1):
        seen.append(draw())
    assert seen[0] == seen[1] != seen[2]


def test_seeds_that_numpy_does_not_take_are_folded() -> None:
    with seeded_rng(2**32 + 5):
        folded = np.random.rand()
    np.random.seed(5)
    assert folded == np.random.rand()


@pytest.mark.parametrize(
    "advance",
    [lambda: torch.rand(()), lambda: np.random.rand(), random.random],
    ids=["torch", "numpy", "python"],
)
def test_the_seed_of_a_pass_depends_on_every_draw(advance: Any) -> None:
    seed(1)
    before = current_seed()
    assert current_seed() == before
    advance()
    assert current_seed() != before


def test_a_trainer_in_this_process_leaves_them_alone() -> None:
    seed(1)
    before = current_seed()
    with embedded_service() as service:
        model = service.create_lora_training_client("tiny", rank=3, seed=5)
        data = [Datum.from_tokens([1, 2, 3])]
        model.forward_backward(data, "cross_entropy").result()
        model.optim_step(AdamParams()).result()
        model.save_state("state").result()
        sampler = model.save_weights_and_get_sampling_client()
        sampler.sample(data[0].model_input, 1, SamplingParams(max_tokens=2)).result()
    assert current_seed() == before
