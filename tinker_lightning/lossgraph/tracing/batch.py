"""Traces a loss on a whole batch."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, NoReturn

from torch import fx

from tinker_lightning.errors import InvalidLoss, LossNotTraceable
from tinker_lightning.lossgraph.batch_loss import (
    SOURCES,
    BatchLoss,
    Hyperparameter,
    LossFnOutput,
    Setting,
    Source,
    check_diagnostic,
    check_name,
    plain,
)
from tinker_lightning.lossgraph.graphs.run import Program
from tinker_lightning.lossgraph.tracing.record import Recorder, record
from tinker_lightning.lossgraph.tracing.signatures import place_of_function, signature_of
from tinker_lightning.lossgraph.tracing.values import ListValue, NeedsSettings, Value, refuse

if TYPE_CHECKING:
    from collections.abc import Callable

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
    settings: Mapping[str, Setting] | None = None,
    present: Iterable[str] | None = None,
    of_lists: bool = False,
) -> BatchLoss:
    """Traces a function of a batch.

    Args:
        fn: The function. On logits it takes `(model_outputs, loss_fn_inputs, attention_mask, **hyperparameters)` and
            returns a `LossFnOutput`; on log-probabilities `(data, logprobs, **hyperparameters)`, inputs and
            log-probabilities stacked to `[B, T]`, and returns `(loss, metrics)`.
        name: The loss's name.
        source: What it is computed from.
        fixed: Settings that calls cannot change.
        settings: Settings of a call. Those on which Python decides are fixed to these values.
        present: The inputs of the batch, for functions that ask. By default every input that they ask for is present.
        of_lists: Whether it also runs elsewhere, with lists of datums and of log-probabilities. What would give other
            numbers there is refused.

    Raises:
        LossNotTraceable: If a graph cannot express it; names the line.
    """
    check_name(name)
    fixed = {key: plain(value) for key, value in (fixed or {}).items()}
    given = {**fixed, **{key: plain(value) for key, value in (settings or {}).items()}}
    defaults = read_hyperparameters(fn, source)
    if not takes_others(fn) and (unknown := [key for key in given if key not in defaults]):
        raise InvalidLoss(f"{name} has no hyperparameter {unknown[0]!r}; it has {', '.join(defaults) or 'none'}")
    values = {**defaults, **given}
    must_fix = {key for key, value in values.items() if key in fixed or not _is_number(value)}
    while True:
        hyperparameters = {
            key: Hyperparameter(value if key in must_fix else defaults.get(key, value), key in must_fix)
            for key, value in values.items()
        }
        inputs = _Inputs(source, None if present is None else frozenset(present))
        try:
            graph = record(fn, functools.partial(_call, fn, source, hyperparameters, inputs, of_lists))
            break
        except NeedsSettings as needed:  # what Python decides by settings is decided now, by their values
            must_fix |= needed.names
    description = (inspect.getdoc(fn) or "").partition("\n")[0]
    return BatchLoss(name, source, hyperparameters, inputs.names, Program(graph), description[:200], inputs.asked)


def read_hyperparameters(fn: Callable[..., Any], source: Source) -> dict[str, Setting]:
    """Returns the settings of a function with their defaults: the parameters after those that every loss has.

    Raises:
        InvalidLoss: If it does not have the parameters of its kind, or a setting has no default.
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
        default = plain(each.default)
        if default is each.empty or not (default is None or isinstance(default, float | int | str)):
            raise InvalidLoss(f"the hyperparameter {each.name} needs a default that is a number, a string or None")
        settings[each.name] = default
    return settings


def takes_others(fn: Callable[..., Any]) -> bool:
    """Returns whether a function has `**kwargs`, so that it accepts settings of any name."""
    return any(each.kind is each.VAR_KEYWORD for each in signature_of(fn).parameters.values())


def _call(
    fn: Callable[..., Any],
    source: Source,
    hyperparameters: Mapping[str, Hyperparameter],
    inputs: _Inputs,
    of_lists: bool,
    recorder: Recorder,
) -> tuple[Any, Any, dict[str, Any]]:
    given = {
        name: recorder.input(name, _RANKS.get(name), has_grad=name != "attention_mask") for name in SOURCES[source]
    }
    settings = {name: each.default if each.fixed else recorder.setting(name) for name, each in hyperparameters.items()}
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
    """The inputs by name; remembers which the function reads, and which it asks for."""

    def __init__(self, source: Source, present: frozenset[str] | None) -> None:
        self.source = source
        self.recorder: Recorder | None = None
        self.asked: dict[str, bool] = {}
        self._present = present
        self._used: dict[str, None] = {}

    @property
    def names(self) -> tuple[str, ...]:
        """Returns those that a batch must have."""
        return tuple(self._used | {name: None for name, there in self.asked.items() if there})

    def __getitem__(self, name: str) -> Value:
        if not isinstance(name, str):
            self._refuse(f"it takes datum {name!r:.40} of its data")
        if not self.asked.get(name, True):
            raise KeyError(name)
        assert self.recorder is not None  # noqa: S101  # set before the function runs
        self._used[name] = None
        return self.recorder.input(f"loss_fn_inputs.{name}")

    def __contains__(self, name: object) -> bool:
        if name in self._used:
            return True
        return self.asked.setdefault(str(name), self._present is None or name in self._present)

    def get(self, name: str, default: Any = None) -> Any:
        """Returns the input, or the default if the batch has none."""
        return self[name] if name in self else default  # noqa: SIM401  # this is `get`

    def __iter__(self) -> Iterator[str]:
        if self.source == "logprobs":
            self._refuse("it loops over its data")
        refuse("it loops over all of its inputs, which are not known while tracing; name those that it reads")

    def __len__(self) -> int:
        if self.source == "logprobs":
            self._refuse("it counts its data with len()")
        refuse("it counts its inputs, which are not known while tracing")

    def _refuse(self, reason: str) -> NoReturn:
        """Refuses what takes it for a list of datums."""
        name = "data" if self.source == "logprobs" else "loss_fn_inputs"
        refuse(f"{reason}, but on a server {name} are inputs of the whole batch by name: {name}['weights'] is [B, T]")


def _is_number(value: Setting) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
