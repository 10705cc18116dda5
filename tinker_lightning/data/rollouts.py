"""Prompts to answer and to be rewarded for, as a data module for reinforcement learning."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, Literal, TypeAlias

import lightning.pytorch as pl

from tinker_lightning.data.environments import imported, prompts_of
from tinker_lightning.rl import Rewards, RolloutLoader
from tinker_lightning.types import SamplingParams

# With plain `Any`, jsonargparse would instantiate the classes itself and pass None for missing arguments.
Source: TypeAlias = dict[str, Any] | list[dict[str, Any]] | Any


class RolloutData(pl.LightningDataModule):
    """Loads prompts of a file or dataset for `GRPO` and `Distill`, as `RolloutLoader`s.

    Args:
        train: A JSON Lines file, or any other collection of prompts or environments. A prompt is a text, a chat, or a
            dict with `prompt` or `messages`, whose other columns go to the rewards. Also the import path of a
            collection, or of a function that returns one; and classes or functions with their arguments, as dicts with
            `class_path` and `init_args`.
        validation: The same; its prompts are answered in their order, always with the same seeds.
        test: The same, for `Trainer.test`.
        environment: A class, or its import path, whose instances are the environments; each row of `train`,
            `validation` and `test` has the arguments of one.
        rewards: A reward function, its import path, such as `my_rewards.right`, or a list of them.
        max_tokens: The maximum number of tokens of an answer.
        temperature: The softmax temperature of sampling.
        stop: Strings that end an answer.
        weights: The factor of each reward.
        batch_size: The number of prompts of a batch.
        group_size: The number of answers to each prompt.
        staleness: The maximum age, in optimizer steps, of the weights that sample a batch.
        epochs: How often a batch is trained.
        minibatches: Into how many optimizer steps each pass over a batch is split.
        refill: How many times at most the groups that a recipe dropped are replaced by further prompts.
        seed: The seed of the order and of the samples.
        timeout: How many seconds the episodes of a prompt may take together; None for any number.
        on_error: What to do if an environment raises or takes too long: `raise`, or `skip` its prompt and count it.
        as_text: Whether strings are plain text to continue; by default they are messages of the user.
        system: A system message for chats that have none.
    """

    def __init__(
        self,
        train: Source = None,
        validation: Source = None,
        *,
        test: Source = None,
        environment: Any = None,
        rewards: Any = None,
        max_tokens: int = 64,
        temperature: float = 1.0,
        stop: list[str] | None = None,
        weights: list[float] | None = None,
        batch_size: int = 8,
        group_size: int = 8,
        staleness: int = 0,
        epochs: int = 1,
        minibatches: int = 1,
        refill: int = 0,
        seed: int = 0,
        timeout: float | None = None,
        on_error: Literal["raise", "skip"] = "raise",
        as_text: bool = False,
        system: str | None = None,
    ) -> None:
        super().__init__()
        self.batch_size = batch_size
        self._sources = {"train": train, "validation": validation, "test": test}
        self._environment = imported(environment, "environment") if isinstance(environment, str) else environment
        functions = _functions(rewards)
        self._rewards = functions if weights is None else Rewards(functions, weights)
        self._settings: dict[str, Any] = {
            "sampling_params": SamplingParams(max_tokens=max_tokens, temperature=temperature, stop=stop),
            "group_size": group_size,
            "seed": seed,
            "timeout": timeout,
            "on_error": on_error,
            "as_text": as_text,
            "system": system,
        }
        self._training = {"staleness": staleness, "epochs": epochs, "minibatches": minibatches, "refill": refill}
        self._loaders: dict[str, RolloutLoader] = {}
        # Lightning takes a loader for each method that it finds.
        for part, method in (("train", "train"), ("validation", "val"), ("test", "test")):
            if self._sources[part] is not None:
                setattr(self, f"{method}_dataloader", functools.partial(self._loader, part))

    def setup(self, stage: str) -> None:
        """Reads the data of a stage.

        Not when Lightning asks for a loader: it patches `DataLoader` meanwhile, and an exception would leave it so.
        """
        for part in {"fit": ("train", "validation"), "validate": ("validation",), "test": ("test",)}.get(stage, ()):
            if self._sources[part] is not None:
                self._loader(part)

    def _loader(self, part: str) -> RolloutLoader:
        if part not in self._loaders:
            own: dict[str, Any] = self._training if part == "train" else {"shuffle": False}
            self._loaders[part] = RolloutLoader(
                prompts_of(self._sources[part], part, self._environment),
                self._rewards,
                batch_size=self.batch_size,
                **self._settings,
                **own,
            )
        return self._loaders[part]


def _functions(rewards: Any) -> Any:
    """Returns rewards whose import paths are replaced by the functions."""
    if isinstance(rewards, Sequence) and not isinstance(rewards, str):
        return [_functions(each) for each in rewards]
    return imported(rewards, "rewards") if isinstance(rewards, str) else rewards
