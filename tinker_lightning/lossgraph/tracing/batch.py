"""Traces a loss of a whole batch into its graphs: one for each set of inputs that the function tells apart."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np
from torch import fx

from tinker_lightning.errors import InvalidInput, InvalidLoss, LossNotTraceable
from tinker_lightning.lossgraph.batch_loss import (
    MAX_VARIANTS,
    SOURCES,
    BatchLoss,
    Hyperparameter,
    LossFnOutput,
    Setting,
    Source,
    Variant,
    check_diagnostic,
    check_name,
)
from tinker_lightning.lossgraph.graphs.run import Program
from tinker_lightning.lossgraph.tracing.record import DependsOn, Recorder, Value, record, refuse
from tinker_lightning.lossgraph.tracing.signatures import place_of_function, signature_of
from tinker_lightning.lossgraph.tracing.values import ListValue

if TYPE_CHECKING:
    from collections.abc import Callable

_MAX_TRACES = 64
_RANKS = {"model_outputs": 3, "attention_mask": 2}  # log-probabilities may have alternatives for each token
_SIGNATURES = {
    "logits": "(model_outputs, loss_fn_inputs, attention_mask, **hyperparameters)",
    "logprobs": "(data, logprobs, **hyperparameters)",
}


def trace_batch_loss(
    fn: Callable[..., Any],
    name: str,
    source: Source,
    fixed: Mapping[str, Setting] | None = None,
    *,
    of_lists: bool = False,
) -> BatchLoss:
    """A function of a batch as graphs.

    Args:
        fn: The function. On logits it takes `(model_outputs, loss_fn_inputs, attention_mask, **hyperparameters)` and
            returns a `LossFnOutput`; on log-probabilities `(data, logprobs, **hyperparameters)`, inputs and
            log-probabilities stacked to `[B, T]`, and returns `(loss, metrics)`.
        name: What to call it.
        source: What it is computed from.
        fixed: Values of settings that are not to change from call to call.
        of_lists: Whether it also runs elsewhere, with lists of datums and of log-probabilities. What would give other
            numbers there is refused.

    Raises:
        LossNotTraceable: If it does what no graph can say; names the line.
    """
    check_name(name)
    defaults = read_hyperparameters(fn, source)
    if unknown := [key for key in fixed or {} if key not in defaults]:
        raise InvalidLoss(f"{name} has no hyperparameter {unknown[0]!r}; it has {', '.join(defaults) or 'none'}")
    fixed = {key: _plain(value) for key, value in (fixed or {}).items()}
    hyperparameters = {
        key: Hyperparameter(fixed.get(key, default), key in fixed or not _is_number(default))
        for key, default in defaults.items()
    }
    while True:
        try:
            variants = _variants(fn, source, hyperparameters, of_lists)
            break
        except DependsOn as blocked:
            # What Python decides by settings alone is decided now, by their values.
            names = [key.removeprefix("hyperparameters.") for key in blocked.inputs]
            hyperparameters |= {key: Hyperparameter(hyperparameters[key].default, True) for key in names}
    description = (inspect.getdoc(fn) or "").partition("\n")[0]
    return BatchLoss(name, source, hyperparameters, variants, description[:200])


def read_hyperparameters(fn: Callable[..., Any], source: Source) -> dict[str, Setting]:
    """The settings of a function with their defaults: the parameters behind those that every loss has.

    Raises:
        InvalidLoss: If it has not the parameters of its kind, or a setting without a default.
    """
    signature = signature_of(fn)
    parameters = list(signature.parameters.values())
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    count = 3 if source == "logits" else 2
    if len(parameters) < count or any(each.kind not in positional for each in parameters[:count]):
        raise InvalidLoss(f"a loss on {source} takes {_SIGNATURES[source]}, but this one {signature}")
    settings: dict[str, Setting] = {}
    for each in parameters[count:]:
        if each.kind in (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL):
            continue
        default = _plain(each.default)
        if default is each.empty or not (default is None or isinstance(default, float | int | str)):
            raise InvalidLoss(f"the hyperparameter {each.name} needs a default that is a number, a text or None")
        settings[each.name] = default
    return settings


def _variants(
    fn: Callable[..., Any], source: Source, hyperparameters: Mapping[str, Hyperparameter], of_lists: bool
) -> list[Variant]:
    """A graph for each way in which the function asks whether inputs are there."""
    variants: list[Variant] = []
    decisions: list[tuple[str, bool]] = []
    for _ in range(_MAX_TRACES):
        inputs = _Inputs(source, dict(decisions))
        try:
            graph = record(fn, functools.partial(_call, fn, source, hyperparameters, inputs, of_lists))
        except (InvalidInput, DependsOn) as error:
            if isinstance(error, DependsOn) and _are_settings(error.inputs):
                raise
            # A function may refuse a batch that lacks an input; but what it does with all of them must be traceable.
            if all(inputs.decisions.values()):
                raise error.error if isinstance(error, DependsOn) else error from None
        else:
            absent = tuple(name for name, there in inputs.decisions.items() if not there)
            variants.append(Variant(inputs.names, absent, Program(graph)))
        decisions = list(inputs.decisions.items())
        while decisions and not decisions[-1][1]:
            decisions.pop()
        if not decisions:
            break
        decisions[-1] = (decisions[-1][0], False)
    if decisions or len(variants) > MAX_VARIANTS:
        raise LossNotTraceable(
            f"it tells more than {MAX_VARIANTS} combinations of inputs apart. Require some of them, or register one "
            "loss for each case."
        )
    return variants


def _call(
    fn: Callable[..., Any],
    source: Source,
    hyperparameters: Mapping[str, Hyperparameter],
    inputs: _Inputs,
    of_lists: bool,
    recorder: Recorder,
) -> tuple[Any, Any, dict[str, Any]]:
    given = {name: recorder.input(name, _RANKS.get(name)) for name in SOURCES[source]}
    settings = {
        name: each.default if each.fixed else recorder.setting(f"hyperparameters.{name}", each.default)  # type: ignore[arg-type]  # others are fixed
        for name, each in hyperparameters.items()
    }
    inputs.recorder = recorder
    if source == "logits":
        returned = fn(given["model_outputs"], inputs, given["attention_mask"], **settings)
        if not isinstance(returned, LossFnOutput):
            _wrong_output(fn, "a LossFnOutput(loss, logprobs, diagnostics)", returned)
        loss, logprobs, diagnostics = returned.loss, returned.logprobs, returned.diagnostics
        diagnostics = {} if diagnostics is None else diagnostics
    else:
        logprobs = given["logprobs"]
        returned = fn(inputs, ListValue(logprobs.node, recorder) if of_lists else logprobs, **settings)
        if isinstance(returned, fx.Proxy):
            returned = returned, {}
        if not (isinstance(returned, tuple) and len(returned) == 2):
            _wrong_output(fn, "(loss, metrics)", returned)
        (loss, diagnostics), logprobs = returned, None
    if not isinstance(loss, fx.Proxy):
        _wrong_output(fn, "its loss as a tensor computed from what it is given", loss)
    if not (logprobs is None or isinstance(logprobs, fx.Proxy)):
        _wrong_output(fn, "its logprobs as a tensor or None", logprobs)
    if not isinstance(diagnostics, Mapping):
        _wrong_output(fn, "its diagnostics as a dict", diagnostics)
    for name, value in diagnostics.items():
        try:
            check_diagnostic(name)
        except InvalidLoss as error:
            raise LossNotTraceable(f"{place_of_function(fn)}{error}") from None
        if not isinstance(value, fx.Proxy | int | float):
            _wrong_output(fn, f"the diagnostic {name!r} as a number", value)
    return loss, logprobs, dict(diagnostics)


def _wrong_output(fn: Callable[..., Any], wanted: str, got: Any) -> None:
    name = getattr(fn, "__name__", type(fn).__name__)
    raise LossNotTraceable(f"{place_of_function(fn)}{name} must return {wanted}, but returned {type(got).__name__}")


class _Inputs(Mapping[str, Value]):
    """The inputs by name. Whether one is there is decided by who traces."""

    def __init__(self, source: Source, decisions: dict[str, bool]) -> None:
        self.source = source
        self.recorder: Recorder | None = None
        self.used: dict[str, None] = {}
        self.decisions = decisions

    @property
    def names(self) -> tuple[str, ...]:
        """Those that a batch must have to be treated like this one."""
        return tuple(self.used | {name: None for name, there in self.decisions.items() if there})

    def __getitem__(self, name: str) -> Value:
        if not isinstance(name, str):
            self._refuse(f"it takes datum {name!r:.40} of its data")
        if not self.decisions.get(name, True):
            raise KeyError(name)
        assert self.recorder is not None  # noqa: S101  # set before the function runs
        self.used[name] = None
        return self.recorder.input(f"loss_fn_inputs.{name}")

    def __contains__(self, name: object) -> bool:
        if name in self.used:
            return True
        return self.decisions.setdefault(str(name), True)

    def get(self, name: str, default: Any = None) -> Any:
        """The input, or the default where a batch has none."""
        return self[name] if name in self else default  # noqa: SIM401  # this is `get`

    def __iter__(self) -> Iterator[str]:
        if self.source == "logprobs":
            self._refuse("it goes through its data")
        refuse("it goes through all of its inputs, which are not known while tracing; name those that it reads")

    def __len__(self) -> int:
        if self.source == "logprobs":
            self._refuse("it counts its data with len()")
        refuse("it counts its inputs, which are not known while tracing")

    def _refuse(self, reason: str) -> NoReturn:
        """Refuses what takes it for a list of datums."""
        name = "data" if self.source == "logprobs" else "loss_fn_inputs"
        refuse(f"{reason}, but on a server {name} are inputs of the whole batch by name: {name}['weights'] is [B, T]")


def _are_settings(inputs: frozenset[str]) -> bool:
    return bool(inputs) and all(name.startswith("hyperparameters.") for name in inputs)


def _plain(value: Any) -> Any:
    """A number of numpy's as one of Python's."""
    return value.item() if isinstance(value, np.generic) else value


def _is_number(value: Setting) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
