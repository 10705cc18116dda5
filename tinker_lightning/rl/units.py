"""The rollouts of one batch: started together, arriving one by one."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
import math
import queue
import time
from collections import Counter
from collections.abc import Awaitable, Iterable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from tinker_lightning.errors import (
    ClientClosed,
    RewardFailed,
    RolloutFailed,
    ServerUnreachable,
    Unauthorized,
    Unsupported,
)
from tinker_lightning.rl.environment import SamplerPolicy
from tinker_lightning.rl.groups import Group
from tinker_lightning.rl.trajectory import Trajectory
from tinker_lightning.threads.background import on_loop, seconds_blocked
from tinker_lightning.types import SamplingParams

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from concurrent.futures import Future

    from tinker_lightning.rl.environment import Policy, Prompt
    from tinker_lightning.rl.tasks import Task
    from tinker_lightning.rl.trajectory import Completion

logger = logging.getLogger("tinker_lightning.rl")

OnError: TypeAlias = Literal["raise", "skip"]

# How often waiting calls `while_waiting`, in seconds.
_CALLBACK_SECONDS = 0.5

# How long the event loop of all rollouts may be blocked, in seconds, apart from the time that an episode may take.
_BLOCKED_SECONDS = 30.0

# Failures of the connection, after which no other rollout would succeed either.
_FATAL = (ClientClosed, ServerUnreachable, Unauthorized, Unsupported)


@dataclass(frozen=True)
class PolicySource:
    """The weights to sample from.

    Args:
        version: How many optimizer steps they have taken.
        sampler: Returns a sampling client when it is awaited; the weights may still be on their way to it.
        tokenizer: The tokenizer of the model.
    """

    version: int
    sampler: Awaitable[Any]
    tokenizer: Any


@dataclass(frozen=True)
class Sampling:
    """How each task is sampled.

    Args:
        group_size: The number of episodes of a task.
        params: How tokens are chosen.
        seed: The seed of the run.
        timeout: How many seconds the episodes of a task may take together; None for any number.
        on_error: Whether a task that fails raises, or is skipped and counted.
        failures: How many tasks were skipped, by the name of their environments.
    """

    group_size: int
    params: SamplingParams
    seed: int
    timeout: float | None = None
    on_error: OnError = "raise"
    failures: Counter[str] = field(default_factory=Counter)

    async def roll(self, task: Task, source: PolicySource) -> Group:
        """Samples and scores the episodes of a task."""
        sampler = await source.sampler
        policy = SamplerPolicy(sampler, source.tokenizer, version=source.version, params=self.params)
        policies = [SeededPolicy(policy, self.params, self.seed, task.number, i) for i in range(self.group_size)]
        began = time.monotonic()
        try:
            async with asyncio.timeout(self.timeout) as limit:
                trajectories = await task.environment.group(policies)
                _check_episodes(trajectories, self.group_size)
        except _FATAL:
            raise
        except Exception as error:
            took_too_long = isinstance(error, TimeoutError) and limit.expired()
            reason = str(error) if isinstance(error, RolloutFailed) else f"{type(error).__name__}: {error}"
            reason = f"did not end within {self.timeout} s" if took_too_long else reason
            if self.on_error == "skip":
                self._report(task, reason)
                return Group(task, [], source.version, time.monotonic() - began, failed=reason)
            if isinstance(error, RewardFailed):
                raise
            name = type(task.environment).__name__
            raise RolloutFailed(
                f"prompt {task.index} ({name}): {reason.rstrip('.')}. Pass on_error='skip' to RolloutLoader to leave "
                "out and count such prompts."
            ) from error
        return Group(task, trajectories, source.version, time.monotonic() - began)

    def _report(self, task: Task, reason: str) -> None:
        name = type(task.environment).__name__
        if not self.failures[name]:
            logger.warning(
                "prompt %d (%s): %s; this prompt and others that fail are left out, and counted in groups/failed",
                task.index,
                name,
                reason.rstrip("."),
            )
        self.failures[name] += 1


class Unit:
    """The tasks of one batch, and what has arrived of them; `planned` is how many groups it trains."""

    def __init__(self, number: int, tasks: list[Task], planned: int) -> None:
        self.number = number
        self.tasks = tasks
        self.planned = planned
        self.groups: dict[int, Group] = {}
        self._running: dict[int, Future[Group]] = {}
        self._arrived: queue.SimpleQueue[int] = queue.SimpleQueue()
        self._timeout: float | None = None

    @property
    def is_started(self) -> bool:
        """Whether its planned tasks are running or done."""
        return all(order in self._running or order in self.groups for order in range(self.planned))

    def start(self, orders: Iterable[int], sampling: Sampling, source: PolicySource) -> None:
        """Starts rollouts of its tasks, by their places in it."""
        self._timeout = sampling.timeout
        for order in orders:
            if order not in self._running and order not in self.groups:
                task = self.tasks[order]
                future = on_loop(sampling.roll(task, source), f"rollout of prompt {task.index}")
                self._running[order] = future
                # Not of `self`: a rollout that is cancelled must not arrive among those that are started later.
                future.add_done_callback(lambda _, order=order, arrived=self._arrived: arrived.put(order))  # type: ignore[misc]

    def arriving(self, orders: Iterable[int], while_waiting: Callable[[], None] | None) -> Iterator[tuple[int, Group]]:
        """Yields groups by their places as they arrive; raises the failure of a rollout."""
        missing = dict.fromkeys(orders)
        for order in [order for order in missing if order in self.groups]:
            del missing[order]
            yield order, self.groups[order]
        while missing:
            if while_waiting is not None:
                while_waiting()
            with contextlib.suppress(queue.Empty):
                order = self._arrived.get(timeout=_CALLBACK_SECONDS)
                self.groups[order] = self._running.pop(order).result()
                if order in missing:
                    del missing[order]
                    yield order, self.groups[order]
                continue
            self._check_loop()

    def _check_loop(self) -> None:
        """Raises `RolloutFailed` if an environment keeps the event loop, so that not even its timeout can end it."""
        if self._timeout is not None and (seconds := seconds_blocked()) > self._timeout + _BLOCKED_SECONDS:
            names = sorted({type(self.tasks[order].environment).__name__ for order in self._running})
            raise RolloutFailed(
                f"a rollout of {' or '.join(names)} has blocked the event loop, which all rollouts share, for "
                f"{seconds:.0f} s. Await what takes time: asyncio.sleep in place of time.sleep, and await "
                "asyncio.to_thread(function) for a function that blocks."
            )

    def stop(self) -> None:
        """Cancels what is running and forgets what has arrived."""
        for future in self._running.values():
            future.cancel()
        self._running, self.groups, self._arrived = {}, {}, queue.SimpleQueue()

    @property
    def counts(self) -> tuple[int, int]:
        """How many rollouts have arrived, and how many are running."""
        done = sum(future.done() for future in self._running.values())
        return len(self.groups) + done, len(self._running) - done


def _check_episodes(episodes: Any, count: int) -> None:
    """Raises `RolloutFailed` unless there is a trajectory for each policy, with a reward that is not infinite."""
    given = list(episodes) if isinstance(episodes, Iterable) else [episodes]
    if others := [type(each).__name__ for each in given if not isinstance(each, Trajectory)]:
        raise RolloutFailed(f"the environment returned {others[0]}; return a Trajectory for each policy")
    if len(given) != count:
        raise RolloutFailed(f"the environment returned {len(given)} trajectories for {count} policies")
    for each in given:
        if math.isinf(each.reward):
            raise RolloutFailed(f"the reward of an episode is {each.reward}; return a finite number")
        for name, value in {**each.rewards, **each.metrics}.items():
            try:
                float(value)
            except (TypeError, ValueError) as error:
                raise RolloutFailed(f"{name!r} of an episode is {value!r:.80}; return a number") from error


def derive(*parts: int) -> int:
    """Returns a seed of 31 bits that depends on all parts and on their order.

    >>> derive(0, 1, 2) == derive(0, 1, 2), derive(0, 1, 2) == derive(0, 2, 1)
    (True, False)
    """
    digest = hashlib.blake2b("/".join(map(str, parts)).encode(), digest_size=8).digest()
    return int.from_bytes(digest) >> 33


class SeededPolicy:
    """A policy whose requests have seeds: of the run, the task, the sample and the number of the request.

    Args:
        policy: The policy to sample from.
        params: How tokens are chosen where a call does not say.
        parts: What the seeds derive from.
    """

    def __init__(self, policy: Policy, params: SamplingParams, *parts: int) -> None:
        self._policy = policy
        self._params = params
        self._parts = parts
        self._requests = 0

    @property
    def tokenizer(self) -> Any:
        """The tokenizer of the model."""
        return self._policy.tokenizer

    @property
    def version(self) -> int:
        """How many optimizer steps its weights have taken."""
        return self._policy.version

    async def sample(
        self, prompt: Prompt, *, num_samples: int = 1, params: SamplingParams | None = None
    ) -> list[Completion]:
        """Returns completions of a prompt; a seed among the parameters is kept."""
        params = params or self._params
        if params.seed is None:
            params = replace(params, seed=derive(*self._parts, self._requests))
        self._requests += 1
        return await self._policy.sample(prompt, num_samples=num_samples, params=params)
