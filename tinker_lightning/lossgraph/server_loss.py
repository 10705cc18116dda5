"""`@custom_loss`: a Python function of a batch that a server runs under a name."""

from __future__ import annotations

import functools
from collections import OrderedDict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from tinker_lightning.errors import InvalidInput, InvalidLoss
from tinker_lightning.losses.library import checked, is_of_library
from tinker_lightning.losses.surrogate import function_name
from tinker_lightning.lossgraph.batch_loss import SOURCES, BatchLoss, LossFnOutput, check_name, settings
from tinker_lightning.lossgraph.tracing.batch import trace_batch_loss
from tinker_lightning.lossgraph.tracing.signatures import signature_of

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from tinker_lightning.lossgraph.batch_loss import Setting, Source
    from tinker_lightning.lossgraph.graphs.graph import Graph
    from tinker_lightning.types import Datum

__all__ = ["LossFnOutput", "ServerLoss", "custom_loss"]


# A setting that decides what is computed may be another at each step; the graphs of those used last are kept.
_KEPT_UPLOADS = 64


class LossServer(Protocol):
    """Where losses are kept: `ServiceClient.losses`."""

    by_name: dict[str, ServerLoss]

    def register(self, loss: BatchLoss) -> str:
        """Uploads graphs; returns the loss's id."""

    def register_function(self, name: str, function: Callable[..., Any], source: Source) -> str:
        """Hands a function over as it is; returns the loss's id."""


@dataclass(slots=True)
class _Upload:
    loss: BatchLoss
    loss_id: str = ""
    is_there: bool = False


