"""A group of episodes as a recipe trains on it."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from tinker_lightning.remote.calls import Pass
    from tinker_lightning.rl.groups import Group
    from tinker_lightning.types import Datum


class TrainedGroup:
    """A group whose forward pass was sent, or the reason why it is not trained.

    Args:
        group: The group.
        advantages: The advantage of each episode; None if the group is dropped.
        dropped: Why it is dropped.
        steps: How many optimizer steps the weights have taken that it trains; by default as many as the sampler's.
    """

    def __init__(
        self, group: Group, advantages: Sequence[float] | None, dropped: str = "", steps: int | None = None
    ) -> None:
        self.group = group
        self.dropped = dropped
        self.steps = group.version if steps is None else steps
        self.data: list[Datum] = []
        self.episodes: list[int] = []  # of each datum
        self.advantages = list(advantages or ())
        for i, (trajectory, advantage) in enumerate(zip(group.trajectories, self.advantages, strict=False)):
            if trajectory.is_scored and not math.isnan(advantage):
                own = trajectory.datums()
                self.data += own
                self.episodes += [i] * len(own)
        if advantages is not None and not self.data:
            self.dropped = "no episode has a token to train on"
        self.sent: Pass | None = None
        self.logprobs: list[Tensor] = []

    @property
    def tokens(self) -> float:
        """The number of sampled tokens that are trained."""
        return sum(float(datum.loss_fn_inputs["mask"].to_numpy().sum()) for datum in self.data)
