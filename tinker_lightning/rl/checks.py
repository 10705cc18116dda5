"""Rejects settings of a `RolloutLoader` before anything is sampled."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tinker_lightning.errors import InvalidInput

if TYPE_CHECKING:
    from collections.abc import Mapping

    from tinker_lightning.types import SamplingParams


def check_settings(
    counts: Mapping[str, int],
    limits: Mapping[str, int],
    params: SamplingParams,
    timeout: float | None,
    on_error: str,
) -> None:
    """Raises `InvalidInput` for a setting that is out of range, or conflicts with another.

    Args:
        counts: Settings of at least 1, by name: `group_size`, `batch_size`, `epochs` and `minibatches`.
        limits: Settings of at least 0, by name: `staleness` and `refill`.
        params: How tokens are chosen.
        timeout: How many seconds the episodes of a prompt may take.
        on_error: What to do if an environment fails.
    """
    for least, settings in ((1, counts), (0, limits)):
        for name, value in settings.items():
            if value < least:
                raise InvalidInput(f"RolloutLoader: {name} must be at least {least}, got {value}")
    if timeout is not None and not timeout > 0:
        raise InvalidInput(f"RolloutLoader: timeout must be a positive number of seconds, or None, got {timeout}")
    if on_error not in ("raise", "skip"):
        raise InvalidInput(f"RolloutLoader: on_error must be 'raise' or 'skip', got {on_error!r}")
    batch_size, minibatches = counts["batch_size"], counts["minibatches"]
    if batch_size % minibatches:
        raise InvalidInput(
            f"RolloutLoader: a batch of {batch_size} prompts cannot be split into {minibatches} equal minibatches"
        )
    if limits["refill"] and (counts["epochs"] > 1 or minibatches > 1):
        raise InvalidInput("RolloutLoader: refill is for batches that are trained once, in one step")
    if params.seed is not None:
        raise InvalidInput("RolloutLoader: leave the seed out of sampling_params and pass seed=... to the loader")
