"""The route of a loss: on the server, or locally between a forward pass and the backward of its gradient."""

from __future__ import annotations

import functools
import inspect
import logging
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import FunctionType, MethodType
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from tinker_lightning import losses
from tinker_lightning.client.passes.preparation import spread
from tinker_lightning.client.server_losses import LossHandle
from tinker_lightning.errors import InvalidInput
from tinker_lightning.losses import custom
from tinker_lightning.losses.batch import action_tokens, action_weight, weighted_tokens
from tinker_lightning.losses.builtin import LOSSES as BUILT_IN
from tinker_lightning.losses.custom import LossFn, function_name
from tinker_lightning.losses.library import (
    TOKEN_COUNTS,
    check_settings,
    is_of_library,
    supported_settings,
    unwrap_partial,
)
from tinker_lightning.lossgraph.graph_loss import CUSTOM_PREFIX, LIBRARY_PREFIX
from tinker_lightning.lossgraph.server_loss import ServerLoss
from tinker_lightning.types.datum import to_datums

if TYPE_CHECKING:
    from torch import Tensor

    from tinker_lightning.client.backend import TrainingBackend

_NOT_IN_NAMES = re.compile(r"[^A-Za-z0-9_.-]")
logger = logging.getLogger("tinker_lightning")

RouteName: TypeAlias = Literal["auto", "builtin", "server", "retained", "two-pass"]
Reduction: TypeAlias = Literal["mean", "sum"]
ROUTES: tuple[RouteName, ...] = ("auto", "builtin", "server", "retained", "two-pass")


@dataclass(frozen=True, slots=True)
class Route:
    """The route of a loss: where it runs, and how its values are averaged.

    Args:
        route: The name of the route.
        loss: A function of datums and log-probabilities if it runs locally; else what `RemoteLM.server_loss` takes.
        config: The settings sent with each call.
        local: The reduced loss as a function of datums and log-probabilities; None if only the server can evaluate it.
        tokens: Counts the tokens that the loss is divided by; None for a loss that is not divided.
        weight: Returns the weight of a batch in the mean over several batches.
        is_of_library: Whether the loss is one of `tinker_lightning.losses`.
        regularized: Whether regularizers are added to the loss.
    """

    route: Literal["builtin", "server", "retained", "two-pass"]
    loss: Any
    config: Mapping[str, float | str]
    local: LossFn | None = None
    tokens: Callable[[Sequence[Any]], float] | None = None
    weight: Callable[[Sequence[Any]], float] = len
    is_of_library: bool = False
    regularized: bool = False
    runs_locally: bool = field(init=False)
    """Whether the loss is evaluated here, from the log-probabilities of a forward pass."""
    needs_logprobs: bool = field(init=False)
    """Whether a training step starts with a forward pass."""

    def __post_init__(self) -> None:
        runs_locally = self.route in ("retained", "two-pass")
        object.__setattr__(self, "runs_locally", runs_locally)
        object.__setattr__(self, "needs_logprobs", runs_locally or self.regularized)

    def with_inputs(self, data: list[Any], inputs: Mapping[str, Any]) -> list[Any]:
        """Adds to each datum its row of the batch's inputs, if the loss reads them from datums."""
        return spread(to_datums(data), inputs) if inputs and self.local is not None else data


def is_plain_function(loss: Any) -> bool:
    """Returns whether a class attribute `loss` is a function of `(data, logprobs)` and not a method."""
    if is_of_library(loss):
        return True
    if not isinstance(loss, FunctionType):
        return False
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    parameters = inspect.signature(loss).parameters.values()
    required = [each.name for each in parameters if each.kind in positional and each.default is each.empty]
    *within, name = loss.__qualname__.rpartition("<locals>.")[2].split(".")
    return len(required) == 2 and required[0] != "self" and not (within and name == "loss")


