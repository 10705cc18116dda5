"""Prompts to answer and to be rewarded for, as a data module for reinforcement learning."""

from __future__ import annotations

import functools
import importlib
import inspect
import os
import re
from collections.abc import Iterable, Mapping, Sequence, Sized
from typing import Any, Literal, TypeAlias

import lightning.pytorch as pl

from tinker_lightning.data.sources import check_source, read_rows
from tinker_lightning.errors import InvalidInput, did_you_mean
from tinker_lightning.rl import Environment, Rewards, RolloutLoader
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


_IMPORT_PATH = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)+")


def imported(path: str, option: str) -> Any:
    """Returns what an import path names; errors name the option that has it."""
    package, _, name = path.rpartition(".")
    try:
        module = importlib.import_module(package)
    except (ModuleNotFoundError, ValueError) as error:
        file = "" if os.path.exists(path) else f", and there is no file {path}"
        raise InvalidInput(
            f"{option}: {path!r} cannot be imported: {error}{file}. Write package.module.name, and start the command "
            "in the folder that has the package."
        ) from error
    except Exception as error:  # of the user's module
        raise InvalidInput(f"{option}: importing {package} failed with {type(error).__name__}: {error}") from error
    if not hasattr(module, name):
        near = did_you_mean(name, [each for each in vars(module) if not each.startswith("_")])
        missing = f"the module {package} has no {name!r}. {near}".rstrip()
        raise InvalidInput(f"{option}: {path!r} cannot be imported: {missing}")
    return getattr(module, name)


def prompts_of(source: Any, part: str, environment: Any = None) -> Any:
    """Returns the prompts or environments that an option of a data module names.

    Args:
        source: A JSON Lines file; a collection of prompts or environments; the import path of one, or of a function
            that returns one; a dict with `class_path` and `init_args`, which is a class or function to call, alone or
            in a list.
        part: The name of the option.
        environment: A class or function that returns the environment of each row; the columns of a row are its
            arguments.
    """
    if isinstance(source, str) and _IMPORT_PATH.fullmatch(source) and not _is_file(source):
        found = imported(source, part)
        source = {"class_path": source} if callable(found) else found
    if _is_call(source):
        source = _result(source, part)
    elif isinstance(source, Sequence) and not isinstance(source, str):
        source = [each for item in source for each in (_result(item, part) if _is_call(item) else [item])]
    elif isinstance(source, Environment):
        source = [source]
    if isinstance(source, str | os.PathLike):
        source = read_rows(source, part)
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


def _is_file(source: str) -> bool:
    return source.endswith((".json", ".jsonl", ".txt")) or os.path.isfile(source)


def _is_call(item: Any) -> bool:
    return isinstance(item, Mapping) and isinstance(item.get("class_path"), str)


def _result(call: Mapping[str, Any], part: str) -> Any:
    """Returns what a class or function returns, an environment as a list of one."""
    if other := sorted(set(call) - {"class_path", "init_args"}):
        raise InvalidInput(f"{part}: expected class_path and init_args, and no other keys, got {other[0]!r}")
    path = call["class_path"]
    found = _called(imported(path, part), call.get("init_args") or {}, part)
    if isinstance(found, Environment):
        return [found]
    if isinstance(found, str | Mapping) or not isinstance(found, Iterable):
        raise InvalidInput(
            f"{part}: {path} returned {_a(found)}, not an Environment. Name a subclass of Environment, or a function "
            "that returns environments."
        )
    return found


def _environment(make: Any, row: Any, where: str) -> Environment:
    if not isinstance(row, Mapping):
        raise InvalidInput(f"{where} must be a dict with the arguments of an environment, got {_a(row)}")
    found = _called(make, row, where)
    if not isinstance(found, Environment):
        raise InvalidInput(
            f"environment must be a subclass of Environment, or a function that returns one; {_name(make)} returned "
            f"{_a(found)}"
        )
    return found


def _called(make: Any, arguments: Mapping[str, Any], where: str) -> Any:
    """Calls a class or function; raises `InvalidInput` for arguments that it does not take."""
    if not callable(make):
        raise InvalidInput(f"{where}: expected a class or a function, got {_a(make)}")
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


def _name(made: Any) -> str:
    return getattr(made, "__name__", type(made).__name__)


def _a(value: Any) -> str:
    return f"a {type(value).__name__}"
