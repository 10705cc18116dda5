"""A named term of a loss: its function, its weight, and where it runs."""

from __future__ import annotations

import inspect
import math
import numbers
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

from torch import Tensor

from tinker_lightning.errors import InvalidLoss

Returned: TypeAlias = "tuple[Tensor, Mapping[Any, Any]] | Tensor"
# Has the signature of a loss function, and may be async.
RegularizerFn: TypeAlias = Callable[[list[Any], list[Tensor]], "Returned | Awaitable[Returned]"]

_SPEC = ("fn", "weight", "name", "run_in_executor", "async")


@dataclass(frozen=True, slots=True)
class Regularizer:
    """A term that is added to a loss, `weight * fn(data, logprobs)`, with telemetry under its name.

    A plain function runs on the caller's thread. An async one runs on a background event loop, concurrently.

    >>> Regularizer(lambda data, logprobs: logprobs[0].sum(), lambda step: 0.1 * step, "warm").weight_at(3)
    0.30000000000000004

    Args:
        fn: Takes `(data, logprobs)` and returns a scalar tensor, or that and a dict of metrics; may be async.
        weight: A number, or a function of the step.
        name: The name in telemetry, unique within a loss.
        run_in_executor: Runs a slow plain function on its own thread.
    """

    fn: RegularizerFn
    weight: float | Callable[[int], float]
    name: str
    run_in_executor: bool = False

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not self.name.strip() or "/" in self.name:
            raise InvalidLoss(
                f"the name of a regularizer must be a non-empty string without '/', got {self.name!r}; its telemetry "
                "is logged as regularizers/<name>/value"
            )
        if not callable(self.fn):
            raise InvalidLoss(
                f"regularizer {self.name!r}: fn must be a function of (data, logprobs), got {type(self.fn).__name__}"
            )
        if not isinstance(self.run_in_executor, bool):
            raise InvalidLoss(
                f"regularizer {self.name!r}: run_in_executor must be True or False, got {self.run_in_executor!r}"
            )
        if not callable(self.weight):
            _finite(self.weight, f"regularizer {self.name!r}: weight")

    @property
    def is_async(self) -> bool:
        """Whether the function is declared async; other callables may still return an awaitable."""
        return inspect.iscoroutinefunction(self.fn) or inspect.iscoroutinefunction(type(self.fn).__call__)

    def weight_at(self, step: int) -> float:
        """Returns the weight at a step; raises `InvalidLoss` if it is not a finite number."""
        if not callable(self.weight):
            return float(self.weight)
        where = f"regularizer {self.name!r}: its weight at step {step}"
        try:
            weight = self.weight(step)
        except Exception as error:
            raise InvalidLoss(f"{where} failed: {type(error).__name__}: {error}") from error
        return _finite(weight, where)


def as_regularizers(given: Iterable[Regularizer | Mapping[str, Any]] | None) -> tuple[Regularizer, ...]:
    """Validates regularizers; dicts of `fn`, `weight`, `name` and `run_in_executor` are converted."""
    if given is None:
        return ()
    if isinstance(given, Regularizer | Mapping | str) or not isinstance(given, Iterable):
        raise InvalidLoss(
            f"regularizers must be a list of Regularizer, got one {type(given).__name__}; write [regularizer]"
        )
    regularizers = tuple(_as_regularizer(i, each) for i, each in enumerate(given))
    names = [regularizer.name for regularizer in regularizers]
    for i, name in enumerate(names):
        if name in names[:i]:
            raise InvalidLoss(
                f"regularizers {names.index(name)} and {i} are both named {name!r}; give each a different name"
            )
    return regularizers


def _as_regularizer(i: int, given: Any) -> Regularizer:
    if isinstance(given, Regularizer):
        return given
    if not isinstance(given, Mapping):
        raise InvalidLoss(
            f"regularizer {i}: got {type(given).__name__}; write Regularizer(fn, weight, name), or a dict of these"
        )
    if missing := [key for key in ("fn", "weight", "name") if key not in given]:
        raise InvalidLoss(f"regularizer {i}: the dict has no {', '.join(missing)}")
    if unknown := [str(key) for key in given if key not in _SPEC]:
        raise InvalidLoss(f"regularizer {i}: unknown {', '.join(unknown)}; a dict may have {', '.join(_SPEC)}")
    regularizer = Regularizer(given["fn"], given["weight"], given["name"], given.get("run_in_executor", False))
    # Whether the function is async is detected; the entry must not contradict it.
    if regularizer.is_async and not given.get("async", True):
        raise InvalidLoss(f"regularizer {regularizer.name!r}: async is {given['async']!r}, but its function is async")
    return regularizer


def _finite(value: Any, what: str) -> float:
    if not isinstance(value, numbers.Real):
        raise InvalidLoss(f"{what} must be a number or a function of the step, got {type(value).__name__}")
    if not math.isfinite(value):
        raise InvalidLoss(f"{what} is {float(value)}; it must be finite")
    return float(value)
