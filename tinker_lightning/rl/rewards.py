"""Rewards: plain functions of a prompt and a completion."""

from __future__ import annotations

import asyncio
import functools
import inspect
import logging
import math
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from tinker_lightning.errors import InvalidInput, InvalidTensor, RewardFailed, check_choice
from tinker_lightning.threads.background import is_cancellation, run_on_thread
from tinker_lightning.types.tensor import as_array

if TYPE_CHECKING:
    from collections.abc import Iterable

RewardFunction: TypeAlias = Callable[..., Any]

logger = logging.getLogger("tinker_lightning.rl")

# The interval, in seconds, at which rewards without a timeout that are still running are logged.
_SLOW_SECONDS = 30.0


class Rewards:
    """Scores completions by one or several functions, which run concurrently.

    A function takes the prompt, the completion's text, and the other columns of the prompt's row that it has
    parameters for, and returns a number, or a dict of numbers, which are added up and logged one by one. It may be
    `async`; others run on a thread each, so that a slow one delays nobody.

    Args:
        functions: A function, several, or a dict of them by name. The default name is the function's.
        weights: The factor of each function's reward, in order or by name; 1 for a function that is not named.
        timeout: The time in seconds that a function may take; None for any, with a warning every 30 s.
        on_error: What to do if a function raises, times out, or returns anything but finite numbers: `raise`
            raises `RewardFailed`; `skip` counts it in `failures`, and the completion is not trained on.

    >>> def exact(prompt, completion, answer):
    ...     return float(completion.strip() == answer)
    >>> asyncio.run(Rewards(exact).score("1 + 1 =", " 2", {"answer": "2"}))
    (1.0, {'exact': 1.0})
    """

    def __init__(
        self,
        functions: RewardFunction | Sequence[RewardFunction] | Mapping[str, RewardFunction],
        weights: Sequence[float] | Mapping[str, float] | None = None,
        timeout: float | None = None,
        on_error: Literal["raise", "skip"] = "raise",
    ) -> None:
        check_choice("on_error", on_error, ("raise", "skip"))
        if timeout is not None and not timeout > 0:
            raise InvalidInput(f"timeout must be a positive number of seconds, or None, got {timeout}")
        self.functions = _by_name(functions)
        self.weights = _weights(weights, self.functions)
        self.timeout = timeout
        self.on_error = on_error
        self.failures: Counter[str] = Counter()
        self._columns = {name: _columns(name, function) for name, function in self.functions.items()}

    async def score(
        self, prompt: Any, completion: str, columns: Mapping[str, Any] | None = None
    ) -> tuple[float, dict[str, float]]:
        """Returns the weighted sum of the rewards, and each reward by the name of its function.

        The parts of a dict are also returned one by one, as `function/part`. If a function failed and `on_error` is
        `skip`, the sum is NaN, and the reward of that function is absent.
        """
        calls = [self._call(name, prompt, completion, columns or {}) for name in self.functions]
        outcomes = await asyncio.gather(*calls, return_exceptions=True)
        total = 0.0
        rewards: dict[str, float] = {}
        for (name, weight), outcome in zip(self.weights.items(), outcomes, strict=True):
            if not isinstance(outcome, BaseException):
                total += weight * outcome[name]
                rewards |= outcome
            elif self.on_error == "skip" and isinstance(outcome, RewardFailed):
                self._count(name, outcome)
                total = math.nan
            else:
                raise outcome
        return total, rewards

    async def _call(self, name: str, prompt: Any, completion: str, columns: Mapping[str, Any]) -> dict[str, float]:
        function, wanted = self.functions[name], self._columns[name]
        arguments = dict(columns) if wanted is None else {key: columns[key] for key in wanted if key in columns}
        call = functools.partial(function, prompt, completion, **arguments)
        running = _Call(name, prompt, completion)
        if self.timeout is None:
            _running.add(running)
        try:
            async with asyncio.timeout(self.timeout) as limit:
                if inspect.iscoroutinefunction(function):
                    value = call()
                else:
                    outcome = functools.partial(_outcome, call)
                    value = await asyncio.wrap_future(run_on_thread(outcome, f"reward {name}"))
                if inspect.isawaitable(value):
                    value = await value
                if isinstance(value, BaseException):
                    raise value
            return _numbers(name, value)
        except InvalidTensor as error:
            raise _failure(name, f"returned {error}", prompt, completion) from error
        except BaseException as error:
            if is_cancellation(error):
                raise
            if limit.expired():
                raise _failure(name, f"took longer than {self.timeout} s", prompt, completion) from error
            missing = [key for key in wanted or () if key not in columns and isinstance(error, TypeError)]
            hint = f"; the row has no {missing[0]!r}, only {', '.join(columns) or 'a prompt'}" if missing else ""
            text = f"{type(error).__name__}: {error}".removesuffix(": ")
            raise _failure(name, f"raised {text}{hint}", prompt, completion) from error
        finally:
            _running.discard(running)

    def _count(self, name: str, error: RewardFailed) -> None:
        if not self.failures[name]:
            logger.warning("%s; this completion and other such ones are not trained on", error)
        self.failures[name] += 1


