"""Rollout jobs: the rollouts of a batch of prompts, started together and arriving one by one.

`TrainingProgress` decides which jobs may start, `Sampling` plays and scores the episodes of a task, and `RolloutJob`
holds the groups of a batch until they are trained. Every request has a seed, so that a run can be repeated.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import math
import time
from collections import Counter
from collections.abc import Awaitable, Iterable
from concurrent.futures import FIRST_COMPLETED, wait
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from typing_extensions import override

from tinker_lightning.errors import (
    ClientClosed,
    RewardFailed,
    RolloutFailed,
    ServerUnreachable,
    Unauthorized,
    Unsupported,
)
from tinker_lightning.remote.calls import TokenCount
from tinker_lightning.rl.environment import SamplerPolicy
from tinker_lightning.rl.rewards import log_slow_rewards
from tinker_lightning.rl.trajectory import Group, Trajectory
from tinker_lightning.threads.background import is_cancellation, run_on_loop, seconds_blocked
from tinker_lightning.types import SamplingParams

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from concurrent.futures import Future

    from tinker_lightning.rl.environment import Prompt
    from tinker_lightning.rl.tasks import Task
    from tinker_lightning.rl.trajectory import Completion

logger = logging.getLogger("tinker_lightning.rl")

OnError: TypeAlias = Literal["raise", "skip"]

# The interval, in seconds, at which waiting calls `while_waiting`.
_CALLBACK_SECONDS = 0.5

# The time, in seconds, for which the event loop of all rollouts may be blocked beyond the timeout of an episode.
_BLOCKED_SECONDS = 30.0

# Failures of the connection, after which no other rollout would succeed either.
_FATAL = (ClientClosed, ServerUnreachable, Unauthorized, Unsupported)


@dataclass(frozen=True, slots=True)
class TrainingProgress:
    """The progress of a fit, which decides how far sampling may run ahead.

    An optimizer step trains a window of one or several jobs. With a staleness of k, jobs of the current window and of
    the next k windows may be sampled, so that at any moment at most `(k + finished steps + 1) * window` jobs have been
    started:

        k = 0    sample 0 | train 0 | sample 1 | train 1 | sample 2 | train 2
        k = 1    sample 0 | sample 1 | sample 2 | sample 3 |
                          | train 0  | train 1  | train 2  | train 3

    Args:
        job: The number of the job that is trained now or next.
        position: Its position in the epoch.
        accumulate: The number of jobs that an optimizer step trains.
        length: The number of jobs of an epoch; None if it is unknown.
        epochs: The number of epochs left, with this one; None for any number.
        steps: The number of windows left, with this one; None for any number.
    """

    job: int
    position: int = 0
    accumulate: int = 1
    length: int | None = None
    epochs: int | None = None
    steps: int | None = None

    def limit(self, staleness: int) -> int:
        """Returns the number of the first job that must not be started yet.

        >>> TrainingProgress(job=5, position=1, accumulate=4).limit(0)  # the rest of its window: 5, 6 and 7
        8
        >>> TrainingProgress(job=5, position=1, accumulate=4, length=6).limit(1)  # 8 and 9 are the short last window
        10
        """
        job, position, epochs = self.job, self.position, self.epochs
        windows = staleness + 1 if self.steps is None else min(staleness + 1, self.steps)
        for _ in range(windows):
            end = (position // self.accumulate + 1) * self.accumulate
            if self.length is not None:
                end = min(end, self.length)
            job += end - position
            position = end
            if self.length is not None and position >= self.length:
                epochs = None if epochs is None else epochs - 1
                if epochs is not None and epochs <= 0:
                    break
                position = 0
        return job


@dataclass(frozen=True)
class PolicySource:
    """The weights to sample from.

    Args:
        version: The number of optimizer steps that they have taken.
        sampler: Returns a sampling client when it is awaited; the weights may still be on their way to it.
        tokenizer: The tokenizer of the model.
    """

    version: int
    sampler: Awaitable[Any]
    tokenizer: Any


@dataclass(frozen=True)
class Sampling:
    """Plays and scores groups of episodes.

    Args:
        group_size: The number of episodes of a task.
        params: The sampling parameters.
        seed: The seed of the run.
        timeout: The time in seconds that the episodes of a task may take together; None for any.
        on_error: Whether a task that fails raises, or is skipped and counted.
        failures: The number of tasks that were skipped, by the name of their environments.
    """

    group_size: int
    params: SamplingParams
    seed: int
    timeout: float | None = None
    on_error: OnError = "raise"
    failures: Counter[str] = field(default_factory=Counter)

    async def sample_group(self, task: Task, source: PolicySource) -> Group:
        """Returns the scored episodes of a task; a group without episodes if it failed and is skipped."""
        sampler = await source.sampler
        policies = [
            SeededPolicy(
                sampler, source.tokenizer, self.seed, task.number, i, version=source.version, params=self.params
            )
            for i in range(self.group_size)
        ]
        began = time.monotonic()
        try:
            async with asyncio.timeout(self.timeout) as limit:
                trajectories = await task.environment.group(policies)
                _check_episodes(trajectories, self.group_size)
        except _FATAL:
            raise
        except BaseException as error:
            if is_cancellation(error):
                raise
            took_too_long = isinstance(error, TimeoutError) and limit.expired()
            reason = f"did not end within {self.timeout} s" if took_too_long else str(error)
            if not (took_too_long or isinstance(error, RolloutFailed)):
                reason = f"{type(error).__name__}: {error}".removesuffix(": ")
            if self.on_error == "skip":
                self._report(task, reason)
                seconds = time.monotonic() - began
                return Group(task, [], source.version, seconds, failed=reason, tokens=_count_tokens(policies))
            if isinstance(error, RewardFailed):
                raise
            name = type(task.environment).__name__
            raise RolloutFailed(
                f"prompt {task.index} ({name}): {reason.rstrip('.')}. Pass on_error='skip' to RolloutLoader to leave "
                "out and count such prompts."
            ) from error
        return Group(task, trajectories, source.version, time.monotonic() - began, tokens=_count_tokens(policies))

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


class RolloutJob:
    """The tasks of one batch, and the groups that have arrived.

    Args:
        tasks: The tasks, by slot. More are added where dropped groups are replaced.
        planned: The number of groups that it trains.
    """

    def __init__(self, tasks: list[Task], planned: int) -> None:
        self.tasks = tasks
        self.planned = planned
        self.groups: dict[int, Group] = {}
        self._running: dict[int, Future[Group]] = {}
        self._timeout: float | None = None

    @property
    def is_started(self) -> bool:
        """Whether all planned tasks are running or done."""
        return all(slot in self._running or slot in self.groups for slot in range(self.planned))

    def start(self, slots: Iterable[int], sampling: Sampling, source: PolicySource) -> None:
        """Starts the rollouts of the tasks in some slots."""
        self._timeout = sampling.timeout
        for slot in slots:
            if slot not in self._running and slot not in self.groups:
                task = self.tasks[slot]
                name = f"rollout of prompt {task.index}"
                self._running[slot] = run_on_loop(sampling.sample_group(task, source), name)

    def receive(self, slots: Iterable[int], while_waiting: Callable[[], None] | None) -> Iterator[tuple[int, Group]]:
        """Yields groups with their slots as they arrive; raises the failure of a rollout."""
        missing = list(slots)
        while True:
            for slot in [slot for slot in missing if slot in self._running and self._running[slot].done()]:
                self.groups[slot] = self._running[slot].result()  # a failure stays, to be raised again
                del self._running[slot]
            for slot in [slot for slot in missing if slot in self.groups]:
                missing.remove(slot)
                yield slot, self.groups[slot]
            if not missing:
                return
            if while_waiting is not None:
                while_waiting()
            if not wait([self._running[slot] for slot in missing], _CALLBACK_SECONDS, FIRST_COMPLETED).done:
                log_slow_rewards()
                self._check_loop()

    def _check_loop(self) -> None:
        """Raises `RolloutFailed` if an environment keeps the event loop, so that not even its timeout can end it."""
        if self._timeout is not None and (seconds := seconds_blocked()) > self._timeout + _BLOCKED_SECONDS:
            names = sorted({type(self.tasks[slot].environment).__name__ for slot in self._running})
            raise RolloutFailed(
                f"a rollout of {' or '.join(names)} has blocked the event loop, which all rollouts share, for "
                f"{seconds:.0f} s. Await what takes time: asyncio.sleep in place of time.sleep, and await "
                "asyncio.to_thread(function) for a function that blocks."
            )

    def stop(self) -> TokenCount:
        """Cancels running rollouts and drops the groups that have arrived; returns the tokens that nobody has received.

        The tokens of a rollout that is cancelled are not known.
        """
        running = [future for future in self._running.values() if not future.cancel()]
        dropped = [future.result().tokens for future in running if future.exception() is None]
        self._running, self.groups = {}, {}
        return sum(dropped, start=TokenCount())

    @property
    def counts(self) -> tuple[int, int]:
        """The number of rollouts that have arrived, and the number that are running."""
        done = sum(future.done() for future in self._running.values())
        return len(self.groups) + done, len(self._running) - done


class SeededPolicy(SamplerPolicy):
    """A policy whose requests have seeds, derived from the run, the task, the sample and the number of the request.

    Args:
        sampler: A sampling client.
        tokenizer: The tokenizer of the model.
        *parts: The numbers that the seeds derive from.
        version: The number of optimizer steps that its weights have taken.
        params: The sampling parameters of calls that pass none.
    """

    def __init__(self, sampler: Any, tokenizer: Any, *parts: int, version: int, params: SamplingParams) -> None:
        super().__init__(sampler, tokenizer, version=version, params=params)
        self._parts = parts
        self._requests = 0

    @override
    async def sample(
        self, prompt: Prompt, *, num_samples: int = 1, params: SamplingParams | None = None
    ) -> list[Completion]:
        """Returns completions of a prompt; a seed among the parameters is kept."""
        params = params or self.params
        if params.seed is None:
            params = replace(params, seed=derive_seed(*self._parts, self._requests))
        self._requests += 1
        return await super().sample(prompt, num_samples=num_samples, params=params)


def derive_seed(*parts: int) -> int:
    """Returns a seed of 31 bits that depends on all parts and on their order.

    >>> derive_seed(0, 1, 2) == derive_seed(0, 1, 2), derive_seed(0, 1, 2) == derive_seed(0, 2, 1)
    (True, False)
    """
    digest = hashlib.blake2b("/".join(map(str, parts)).encode(), digest_size=8).digest()
    return int.from_bytes(digest) >> 33


def _count_tokens(policies: Iterable[SamplerPolicy]) -> TokenCount:
    return sum((policy.tokens for policy in policies), start=TokenCount())


def _check_episodes(episodes: Any, count: int) -> None:
    """Raises `RolloutFailed` unless there is a trajectory for each policy, with a reward that is not infinite."""
    trajectories = list(episodes) if isinstance(episodes, Iterable) else [episodes]
    if others := [type(each).__name__ for each in trajectories if not isinstance(each, Trajectory)]:
        raise RolloutFailed(f"the environment returned {others[0]}; return a Trajectory for each policy")
    if len(trajectories) != count:
        raise RolloutFailed(f"the environment returned {len(trajectories)} trajectories for {count} policies")
    for each in trajectories:
        if math.isinf(each.reward):
            raise RolloutFailed(f"the reward of an episode is {each.reward}; return a finite number")
        for name, value in {**each.rewards, **each.metrics}.items():
            try:
                float(value)
            except (TypeError, ValueError) as error:
                raise RolloutFailed(f"{name!r} of an episode is {value!r:.80}; return a number") from error
