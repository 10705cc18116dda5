"""Constructor arguments of a module: their types, advice about unknown ones, and plain data of them for files."""

from __future__ import annotations

import contextlib
import inspect
import sys
from collections.abc import Mapping
from dataclasses import fields
from typing import TYPE_CHECKING, Any, TypedDict

from tinker_lightning.errors import InvalidInput, did_you_mean, suggestion
from tinker_lightning.remote.optimizers import OptimizerName, Schedule  # noqa: TC001 read by jsonargparse
from tinker_lightning.types.params import OPTIMIZERS, AdamParams

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator
    from typing import Unpack as Unpack

    import lightning.pytorch as pl
else:

    class Unpack:
        """Hides `Unpack` from jsonargparse, which then finds the arguments of `RemoteModule` with their defaults."""

        def __class_getitem__(cls, _: Any) -> Any:
            return Any


class Secret(str):
    """A string with the repr `***` that command lines do not write to configuration files."""

    __slots__ = ()

    def __repr__(self) -> str:
        return "'***'"


with contextlib.suppress(ImportError):  # the extra "cli"
    from jsonargparse.typing import register_type

    # A configuration without the key can be reused: the key is then read from the environment.
    register_type(Secret, serializer=lambda _: None, deserializer=Secret)


class PredictOptions(TypedDict, total=False):
    """Options of `RemoteModule.predict_step`.

    Args:
        max_tokens: The maximum number of tokens of a sample; None for the rest of the context.
        temperature: The softmax temperature; 0 is greedy.
        top_p: Restricts sampling to the most likely tokens whose probabilities add up to this value.
        top_k: Restricts sampling to the k most likely tokens; -1 for all.
        num_samples: The number of samples of each prompt.
        seed: Makes samples reproducible for a given prompt and weights.
        stop: Strings or token ids that end a sample.
    """

    max_tokens: int | None
    temperature: float
    top_p: float
    top_k: int
    num_samples: int
    seed: int | None
    stop: str | list[str] | list[int] | None


class ModelSettings(TypedDict, total=False):
    """The arguments of `RemoteModule` that every recipe takes; see `RemoteModule.__init__`."""

    rank: int
    learning_rate: float
    schedule: Schedule
    warmup: float
    betas: tuple[float, float]
    eps: float
    weight_decay: float
    optimizer: OptimizerName
    seed: int | None
    train_mlp: bool
    train_attn: bool
    train_unembed: bool
    max_steps_in_flight: int
    predict: PredictOptions | None
    base_url: str | None
    api_key: Secret | str | None


def check_unknown(module: Any, unknown: Mapping[str, Any]) -> None:
    """Raises `InvalidInput` for arguments that a module does not have."""
    for name in unknown:
        known = {each for cls in type(module).__mro__ for each in inspect.signature(cls).parameters}
        fix = suggestion(name, known) or "The docstring of RemoteModule.__init__ lists those of all modules."
        raise InvalidInput(f"{type(module).__name__} has no argument {name!r}. {fix}")


def check_optimizer(optimizer: str, settings: AdamParams) -> None:
    """Raises `InvalidInput` for settings of AdamW that another optimizer does not have, and would leave out."""
    own = {"learning_rate", *(each.name for each in fields(OPTIMIZERS[optimizer]))}
    for each in fields(settings):
        if each.name not in own and getattr(settings, each.name) != each.default:
            name = "betas[1]" if each.name == "beta2" else each.name
            raise InvalidInput(f"{name} is a setting of AdamW. Leave it out: {optimizer} does not have it.")


def check_keys(options: Mapping[str, Any]) -> None:
    """Raises `InvalidInput` for a key that `PredictOptions` does not have."""
    if not isinstance(options, Mapping):
        raise InvalidInput(f"predict must be a dict of options such as {{'max_tokens': 64}}, got {options!r}")
    names = list(PredictOptions.__annotations__)
    for name in options:
        if name not in names:
            fix = did_you_mean(str(name), names) or f"The options are {', '.join(names)}."
            raise InvalidInput(f"predict has no option {name!r}. {fix}")


def is_secret(name: object, value: object) -> bool:
    """Returns whether a value is an API key: a `Secret`, or named `api_key` or `…_api_key` (also `X-API-Key`)."""
    plain = str(name).lower().replace("-", "_")
    return isinstance(value, Secret) or plain == "api_key" or plain.endswith("_api_key")


def arguments_left_out(module: Any) -> list[str]:
    """Returns the names of the constructor arguments of a module that are API keys or not plain data."""
    arguments = _arguments(module)
    return [name for name, value in arguments if is_secret(name, value) or not _is_plain(value)]


def api_keys(module: Any) -> frozenset[str]:
    """Returns the API keys among the constructor arguments of a module."""
    return frozenset(Secret(value) for name, value in _arguments(module) if value and is_secret(name, value))


def fixed_arguments(module: Any) -> frozenset[str]:
    """Returns the arguments that a subclass hard-codes for `super().__init__`, which a file must not pass again."""
    *inner, (outermost, rest) = _calls(module)
    left = list(rest)
    free = set(outermost)
    for name, value in (pair for arguments, _ in reversed(inner) for pair in arguments.items()):
        if left and value is left[0]:  # one of the outermost call's `*args`, which are passed on in order
            left.pop(0)
            free.add(name)
    return frozenset(name for arguments, _ in inner for name in arguments) - free


def hide_keys(value: Any, keys: Collection[str]) -> Any:
    """Returns plain data for files: API keys are emptied, and tuples, which `yaml.safe_load` rejects, become lists.

    API keys are the strings in `keys`, and what `is_secret` names.
    """
    if isinstance(value, Mapping):
        return {name: "" if item and is_secret(name, item) else hide_keys(item, keys) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [hide_keys(item, keys) for item in value]
    return "" if isinstance(value, str) and (value in keys or is_secret("", value)) else value


def hide_in_configs(callbacks: Iterable[pl.Callback], keys: Collection[str]) -> None:
    """Removes API keys from the configurations that callbacks of `LightningCLI` are about to write.

    A module may declare `api_key: str` itself, or take a key under another name.
    """
    cli: Any = sys.modules.get("lightning.pytorch.cli")  # not imported here, because only command lines need it
    for callback in callbacks if cli is not None else ():
        if isinstance(callback, cli.SaveConfigCallback):
            callback.config = callback.config.clone()
            for name, value in list(callback.config.items()):
                leaf = name.rpartition(".")[2]
                callback.config[name] = hide_keys({leaf: value}, keys)[leaf]


def _arguments(module: Any) -> Iterator[tuple[str, Any]]:
    return (pair for arguments, _ in _calls(module) for pair in arguments.items())


def _calls(module: Any) -> Iterator[tuple[dict[str, Any], tuple[Any, ...]]]:
    """Yields the named arguments and the `*args` of the running `__init__` calls of a module, the innermost first."""
    frame = inspect.currentframe()
    while (frame := frame and frame.f_back) is not None:
        names, rest, keywords, values = inspect.getargvalues(frame)
        if frame.f_code.co_name == "__init__" and names and values.get(names[0]) is module:
            arguments = {name: values[name] for name in names[1:] if name in values}
            yield {**arguments, **values.get(keywords or "", {})}, values.get(rest or "", ())


def _is_plain(value: Any) -> bool:
    if isinstance(value, Mapping):
        return all(isinstance(key, str) and _is_plain(item) for key, item in value.items())
    if isinstance(value, list | tuple):
        return all(_is_plain(item) for item in value)
    return value is None or isinstance(value, str | int | float | bool)
