"""A loss on a whole batch that a server keeps under a name: its inputs, its settings and its graph."""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import numpy as np

from tinker_lightning.errors import InvalidInput, InvalidLoss
from tinker_lightning.lossgraph.graphs.graph import Graph
from tinker_lightning.lossgraph.graphs.json import Ref
from tinker_lightning.lossgraph.graphs.run import Program

if TYPE_CHECKING:
    from torch import Tensor

    from tinker_lightning.lossgraph.graphs.limits import Limits

# What a loss is computed from: logits and a mask that is 0 on padding, or the log-probabilities of the targets.
Source: TypeAlias = Literal["logits", "logprobs"]
SOURCES: dict[Source, tuple[str, ...]] = {"logits": ("model_outputs", "attention_mask"), "logprobs": ("logprobs",)}
Setting: TypeAlias = float | int | str | bool | None
_Tensors: TypeAlias = Mapping[str, "Tensor"]

# Prefixes of losses that are uploaded without being registered: nobody uses their names, and lists omit them.
OF_LIBRARY, OF_OWN = UNLISTED = ("library.", "own.")

MAX_INPUTS = 64
MAX_SETTINGS = 32
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_.-]{0,63}")
_INPUT = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,63}")
_DIAGNOSTIC = re.compile(r"[^\x00-\x1f:]{1,100}(:[a-z0-9_]{1,20})?")


@dataclass(frozen=True, slots=True)
class LossFnOutput:
    """The result of a loss on logits.

    Args:
        loss: The scalar to train on.
        logprobs: Log-probabilities to return for each datum, usually `[B, T]`.
        diagnostics: Numbers to log, by name.
    """

    loss: Any
    logprobs: Any = None
    diagnostics: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Hyperparameter:
    """A setting of a loss. A fixed one has shaped the graph, so a call cannot change it."""

    default: Setting
    fixed: bool = False


