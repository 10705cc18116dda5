"""Python functions of a batch as server-side losses: `@custom_loss` registers them, as a graph or as they are."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

from torch import Tensor

from tinker_lightning.errors import InvalidInput, InvalidLoss, TinkerLightningError
from tinker_lightning.losses.custom import function_name
from tinker_lightning.losses.library import check_datums, is_of_library
from tinker_lightning.lossgraph.graph_loss import (
    BATCH_SOURCES,
    GraphLoss,
    Hyperparameter,
    LossFnOutput,
    Setting,
    Source,
    cast_like_defaults,
    check_name,
    check_settings,
    unknown_setting_message,
)
from tinker_lightning.lossgraph.trace import accepts_any_setting, read_hyperparameters, trace_batch_loss

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from tinker_lightning.lossgraph.graph import Graph
    from tinker_lightning.lossgraph.program import Limits
    from tinker_lightning.types import Datum

__all__ = ["LossFnOutput", "ServerLoss", "custom_loss"]


# A setting that needs its own graph may change at each step, so only the most recently used graphs are kept.
_KEPT_UPLOADS = 64


class LossServer(Protocol):
    """Uploads losses to a server. `ServiceClient.losses` implements it."""

    by_name: dict[str, ServerLoss]

    def register(self, loss: GraphLoss) -> str:
        """Uploads a graph and returns the id of the loss."""

    def register_function(self, name: str, function: Callable[..., Any], source: Source) -> str:
        """Registers the function itself and returns the id of the loss."""


class LossClient(Protocol):
    """A client that losses can be registered with."""

    @property
    def losses(self) -> LossServer | None:
        """The losses of the server; None if it accepts none."""


@dataclass(slots=True)
class _Upload:
    loss: GraphLoss
    loss_id: str = ""
    is_uploaded: bool = False


class ServerLoss:
    """A server-side loss. Pass it, or its name, to `forward_backward`; a call runs the function locally.

    Set `takes_lists` if the function takes lists of datums and log-probabilities, like `RemoteModule.loss`.
    """

    def __init__(
        self,
        server: LossServer,
        name: str,
        function: Callable[..., Any],
        source: Source,
        fixed: Mapping[str, Setting],
        *,
        trace: bool,
        takes_lists: bool = False,
    ) -> None:
        self.name = name
        self.server = server
        self.source = source
        self.function = function
        self._fixed = dict(fixed)
        self._trace = trace
        self._of_lists = takes_lists
        self._uploads: list[_Upload] = []  # least recently used first
        self._function_id: str | None = None
        defaults = read_hyperparameters(function, source)
        self._accepts_any_setting = accepts_any_setting(function)
        if not self._accepts_any_setting and (unknown := [key for key in fixed if key not in defaults]):
            raise InvalidLoss(f"{name} has no hyperparameter {unknown[0]!r}; it has {', '.join(defaults) or 'none'}")
        self._hyperparameters = {key: Hyperparameter(value) for key, value in {**defaults, **fixed}.items()}
        if trace:
            self._upload({}, None)
        else:
            self._register_function()
        functools.update_wrapper(self, function, updated=())

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Calls the function."""
        self._check_fixed(kwargs)
        return self.function(*args, **{**self._fixed, **kwargs})

    def resolve(self, config: Mapping[str, Any], present: Iterable[str]) -> tuple[str, dict[str, float | str]]:
        """Returns the id of the loss for a call with these settings and inputs, and the settings to send with it.

        If a fixed setting changes, or an optional input is missing, another graph is traced and uploaded.
        """
        self._check_fixed(config)
        if not self._trace:
            return self._function_id or self._register_function(), dict(config)
        if not self._accepts_any_setting and (
            unknown := [name for name in config if name not in self._hyperparameters]
        ):
            raise InvalidInput(unknown_setting_message(self.name, unknown[0], self._hyperparameters))
        upload = self._upload(cast_like_defaults(self._hyperparameters, config), frozenset(present))
        hyperparameters = upload.loss.hyperparameters
        sent = {name: value for name, value in config.items() if not hyperparameters[name].fixed}
        check_settings(self.name, hyperparameters, sent)
        return upload.loss_id, sent

    def invalidate(self, loss_id: str) -> None:
        """Marks the loss for another upload, because a pass failed and the server may have evicted it."""
        if self._function_id == loss_id:
            self._function_id = None
        for upload in list(self._uploads):
            upload.is_uploaded &= upload.loss_id != loss_id

    def graphs(self, loss_id: str) -> list[Graph]:
        """Returns the graph of the loss with this id, or an empty list if it was not traced."""
        return [upload.loss.program.graph for upload in self._uploads if upload.loss_id == loss_id]

    @property
    def reads(self) -> frozenset[str]:
        """The names of all inputs that the loss can read; empty if it was not traced."""
        return frozenset(name for upload in self._uploads for name in upload.loss.reads)

    @property
    def is_of_library(self) -> bool:
        """Whether it is a loss of `tinker_lightning.losses`, whose inputs can be checked locally."""
        return self.source == "logprobs" and is_of_library(self.function)

    def check_datums(self, data: Sequence[Datum], config: Mapping[str, Any]) -> list[Datum]:
        """Returns the datums to send for a loss of the library; raises `InvalidInput` if it does not accept them."""
        return check_datums(self.function, data, {**self._fixed, **config})

    def _check_fixed(self, config: Mapping[str, Any]) -> None:
        for name in config.keys() & self._fixed.keys():
            if config[name] != self._fixed[name]:
                raise InvalidInput(
                    f"loss_fn_config: {name} of {self.name} was fixed to {self._fixed[name]!r} by custom_loss and "
                    f"cannot be {config[name]!r} in a call. Do not pass it to custom_loss if calls should set it."
                )

    def _upload(self, config: Mapping[str, Any], present: frozenset[str] | None) -> _Upload:
        """Returns the graph for these settings and inputs, after uploading it if necessary."""
        values = {**{name: each.default for name, each in self._hyperparameters.items()}, **config}
        upload = next((each for each in reversed(self._uploads) if each.loss.fits(values, present)), None)
        if upload is None:
            loss = trace_batch_loss(
                self.function,
                self.name,
                self.source,
                self._fixed,
                settings=config,
                present=present,
                takes_lists=self._of_lists,
            )
            upload = _Upload(loss)
        if not upload.is_uploaded:
            upload.loss_id, upload.is_uploaded = self.server.register(upload.loss), True
        self._uploads = [*(each for each in self._uploads if each is not upload), upload][-_KEPT_UPLOADS:]
        return upload

    def _register_function(self) -> str:
        function = functools.partial(self.function, **self._fixed) if self._fixed else self.function
        self._function_id = self.server.register_function(self.name, function, self.source)
        return self._function_id


