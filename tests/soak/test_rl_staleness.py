"""Sampling ahead is faster where sampling takes as long as training."""  # R5.9

from __future__ import annotations

import pytest

from benchmarks.rl_staleness import Times, steps_per_second
from tests.helpers.trainers import SMALL

pytestmark = SMALL


def test_the_simulated_server_trains() -> None:
    times = Times(sample=0.01, passes=0.01, step=0.01)
    assert steps_per_second(times, straggler=True, staleness=1, streaming=False, steps=1) > 0


@pytest.mark.soak
def test_one_step_ahead_is_half_as_fast_again() -> None:
    times = Times(sample=1.0, passes=0.9, step=0.1)
    sync, ahead = (
        steps_per_second(times, straggler=False, staleness=staleness, streaming=True, steps=6) for staleness in (0, 1)
    )
    assert ahead > 1.5 * sync
