"""A loss of a whole batch that a server keeps under a name: what it is given, its settings, and its graphs.

One function may have several graphs: which inputs a batch has is known before it runs, so that
`if "weights" in loss_fn_inputs` is decided by choosing a graph.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import numpy as np

from tinker_lightning.errors import InvalidInput, InvalidLoss
from tinker_lightning.lossgraph.graphs.graph import Graph, Ref
from tinker_lightning.lossgraph.graphs.run import Program

if TYPE_CHECKING:
    from collections.abc import Iterable

    from torch import Tensor

    from tinker_lightning.lossgraph.graphs.limits import Limits

# What a loss is computed from: logits and a mask of what is no padding, or the log-probabilities of the targets.
Source: TypeAlias = Literal["logits", "logprobs"]
SOURCES: dict[Source, tuple[str, ...]] = {"logits": ("model_outputs", "attention_mask"), "logprobs": ("logprobs",)}
Setting: TypeAlias = float | int | str | bool | None

# How the names of losses begin that are uploaded without being registered: nobody uses them, and lists leave them out.
OF_LIBRARY, OF_OWN = UNLISTED = ("library.", "own.")

MAX_VARIANTS = 16
MAX_SETTINGS = 32
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_.-]{0,63}")
_INPUT = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,63}")
_DIAGNOSTIC = re.compile(r"[^\x00-\x1f:]{1,100}(:[a-z0-9_]{1,20})?")


@dataclass(frozen=True, slots=True)
class LossFnOutput:
    """What a loss on logits returns.

    Args:
        loss: The scalar that is trained on.
        logprobs: Log-probabilities to give back for each datum, usually `[B, T]`.
        diagnostics: Numbers to log, by name.
    """

    loss: Any
    logprobs: Any = None
    diagnostics: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Hyperparameter:
    """A setting of a loss. One that is fixed has shaped the graph and cannot be changed in a call."""

    default: Setting
    fixed: bool = False


@dataclass(frozen=True, slots=True)
class Variant:
    """The graph for batches that have these inputs, and have not those that are absent."""

    inputs: tuple[str, ...]
    absent: tuple[str, ...]
    program: Program


@dataclass(frozen=True, slots=True)
class BatchLoss:
    """A loss of a whole batch, as graphs.

    Args:
        name: What it is called.
        source: What it is computed from.
        hyperparameters: Its settings.
        variants: Its graphs. Inputs of each are those of its source, then `loss_fn_inputs.*` and `hyperparameters.*`.
        description: What lists say of it.
    """

    name: str
    source: Source
    hyperparameters: Mapping[str, Hyperparameter]
    variants: Sequence[Variant]
    description: str = ""

    def inputs(self, present: Iterable[str]) -> tuple[str, ...]:
        """The names of the inputs that it reads, of those that are there.

        Raises:
            InvalidInput: If one is missing.
        """
        return self._variant(set(present)).inputs

    @property
    def reads(self) -> frozenset[str]:
        """All inputs that it ever looks at."""
        return frozenset(name for variant in self.variants for name in (*variant.inputs, *variant.absent))

    def __call__(
        self,
        sources: Mapping[str, Tensor],
        inputs: Mapping[str, Tensor],
        hyperparameters: Mapping[str, Setting],
        limits: Limits,
    ) -> LossFnOutput:
        """The loss of a batch, within limits.

        Raises:
            InvalidLoss: If a call of the graph fails, or takes too much.
        """
        program = self._variant(set(inputs)).program
        loss, logprobs, diagnostics = program(self._values(program, sources, inputs, hyperparameters), limits)
        return LossFnOutput(loss, logprobs, diagnostics)

    def check(
        self,
        sources: Mapping[str, Tensor],
        inputs: Mapping[str, Tensor],
        hyperparameters: Mapping[str, Setting],
        limits: Limits,
    ) -> None:
        """The same on shapes alone: all that can be told before the model runs."""
        program = self._variant(set(inputs)).program
        program.check(self._values(program, sources, inputs, hyperparameters), limits)

    @property
    def writes(self) -> bool:
        """Whether it changes tensors in place, which may be those that it is given."""
        return any(variant.program.writes for variant in self.variants)

    def settings(self, given: Mapping[str, Any]) -> dict[str, Setting]:
        """All settings, with those of a call.

        Raises:
            InvalidInput: If one is not known, is fixed, or has no value that it can have.
        """
        return settings(self.name, self.hyperparameters, given)

    def encode(self) -> dict[str, Any]:
        """The loss as JSON has it."""
        return {
            "name": self.name,
            "source": self.source,
            "description": self.description,
            "hyperparameters": {
                name: {"default": each.default, "fixed": each.fixed} for name, each in self.hyperparameters.items()
            },
            "variants": [
                {
                    "inputs": list(variant.inputs),
                    "absent": list(variant.absent),
                    "graph": variant.program.graph.encode(),
                }
                for variant in self.variants
            ],
        }

    @property
    def digest(self) -> str:
        """Names its contents: the same for the same loss."""
        return hashlib.sha256(json.dumps(self.encode(), sort_keys=True).encode()).hexdigest()[:16]

    @classmethod
    def decode(cls, message: Mapping[str, Any]) -> BatchLoss:
        """A loss from its JSON.

        Raises:
            InvalidLoss: If it is none; says where.
        """
        name = message.get("name")
        check_name(name)
        source = message.get("source")
        if not isinstance(source, str) or source not in SOURCES:
            raise InvalidLoss(f"source must be one of {', '.join(SOURCES)}, got {source!r:.40}")
        hyperparameters = _decode_hyperparameters(message.get("hyperparameters", {}))
        entries = message.get("variants")
        if not isinstance(entries, list) or not 1 <= len(entries) <= MAX_VARIANTS:
            raise InvalidLoss(f"variants must be a list of 1 to {MAX_VARIANTS} graphs")
        variants = []
        for i, entry in enumerate(entries):
            try:
                variants.append(_decode_variant(entry, SOURCES[source], hyperparameters))
            except InvalidLoss as error:
                raise InvalidLoss(f"variants[{i}]: {error}") from error
        description = message.get("description", "")
        if not isinstance(description, str):
            raise InvalidLoss("description must be a text")
        return cls(str(name), source, hyperparameters, variants, description[:200])

    def _variant(self, present: set[str]) -> Variant:
        fitting = [variant for variant in self.variants if not present & set(variant.absent)]
        missing: list[list[str]] = []
        for variant in fitting:
            lacks = [name for name in variant.inputs if name not in present]
            if not lacks:
                return variant
            missing.append(lacks)
        if not missing:
            raise InvalidInput(f"{self.name} was not traced for a batch with the inputs {', '.join(sorted(present))}")
        lacks = min(missing, key=len)
        raise InvalidInput(
            f"loss_fn_inputs: {', '.join(lacks)}: missing; {self.name} reads it. Give it with each datum, "
            f"Datum.from_targets(..., {lacks[0]}=...), or once for the batch, loss_fn_inputs={{{lacks[0]!r}: ...}}."
        )

    @staticmethod
    def _values(
        program: Program,
        sources: Mapping[str, Tensor],
        inputs: Mapping[str, Tensor],
        hyperparameters: Mapping[str, Setting],
    ) -> list[Any]:
        tables: dict[str, Mapping[str, Any]] = {"loss_fn_inputs": inputs, "hyperparameters": hyperparameters}
        values = []
        for target in program.graph.inputs:
            table, dot, name = target.partition(".")
            values.append(tables[table][name] if dot else sources[target])
        return values


def settings(loss: str, known: Mapping[str, Hyperparameter], given: Mapping[str, Any]) -> dict[str, Setting]:
    """All settings of a loss, with those of a call.

    Raises:
        InvalidInput: If one is not known, is fixed, or has no value that it can have.
    """
    values = {name: each.default for name, each in known.items()}
    for name, value in given.items():
        value = value.item() if isinstance(value, np.generic) else value
        if name not in known:
            listing = ", ".join(known) or "no settings at all"
            raise InvalidInput(f"loss_fn_config: {loss} does not know {name!r}; it takes {listing}")
        default = known[name].default
        if isinstance(value, float) and isinstance(default, int) and value.is_integer():
            value = type(default)(value)  # the wire knows numbers only as floats
        elif isinstance(value, int) and isinstance(default, float):
            value = float(value)  # for the function may have asked for the type
        if known[name].fixed and value != default:
            raise InvalidInput(
                f"loss_fn_config: {name} of {loss} is fixed to {default!r}, for the function decides by it what to "
                f"compute. Register it once more, under another name, with {name}={value!r}."
            )
        is_number = isinstance(value, int | float)
        is_wrong = not math.isfinite(value) if is_number else isinstance(default, int | float)
        if is_wrong and not known[name].fixed:
            raise InvalidInput(f"loss_fn_config: {name} must be a finite number, got {value!r}")
        values[name] = value
    return values


def check_given(loss: str, given: Iterable[str], reads: Iterable[str]) -> None:
    """Refuses inputs that were given once for the batch, hence for this loss, if it does not read them.

    Raises:
        InvalidInput: If there is one; names those that it reads.
    """
    if unread := [name for name in given if name not in reads]:
        raise InvalidInput(
            f"loss_fn_inputs: {loss} does not read {unread[0]!r:.80}; it reads {', '.join(sorted(reads)) or 'none'}"
        )


def check_name(name: Any) -> None:
    """Refuses what cannot be the name of a loss."""
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise InvalidLoss(
            f"a loss cannot be called {name!r:.80}: a name has up to 64 letters, digits, '_', '-' and '.', and begins "
            "with a letter or '_'"
        )


def check_diagnostic(name: Any) -> None:
    """Refuses what cannot be the name of a diagnostic."""
    if not isinstance(name, str) or not _DIAGNOSTIC.fullmatch(name):
        raise InvalidLoss(f"a diagnostic cannot be called {name!r:.120}; use a short text with at most one colon")


def metric_names(diagnostics: Iterable[Any]) -> dict[str, str]:
    """The metric that each diagnostic becomes, by its name: the protocol wants it to say how chunks are put together.

    Raises:
        InvalidLoss: If one cannot be called so, or two become the same.
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
            raise InvalidLoss(f"hyperparameters: {name!r:.80} must be a name with an object behind it")
        default, fixed = entry.get("default"), entry.get("fixed", False)
        if not isinstance(fixed, bool) or not (default is None or isinstance(default, bool | int | float | str)):
            raise InvalidLoss(f"hyperparameters: {name}: default must be a number or text, and fixed true or false")
        if not fixed and (isinstance(default, bool) or not isinstance(default, int | float)):
            raise InvalidLoss(f"hyperparameters: {name}: only a number can change with each call; fix it")
        decoded[name] = Hyperparameter(default[:200] if isinstance(default, str) else default, fixed)
    return decoded


def _decode_variant(message: Any, sources: tuple[str, ...], hyperparameters: Mapping[str, Hyperparameter]) -> Variant:
    if not isinstance(message, dict):
        raise InvalidLoss("must be an object with inputs, absent and graph")
    names: list[tuple[str, ...]] = []
    for key in ("inputs", "absent"):
        listed = message.get(key, [])
        if not isinstance(listed, list) or len(listed) > 64:
            raise InvalidLoss(f"{key} must be a list of names")
        if not all(isinstance(name, str) and _INPUT.fullmatch(name) for name in listed):
            raise InvalidLoss(f"{key}: a name has letters, digits and '_' only")
        names.append(tuple(listed))
    inputs, absent = names
    graph = Graph.decode(message.get("graph"))
    known = {*sources, *(f"loss_fn_inputs.{name}" for name in inputs)}
    known |= {f"hyperparameters.{name}" for name, each in hyperparameters.items() if not each.fixed}
    if unknown := [target for target in graph.inputs if target not in known]:
        raise InvalidLoss(f"the graph reads {unknown[0]!r:.140}, which is none of its inputs")
    _check_output(graph.output)
    return Variant(inputs, absent, Program(graph))


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
            raise InvalidLoss(f"the diagnostic {name!r} is no number")
