"""Prompts and environments for reinforcement learning, as a data module.

In a configuration file, jsonargparse reads the types of the options: it imports rewards and functions by their paths,
and creates environments from `class_path` and `init_args`.
"""

from __future__ import annotations

import functools
import inspect
import os
from collections.abc import Callable, Iterable, Mapping, Sequence, Sized
from typing import Any, Literal, TypeAlias

import lightning.pytorch as pl
from typing_extensions import override

from tinker_lightning.data.modules import PromptData
from tinker_lightning.data.sources import check_source, read_rows
from tinker_lightning.errors import InvalidInput, did_you_mean
from tinker_lightning.rl import Environment, Rewards, RolloutLoader
from tinker_lightning.types import SamplingParams

RewardFunction: TypeAlias = Callable[..., Any]
EnvironmentFunction: TypeAlias = Callable[..., Iterable[Environment]]
# The parser tries `Any` last: rows, and the datasets of other packages. With `str` before it, "2" stays a string.
Source: TypeAlias = Environment | EnvironmentFunction | str | list[Environment | EnvironmentFunction | str | Any] | Any


class RolloutData(pl.LightningDataModule):
    """Loads prompts or environments for `GRPO` and `Distill`, as `RolloutLoader`s.

    Args:
        train: A JSON Lines file, or any other collection of prompts or environments. A prompt is a text, a chat, or a
            dict with `prompt` or `messages`, whose other columns go to the rewards. Also a function that returns a
            collection. In a configuration file, the import path of such a function, and classes or functions with
            their arguments as `class_path` and `init_args`, alone or in a list.
        validation: The same; its prompts are answered in their order, always with the same seeds.
        test: The same, for `Trainer.test`.
        environment: A subclass of `Environment`, or a function that returns one; each row of `train`, `validation` and
            `test` has the arguments of one.
        rewards: A reward function, several, or `Rewards`; in a configuration file, import paths such as
            `my_rewards.right`.
        max_tokens: The maximum number of tokens of an answer.
        temperature: The softmax temperature of sampling.
        stop: Strings that end an answer.
        weights: The factor of each reward.
        batch_size: The number of prompts of a batch.
        group_size: The number of answers to each prompt.
        staleness: The maximum age, in optimizer steps, of the weights that sample a batch.
        num_epochs: The number of times that each prompt of `train` is visited, after which the fit ends, unless the
            `max_epochs` or `max_steps` of the trainer end it before. An epoch of the trainer is then one pass over the
            prompts, whose last batch may be short. None leaves the end to the trainer, and fills every batch.
        epochs: The number of passes over a batch.
        minibatches: The number of optimizer steps into which each pass over a batch is split.
        refill: The number of times at most that groups dropped by a recipe are replaced by further prompts.
        seed: The seed of the order and of the samples.
        timeout: The time in seconds that the episodes of a prompt may take together; None for any.
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
        environment: type[Environment] | Callable[..., Any] | None = None,
        rewards: Rewards | RewardFunction | Sequence[RewardFunction] | Mapping[str, RewardFunction] | None = None,
        max_tokens: int = 64,
        temperature: float = 1.0,
        stop: list[str] | None = None,
        weights: list[float] | None = None,
        batch_size: int = 8,
        group_size: int = 8,
        staleness: int = 0,
        num_epochs: int | None = None,
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
        self._environment = environment
        self._rewards = rewards if weights is None else Rewards(rewards, weights)  # type: ignore[arg-type]
        self._prompt_options: dict[str, Any] = {"as_text": as_text, "system": system}
        self._settings: dict[str, Any] = {
            "sampling_params": SamplingParams(max_tokens=max_tokens, temperature=temperature, stop=stop),
            "group_size": group_size,
            "seed": seed,
            "timeout": timeout,
            "on_error": on_error,
            **self._prompt_options,
        }
        self._training = {
            "staleness": staleness,
            "num_epochs": num_epochs,
            "epochs": epochs,
            "minibatches": minibatches,
            "refill": refill,
        }
        self._loaders: dict[str, RolloutLoader] = {}
        self._prompts: PromptData | None = None
        # Lightning takes a loader for each method that it finds.
        for part, method in (("train", "train"), ("validation", "val"), ("test", "test")):
            if self._sources[part] is not None:
                setattr(self, f"{method}_dataloader", functools.partial(self._loader, part))

    @override
    def setup(self, stage: str) -> None:
        """Reads the data of a stage, and makes the trainer end after `num_epochs`.

        Not when Lightning asks for a loader: it patches `DataLoader` meanwhile, and an exception would leave it so.
        """
        for part in {"fit": ("train", "validation"), "validate": ("validation",), "test": ("test",)}.get(stage, ()):
            if self._sources[part] is not None:
                self._loader(part)
        if stage == "predict":
            prompts = self._prompts = self._prompt_data()
            prompts.trainer = self.trainer
            prompts.setup(stage)
        if stage == "fit" and "train" in self._loaders and self.trainer is not None:
            self._loaders["train"].limit_epochs(self.trainer)

    @override
    def predict_dataloader(self) -> Any:
        """Returns the prompts of the test rows, else of the validation rows, else of the training rows, in order."""
        if self._prompts is None:
            self.setup("predict")
        return self._prompts.predict_dataloader()  # type: ignore[union-attr]

    def _prompt_data(self) -> PromptData:
        part = next((name for name in ("test", "validation", "train") if self._sources[name] is not None), "train")
        rows: Any = resolve_prompts(self._sources[part], part, self._environment)
        has_length = isinstance(rows, Sized)
        is_prompts = has_length and not any(
            isinstance(one, Environment) for each in rows for one in (each if isinstance(each, list) else [each])
        )
        if not is_prompts:
            raise InvalidInput(
                f"predict samples answers to prompts, but {part} has environments, or no length. Evaluate environments "
                "with test or validate; for other prompts, pass PromptData."
            )
        return PromptData(test=rows, batch_size=self.batch_size, **self._prompt_options)

    def _loader(self, part: str) -> RolloutLoader:
        if part not in self._loaders:
            own: dict[str, Any] = self._training if part == "train" else {"shuffle": False}
            self._loaders[part] = RolloutLoader(
                resolve_prompts(self._sources[part], part, self._environment),
                self._rewards,
                batch_size=self.batch_size,
                **self._settings,
                **own,
            )
        return self._loaders[part]


def resolve_prompts(source: Any, part: str, environment: Any = None) -> Any:
    """Returns the prompts or environments that an option of a data module stands for.

    Args:
        source: A JSON Lines file; an environment; a collection of prompts or environments, or a function that returns
            one. A list may contain lists of environments.
        part: The name of the option.
        environment: A class or function that returns the environment of each row; the columns of a row are its
            arguments.
    """
    if isinstance(source, Environment):
        source = [source]
    elif isinstance(source, str | os.PathLike):
        source = _read(source, part)
    elif callable(source) and not isinstance(source, Iterable):
        source = _call(source, {}, part)
    if isinstance(source, list | tuple):
        source = [each for item in source for each in _items(item, part)]
    check_source(source, part)
    is_indexed = isinstance(source, Sized) and callable(getattr(type(source), "__getitem__", None))
    if not is_indexed and (isinstance(source, Sized) or part != "train"):
        source = list(source)  # only what is trained on may be a stream
    if environment is None:
        return source
    if not isinstance(source, Sized):
        raise InvalidInput(f"{part} has no length, so environment={environment!r} cannot be used. Pass environments.")
    rows: Any = source
    return [_environment(environment, row, f"{part}: row {i}") for i, row in enumerate(rows)]


def _read(file: str | os.PathLike[str], part: str) -> list[Any]:
    if not os.path.exists(file) and not os.fspath(file).endswith((".json", ".jsonl", ".txt")):
        raise InvalidInput(
            f"{part}: there is no file {file}, and no such function. In a configuration file, write class_path: {file} "
            "to see why it cannot be imported; in Python, pass the function."
        )
    return read_rows(file, part)


def _items(item: Any, part: str) -> Sequence[Any]:
    """Returns the prompts or environments that an item of a list stands for."""
    if isinstance(item, Mapping) and "class_path" in item:
        raise InvalidInput(
            f"{part}: expected class_path and init_args, and no other keys, got {', '.join(map(str, item))}. Only "
            "configuration files have these; in Python, pass the environment itself."
        )
    if callable(item) and not isinstance(item, Environment):
        item = _call(item, {}, part)
    is_group = isinstance(item, list | tuple) and item and all(isinstance(each, Environment) for each in item)
    return item if is_group else [item]


def _environment(make: Any, row: Any, where: str) -> Environment:
    if not isinstance(row, Mapping):
        raise InvalidInput(f"{where} must be a dict with the arguments of an environment, got {_a(row)}")
    environment = _call(make, row, where)
    if not isinstance(environment, Environment):
        raise InvalidInput(
            f"environment must be a subclass of Environment, or a function that returns one; {_name(make)} returned "
            f"{_a(environment)}"
        )
    return environment


def _call(make: Any, arguments: Mapping[str, Any], where: str) -> Any:
    """Calls a class or function; raises `InvalidInput` for arguments that it does not take."""
    if inspect.isabstract(make):
        raise InvalidInput(f"{where}: the class {_name(make)} has no method {', '.join(make.__abstractmethods__)}")
    try:
        signature = inspect.signature(make)
    except ValueError:  # a builtin without one
        return make(**arguments)
    try:
        signature.bind(**arguments)
    except TypeError as error:
        unknown = [name for name in arguments if name not in signature.parameters]
        near = did_you_mean(unknown[0], signature.parameters) if unknown else ""
        fault = f"has no argument {unknown[0]!r}. {near}".rstrip() if unknown else f"is {error}"
        raise InvalidInput(f"{where}: {_name(make)} {fault}") from error
    return make(**arguments)


def _name(function: Any) -> str:
    return getattr(function, "__name__", type(function).__name__)


def _a(value: Any) -> str:
    return f"a {type(value).__name__}"
