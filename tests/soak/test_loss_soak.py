"""Ten thousand damaged graphs."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.helpers.damaged_graphs import fuzz, memory

if TYPE_CHECKING:
    from tests.helpers.api import Api


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(1, 11))
def test_ten_thousand_damaged_graphs_harm_nobody(api: Api, seed: int) -> None:  # R3.7
    before = memory()
    counts = fuzz(api, seed, 1000)
    assert counts["trained"] > 30, counts
    assert counts["failed"] > 100, counts
    assert memory() - before < 2 << 30