@dataclass(frozen=True, eq=False)
class _Call:
    name: str
    prompt: Any
    completion: str
    began: float = field(default_factory=time.monotonic)


_running: set[_Call] = set()  # of all `Rewards` without a timeout
_last_logged = 0.0


def log_slow_rewards() -> None:
    """Logs rewards without a timeout that run for more than 30 s, and again every 30 s; called during waits."""
    global _last_logged
    now = time.monotonic()
    slow = sorted((each for each in list(_running) if now - each.began > _SLOW_SECONDS), key=lambda each: each.began)
    if not slow or now - _last_logged < _SLOW_SECONDS:
        return
    _last_logged = now
    for name, count in Counter(each.name for each in slow).items():
        first = next(each for each in slow if each.name == name)
        logger.warning(
            "reward %r has been running for %.0f s; unfinished calls: %d. Rewards(..., timeout=...) limits the time of "
            "a call. Prompt: %.300r. Completion: %.300r",
            name,
            now - first.began,
            count,
            first.prompt,
            first.completion,
        )


def _outcome(call: Callable[[], Any]) -> Any:
    """Returns the result of a call, or the exception that it raised: asyncio cannot pass on each kind of them."""
    try:
        return call()
    except BaseException as error:
        return error


def no_reward(prompt: Any, completion: str) -> float:
    """Returns 0: the reward of prompts whose answers are not compared with each other, as in distillation."""
    del prompt, completion
    return 0.0


def _by_name(functions: Any) -> dict[str, RewardFunction]:
    if isinstance(functions, Mapping):
        named = {str(name): function for name, function in functions.items()}
    else:
        listed: Iterable[Any] = [functions] if callable(functions) else functions
        named = {}
        for function in listed:
            name = getattr(function, "__name__", type(function).__name__)
            if name in named:
                raise InvalidInput(f"two rewards are named {name!r}; pass a dict with a different name for each")
            named[name] = function
    if not named:
        raise InvalidInput("there is no reward; pass at least one function of (prompt, completion, **columns)")
    for name, function in named.items():
        if not callable(function):
            raise InvalidInput(f"reward {name!r} must be a function, got {type(function).__name__}")
    return named


def _weights(weights: Sequence[float] | Mapping[str, float] | None, names: Iterable[str]) -> dict[str, float]:
    names = list(names)
    if weights is None:
        weights = {}
    elif not isinstance(weights, Mapping):
        if len(weights) != len(names):
            raise InvalidInput(f"there are {len(weights)} weights for {len(names)} rewards ({', '.join(names)})")
        weights = dict(zip(names, weights, strict=True))
    if unknown := [name for name in weights if name not in names]:
        raise InvalidInput(f"weights names {unknown[0]!r}, but the rewards are {', '.join(names)}")
    factors = {name: float(weights.get(name, 1.0)) for name in names}
    for name, weight in factors.items():
        if not math.isfinite(weight):
            raise InvalidInput(f"the weight of reward {name!r} is {weight}; it must be finite")
    return factors


def _columns(name: str, function: RewardFunction) -> list[str] | None:
    """Returns the columns that a function has parameters for; None if it takes all."""
    try:
        parameters = list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):  # of a builtin, for example
        return []
    kinds = inspect.Parameter
    positional = [each for each in parameters if each.kind in (kinds.POSITIONAL_ONLY, kinds.POSITIONAL_OR_KEYWORD)]
    if len(positional) < 2 and not any(each.kind is kinds.VAR_POSITIONAL for each in parameters):
        raise InvalidInput(f"reward {name!r} must take (prompt, completion, **columns), but takes {len(positional)}")
    if any(each.kind is kinds.VAR_KEYWORD for each in parameters):
        return None
    by_name = (kinds.POSITIONAL_OR_KEYWORD, kinds.KEYWORD_ONLY)
    return [each.name for each in parameters if each.kind in by_name and each not in positional[:2]]


def _numbers(name: str, value: Any) -> dict[str, float]:
    if not isinstance(value, Mapping):
        return {name: _number(value)}
    parts = {f"{name}/{key}": _number(each) for key, each in value.items()}
    return {name: math.fsum(parts.values()), **parts}


def _number(value: Any) -> float:
    if value is None:
        raise InvalidTensor("None; return a number")
    if isinstance(value, str):
        raise InvalidTensor(f"the string {value!r:.80}; return a number")
    array = as_array(value)
    if array.size != 1:
        raise InvalidTensor(f"an array of shape {list(array.shape)}; return one number")
    number = float(array.reshape(()))
    if not math.isfinite(number):
        raise InvalidTensor(f"{number}; return a finite number")
    return number


def _failure(name: str, fault: str, prompt: Any, completion: str) -> RewardFailed:
    return RewardFailed(f"reward {name!r} {fault}. Prompt: {prompt!r:.300}. Completion: {completion!r:.300}")
