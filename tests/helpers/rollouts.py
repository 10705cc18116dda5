"""Small rollouts of `tiny`, groups without a model, and records of what is sampled, stepped and sent."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from tinker_lightning import SamplingParams
from tinker_lightning.client.sampling import SamplingClient
from tinker_lightning.client.training import TrainingClient
from tinker_lightning.recipes import GRPO
from tinker_lightning.rl import Completion, Group, PromptEnvironment, RolloutLoader, Trajectory, Turn
from tinker_lightning.rl.tasks import Task

if TYPE_CHECKING:
    from collections.abc import Iterator

    import pytest
    import torch

PROMPTS = [f"prompt {i}:" for i in range(8)]


def lower(prompt: str, completion: str) -> float:
    """The share of lower-case letters, which `tiny` learns in some steps."""
    del prompt
    return sum(each.islower() for each in completion) / 4


def constant(*_: str) -> float:
    """The same for all answers, so that all groups are dropped."""
    return 1.0


def code_points(prompt: str, completion: str) -> float:
    """Differs for all answers, so that no group is dropped."""
    del prompt
    return sum(map(ord, completion)) / 1000


class Stream:
    """Prompts without a length."""

    def __init__(self, prompts: list[Any]) -> None:
        self.prompts = prompts

    def __iter__(self) -> Iterator[Any]:
        return iter(self.prompts)


def rollouts(prompts: Any = PROMPTS, **settings: Any) -> RolloutLoader:
    """Batches of two prompts with four answers of four tokens each, if nothing else is said."""
    defaults = {
        "rewards": lower,
        "group_size": 4,
        "batch_size": 2,
        "sampling_params": SamplingParams(max_tokens=4),
        "as_text": True,
    }
    return RolloutLoader(prompts, **{**defaults, **settings})


def record(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Returns a list to which all samplings and optimizer steps of a test are added when they are submitted.

    Without the few tokens by which a recipe sees what a sampler returns.
    """
    events: list[str] = []
    sample, step = SamplingClient.sample, TrainingClient.optim_step

    def recorded_sample(self: SamplingClient, prompt: Any, num_samples: int, params: Any, **kwargs: Any) -> Any:
        if prompt.length > 1:
            events.append("sample")
        return sample(self, prompt, num_samples, params, **kwargs)

    def recorded_step(self: TrainingClient, *args: Any, **kwargs: Any) -> Any:
        events.append("step")
        return step(self, *args, **kwargs)

    monkeypatch.setattr(SamplingClient, "sample", recorded_sample)
    monkeypatch.setattr(TrainingClient, "optim_step", recorded_step)
    return events


def group_of(*episodes: tuple[float, int], **settings: Any) -> Group:
    """A group of episodes with a reward and a number of sampled tokens each, after a prompt of three tokens."""
    task = Task(0, 0, 0, PromptEnvironment("prompt", lower))
    draw = np.random.default_rng(0)
    trajectories = []
    for i, (reward, tokens) in enumerate(episodes):
        logprobs = draw.normal(-2, 0.5, tokens).astype(np.float32)
        completion = Completion([7 + i] * tokens, logprobs, "stop", f"answer {i}", 0)
        trajectories.append(Trajectory([Turn([1, 2, 3], completion)], reward, **settings))
    return Group(task, trajectories, 0)


class Windows(GRPO):
    """Keeps the gradients of each step, by the tokens of the input, and counts the groups that are sent."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, reference=None, **kwargs)
        self.windows: list[list[tuple[list[int], torch.Tensor]]] = []
        self.sent = 0

    def request(self, *args: Any) -> None:
        self.sent += 1
        super().request(*args)

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        del optimizer
        calls = self.lm.handle.remote.window
        self.windows.append(
            [
                (datum.model_input.to_ints(), own)
                for call in calls
                for datum, own in zip(call.datums, call.gradients or (), strict=True)
            ]
        )
