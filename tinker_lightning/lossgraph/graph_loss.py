"""Losses on a batch or on each datum as graphs: inputs, settings and graph, their JSON form and their checks."""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import numpy as np
import torch
from torch import Tensor

from tinker_lightning.errors import InvalidDatum, InvalidInput, InvalidLoss, MissingInput
from tinker_lightning.lossgraph.graph import Graph, Node, Ref, map_leaves
from tinker_lightning.lossgraph.program import DEFAULT_LIMITS, Program
from tinker_lightning.types import TensorData

if TYPE_CHECKING:
    from tinker_lightning.lossgraph.program import Limits

Setting: TypeAlias = float | int | str | bool | None

# The model output that a loss is computed from: the logits of a batch, or the log-probabilities of a batch or a datum.
Source: TypeAlias = Literal["logits", "logprobs", "datum"]
BATCH_SOURCES: tuple[Source, ...] = ("logits", "logprobs")
# The model outputs that a graph can read; the mask is 0 on padding.
OUTPUTS: dict[Source, tuple[str, ...]] = {
    "logits": ("model_outputs", "attention_mask"),
    "logprobs": ("logprobs",),
    "datum": ("logprobs",),
}
_Tensors: TypeAlias = Mapping[str, "Tensor"]

# Prefixes of losses that are uploaded without being registered. Listings omit them.
LIBRARY_PREFIX, CUSTOM_PREFIX = UNLISTED_PREFIXES = ("library.", "own.")

# The name of an input that multiplies the loss, for servers that have no other way to scale it.
SCALE = "loss_scale"

MAX_INPUTS = 64
MAX_DATUM_INPUTS = 16  # of the protocol
MAX_SETTINGS = 32
MAX_METRICS = 256
_NO_SETTINGS: Mapping[str, Setting] = {}
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_.-]{0,63}")
_INPUT = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,63}")
_DIAGNOSTIC = re.compile(r"[^\x00-\x1f:]{1,100}(:[a-z0-9_]{1,20})?")
_DATUM_METRIC = re.compile(r"custom/[a-z0-9_./-]{1,64}:(sum|mean)")


@dataclass(frozen=True, slots=True)
class Hyperparameter:
    """A setting of a loss. A fixed one has shaped the graph, so a call cannot change it."""

    default: Setting
    fixed: bool = False


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