def choose(
    loss: Any,
    config: Mapping[str, float | str],
    route: RouteName,
    backend: Callable[[], TrainingBackend],
    *,
    regularized: bool = False,
    reduction: Reduction = "mean",
    equals: str | None = None,
    may_defer: bool = False,
) -> Route:
    """Returns the cheapest exact route for a loss, or the requested one, and logs it.

    A custom Python function runs locally unless `route="server"`, because tracing would freeze its Python branches.
    With regularizers, which need the log-probabilities locally, a server-side loss would take a third pass.
    A function of the library that servers know by name takes the built-in route if its value may be deferred.

    Args:
        loss: A name, a registered loss, a function of datums and log-probabilities, or None for regularizers alone.
        config: The settings of the loss.
        route: The requested route.
        backend: Returns the client; called only if needed.
        regularized: Whether there are regularizers.
        reduction: How a loss that sums over tokens is reduced.
        equals: The built-in loss that a custom function equals up to a factor.
        may_defer: Whether nobody reads the value of the loss before the step is sent.
    """
    if route not in ROUTES:
        raise InvalidInput(f"route must be one of {', '.join(ROUTES)}, got {route!r}")
    if reduction not in ("mean", "sum"):
        raise InvalidInput(f"reduction must be 'mean' or 'sum', got {reduction!r}")
    if loss is None:
        return _with_retention(Route("two-pass", None, {}, regularized=regularized), route, backend)
    name: RouteName = "two-pass" if route == "retained" else route
    equals = equals or _builtin_equivalent(loss)
    if equals is not None and not regularized and (route == "builtin" or (route == "auto" and may_defer)):
        choice, why = _choose_builtin(loss, dict(config), route, backend, equals)
    else:
        choice, why = _choose(loss, dict(config), name, backend, regularized)
    choice = _with_retention(choice, route, backend)
    logger.info("loss %s: route %s (%s)", loss_name(loss), choice.route, why)
    return _with_reduction(replace(choice, regularized=regularized), _registered_loss(loss, backend) or loss, reduction)


def _with_retention(choice: Route, requested: RouteName, backend: Callable[[], TrainingBackend]) -> Route:
    """Saves the second forward of a loss that runs locally if the server can keep the first one."""
    if not choice.runs_locally or requested == "two-pass":
        return choice
    if backend().retains:
        return replace(choice, route="retained")
    if requested == "retained":
        raise InvalidInput(
            "route='retained': this server does not keep forward passes for their gradient. Use route='two-pass', "
            "which works on every server."
        )
    return choice


def _with_reduction(choice: Route, loss: Any, reduction: Reduction) -> Route:
    """Adds how a loss of the library is divided, and how much a batch counts in a mean over batches."""
    if isinstance(loss, ServerLoss):
        loss = loss.function if loss.is_of_library else None
    function, bound = unwrap_partial(getattr(losses, loss) if isinstance(loss, str) and loss in BUILT_IN else loss)
    if not is_of_library(function):
        return choice
    count = TOKEN_COUNTS.get(function.__name__)
    if count is None:
        own = {**bound, **choice.config, **unwrap_partial(choice.local)[1]}.get("reduction")  # a setting of `grpo`
        weight = {"token": weighted_tokens, "sum": one_per_batch}.get(str(own), len)
        return replace(choice, weight=weight, is_of_library=True)
    if reduction == "sum":
        return replace(choice, weight=one_per_batch, is_of_library=True)
    local = _mean(choice.local, count)
    loss = local if choice.runs_locally else choice.loss
    weight = action_weight if count is action_tokens else count  # a batch without actions does not count in a mean
    return replace(choice, loss=loss, local=local, tokens=count, weight=weight, is_of_library=True)


def _mean(loss: Any, count: Callable[[Sequence[Any]], float]) -> LossFn:
    @functools.wraps(unwrap_partial(loss)[0], updated=())
    def mean(data: list[Any], logprobs: list[Tensor]) -> Any:
        total, metrics = loss(data, logprobs)
        return total / count(data), metrics

    return mean


def one_per_batch(_: Sequence[Any]) -> float:
    """Counts every batch as one."""
    return 1.0


