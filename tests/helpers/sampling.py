"""Sampling without a scheduler."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tinker_lightning.server.engine import sampler

if TYPE_CHECKING:
    from collections.abc import Callable

    from tinker_lightning.types import SampleResponse


def sample(*arguments: Any, in_pauses: Callable[[], object] = lambda: None, **options: Any) -> SampleResponse:
    """Samples to the end; calls `in_pauses` whenever it pauses."""
    slices = sampler.sample(*arguments, **options)
    while True:
        try:
            next(slices)
        except StopIteration as ended:
            response: SampleResponse = ended.value
            return response
        in_pauses()