def custom_loss(
    client: LossClient,
    name: str | None = None,
    *,
    on: Source = "logits",
    trace: bool = True,
    **fixed: Setting,
) -> Callable[[Callable[..., Any]], ServerLoss]:
    """Registers a function as a server-side loss, which training refers to by name.

    On logits the function takes `(model_outputs, loss_fn_inputs, attention_mask, **hyperparameters)`: logits
    `[B, T, V]`, a dict of tensors, and a mask `[B, T]` that is 0 on padding. It returns a `LossFnOutput`. On
    log-probabilities it takes `(data, logprobs, **hyperparameters)`, like the losses of `tinker_lightning.losses`: a
    dict of tensors `[B, T]`, and the log-probabilities of the targets. It returns `(loss, metrics)`.

    The function is traced and sent as data, not as code. Python control flow runs only while tracing.

    Args:
        client: The client that `connect()` returns, or a training client created by it; they share their losses.
        name: The name of the loss, by default the name of the function. Required for a lambda.
        on: The output of the model that the loss is computed from.
        trace: If False, the function itself is registered in a trainer of this process, or sent pickled, which a server
            accepts only if it was started with `--allow-pickled-losses`.
        **fixed: Values of hyperparameters that calls cannot change.

    Raises:
        LossNotTraceable: If the function cannot be traced. The message contains the line.
        InvalidLoss: If the server does not accept the loss.
        ServerUnreachable: If the server cannot be reached.
    """
    try:
        server = client.losses
    except AttributeError:
        server = None
    if server is None:
        raise InvalidInput(
            f"custom_loss takes the client that connect() returns, got {type(client).__name__}: "
            "client = connect(url); @custom_loss(client, name='my_loss')"
        )
    if on not in BATCH_SOURCES:
        raise InvalidInput(f"on must be one of {', '.join(BATCH_SOURCES)}, got {on!r}")

    def decorate(function: Callable[..., Any]) -> ServerLoss:
        if not callable(function):
            raise InvalidLoss(f"custom_loss decorates functions, got {type(function).__name__}")
        loss_name = name or function_name(function)
        try:
            check_name(loss_name)
        except InvalidLoss as error:
            fix = "" if name else ". Give it a name: custom_loss(client, name='my_loss')"
            raise InvalidLoss(f"{error}{fix}") from None
        loss = ServerLoss(server, loss_name, function, on, fixed, trace=trace)
        server.by_name[loss_name] = loss
        return loss

    return decorate


