"""How many random examples a test tries: few in every run, many in `tox -e soak`."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any, TypeVar

import pytest
from hypothesis import HealthCheck, settings

if TYPE_CHECKING:
    from collections.abc import Callable

F = TypeVar("F", bound="Callable[..., Any]")
LONG = "FUZZ_LONG" in os.environ


def examples(few: int, many: int, **options: Any) -> Callable[[F], F]:
    """Sets the number of examples of a hypothesis test, and marks it for the long run."""
    # A fixture that examples share is meant to be shared.
    checks = [HealthCheck.function_scoped_fixture, HealthCheck.too_slow, HealthCheck.data_too_large]
    chosen = settings(max_examples=many if LONG else few, deadline=None, suppress_health_check=checks, **options)

    def decorate(test: F) -> F:
        marked: F = pytest.mark.fuzz(chosen(test))
        return marked

    return decorate
