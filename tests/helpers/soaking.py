"""What the ordinary run tries in part, and `tox -e soak` in full."""

from __future__ import annotations

import itertools
import os
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Sequence


def mostly_soak(cases: Iterable[Any], *, but: Collection[Any]) -> list[Any]:
    """Marks all cases as soak except those in `but`, which show the same property."""
    cases = list(cases)
    assert all(case in cases for case in but), "a case to keep does not exist"
    return [case if case in but else _soak(case) for case in cases]


def first_only(cases: Iterable[Any], count: int = 1) -> list[Any]:
    """Marks all cases as soak except the first `count`, which show the same property."""
    cases = list(cases)
    return cases[:count] + [_soak(case) for case in cases[count:]]


def diagonal(*values: Sequence[Any]) -> list[Any]:
    """Combines values, and marks as soak what is not needed for each value to occur in the ordinary run."""
    most = max(len(each) for each in values)
    return mostly_soak(
        itertools.product(*values), but=[tuple(each[i % len(each)] for each in values) for i in range(most)]
    )


def _soak(case: Any) -> Any:
    return pytest.param(*_values(case), marks=pytest.mark.soak)


def _values(case: Any) -> tuple[Any, ...]:
    return case if isinstance(case, tuple) else (case,)


def size(name: str, full: int) -> int:
    """How much a long test does: `SOAK_<NAME>` of the environment, or all of it."""
    return int(os.environ.get(f"SOAK_{name}", full))