@dataclass(frozen=True, slots=True)
class BatchLoss:
    """A loss on a whole batch, as a graph.

    Args:
        name: Its name.
        source: What it is computed from.
        hyperparameters: Its settings.
        inputs: The names of the inputs that a batch must have.
        program: The graph. It reads the inputs of its source, `loss_fn_inputs.*` and `hyperparameters.*`.
        description: A line for listings.
        asked: The inputs that the function has asked for while it was traced, and the answer. Not sent to a server.
    """

    name: str
    source: Source
    hyperparameters: Mapping[str, Hyperparameter]
    inputs: tuple[str, ...]
    program: Program
    description: str = ""
    asked: Mapping[str, bool] = field(default_factory=dict, compare=False)

    @property
    def reads(self) -> frozenset[str]:
        """Returns the names of all inputs that it looks at."""
        return frozenset((*self.inputs, *self.asked))

    def fits(self, settings: Mapping[str, Any], present: Iterable[str] | None) -> bool:
        """Returns whether tracing with these settings and inputs would give the same graph."""
        if settings.keys() != self.hyperparameters.keys():
            return False
        fixed = ((settings[name], each.default) for name, each in self.hyperparameters.items() if each.fixed)
        if any(type(value) is not type(default) or value != default for value, default in fixed):
            return False
        return present is None or all((name in present) == there for name, there in self.asked.items())

    def select(self, present: Iterable[str]) -> tuple[str, ...]:
        """Returns the names of the inputs that it reads.

        Raises:
            InvalidInput: If a batch with these inputs lacks one.
        """
        present = set(present)
        if missing := [name for name in self.inputs if name not in present]:
            raise InvalidInput(
                f"loss_fn_inputs: {', '.join(missing)}: missing; {self.name} reads it. Give it with each datum, "
                f"Datum.from_targets(..., {missing[0]}=...), or once for the batch, "
                f"loss_fn_inputs={{{missing[0]!r}: ...}}."
            )
        return self.inputs

    def __call__(
        self, sources: _Tensors, inputs: _Tensors, hyperparameters: Mapping[str, Setting], limits: Limits
    ) -> LossFnOutput:
        """Returns the loss of a batch.

        Raises:
            InvalidLoss: If a call of the graph fails, or exceeds the limits.
        """
        return LossFnOutput(*self.program(self._values(sources, inputs, hyperparameters), limits))

    def check(
        self, sources: _Tensors, inputs: _Tensors, hyperparameters: Mapping[str, Setting], limits: Limits
    ) -> None:
        """Runs the graph on shapes alone, which finds most errors before the model runs."""
        self.program.check(self._values(sources, inputs, hyperparameters), limits)

    def _values(self, sources: _Tensors, inputs: _Tensors, hyperparameters: Mapping[str, Setting]) -> list[Any]:
        given: dict[str, Any] = {**sources, **{f"loss_fn_inputs.{name}": each for name, each in inputs.items()}}
        given |= {f"hyperparameters.{name}": each for name, each in hyperparameters.items()}
        return [given[target] for target in self.program.graph.inputs]

    def settings(self, given: Mapping[str, Any]) -> dict[str, Setting]:
        """Returns all settings, with those of a call.

        Raises:
            InvalidInput: If one is unknown, fixed, or has an invalid value.
        """
        return settings(self.name, self.hyperparameters, given)

    def encode(self) -> dict[str, Any]:
        """Returns the loss as JSON."""
        return {
            "name": self.name,
            "source": self.source,
            "description": self.description,
            "hyperparameters": {
                name: {"default": each.default, "fixed": each.fixed} for name, each in self.hyperparameters.items()
            },
            "inputs": list(self.inputs),
            "graph": self.program.graph.encode(),
        }

    @property
    def digest(self) -> str:
        """Returns a hash of its contents."""
        return hashlib.sha256(json.dumps(self.encode(), sort_keys=True).encode()).hexdigest()[:16]

    @classmethod
    def decode(cls, message: Mapping[str, Any]) -> BatchLoss:
        """Returns the loss that JSON describes.

        Raises:
            InvalidLoss: If it does not describe one; says where.
        """
        name, source, inputs = message.get("name"), message.get("source"), message.get("inputs", [])
        check_name(name)
        if not isinstance(source, str) or source not in SOURCES:
            raise InvalidLoss(f"source must be one of {', '.join(SOURCES)}, got {source!r:.40}")
        hyperparameters = _decode_hyperparameters(message.get("hyperparameters", {}))
        if not isinstance(inputs, list) or len(inputs) > MAX_INPUTS:
            raise InvalidLoss(f"inputs must be a list of at most {MAX_INPUTS} names")
        if not all(isinstance(each, str) and _INPUT.fullmatch(each) for each in inputs):
            raise InvalidLoss("inputs: a name consists of letters, digits and '_'")
        graph = Graph.decode(message.get("graph"))
        known = {*SOURCES[source], *(f"loss_fn_inputs.{each}" for each in inputs)}
        known |= {f"hyperparameters.{key}" for key, each in hyperparameters.items() if not each.fixed}
        if unknown := [target for target in graph.inputs if target not in known]:
            raise InvalidLoss(f"the graph reads {unknown[0]!r:.140}, which is not one of its inputs")
        _check_output(graph.output)
        description = message.get("description", "")
        if not isinstance(description, str):
            raise InvalidLoss("description must be a string")
        return cls(str(name), source, hyperparameters, tuple(inputs), Program(graph), description[:200])


def settings(
    loss: str, known: Mapping[str, Hyperparameter], given: Mapping[str, Any], *, takes_others: bool = False
) -> dict[str, Setting]:
    """Returns all settings of a loss, with those of a call.

    Args:
        loss: The loss's name.
        known: Its settings.
        given: The settings of a call.
        takes_others: Whether it accepts any other setting too, because it has `**kwargs`.

    Raises:
        InvalidInput: If one is unknown, fixed, or has an invalid value.
    """
    values = {name: each.default for name, each in known.items()}
    for name, value in converted(known, given).items():
        if name not in known:
            if takes_others:
                values[name] = value
                continue
            listing = ", ".join(known) or "no settings at all"
            raise InvalidInput(f"loss_fn_config: {loss} does not know {name!r}; it takes {listing}")
        default = known[name].default
        if known[name].fixed and value != default:
            raise InvalidInput(
                f"loss_fn_config: {name} of {loss} is fixed to {default!r}, because the function decides by it what to "
                f"compute. Register it again, under another name, with {name}={value!r}."
            )
        is_number = isinstance(value, int | float)
        is_wrong = not math.isfinite(value) if is_number else isinstance(default, int | float)
        if is_wrong and not known[name].fixed:
            raise InvalidInput(f"loss_fn_config: {name} must be a finite number, got {value!r}")
        values[name] = value
    return values


