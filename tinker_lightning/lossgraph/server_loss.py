"""`@custom_loss`: a Python function of a batch that a server runs under a name."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from tinker_lightning.errors import InvalidInput, InvalidLoss
from tinker_lightning.losses.library import checked, is_of_library
from tinker_lightning.losses.surrogate import function_name
from tinker_lightning.lossgraph.graph_loss import BATCH_SOURCES, GraphLoss, LossFnOutput, check_name
from tinker_lightning.lossgraph.settings import (
    Hyperparameter,
    check_settings,
    unknown_setting,
    with_types_of_defaults,
)
from tinker_lightning.lossgraph.tracing.trace import read_hyperparameters, takes_others, trace_batch_loss

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from tinker_lightning.lossgraph.graph_loss import Source
    from tinker_lightning.lossgraph.graphs.graph import Graph
    from tinker_lightning.lossgraph.settings import Setting
    from tinker_lightning.types import Datum

__all__ = ["LossFnOutput", "ServerLoss", "custom_loss"]


# A setting that decides what is computed may change at each step; only the graphs used last are kept.
_KEPT_UPLOADS = 64


class LossServer(Protocol):
    """Where losses are kept: `ServiceClient.losses`."""

    by_name: dict[str, ServerLoss]

    def register(self, loss: GraphLoss) -> str:
        """Uploads a graph; returns the loss's id."""

    def register_function(self, name: str, function: Callable[..., Any], source: Source) -> str:
        """Hands over the function itself; returns the loss's id."""


class LossClient(Protocol):
    """A client that losses can be registered with."""

    @property
    def losses(self) -> LossServer | None:
        """The losses of the server; None if it accepts none."""


@dataclass(slots=True)
class _Upload:
    loss: GraphLoss
    loss_id: str = ""
    is_there: bool = False