@dataclass(frozen=True, slots=True, eq=False)
class GraphLoss:
    """A loss as a graph, which is validated when the loss is created.

    The graph reads model outputs, `loss_fn_inputs.*` and `hyperparameters.*`, or for a per-datum loss its `inputs`. It
    returns the loss, its metrics and, optionally, log-probabilities.
    """

    name: str
    source: Source
    inputs: Mapping[str, int | None]  # with the number of dimensions for a per-datum loss, `logprobs` first
    program: Program
    hyperparameters: Mapping[str, Hyperparameter] = field(default_factory=dict)
    description: str = ""
    optional_inputs: Mapping[str, bool] = field(
        default_factory=dict
    )  # whether optional inputs were present while tracing

    def __post_init__(self) -> None:
        _check_inputs(self)
        _check_output(self)

    @property
    def input_prefix(self) -> str:
        """The prefix of inputs in the graph."""
        return "" if self.source == "datum" else "loss_fn_inputs."

    @property
    def reads(self) -> frozenset[str]:
        """The names of all inputs that the loss looks at."""
        return frozenset((*self.inputs, *self.optional_inputs))

    def fits(self, settings: Mapping[str, Any], present: Iterable[str] | None) -> bool:
        """Returns whether tracing with these settings and inputs would give the same graph."""
        if settings.keys() != self.hyperparameters.keys():
            return False
        fixed = ((settings[name], each.default) for name, each in self.hyperparameters.items() if each.fixed)
        if any(type(value) is not type(default) or value != default for value, default in fixed):
            return False
        return present is None or all((name in present) == there for name, there in self.optional_inputs.items())

    def select(self, present: Iterable[str]) -> tuple[str, ...]:
        """Returns the names of the inputs of a loss on a batch; raises `InvalidInput` if one is not present."""
        present = set(present)
        if missing := [name for name in self.inputs if name not in present]:
            raise InvalidInput(
                f"loss_fn_inputs: {', '.join(missing)}: missing; {self.name} reads it. Pass it with each datum, "
                f"Datum.from_targets(..., {missing[0]}=...), or once for the batch, "
                f"loss_fn_inputs={{{missing[0]!r}: ...}}."
            )
        return tuple(self.inputs)

    def settings(self, config: Mapping[str, Any]) -> dict[str, Setting]:
        """Returns all settings: the defaults, overridden by `config`; raises `InvalidInput` if one is invalid."""
        return check_settings(self.name, self.hyperparameters, config)

    def __call__(
        self,
        outputs: _Tensors,
        inputs: _Tensors,
        settings: Mapping[str, Setting] = _NO_SETTINGS,
        limits: Limits = DEFAULT_LIMITS,
    ) -> LossFnOutput:
        """Computes the loss; raises `InvalidLoss` if a call of the graph fails or exceeds the limits."""
        loss, metrics, *logprobs = self.program(self._values(outputs, inputs, settings), limits)
        return LossFnOutput(loss, logprobs[0] if logprobs else None, metrics)

    def check(
        self,
        outputs: _Tensors,
        inputs: _Tensors,
        settings: Mapping[str, Setting] = _NO_SETTINGS,
        limits: Limits = DEFAULT_LIMITS,
    ) -> None:
        """Runs the graph on shapes alone, which finds most errors before the model runs."""
        self.program.check(self._values(outputs, inputs, settings), limits)

    def _values(self, outputs: _Tensors, inputs: _Tensors, settings: Mapping[str, Setting]) -> list[Any]:
        values = dict[str, Any](outputs)
        values |= {f"{self.input_prefix}{name}": each for name, each in inputs.items()}
        values |= {f"hyperparameters.{name}": each for name, each in settings.items()}
        return [values[target] for target in self.program.graph.inputs]

    def encode(self) -> dict[str, Any]:
        """Returns the loss as JSON."""
        return {
            "name": self.name,
            "source": self.source,
            "description": self.description,
            "hyperparameters": {
                name: {"default": each.default, "fixed": each.fixed} for name, each in self.hyperparameters.items()
            },
            "inputs": dict(self.inputs),
            "graph": self.program.graph.encode(),
        }

    @property
    def digest(self) -> str:
        """A hash of the contents."""
        return hashlib.sha256(json.dumps(self.encode(), sort_keys=True).encode()).hexdigest()[:16]

    @classmethod
    def decode(cls, message: Mapping[str, Any], sources: Iterable[Source] = BATCH_SOURCES) -> GraphLoss:
        """Returns the loss that JSON describes, with one of these sources; raises `InvalidLoss` if it is invalid."""
        name, inputs, description = message.get("name"), message.get("inputs", {}), message.get("description", "")
        source = next((each for each in sources if each == message.get("source")), None)
        if source is None:
            raise InvalidLoss(f"source must be one of {', '.join(sources)}, got {message.get('source')!r:.40}")
        if source != "datum":
            check_name(name)
        if not isinstance(inputs, dict):
            raise InvalidLoss("inputs must be an object")
        if not isinstance(description, str):
            raise InvalidLoss("description must be a string")
        program = Program(Graph.decode(message.get("graph")))
        hyperparameters = _decode_hyperparameters(message.get("hyperparameters", {}))
        return cls(str(name)[:200], source, inputs, program, hyperparameters, description[:200])


def check_settings(
    loss: str,
    hyperparameters: Mapping[str, Hyperparameter],
    config: Mapping[str, Any],
    *,
    accepts_any_setting: bool = False,
) -> dict[str, Setting]:
    """Returns all settings of a loss, the defaults overridden by `config`; raises `InvalidInput` if one is invalid."""
    values = {name: each.default for name, each in hyperparameters.items()}
    for name, value in cast_like_defaults(hyperparameters, config).items():
        if name not in hyperparameters:
            if accepts_any_setting:
                values[name] = value
                continue
            raise InvalidInput(unknown_setting_message(loss, name, hyperparameters))
        default = hyperparameters[name].default
        if hyperparameters[name].fixed and value != default:
            raise InvalidInput(
                f"loss_fn_config: {name} of {loss} is fixed to {default!r}, because the control flow of the function "
                f"depends on it. Register the loss under another name with {name}={value!r}."
            )
        is_number = isinstance(value, int | float)
        is_wrong = not math.isfinite(value) if is_number else isinstance(default, int | float)
        if is_wrong and not hyperparameters[name].fixed:
            raise InvalidInput(f"loss_fn_config: {name} must be a finite number, got {value!r}")
        values[name] = value
    return values


