"""Advantages of sampled responses: how much better each reward is than the others of its group."""

from __future__ import annotations

from numbers import Integral, Real
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor

from tinker_lightning.errors import InvalidInput
from tinker_lightning.losses.batch import groups, is_traced

if TYPE_CHECKING:
    from collections.abc import Sequence


def group_advantages(
    rewards: Tensor | Sequence[float],
    *,
    baseline: float | Literal["leave_one_out", "mean"] = "mean",
    group_size: int | None = None,
    scale: bool = False,
) -> Tensor:
    """Returns how much better each reward is than its group, `[B]`; with `scale` in standard deviations, as in GRPO.

    >>> group_advantages(torch.tensor([1.0, 0.0, 5.0, 5.0]), group_size=2)
    tensor([ 0.5000, -0.5000,  0.0000,  0.0000])
    """
    check_grouping(baseline, group_size)
    rewards = _as_rewards(rewards)
    grouped = rewards[None] if group_size is None else groups(rewards, group_size)
    if isinstance(baseline, str):
        if not is_traced(grouped) and grouped.shape[-1] < 2:
            raise InvalidInput("a group of one has nothing to compare with: sample several responses to each prompt")
        advantages = grouped - grouped.mean(-1, keepdim=True)
        if baseline == "leave_one_out":
            size = torch.ones_like(grouped).sum(-1, keepdim=True)
            advantages = advantages * size / (size - 1)
    else:
        advantages = grouped - baseline
    if scale:
        advantages = advantages / (grouped.std(-1, keepdim=True) + 1e-4)
    return advantages.reshape(-1)


def check_grouping(baseline: object, group_size: object) -> None:
    """Raises `InvalidInput` if the baseline is unknown or the group size is not a positive integer."""
    is_known = baseline in ("leave_one_out", "mean") if isinstance(baseline, str) else isinstance(baseline, Real)
    if not (is_known or is_traced(baseline)):
        raise InvalidInput(f"baseline must be 'leave_one_out', 'mean' or a number, got {baseline!r}")
    is_size = isinstance(group_size, Integral) and int(group_size) > 0
    if not (is_size or group_size is None or is_traced(group_size)):
        raise InvalidInput(f"a group needs at least one datum, got a size of {group_size!r}")


def _as_rewards(given: Tensor | Sequence[float]) -> Tensor:
    if is_traced(given):
        return given  # type: ignore[return-value]  # a proxy of a tensor
    try:
        rewards = torch.as_tensor(given)
    except (TypeError, ValueError, RuntimeError) as error:
        raise InvalidInput(f"rewards must be numbers, one per datum, got {given!r:.80}") from error
    if rewards.dim() != 1 or not rewards.numel():
        raise InvalidInput(
            f"rewards has the shape {list(rewards.shape)}, but there must be one per datum, [B]: those of a group are "
            "consecutive, with group_size=..."
        )
    if not torch.isfinite(rewards).all():
        raise InvalidInput("rewards has NaN or infinite entries; leave those datums out")
    return rewards if rewards.is_floating_point() else rewards.float()