class ServerLoss:
    """A loss that a server keeps. Call it to compute it here; pass it, or its name, to `forward_backward`.

    Args:
        server: Where it is kept.
        name: What to call it.
        function: The function.
        source: What it is computed from.
        fixed: Values of hyperparameters that are not to change from call to call.
        trace: Whether to send its graphs; else the function itself is handed over.
        of_lists: Whether the function was written for lists of datums and log-probabilities, as routes take them.
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
        self._of_lists = of_lists
        self._uploads: OrderedDict[Any, _Upload] = OrderedDict()
        self._function_id: str | None = None
        self._first = self._uploaded(self._traced(self._fixed)).loss if trace else None
        if not trace:
            self._register_function()
        functools.update_wrapper(self, function, updated=())

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """What the function returns."""
        self._check_fixed(kwargs)
        return self.function(*args, **{**self._fixed, **kwargs})

    def resolve(self, config: Mapping[str, Any]) -> tuple[str, dict[str, float | str]]:
        """The id of the loss for a call with these settings, and those that the call still has to carry.

        A setting by which the function decides what to compute makes another graph, which is uploaded at its first use.

        Raises:
            InvalidInput: If a setting is not known, is fixed to another value, or has none that it can have.
        """
        self._check_fixed(config)
        first = self._first
        if first is None:
            return self._function_id or self._register_function(), dict(config)
        if unknown := [name for name in config if name not in first.hyperparameters]:
            known = ", ".join(first.hyperparameters) or "no settings at all"
            raise InvalidInput(f"loss_fn_config: {self.name} does not know {unknown[0]!r}; it takes {known}")
        decided = {name: value for name, value in config.items() if first.hyperparameters[name].fixed}
        while True:
            upload = self._traced({**self._fixed, **decided})
            carried = {name: value for name, value in config.items() if name not in decided}
            # With these settings the function may decide by others, too.
            further = {name: value for name, value in carried.items() if upload.loss.hyperparameters[name].fixed}
            if not further:
                break
            decided |= further
        settings(self.name, upload.loss.hyperparameters, carried)
        return self._uploaded(upload).loss_id, carried

    def lose(self, loss_id: str) -> None:
        """Says that a pass with this id has failed: the server may no longer know it, so the next one uploads it."""
        if self._function_id == loss_id:
            self._function_id = None
        for upload in list(self._uploads.values()):
            upload.is_there &= upload.loss_id != loss_id

    def graphs(self, loss_id: str) -> list[Graph]:
        """Those of the loss with this id, as they were traced here; none of a function that was handed over."""
        uploads = [upload for upload in self._uploads.values() if upload.loss_id == loss_id]
        return [variant.program.graph for upload in uploads for variant in upload.loss.variants]

    def reads(self, loss_id: str) -> frozenset[str]:
        """All inputs that the loss with this id ever looks at, where it was traced."""
        uploads = [upload for upload in self._uploads.values() if upload.loss_id == loss_id]
        return frozenset(name for upload in uploads for name in upload.loss.reads)

    @property
    def diagnostics(self) -> frozenset[str]:
        """The names of all diagnostics that are known, which are those of graphs."""
        losses = [upload.loss for upload in self._uploads.values()]
        return frozenset(name for loss in losses for each in loss.variants for name in each.program.graph.output[2])

    @property
    def is_of_library(self) -> bool:
        """Whether it is a loss of this package, of which it is known here what it reads."""
        return self.source == "logprobs" and is_of_library(self.function)

    def checked(self, data: Sequence[Datum], config: Mapping[str, Any]) -> list[Datum]:
        """The datums as they are to be sent, where it `is_of_library`.

        Raises:
            InvalidInput: If the loss would refuse them here.
        """
        return checked(self.function, data, {**self._fixed, **config})

    def _check_fixed(self, given: Mapping[str, Any]) -> None:
        for name in given.keys() & self._fixed.keys():
            if given[name] != self._fixed[name]:
                raise InvalidInput(
                    f"loss_fn_config: {name} of {self.name} was fixed to {self._fixed[name]!r} by custom_loss and "
                    f"cannot be {given[name]!r} in a call. Leave it out there, to give it with each call."
                )

    def _traced(self, fixed: Mapping[str, Setting]) -> _Upload:
        """The graphs with these settings, which may not be on the server yet."""
        key = _key(fixed)
        if key not in self._uploads:
            loss = trace_batch_loss(self.function, self.name, self.source, fixed, of_lists=self._of_lists)
            self._uploads[key] = _Upload(loss)
        self._uploads.move_to_end(key)
        while len(self._uploads) > _KEPT_UPLOADS:
            self._uploads.popitem(last=False)
        return self._uploads[key]

    def _uploaded(self, upload: _Upload) -> _Upload:
        """The same, on the server."""
        if not upload.is_there:
            upload.loss_id, upload.is_there = self.server.register(upload.loss), True
        return upload

    def _register_function(self) -> str:
        self._function_id = self.server.register_function(self.name, _bound(self.function, self._fixed), self.source)
        return self._function_id


def custom_loss(
    client: Any,
    name: str | None = None,
    *,
    on: Source = "logits",
    trace: bool = True,
    **fixed: Setting,
) -> Callable[[Callable[..., Any]], ServerLoss]:
    """Makes a function a loss that the server runs; training refers to it by name.

    On logits it takes `(model_outputs, loss_fn_inputs, attention_mask, **hyperparameters)`: logits `[B, T, V]`, a dict
    of tensors, a mask `[B, T]` of what is no padding; it returns a `LossFnOutput`. On log-probabilities it takes
    `(data, logprobs, **hyperparameters)`, as the losses of `tinker_lightning.losses` do: a dict of tensors `[B, T]`,
    and the log-probabilities of the targets; it returns `(loss, metrics)`.

    The function is traced here and sent as data, not as code. A traced function is the same at every call: what Python
    decides, it decides now.

    Args:
        client: The client that `connect()` gives, or a training client that it made, for they share their losses.
        name: What to call the loss; the function's name if not given. A lambda has none.
        on: What the loss is computed from.
        trace: If False the function itself is handed over: to a trainer in this process as it is, elsewhere pickled,
            which only a server takes that was started with `--allow-pickled-losses`.
        **fixed: Values of hyperparameters that are not to change from call to call.

    Raises:
        LossNotTraceable: If the function does what cannot be traced; names the line.
        InvalidLoss: If the server refuses it.
        ServerUnreachable: If there is no server.
    """
    server: LossServer | None = getattr(client, "losses", None)
    if server is None:
        raise InvalidInput(
            f"custom_loss takes the client that connect() gives, got {type(client).__name__}: "
            "client = connect(url); @custom_loss(client, name='my_loss')"
        )
    if on not in SOURCES:
        raise InvalidInput(f"on must be one of {', '.join(SOURCES)}, got {on!r}")

    def decorate(function: Callable[..., Any]) -> ServerLoss:
        if not callable(function):
            raise InvalidLoss(f"custom_loss decorates functions, got {type(function).__name__}")
        called = name or function_name(function)
        try:
            check_name(called)
        except InvalidLoss as error:
            mend = "" if name else ". Give it a name: custom_loss(client, name='my_loss')"
            raise InvalidLoss(f"{error}{mend}") from None
        loss = ServerLoss(server, called, function, on, fixed, trace=trace)
        server.by_name[called] = loss
        return loss

    return decorate


def _bound(function: Callable[..., Any], fixed: Mapping[str, Setting]) -> Callable[..., Any]:
    if not fixed:
        return function
    if unknown := [key for key in fixed if key not in signature_of(function).parameters]:
        raise InvalidLoss(f"the function has no hyperparameter {unknown[0]!r}")
    return functools.partial(function, **fixed)


def _key(fixed: Mapping[str, Setting]) -> tuple[tuple[str, type, Setting], ...]:
    """With types, for `True == 1`."""
    return tuple((name, type(value), value) for name, value in sorted(fixed.items()))
