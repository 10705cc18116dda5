"""`Regularizer`, and the composition with a base loss: `total = (base or 0) + sum(weight * term)`, with telemetry."""

from __future__ import annotations

import contextlib
import inspect
import math
import numbers
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch import Tensor

from tinker_lightning.errors import (
    InvalidInput,
    InvalidLoss,
    LossWithoutGradient,
    ResultTimeout,
    TinkerLightningError,
)
from tinker_lightning.losses import custom
from tinker_lightning.threads.background import blocker, run_on_loop, run_on_thread

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from tinker_lightning.losses.custom import LossFn


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


def evaluate(
    data: list[Any],
    logprobs: list[Tensor],
    base: LossFn | None,
    regularizers: Iterable[Regularizer | Mapping[str, Any]] | None,
    *,
    step: int,
    grad_norms: bool = True,
    timeout: float | None = None,
) -> tuple[Tensor, dict[str, Any]]:
    """Returns the total of a base loss and regularizers, and its telemetry: a dict of numbers and nested dicts.

    Async terms and those in an executor start first and run concurrently with the rest, which runs on the calling
    thread. Errors name the regularizer. Without regularizers the result is the base loss with its own metrics.

    Args:
        data: The datums that the functions receive.
        logprobs: One tensor per datum: leaves, or the output of a `RemoteLM`.
        base: The base loss, or None.
        regularizers: The terms to add.
        step: The step that weight functions receive.
        grad_norms: Whether to compute the gradient norm of each unweighted term, which costs a backward through it.
        timeout: The number of seconds that terms on other threads may take; one in an executor keeps running.
    """
    terms = as_regularizers(regularizers)
    check_timeout("timeout", timeout)
    if not terms:
        if base is None:
            raise InvalidLoss("there is nothing to train on: pass a loss function, a regularizer, or both")
        return custom.loss_and_metrics(base(data, logprobs), logprobs, needs_gradient=torch.is_grad_enabled())

    weights = [term.weight_at(step) for term in terms]
    base_logprobs, *term_logprobs = _split(logprobs, 1 + len(terms))
    base_loss, returned = _run(data, base, base_logprobs, terms, term_logprobs, timeout)
    contributions, telemetry = [], {}
    for term, weight, logprobs in zip(terms, weights, term_logprobs, strict=True):
        with _name_in_errors(term):
            value, metrics = custom.loss_and_metrics(returned[term.name], logprobs, needs_gradient=False)
            value = value.reshape(())
            contributions.append(weight * value)
            own: dict[str, Any] = {"value": value.item(), "weight": weight, "contribution": contributions[-1].item()}
            if grad_norms and torch.is_grad_enabled():
                own["grad_norm"] = _grad_norm(value, logprobs)
            telemetry[term.name] = own | {"custom": metrics}

    regularizer_total = sum(contributions[1:], contributions[0])
    total = regularizer_total if base_loss is None else base_loss[0].reshape(()) + regularizer_total
    _check_total(total, terms)
    nested: dict[str, Any] = {"loss_total": total.item(), "regularizer_total": regularizer_total.item()}
    if base_loss is not None:
        nested["base_loss"] = {
            "value": base_loss[0].item(),
            **custom.prefix_clashes(base_loss[1], {"value"}, "custom"),
        }
    return total, nested | {"regularizers": telemetry}


def check_timeout(name: str, timeout: float | None) -> None:
    """Raises `InvalidInput` unless a timeout is None or a number above 0; `name` is its name in the message."""
    if timeout is not None and not (isinstance(timeout, int | float) and timeout > 0):
        raise InvalidInput(f"{name} must be a number of seconds above 0, or None, got {timeout!r}")


def flatten(metrics: Mapping[str, Any]) -> dict[str, float]:
    """Flattens telemetry for loggers.

    >>> flatten({"loss_total": 3.0, "regularizers": {"sparsity": {"value": 2.0, "weight": 0.5}}})
    {'loss_total': 3.0, 'regularizers/sparsity/value': 2.0, 'regularizers/sparsity/weight': 0.5}
    """
    flat: dict[str, float] = {}
    for name, value in metrics.items():
        if isinstance(value, dict):
            flat |= {f"{name}/{inner}": number for inner, number in flatten(value).items()}
        else:
            flat[name] = value
    return flat


def _split(logprobs: list[Tensor], count: int) -> list[list[Tensor]]:
    """Returns a copy of the log-probabilities for each function, joined in one node of the autograd graph.

    This makes sums of gradients reproducible: autograd orders functions of several threads by per-thread counters.
    """
    copies = [torch.stack([each] * count).unbind() for each in logprobs]
    return [[each[i] for each in copies] for i in range(count)]


def _run(
    data: list[Any],
    base: LossFn | None,
    logprobs: list[Tensor],
    terms: Sequence[Regularizer],
    term_logprobs: Sequence[list[Tensor]],
    timeout: float | None,
) -> tuple[tuple[Tensor, dict[str, float]] | None, dict[str, Any]]:
    """Runs the base loss and all terms, and returns their results."""
    deadline = None if timeout is None else time.monotonic() + timeout
    running: dict[str, Future[Any]] = {}
    try:
        for term, own in zip(terms, term_logprobs, strict=True):
            if term.is_async or term.run_in_executor:
                running[term.name] = _start(term, data, own)
        base_loss = None
        if base is not None:
            base_loss = custom.loss_and_metrics(base(data, logprobs), logprobs, needs_gradient=torch.is_grad_enabled())
        for term, own in zip(terms, term_logprobs, strict=True):
            if term.name not in running:
                running[term.name] = _start(term, data, own)
        wait(running.values(), None if deadline is None else max(0.0, deadline - time.monotonic()), FIRST_EXCEPTION)
        returned = {}
        # First those that are done: the failure of one is the reason why others are not.
        for term in sorted(terms, key=lambda term: not running[term.name].done()):
            with _name_in_errors(term, None if running[term.name].done() else timeout):
                returned[term.name] = running[term.name].result(timeout=0)
        return base_loss, returned
    finally:
        for future in running.values():
            future.cancel()