def _choose(
    loss: Any, config: dict[str, Any], route: RouteName, backend: Callable[[], TrainingBackend], regularized: bool
) -> tuple[Route, str]:
    local: Any
    requested = "requested" if route != "auto" else ""
    because = "its regularizers need the log-probabilities" if regularized and not requested else ""
    if isinstance(loss, str) and loss in BUILT_IN:
        if not because and route == "auto" and not backend().computes(loss):
            because = "the server is not known to train with it as the protocol defines it"
        function, runs_locally = getattr(losses, loss), bool(because) or route == "two-pass"
        check_settings(function, config, allow_unknown=not runs_locally)
        local = functools.partial(function, **supported_settings(function, config))
        if runs_locally:
            return Route("two-pass", local, {}, local), requested or because
        if route == "server":
            return Route("builtin", loss, config, local), "requested; the server knows it by name"
        return Route("builtin", loss, config, local), requested or "the server knows it by name"
    if route == "builtin":
        raise InvalidInput(f"{loss_name(loss)} is not built into servers, which know {', '.join(BUILT_IN)}")
    if isinstance(loss, str | ServerLoss | LossHandle):
        own: Any = _registered_loss(loss, backend) or loss
        # Another registered function may take the batch only in the form that a server gives it.
        runs_anywhere = isinstance(own, LossHandle) or (isinstance(own, ServerLoss) and own.is_of_library)
        local = functools.partial(own, **config) if runs_anywhere else None
        if route != "two-pass" and not (because and runs_anywhere):
            return Route("server", loss, config, local), requested or "it was registered there"
        if isinstance(own, str) or (isinstance(own, ServerLoss) and own.source != "logprobs"):
            raise InvalidInput(
                f"{loss_name(own)} runs on the server only, because it is not computed from log-probabilities. Write "
                "it as a function of datums and log-probabilities."
            )
        local = functools.partial(own, **config)
        return Route("two-pass", local, {}, local), requested or because
    if is_of_library(loss):
        check_settings(loss, config)
    local = functools.partial(loss, **config) if config else loss
    if route == "server":
        return Route("server", _upload(loss, config, backend()), {}, local), requested
    if route == "auto" and is_of_library(loss) and not regularized and _takes_losses(backend()):
        return Route("server", _upload(loss, config, backend()), {}, local), "the server computes it in one pass"
    custom.check_arguments(loss)
    why = requested or (because if is_of_library(loss) else "") or "it is Python"
    return Route("two-pass", local, {}, local), why


def _builtin_equivalent(loss: Any) -> str | None:
    """Returns the built-in loss that a function of the library equals up to a factor."""
    function, _ = unwrap_partial(loss)
    return function.__name__ if is_of_library(loss) and function.__name__ in BUILT_IN else None


def _choose_builtin(
    loss: Any, config: dict[str, Any], route: RouteName, backend: Callable[[], TrainingBackend], name: str
) -> tuple[Route, str]:
    """Chooses the built-in route for a function that equals a built-in loss, where the server computes that exactly."""
    if route == "auto" and not backend().computes(name):
        return _choose(loss, config, route, backend, False)
    if is_of_library(loss):
        check_settings(loss, config)
    local = functools.partial(loss, **config) if config else loss
    settings = {**unwrap_partial(loss)[1], **config}
    return Route("builtin", name, settings, local), "requested" if route == "builtin" else f"it equals {name}"


def _registered_loss(loss: Any, backend: Callable[[], TrainingBackend]) -> ServerLoss | None:
    """Returns the registered loss, if this client has registered it."""
    if isinstance(loss, str) and loss not in BUILT_IN:
        registry = backend().losses
        loss = None if registry is None else registry.by_name.get(loss)
    return loss if isinstance(loss, ServerLoss) else None


def _upload(loss: Any, config: Mapping[str, Any], backend: TrainingBackend) -> ServerLoss:
    function, settings = unwrap_partial(loss)
    if backend.losses is None:
        raise InvalidInput(f"{type(backend).__name__} does not take custom losses; use route='two-pass'")
    # The name is internal and must not clash with the names of built-in and registered losses.
    name = f"{LIBRARY_PREFIX if is_of_library(loss) else CUSTOM_PREFIX}{_NOT_IN_NAMES.sub('', loss_name(loss))[:50]}"
    return ServerLoss(backend.losses, name, function, "logprobs", {**settings, **config}, trace=True, takes_lists=True)


def _takes_losses(backend: TrainingBackend) -> bool:
    return backend.losses is not None and backend.losses.accepts_batch_losses


def loss_name(loss: Any) -> str:
    """Returns the name of a loss for messages; an overridden `loss` method includes its class, `Focal.loss`."""
    if loss is None:
        return "regularizers"
    if isinstance(loss, ServerLoss | LossHandle):
        return loss.name
    if isinstance(loss, MethodType) and loss.__name__ == "loss":
        return f"{type(loss.__self__).__name__}.{loss.__name__}"
    return loss if isinstance(loss, str) else function_name(loss)