def unknown_setting_message(loss: str, name: str, valid: Iterable[str]) -> str:
    """Returns the message for a setting that a loss does not have."""
    return f"loss_fn_config: {loss} has no setting {name!r}; it takes {', '.join(valid) or 'no settings'}"


def cast_like_defaults(hyperparameters: Mapping[str, Hyperparameter], config: Mapping[str, Any]) -> dict[str, Any]:
    """Returns settings with the types of their defaults, because all numbers on the wire are floats."""
    values = {name: to_python(value) for name, value in config.items()}
    for name in hyperparameters.keys() & values.keys():
        value, default = values[name], hyperparameters[name].default
        if isinstance(value, float) and isinstance(default, int) and value.is_integer():
            values[name] = type(default)(value)
        elif isinstance(value, int) and isinstance(default, float):
            values[name] = float(value)  # the function may depend on the type
    return values


def to_python(value: Any) -> Any:
    """Converts a numpy scalar to a Python number; returns anything else unchanged."""
    return value.item() if isinstance(value, np.generic) else value


def check_batch_inputs(loss: str, names: Iterable[str], reads: Iterable[str]) -> None:
    """Raises `InvalidInput` if a loss does not read an input that was passed once for the batch."""
    if unread := [name for name in names if name not in reads]:
        raise InvalidInput(
            f"loss_fn_inputs: {loss} does not read {unread[0]!r:.80}; it reads {', '.join(sorted(reads)) or 'none'}"
        )


def check_name(name: Any) -> None:
    """Raises `InvalidLoss` if a loss cannot have this name."""
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise InvalidLoss(
            f"invalid loss name {name!r:.80}: use up to 64 letters, digits, '_', '-' and '.', beginning with a letter "
            "or '_'"
        )


def metric_names(diagnostics: Iterable[Any]) -> dict[str, str]:
    """Returns the metric name of each diagnostic. Its suffix determines how clients combine chunks."""
    names: dict[str, str] = {}
    for name in diagnostics:
        if not isinstance(name, str) or not _DIAGNOSTIC.fullmatch(name):
            raise InvalidLoss(f"invalid diagnostic name {name!r:.120}; use a short string with at most one colon")
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
            raise InvalidLoss(f"hyperparameters: {name}: only numbers can change between calls; set fixed to true")
        decoded[name] = Hyperparameter(default[:200] if isinstance(default, str) else default, fixed)
    return decoded


def _check_inputs(loss: GraphLoss) -> None:
    is_datum = loss.source == "datum"
    if is_datum and ([*loss.inputs][:1] != ["logprobs"] or loss.inputs["logprobs"] not in (1, 2)):
        raise InvalidLoss("the first input must be logprobs, with 1 dimension ([T]) or 2 ([T, K])")
    if len(loss.inputs) > (most := MAX_DATUM_INPUTS if is_datum else MAX_INPUTS):
        raise InvalidLoss(f"a loss takes at most {most} inputs, got {len(loss.inputs)}")
    for name, rank in loss.inputs.items():
        if not _INPUT.fullmatch(name) or (is_datum and name != name.lower()):
            letters = "lowercase letters" if is_datum else "letters"
            raise InvalidLoss(f"invalid input name {name!r:.80}; use {letters}, digits and '_'")
        if rank not in ((0, 1, 2) if is_datum else (None,)):
            expected = "0, 1 or 2" if is_datum else "null"
            raise InvalidLoss(f"{name}: the number of dimensions of an input must be {expected}, not {rank!r:.20}")
    readable = {*OUTPUTS[loss.source], *(f"{loss.input_prefix}{name}" for name in loss.inputs)}
    readable |= {f"hyperparameters.{name}" for name, each in loss.hyperparameters.items() if not each.fixed}
    if unknown := [target for target in loss.program.graph.inputs if target not in readable]:
        raise InvalidLoss(f"the graph reads {unknown[0]!r:.140}, which is not one of its inputs")


