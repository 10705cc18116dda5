"""Parametrizations of which the ordinary run tries some cases, and `tox -e soak` all."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable


def mostly_soak(cases: Iterable[Any], *, but: Collection[Any]) -> list[Any]:
    """Marks all cases as soak except those in `but`, which show the same property."""
    cases = list(cases)
    assert all(case in cases for case in but), "a case to keep does not exist"
    return [case if case in but else pytest.param(*_values(case), marks=pytest.mark.soak) for case in cases]


def _values(case: Any) -> tuple[Any, ...]:
    return case if isinstance(case, tuple) else (case,)
