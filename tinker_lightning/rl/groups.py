"""Groups of episodes of one task, and their form in a checkpoint."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from tinker_lightning.rl.trajectory import Completion, Trajectory, Turn

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tinker_lightning.rl.tasks import Task


class Group:
    """The episodes of one task, whose rewards are compared with each other.

    Args:
        task: The task.
        trajectories: Its episodes, one per sample.
        version: The number of optimizer steps taken by the weights that sampled it.
        seconds: The time that sampling and scoring took.
        failed: The reason why there are no episodes; empty if there are.
    """

    # Not a dataclass: Lightning would rebuild it when it moves a batch to a device.
    __slots__ = ("failed", "old_logprobs", "seconds", "task", "trajectories", "version")

    def __init__(
        self, task: Task, trajectories: Sequence[Trajectory], version: int, seconds: float = 0.0, failed: str = ""
    ) -> None:
        self.task = task
        self.trajectories = list(trajectories)
        self.version = version
        self.seconds = seconds
        self.failed = failed
        # The log-probabilities of its datums when it was first trained, if the loss needs them later.
        self.old_logprobs: list[torch.Tensor] | None = None

    @property
    def scored(self) -> list[Trajectory]:
        """The episodes that have a reward."""
        return [each for each in self.trajectories if each.is_scored]

    def to_state(self) -> dict[str, Any]:
        """Returns the group as tensors and plain data."""
        return {
            "trajectories": [_trajectory_state(each) for each in self.trajectories],
            "version": self.version,
            "failed": self.failed,
            "old_logprobs": self.old_logprobs,
        }

    @classmethod
    def from_state(cls, task: Task, state: dict[str, Any]) -> Group:
        """Returns the group that `to_state` was called on."""
        trajectories = [_trajectory(each) for each in state["trajectories"]]
        group = cls(task, trajectories, state["version"], failed=state["failed"])
        group.old_logprobs = state["old_logprobs"]
        return group

    def __repr__(self) -> str:
        return f"Group(prompt {self.task.index}, {len(self.trajectories)} trajectories, version {self.version})"


def _trajectory_state(trajectory: Trajectory) -> dict[str, Any]:
    turns = [
        {
            "prompt": torch.tensor(turn.prompt_tokens, dtype=torch.int64),
            "tokens": torch.tensor(turn.completion.tokens, dtype=torch.int64),
            "logprobs": torch.from_numpy(turn.completion.logprobs.copy()),
            "stop_reason": turn.completion.stop_reason,
            "text": turn.completion.text,
            "version": turn.completion.version,
            "trained": turn.trained,
        }
        for turn in trajectory.turns
    ]
    return {
        "turns": turns,
        "reward": trajectory.reward,
        "rewards": trajectory.rewards,
        "metrics": trajectory.metrics,
        "truncated": trajectory.truncated,
    }


def _trajectory(state: dict[str, Any]) -> Trajectory:
    turns = [
        Turn(
            turn["prompt"].tolist(),
            Completion(
                turn["tokens"].tolist(),
                turn["logprobs"].numpy(),
                turn["stop_reason"],
                turn["text"],
                turn["version"],
            ),
            turn["trained"],
        )
        for turn in state["turns"]
    ]
    return Trajectory(turns, state["reward"], state["rewards"], state["metrics"], state["truncated"])
