"""Where a loss runs: on the server in one pass, or here in two."""

from __future__ import annotations

import functools
import inspect
import logging
import re
from collections.abc import Mapping
from dataclasses import dataclass
from types import FunctionType
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from tinker_lightning import losses
from tinker_lightning.client.loss_handle import LossHandle
from tinker_lightning.errors import InvalidInput
from tinker_lightning.lightning import metric_names
from tinker_lightning.losses import surrogate
from tinker_lightning.losses.builtin import LOSSES as BUILT_IN
from tinker_lightning.losses.library import check_settings, is_of_library, unwrapped
from tinker_lightning.losses.surrogate import function_name
from tinker_lightning.lossgraph.batch_loss import OF_LIBRARY, OF_OWN
from tinker_lightning.lossgraph.server_loss import ServerLoss

if TYPE_CHECKING:
    from collections.abc import Callable

_NOT_IN_NAMES = re.compile(r"[^A-Za-z0-9_.-]")
logger = logging.getLogger("tinker_lightning")

Route: TypeAlias = Literal["auto", "builtin", "server", "two-pass"]
ROUTES: tuple[Route, ...] = ("auto", "builtin", "server", "two-pass")


@dataclass(frozen=True, slots=True)
class Chosen:
    """A route, and the loss in the form in which it is used there.

    Args:
        route: Where it runs.
        loss: For `two-pass` a function of datums and log-probabilities; else what `RemoteLM.server_loss` takes.
        config: The settings that go with each call.
    """

    route: Literal["builtin", "server", "two-pass"]
    loss: Any
    config: Mapping[str, float | str]

    @property
    def runs_locally(self) -> bool:
        """Whether the loss is computed here, from log-probabilities that a forward pass has brought."""
        return self.route == "two-pass"


def is_plain_function(loss: Any) -> bool:
    """Whether what stands in a class as its loss is a function of `(data, logprobs)`, not written as a method."""
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
    route: Route,
    backend: Callable[[], Any],
    *,
    regularized: bool = False,
) -> Chosen:
    """The best route for a loss that is exact, or the one that is asked for; says which, once, in the log.

    A function of one's own stays here unless the server is asked for: tracing fixes what Python decides, which may be
    meant to change. The functions of `tinker_lightning.losses` have nothing of that kind.

    Args:
        loss: A name, what `custom_loss` or `create_custom_loss` gave, or a function of datums and log-probabilities.
        config: Its settings.
        route: What is asked for.
        backend: Gives the client; called only where it matters.
        regularized: Whether there are regularizers beside it, for which the log-probabilities come here anyway. Then
            one pass on the server would be a third.

    Raises:
        InvalidInput: If the loss cannot run there, and says where it can; or if a setting of it cannot be.
        InvalidLoss: If a metric of a loss that is the server's cannot be logged under its name.
        LossNotTraceable: If the server was asked for, and the function does what cannot be traced.
    """
    if route not in ROUTES:
        raise InvalidInput(f"route must be one of {', '.join(ROUTES)}, got {route!r}")
    chosen, why = _choose(loss, dict(config), route, backend, regularized)
    if chosen.route == "server" and (own := _registered(chosen.loss, backend)) is not None:
        metric_names.check(own.diagnostics, "base_loss/" if regularized else "")
    logger.info("loss %s: route %s (%s)", _name(loss), chosen.route, why)
    return chosen


def _choose(
    loss: Any, config: dict[str, Any], route: Route, backend: Callable[[], Any], regularized: bool
) -> tuple[Chosen, str]:
    asked = "asked for" if route != "auto" else ""
    beside = "its regularizers need the log-probabilities here" if regularized and not asked else ""
    if isinstance(loss, str) and loss in BUILT_IN:
        function, is_here = getattr(losses, loss), bool(beside) or route == "two-pass"
        check_settings(function, config, may_have_others=not is_here)
        if is_here:
            return Chosen("two-pass", functools.partial(function, **config), {}), asked or beside
        if route == "server":
            return Chosen("builtin", loss, config), "the server was asked for, which knows it by name"
        return Chosen("builtin", loss, config), asked or "the server knows it by name"
    if route == "builtin":
        raise InvalidInput(f"{_name(loss)} is not built into servers, which know {', '.join(BUILT_IN)}")
    if isinstance(loss, str | ServerLoss | LossHandle):
        # What else was registered is as it was traced, and may take the batch in no other form than a server's.
        is_the_same_here = isinstance(loss, LossHandle) or (isinstance(loss, ServerLoss) and loss.is_of_library)
        if route != "two-pass" and not (beside and is_the_same_here):
            return Chosen("server", loss, config), asked or "it was registered there"
        loss = _registered(loss, backend) or loss
        if isinstance(loss, str) or getattr(loss, "source", "logprobs") != "logprobs":
            raise InvalidInput(
                f"{_name(loss)} runs on the server only: what it is computed from does not come here. Write it as a "
                "function of datums and log-probabilities."
            )
        return Chosen("two-pass", functools.partial(loss, **config), {}), asked or beside
    if is_of_library(loss):
        check_settings(loss, config)
    if route == "server":
        return Chosen("server", _uploaded(loss, config, backend()), {}), asked
    if route == "auto" and is_of_library(loss) and not regularized and _takes_losses(backend()):
        return Chosen("server", _uploaded(loss, config, backend()), {}), "the server computes it in one pass"
    surrogate.check_arguments(loss)
    why = asked or (beside if is_of_library(loss) else "") or "it is Python's"
    return Chosen("two-pass", functools.partial(loss, **config) if config else loss, {}), why


def _registered(loss: Any, backend: Callable[[], Any]) -> ServerLoss | None:
    """What `custom_loss` has made of it, where that is known here."""
    if isinstance(loss, str):
        loss = getattr(getattr(backend(), "losses", None), "by_name", {}).get(loss)
    return loss if isinstance(loss, ServerLoss) else None


def _uploaded(loss: Any, config: Mapping[str, Any], backend: Any) -> ServerLoss:
    function, settings = unwrapped(loss)
    if getattr(backend, "losses", None) is None:
        raise InvalidInput(f"{type(backend).__name__} takes no losses of one's own; use route='two-pass'")
    # Nobody uses the name, so that it may stand beside those of the server's losses, and of one's own registered ones.
    name = f"{OF_LIBRARY if is_of_library(loss) else OF_OWN}{_NOT_IN_NAMES.sub('', _name(loss))[:50]}"
    return ServerLoss(backend.losses, name, function, "logprobs", {**settings, **config}, trace=True, of_lists=True)


def _takes_losses(backend: Any) -> bool:
    return bool(getattr(getattr(backend, "losses", None), "are_taken", False))


def _name(loss: Any) -> str:
    if isinstance(loss, ServerLoss | LossHandle):
        return loss.name
    return loss if isinstance(loss, str) else function_name(loss)
