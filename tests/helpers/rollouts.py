"""Small rollouts of `tiny`, and records of what is sampled and stepped, in their order."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tinker_lightning import SamplingParams
from tinker_lightning.client.sampling import SamplingClient
from tinker_lightning.client.training import TrainingClient
from tinker_lightning.rl import RolloutLoader

if TYPE_CHECKING:
    from collections.abc import Iterator

    import pytest

PROMPTS = [f"prompt {i}:" for i in range(8)]


def lower(prompt: str, completion: str) -> float:
    """The share of lower-case letters, which `tiny` learns in some steps."""
    del prompt
    return sum(each.islower() for each in completion) / 4


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
    """Returns a list to which all samplings and optimizer steps of a test are added when they are submitted."""
    events: list[str] = []
    sample, step = SamplingClient.sample, TrainingClient.optim_step

    def recorded_sample(self: SamplingClient, *args: Any, **kwargs: Any) -> Any:
        events.append("sample")
        return sample(self, *args, **kwargs)

    def recorded_step(self: TrainingClient, *args: Any, **kwargs: Any) -> Any:
        events.append("step")
        return step(self, *args, **kwargs)

    monkeypatch.setattr(SamplingClient, "sample", recorded_sample)
    monkeypatch.setattr(TrainingClient, "optim_step", recorded_step)
    return events