@dataclass(frozen=True, slots=True)
class PythonLoss:
    """A named Python function with the signature that its source requires."""

    name: str
    source: Source
    function: Callable[..., Any]
    defaults: Mapping[str, Setting]
    description: str

    @classmethod
    def from_function(cls, name: str, source: Source, function: Any) -> PythonLoss:
        """Creates a loss; raises `InvalidLoss` if the function does not have the parameters of a loss."""
        check_name(name)
        if source not in BATCH_SOURCES:
            raise InvalidLoss(f"source must be one of {', '.join(BATCH_SOURCES)}, got {source!r:.40}")
        if not callable(function):
            raise InvalidLoss(f"{name} must be a function, got {type(function).__name__}")
        description = (inspect.getdoc(function) or "").partition("\n")[0]
        return cls(name, source, function, read_hyperparameters(function, source), description[:200])

    def settings(self, given: Mapping[str, Any]) -> dict[str, Setting]:
        """Returns all settings: the defaults, overridden by `given`; raises `InvalidInput` if one is invalid."""
        declared = {name: Hyperparameter(default) for name, default in self.defaults.items()}
        return check_settings(self.name, declared, given, accepts_any_setting=accepts_any_setting(self.function))

    @property
    def reads(self) -> None:
        """Always None, because only the function itself determines its inputs."""

    def select(self, present: Iterable[str]) -> tuple[str, ...]:
        """Returns all inputs, because any of them could be read."""
        return tuple(present)

    def check(self, *_: Any) -> None:
        """Does nothing, because a Python function can only be checked by running it."""

    def __call__(
        self,
        outputs: Mapping[str, Tensor],
        inputs: Mapping[str, Tensor],
        settings: Mapping[str, Setting],
        _: Limits,
    ) -> LossFnOutput:
        """Calls the function; raises `InvalidLoss` if it fails, and `InvalidInput` if an input is missing."""
        # Copied because the function may modify its arguments, and the model's backward needs the originals.
        outputs = {name: tensor.clone() for name, tensor in outputs.items()}
        try:
            if self.source == "logits":
                arguments = (outputs["model_outputs"], dict(inputs), outputs["attention_mask"])
                returned = self.function(*arguments, **settings)
            else:
                returned = self.function(dict(inputs), outputs["logprobs"], **settings)
        except KeyError as error:
            raise InvalidInput(f"loss_fn_inputs: {error.args[0]}: missing; {self.name} reads it") from error
        except TinkerLightningError:
            raise
        except Exception as error:
            raise InvalidLoss(f"it raised {type(error).__name__}: {error}") from error
        if self.source == "logprobs" and isinstance(returned, Tensor):
            return LossFnOutput(returned)
        diagnostics: Any
        if isinstance(returned, LossFnOutput):
            loss, logprobs = returned.loss, returned.logprobs
            diagnostics = {} if returned.diagnostics is None else returned.diagnostics
        elif self.source == "logprobs" and isinstance(returned, tuple) and len(returned) == 2:
            loss, logprobs, diagnostics = returned[0], None, returned[1]
        else:
            wanted = "a LossFnOutput" if self.source == "logits" else "(loss, metrics)"
            raise InvalidLoss(f"it must return {wanted}, but returned {type(returned).__name__}")
        if not isinstance(diagnostics, Mapping):
            what = "diagnostics" if self.source == "logits" else "metrics"
            raise InvalidLoss(
                f"it must return its {what} as a dict, but returned {type(diagnostics).__name__}; return {{}} if there "
                "are none"
            )
        return LossFnOutput(loss, logprobs, diagnostics)


RegisteredLoss: TypeAlias = GraphLoss | PythonLoss
