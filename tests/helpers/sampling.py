"""Sampling without a scheduler."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tinker_lightning.server.engine.interface import AdapterWeights, SamplingRequest

if TYPE_CHECKING:
    from collections.abc import Callable

    from tinker_lightning.server.engine.interface import BaseModel
    from tinker_lightning.types import ModelInput, SampleResponse, SamplingParams


def sample(
    base: BaseModel,
    weights: AdapterWeights | None,
    prompt: ModelInput,
    params: SamplingParams,
    *,
    should_pause: Callable[[], bool] = lambda: False,
    in_pauses: Callable[[], object] = lambda: None,
    **options: Any,
) -> SampleResponse:
    """Samples to the end; calls `in_pauses` whenever it pauses."""
    sampler = base.new_sampler()
    sampler.admit(SamplingRequest("alone", prompt, params, weights, **options))
    while not (ended := sampler.step(should_stop=should_pause)):
        in_pauses()
    if isinstance(ended["alone"], Exception):
        raise ended["alone"]
    return ended["alone"]