class ServerLoss:
    """A loss that runs on a server. Call it to compute it locally; pass it, or its name, to `forward_backward`.

    Args:
        server: Where it is kept.
        name: Its name.
        function: The function.
        source: What it is computed from.
        fixed: Values of hyperparameters that calls cannot change.
        trace: Whether to send a graph; otherwise the function itself is handed over.
        of_lists: Whether the function was written for lists of datums and log-probabilities, as `RemoteModule.loss`.
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
        of_lists: bool = False,
    ) -> None:
        self.name = name
        self.server = server
        self.source = source
        self.function = function
        self._fixed = dict(fixed)
        self._trace = trace
        self._of_lists = of_lists
        self._uploads: list[_Upload] = []  # the last used at the end
        self._function_id: str | None = None
        defaults = read_hyperparameters(function, source)
        self._takes_others = takes_others(function)
        if not self._takes_others and (unknown := [key for key in fixed if key not in defaults]):
            raise InvalidLoss(f"{name} has no hyperparameter {unknown[0]!r}; it has {', '.join(defaults) or 'none'}")
        self._known = {key: Hyperparameter(value) for key, value in {**defaults, **fixed}.items()}
        if trace:
            self._uploaded({}, None)
        else:
            self._register_function()
        functools.update_wrapper(self, function, updated=())

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Calls the function."""
        self._check_fixed(kwargs)
        return self.function(*args, **{**self._fixed, **kwargs})

    def resolve(self, config: Mapping[str, Any], present: Iterable[str]) -> tuple[str, dict[str, float | str]]:
        """Returns the id of the loss for a call, and the settings that the call still has to carry.

        A setting by which the function decides what to compute leads to another graph, as does the lack of an input
        that the function asks for. It is traced and uploaded at its first use.

        Args:
            config: The settings of the call.
            present: The names of the inputs that the batch has.

        Raises:
            InvalidInput: If a setting is unknown, is fixed to another value, or has an invalid value.
        """
        self._check_fixed(config)
        if not self._trace:
            return self._function_id or self._register_function(), dict(config)
        if not self._takes_others and (unknown := [name for name in config if name not in self._known]):
            raise InvalidInput(unknown_setting(self.name, unknown[0], self._known))
        upload = self._uploaded(with_types_of_defaults(self._known, config), frozenset(present))
        known_there = upload.loss.hyperparameters
        carried = {name: value for name, value in config.items() if not known_there[name].fixed}
        check_settings(self.name, known_there, carried)
        return upload.loss_id, carried

    def lose(self, loss_id: str) -> None:
        """Notes that a pass with this id has failed: the server may no longer know it, so the next one uploads it."""
        if self._function_id == loss_id:
            self._function_id = None
        for upload in list(self._uploads):
            upload.is_there &= upload.loss_id != loss_id

    def graphs(self, loss_id: str) -> list[Graph]:
        """Returns the graph of the loss with this id, as it was traced; none if the function was handed over."""
        return [upload.loss.program.graph for upload in self._uploads if upload.loss_id == loss_id]

    @property
    def reads(self) -> frozenset[str]:
        """Returns the names of all inputs that it looks at, if it was traced."""
        return frozenset(name for upload in self._uploads for name in upload.loss.reads)

    @property
    def is_of_library(self) -> bool:
        """Returns whether it is a loss of `tinker_lightning.losses`, whose inputs can be checked locally."""
        return self.source == "logprobs" and is_of_library(self.function)

    def checked(self, data: Sequence[Datum], config: Mapping[str, Any]) -> list[Datum]:
        """Returns the datums to send, if it `is_of_library`.

        Raises:
            InvalidInput: If the loss would not accept them locally.
        """
        return checked(self.function, data, {**self._fixed, **config})

    def _check_fixed(self, given: Mapping[str, Any]) -> None:
        for name in given.keys() & self._fixed.keys():
            if given[name] != self._fixed[name]:
                raise InvalidInput(
                    f"loss_fn_config: {name} of {self.name} was fixed to {self._fixed[name]!r} by custom_loss and "
                    f"cannot be {given[name]!r} in a call. Leave it out there, to give it with each call."
                )

    def _uploaded(self, config: Mapping[str, Any], present: frozenset[str] | None) -> _Upload:
        """Returns the graph for these settings and inputs, on the server."""
        values = {**{name: each.default for name, each in self._known.items()}, **config}
        upload = next((each for each in reversed(self._uploads) if each.loss.fits(values, present)), None)
        if upload is None:
            loss = trace_batch_loss(
                self.function,
                self.name,
                self.source,
                self._fixed,
                settings=config,
                present=present,
                of_lists=self._of_lists,
            )
            upload = _Upload(loss)
        if not upload.is_there:
            upload.loss_id, upload.is_there = self.server.register(upload.loss), True
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
    """Makes a function a loss that the server runs; training refers to it by name.

    On logits it takes `(model_outputs, loss_fn_inputs, attention_mask, **hyperparameters)`: logits `[B, T, V]`, a dict
    of tensors, a mask `[B, T]` that is 0 on padding; it returns a `LossFnOutput`. On log-probabilities it takes
    `(data, logprobs, **hyperparameters)`, as the losses of `tinker_lightning.losses` do: a dict of tensors `[B, T]`,
    and the log-probabilities of the targets; it returns `(loss, metrics)`.

    The function is traced here and sent as data, not as code. A traced function is the same at every call: what Python
    decides, it decides while tracing.

    Args:
        client: The client that `connect()` returns, or a training client created by it; they share their losses.
        name: The loss's name; by default the function's. A lambda has none.
        on: What the loss is computed from.
        trace: If False, the function itself is handed over: to a trainer in this process as it is, elsewhere pickled,
            which a server accepts only if it was started with `--allow-pickled-losses`.
        **fixed: Values of hyperparameters that calls cannot change.

    Raises:
        LossNotTraceable: If the function cannot be traced; names the line.
        InvalidLoss: If the server does not accept it.
        ServerUnreachable: If there is no server.
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
        called = name or function_name(function)
        try:
            check_name(called)
        except InvalidLoss as error:
            fix = "" if name else ". Give it a name: custom_loss(client, name='my_loss')"
            raise InvalidLoss(f"{error}{fix}") from None
        loss = ServerLoss(server, called, function, on, fixed, trace=trace)
        server.by_name[called] = loss
        return loss

    return decorate