def _check_output(loss: GraphLoss) -> None:
    output, is_datum = loss.program.graph.output, loss.source == "datum"
    if not (isinstance(output, tuple | list) and len(output) in (2, 3) and isinstance(output[0], Ref)):
        raise InvalidLoss("a loss must return (loss, metrics)")
    if not isinstance(output[1], dict):
        raise InvalidLoss("a loss must return its metrics as a dict")
    if len(output) == 3 and not isinstance(output[2], Ref | None):
        raise InvalidLoss("a loss must return its logprobs as a tensor or None")
    if len(output[1]) > MAX_METRICS:
        raise InvalidLoss(f"a loss returns at most {MAX_METRICS} metrics, got {len(output[1])}")
    if not is_datum:
        metric_names(output[1])
    for name, value in output[1].items():
        if is_datum and not _DATUM_METRIC.fullmatch(name):
            raise InvalidLoss(
                f"the metric {name!r:.100} must be called custom/<name>:sum or custom/<name>:mean, in lowercase "
                "letters; the suffix determines how it is combined over datums"
            )
        if not isinstance(value, Ref if is_datum else Ref | int | float):
            raise InvalidLoss(f"the metric {name!r} must be {'a tensor' if is_datum else 'a number or a tensor'}")


def select_inputs(loss: GraphLoss, inputs: Mapping[str, TensorData]) -> dict[str, TensorData]:
    """Returns the inputs that a loss reads from a datum, without `logprobs`; sparse ones stay sparse."""
    selected: dict[str, TensorData] = {}
    for input_name, rank in loss.inputs.items():
        name = "target_tokens" if input_name == "logprobs" else input_name
        if name not in inputs:
            raise MissingInput(f"{name}: missing; {loss.name} reads it")
        tensor = inputs[name]
        if rank == 0 and tensor.shape == [1]:  # protobuf does not distinguish a scalar from a vector of length 1
            tensor = TensorData(tensor.to_numpy().reshape(()))
        if len(tensor.shape) != rank:
            raise InvalidDatum(f"{name}: has the shape {tensor.shape}, but {loss.name} takes {rank} dimensions")
        if input_name != "logprobs":
            selected[name] = tensor
    return selected


def meta_tensors(selected: Mapping[str, TensorData], dtype: torch.dtype) -> dict[str, Tensor]:
    """Returns tensors with the shapes of the selected inputs and without memory."""
    return {
        name: torch.empty(each.shape, dtype=torch.int64 if each.dtype == "int64" else dtype, device="meta")
        for name, each in selected.items()
    }


def dense_tensors(selected: Mapping[str, TensorData], dtype: torch.dtype) -> dict[str, Tensor]:
    """Returns the selected inputs as dense tensors, and converts floating-point ones to `dtype`."""
    tensors = {name: each.to_torch() for name, each in selected.items()}
    return {name: each.to(dtype) if each.is_floating_point() else each for name, each in tensors.items()}


def combine_metrics(sums: Mapping[str, float], datums: int) -> dict[str, float]:
    """Returns the metrics of a batch, given their sums over datums."""
    return {name: value / datums if name.endswith(":mean") else value for name, value in sums.items()}


def scale_by_input(loss: GraphLoss) -> GraphLoss:
    """Returns the loss multiplied by an additional input, `loss_scale`."""
    graph, count = loss.program.graph, len(loss.program.graph.inputs)

    def moved(value: Any) -> Any:
        return map_leaves(value, lambda part: Ref(part.node + (part.node >= count)) if isinstance(part, Ref) else part)

    value, metrics = moved(graph.output)
    calls = [replace(node, args=moved(node.args), kwargs=moved(dict(node.kwargs))) for node in graph.calls]
    calls.append(Node("call_function", "scaled_loss", "operator.mul", (value, Ref(count))))
    scaled = Graph([*graph.inputs, SCALE], calls, (Ref(count + len(calls)), metrics))
    return replace(loss, inputs={**loss.inputs, SCALE: 0}, program=Program(Graph.decode(scaled.encode())))
