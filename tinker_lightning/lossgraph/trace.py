"""Traces Python functions into a `GraphLoss`: losses on a batch, and losses on a single datum."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, NoReturn

from torch import fx
from typing_extensions import override

from tinker_lightning.errors import InvalidLoss
from tinker_lightning.losses.custom import function_name
from tinker_lightning.lossgraph.graph_loss import (
    OUTPUTS,
    GraphLoss,
    Hyperparameter,
    LossFnOutput,
    Setting,
    Source,
    check_name,
    to_python,
)
from tinker_lightning.lossgraph.program import Program
from tinker_lightning.lossgraph.recorder import Recorder, record
from tinker_lightning.lossgraph.source_lines import error_at_function, loss_signature
from tinker_lightning.lossgraph.stand_ins import SETTING, ListValue, NeedsSettings, Value, reject

if TYPE_CHECKING:
    from collections.abc import Callable

_RANKS = {"model_outputs": 3, "attention_mask": 2}  # log-probabilities may have alternatives for each token
_SIGNATURES = {
    "logits": "(model_outputs, loss_fn_inputs, attention_mask, **hyperparameters)",
    "logprobs": "(data, logprobs, **hyperparameters)",
}
_POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


def trace_batch_loss(
    fn: Callable[..., Any],
    name: str,
    source: Source,
    fixed: Mapping[str, Setting] | None = None,
    *,
    settings: Mapping[str, Setting] | None = None,
    present: Iterable[str] | None = None,
    takes_lists: bool = False,
) -> GraphLoss:
    """Traces a batch-level loss function; raises `LossNotTraceable` with the line if this is not possible.

    Args:
        fn: The function, as `custom_loss` takes it.
        name: The name of the loss.
        source: What it is computed from.
        fixed: Settings that calls cannot change.
        settings: Settings of a call. Those that determine the control flow are fixed to these values.
        present: The inputs of the batch. By default, every input that the function asks for is present.
        takes_lists: Whether the function also runs locally, with lists of datums and of log-probabilities. Operations
            that would give other numbers there raise.
    """
    check_name(name)
    fixed = {key: to_python(value) for key, value in (fixed or {}).items()}
    defaults = read_hyperparameters(fn, source)
    values = {**defaults, **fixed, **{key: to_python(value) for key, value in (settings or {}).items()}}
    must_fix = {key for key, value in values.items() if key in fixed or not _is_number(value)}
    while True:
        hyperparameters = {
            key: Hyperparameter(value if key in must_fix else defaults.get(key, value), key in must_fix)
            for key, value in values.items()
        }
        inputs = _Inputs(source, None if present is None else frozenset(present))
        try:
            graph = record(fn, functools.partial(_call, fn, source, hyperparameters, inputs, takes_lists))
            break
        except NeedsSettings as needed:  # the control flow depends on these settings
            must_fix |= needed.names
    description = (inspect.getdoc(fn) or "").partition("\n")[0][:200]
    with error_at_function(fn):
        names = dict.fromkeys(inputs.names)
        return GraphLoss(name, source, names, Program(graph), hyperparameters, description, inputs.optional)


def trace_datum_loss(fn: Callable[..., Any], input_ranks: Mapping[str, int]) -> GraphLoss:
    """Traces a per-datum loss function, in the form of the protocol's `create_custom_loss`.

    The parameters of `fn(logprobs, *inputs)` name the inputs of each datum. It returns the loss, or `(loss, metrics)`
    with metrics that are named `custom/<name>:sum` or `custom/<name>:mean`. The loss of a batch is the sum over datums.
    """
    parameters, name = loss_signature(fn).parameters, function_name(fn)
    for each in parameters.values():
        if each.kind not in _POSITIONAL or each.default is not each.empty:
            raise InvalidLoss(
                f"{name}: the parameter {each.name} must be a plain one without a default: it names an input of each "
                "datum"
            )
    if set(input_ranks) != set(parameters):
        raise InvalidLoss(
            f"{name}: input_ranks must give the number of dimensions of {', '.join(parameters)}, got "
            f"{', '.join(map(str, input_ranks)) or 'none'}"
        )
    inputs = {each: input_ranks[each] for each in parameters}

    def body(recorder: Recorder) -> Any:
        tensors = (recorder.input(each, rank, has_grad=each == "logprobs") for each, rank in inputs.items())
        return _loss_and_metrics(fn, fn(*tensors))

    graph = record(fn, body)
    with error_at_function(fn):
        return GraphLoss(name, "datum", inputs, Program(graph))


def read_hyperparameters(fn: Callable[..., Any], source: Source) -> dict[str, Setting]:
    """Returns the settings of a function, which are its remaining parameters, with their defaults."""
    signature = loss_signature(fn)
    parameters = list(signature.parameters.values())
    count = 3 if source == "logits" else 2
    if len(parameters) < count or any(each.kind not in _POSITIONAL for each in parameters[:count]):
        raise InvalidLoss(f"a loss on {source} takes {_SIGNATURES[source]}, but this one {signature}")
    settings: dict[str, Setting] = {}
    for each in parameters[count:]:
        if each.kind in (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL):
            continue
        default = to_python(each.default)
        if default is each.empty or not (default is None or isinstance(default, float | int | str)):
            raise InvalidLoss(f"the hyperparameter {each.name} needs a default that is a number, a string or None")
        settings[each.name] = default
    return settings


def accepts_any_setting(fn: Callable[..., Any]) -> bool:
    """Returns whether a function has `**kwargs`, so that it accepts settings of any name."""
    return any(each.kind is each.VAR_KEYWORD for each in loss_signature(fn).parameters.values())


def _call(
    fn: Callable[..., Any],
    source: Source,
    hyperparameters: Mapping[str, Hyperparameter],
    inputs: _Inputs,
    takes_lists: bool,
    recorder: Recorder,
) -> tuple[Any, ...]:
    outputs = {
        name: recorder.input(name, _RANKS.get(name), has_grad=name != "attention_mask") for name in OUTPUTS[source]
    }
    settings = {
        name: each.default if each.fixed else recorder.input(f"{SETTING}{name}")
        for name, each in hyperparameters.items()
    }
    inputs.recorder = recorder
    if source == "logprobs":
        stacked = outputs["logprobs"]
        return _loss_and_metrics(
            fn, fn(inputs, ListValue(stacked.node, recorder) if takes_lists else stacked, **settings)
        )
    result = fn(outputs["model_outputs"], inputs, outputs["attention_mask"], **settings)
    if not isinstance(result, LossFnOutput):
        _reject_output(fn, "a LossFnOutput(loss, logprobs, diagnostics)", result)
    diagnostics = {} if result.diagnostics is None else result.diagnostics
    return *_loss_and_metrics(fn, (result.loss, diagnostics)), result.logprobs


def _loss_and_metrics(fn: Callable[..., Any], returned: Any) -> tuple[fx.Proxy, dict[Any, Any]]:
    """Converts the result of a traced function to `(loss, metrics)`; raises `LossNotTraceable` if it is neither."""
    if isinstance(returned, fx.Proxy):
        returned = returned, {}
    if not (isinstance(returned, tuple) and len(returned) == 2):
        _reject_output(fn, "(loss, metrics)", returned)
    loss, metrics = returned
    if not isinstance(loss, fx.Proxy):
        _reject_output(fn, "its loss as a tensor computed from what it is given", loss)
    if not isinstance(metrics, Mapping):
        _reject_output(fn, "its metrics as a dict", metrics)
    if unnamed := [name for name in metrics if not isinstance(name, str)]:
        with error_at_function(fn):
            raise InvalidLoss(f"invalid metric name {unnamed[0]!r:.100}; use a string")
    return loss, dict(metrics)


def _reject_output(fn: Callable[..., Any], expected: str, got: Any) -> NoReturn:
    """Raises `LossNotTraceable` with what a function must return."""
    name = getattr(fn, "__name__", type(fn).__name__)
    with error_at_function(fn):
        raise InvalidLoss(f"{name} must return {expected}, but returned {type(got).__name__}")


class _Inputs(Mapping[str, Value]):
    """The inputs of a batch by name; records which the function reads, and which it looks up with `in` or `get`."""

    def __init__(self, source: Source, present: frozenset[str] | None) -> None:
        self.source = source
        self.recorder: Recorder | None = None
        self.optional: dict[str, bool] = {}
        self._present = present
        self._used: dict[str, None] = {}

    @property
    def names(self) -> tuple[str, ...]:
        """The inputs that a batch must have."""
        return tuple(self._used | {name: None for name, there in self.optional.items() if there})

    def __getitem__(self, name: str) -> Value:
        if not isinstance(name, str):
            self._reject(f"it takes datum {name!r:.40} of its data")
        if not self.optional.get(name, True):
            raise KeyError(name)
        assert self.recorder is not None  # noqa: S101  # set before the function runs
        self._used[name] = None
        return self.recorder.input(f"loss_fn_inputs.{name}")

    def __contains__(self, name: object) -> bool:
        if name in self._used:
            return True
        return self.optional.setdefault(str(name), self._present is None or name in self._present)

    @override
    def get(self, name: str, default: Any = None) -> Any:
        """Returns the input, or the default if the batch does not have it."""
        return self[name] if name in self else default  # noqa: SIM401  # this is `get`

    def __iter__(self) -> Iterator[str]:
        self._reject("it loops over its data", "it loops over all of its inputs")

    def __len__(self) -> int:
        self._reject("it counts its data with len()", "it counts its inputs")

    def _reject(self, datum_use: str, name_use: str = "") -> NoReturn:
        """Raises for operations on a list of datums, and for those that need the names of all inputs."""
        if name_use and self.source == "logits":
            reject(f"{name_use}, which are not known while tracing; name those that it reads")
        name = "data" if self.source == "logprobs" else "loss_fn_inputs"
        reject(f"{datum_use}, but on a server {name} are inputs of the batch by name: {name}['weights'] is [B, T]")


def _is_number(value: Setting) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