def converted(known: Mapping[str, Hyperparameter], given: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the settings of a call with the types of their defaults: the wire has no numbers but floats."""
    values = {name: plain(value) for name, value in given.items()}
    for name in known.keys() & values.keys():
        value, default = values[name], known[name].default
        if isinstance(value, float) and isinstance(default, int) and value.is_integer():
            values[name] = type(default)(value)
        elif isinstance(value, int) and isinstance(default, float):
            values[name] = float(value)  # the function may depend on the type
    return values


def plain(value: Any) -> Any:
    """Returns a numpy number as a Python number, and anything else as it is."""
    return value.item() if isinstance(value, np.generic) else value


def check_given(loss: str, given: Iterable[str], reads: Iterable[str]) -> None:
    """Checks that a loss reads the inputs that were given once for the batch, and therefore for this loss.

    Raises:
        InvalidInput: If it does not read one; names those that it reads.
    """
    if unread := [name for name in given if name not in reads]:
        raise InvalidInput(
            f"loss_fn_inputs: {loss} does not read {unread[0]!r:.80}; it reads {', '.join(sorted(reads)) or 'none'}"
        )


def check_name(name: Any) -> None:
    """Raises `InvalidLoss` if this is not a valid name of a loss."""
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise InvalidLoss(
            f"a loss cannot be called {name!r:.80}: a name has up to 64 letters, digits, '_', '-' and '.', and begins "
            "with a letter or '_'"
        )


def check_diagnostic(name: Any) -> None:
    """Raises `InvalidLoss` if this is not a valid name of a diagnostic."""
    if not isinstance(name, str) or not _DIAGNOSTIC.fullmatch(name):
        raise InvalidLoss(f"a diagnostic cannot be called {name!r:.120}; use a short string with at most one colon")


def metric_names(diagnostics: Iterable[Any]) -> dict[str, str]:
    """Returns the metric that each diagnostic becomes: in the protocol the suffix says how chunks are combined.

    Raises:
        InvalidLoss: If a name is invalid, or two become the same metric.
    """
    names: dict[str, str] = {}
    for name in diagnostics:
        check_diagnostic(name)
        names[name] = name if ":" in name else f"{name}:unique"
    if twice := [name for name, metric in names.items() if metric != name and metric in names]:
        raise InvalidLoss(f"the diagnostics {twice[0]!r} and {names[twice[0]]!r} would be the same metric; rename one")
    return names


def _decode_hyperparameters(message: Any) -> dict[str, Hyperparameter]:
    if not isinstance(message, dict) or len(message) > MAX_SETTINGS:
        raise InvalidLoss(f"hyperparameters must be an object of at most {MAX_SETTINGS} entries")
    decoded = {}
    for name, entry in message.items():
        if not _INPUT.fullmatch(name) or not isinstance(entry, dict):
            raise InvalidLoss(f"hyperparameters: {name!r:.80} must be a valid name, and its value an object")
        default, fixed = entry.get("default"), entry.get("fixed", False)
        if not isinstance(fixed, bool) or not (default is None or isinstance(default, bool | int | float | str)):
            raise InvalidLoss(f"hyperparameters: {name}: default must be a number or string, and fixed true or false")
        if not fixed and (isinstance(default, bool) or not isinstance(default, int | float)):
            raise InvalidLoss(f"hyperparameters: {name}: only a number can change with each call; fix it")
        decoded[name] = Hyperparameter(default[:200] if isinstance(default, str) else default, fixed)
    return decoded


def _check_output(output: Any) -> None:
    if not (isinstance(output, tuple) and len(output) == 3 and isinstance(output[0], Ref)):
        raise InvalidLoss("a graph must return a tuple of loss, logprobs and diagnostics")
    _, logprobs, diagnostics = output
    if not (logprobs is None or isinstance(logprobs, Ref)) or not isinstance(diagnostics, dict):
        raise InvalidLoss("logprobs must be a value or null, and diagnostics an object")
    if len(diagnostics) > 256:
        raise InvalidLoss("there are more than 256 diagnostics")
    metric_names(diagnostics)
    for name, value in diagnostics.items():
        if not isinstance(value, Ref | int | float):
            raise InvalidLoss(f"the diagnostic {name!r} is not a number")