def _start(term: Regularizer, data: list[Any], logprobs: list[Tensor]) -> Future[Any]:
    """Starts a term; the future of one that runs on this thread is already done."""

    def call() -> Future[Any]:
        returned = term.fn(data, logprobs)
        if inspect.isawaitable(returned):
            return run_on_loop(returned, term.name)
        done: Future[Any] = Future()
        done.set_result(returned)
        return done

    with _name_in_errors(term):
        if term.run_in_executor and not term.is_async:
            return run_on_thread(lambda: call().result(), term.name)
        return call()


@contextlib.contextmanager
def _name_in_errors(term: Regularizer, timeout: float | None = None) -> Iterator[None]:
    """Adds the name of the regularizer to errors; `timeout` is the one that has expired, if any."""
    try:
        yield
    except TinkerLightningError as error:
        named = type(error)(f"regularizer {term.name!r}: {error}")
        named.__dict__.update(error.__dict__)  # the operation and request of the error
        raise named from error
    except Exception as error:
        has_own_thread = term.run_in_executor and not term.is_async
        if timeout is not None and not has_own_thread and (by := blocker()):
            raise ResultTimeout(
                f"regularizer {term.name!r}: no value within {timeout} s, because {by!r} blocks the event loop that "
                "all async regularizers share: it sleeps or computes without an await. Use asyncio.sleep and "
                "asyncio.to_thread in it, or make it a plain function with run_in_executor=True; nothing was sent."
            ) from error
        if timeout is not None:
            raise ResultTimeout(
                f"regularizer {term.name!r}: no value within {timeout} s. Raise the timeout, or check what it "
                "waits for; nothing was sent."
            ) from error
        kind = ResultTimeout if isinstance(error, TimeoutError) else InvalidLoss
        raise kind(f"regularizer {term.name!r} failed: {type(error).__name__}: {error}") from error


def _grad_norm(value: Tensor, logprobs: list[Tensor]) -> float:
    """Returns the norm of a term's gradient with respect to the log-probabilities."""
    inputs = [each for each in logprobs if each.requires_grad]
    if not (value.requires_grad and inputs):
        return 0.0
    gradients = torch.autograd.grad(value, inputs, retain_graph=True, allow_unused=True)
    used = [gradient.flatten().to("cpu", torch.float64) for gradient in gradients if gradient is not None]
    norm = torch.cat(used).norm().item() if used else 0.0
    custom.check_gradient(value, torch.tensor(norm))
    return norm


def _check_total(total: Tensor, terms: Sequence[Regularizer]) -> None:
    what = "the total of the loss and its regularizers"
    custom.check_finite(total, what=what, fix="Each of them is finite, so lower the weights")
    if torch.is_grad_enabled() and not total.requires_grad:
        raise LossWithoutGradient(
            f"none of the regularizers ({', '.join(term.name for term in terms)}) depends on the log-probabilities, so "
            "there is nothing to train. Compute one from the tensors in the second argument, without .detach(), "
            ".item(), .tolist(), numpy or torch.no_grad() in between."
        )


def as_regularizers(values: Iterable[Regularizer | Mapping[str, Any]] | None) -> tuple[Regularizer, ...]:
    """Validates regularizers; dicts of `fn`, `weight`, `name` and `run_in_executor` are converted."""
    if values is None:
        return ()
    if isinstance(values, Regularizer | Mapping | str) or not isinstance(values, Iterable):
        raise InvalidLoss(
            f"regularizers must be a list of Regularizer, got one {type(values).__name__}; write [regularizer]"
        )
    regularizers = tuple(_as_regularizer(i, each) for i, each in enumerate(values))
    names = [regularizer.name for regularizer in regularizers]
    for i, name in enumerate(names):
        if name in names[:i]:
            raise InvalidLoss(
                f"regularizers {names.index(name)} and {i} are both named {name!r}; give each a different name"
            )
    return regularizers


def _as_regularizer(i: int, value: Any) -> Regularizer:
    if isinstance(value, Regularizer):
        return value
    if not isinstance(value, Mapping):
        raise InvalidLoss(
            f"regularizer {i}: got {type(value).__name__}; write Regularizer(fn, weight, name), or a dict of these"
        )
    if missing := [key for key in ("fn", "weight", "name") if key not in value]:
        raise InvalidLoss(f"regularizer {i}: the dict has no {', '.join(missing)}")
    if unknown := [str(key) for key in value if key not in _SPEC]:
        raise InvalidLoss(f"regularizer {i}: unknown {', '.join(unknown)}; a dict may have {', '.join(_SPEC)}")
    regularizer = Regularizer(value["fn"], value["weight"], value["name"], value.get("run_in_executor", False))
    # Whether the function is async is detected; the entry must not contradict it.
    if regularizer.is_async and not value.get("async", True):
        raise InvalidLoss(f"regularizer {regularizer.name!r}: async is {value['async']!r}, but its function is async")
    return regularizer


def _finite(value: Any, what: str) -> float:
    if not isinstance(value, numbers.Real):
        raise InvalidLoss(f"{what} must be a number or a function of the step, got {type(value).__name__}")
    if not math.isfinite(value):
        raise InvalidLoss(f"{what} is {float(value)}; it must be finite")
    return float(value)
