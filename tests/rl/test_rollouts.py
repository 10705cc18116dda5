"""The loader of rollouts: order, seeds, admission, state, and the errors that it raises."""  # R5.9

from __future__ import annotations

import asyncio
import re
import time
from typing import TYPE_CHECKING, Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.helpers.fuzzing import examples
from tests.helpers.rollouts import PROMPTS, Stream, lower, rollouts
from tests.helpers.soaking import first_only
from tinker_lightning import SamplingParams
from tinker_lightning.errors import InvalidInput, RolloutFailed
from tinker_lightning.rl import Completion, Environment, RolloutLoader, Trajectory, Turn
from tinker_lightning.rl.rollout_jobs import PolicySource, TrainingProgress
from tinker_lightning.threads.background import run_on_loop

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from tinker_lightning.client import ServiceClient
    from tinker_lightning.rl import Group, Policy


def source_of(service: ServiceClient, version: int = 0) -> PolicySource:
    """The base model as a policy."""
    sampler = service.create_sampling_client(base_model="tiny")

    async def ready() -> Any:
        return sampler

    class Ready:
        def __await__(self) -> Any:
            return ready().__await__()

    return PolicySource(version, Ready(), sampler.get_tokenizer())


def arrived(loader: RolloutLoader, job: int) -> list[Group]:
    """The groups of a job, in order."""
    rollouts = loader.job(job)
    return [group for _, group in sorted(rollouts.receive(range(rollouts.planned), None))]


def tokens_of(groups: Sequence[Group]) -> list[list[int]]:
    return [each.turns[0].completion.tokens for group in groups for each in group.trajectories]


def test_samples_depend_on_seed_prompt_and_number_only(service: ServiceClient) -> None:
    source = source_of(service)
    alone, crowded, other = rollouts(), rollouts(), rollouts(seed=1)
    for loader, jobs in ((alone, 1), (crowded, 4), (other, 1)):
        loader.admit(jobs, lambda: source)
    first = tokens_of(arrived(alone, 0))
    assert tokens_of(arrived(crowded, 0)) == first
    assert tokens_of(arrived(other, 0)) != first
    assert len({tuple(each) for each in first}) == len(first)  # samples of a group differ


def test_each_pass_has_a_new_order_and_new_seeds(service: ServiceClient) -> None:
    loader = rollouts(PROMPTS[:4], batch_size=3)
    loader.admit(4, lambda: source_of(service))
    tasks = [task for job in range(4) for task in loader.job(job).tasks]
    assert [task.number for task in tasks] == list(range(12))
    laps = [[task.index for task in tasks[i : i + 4]] for i in (0, 4, 8)]
    assert all(sorted(lap) == [0, 1, 2, 3] for lap in laps)
    assert len({tuple(lap) for lap in laps}) > 1
    loader.stop()


def test_an_epoch_with_a_limit_is_one_pass(service: ServiceClient) -> None:
    loader = rollouts(PROMPTS[:5], num_epochs=2, batch_size=3)
    assert len(loader) == 2
    loader.admit(4, lambda: source_of(service))
    jobs = [[(task.lap, task.index) for task in loader.job(job).tasks] for job in range(4)]
    assert [len(job) for job in jobs] == [3, 2, 3, 2]
    first, second = [*jobs[0], *jobs[1]], [*jobs[2], *jobs[3]]
    assert (sorted(first), sorted(second)) == ([(0, i) for i in range(5)], [(1, i) for i in range(5)])
    assert [index for _, index in first] != [index for _, index in second]  # shuffled again
    loader.stop()
    with pytest.raises(InvalidInput, match="num_epochs must be at least 1, or None, got 0"):
        rollouts(num_epochs=0)
    with pytest.raises(InvalidInput, match="Leave one of them out"):
        rollouts(num_epochs=1, refill=1)


def test_lengths() -> None:
    assert len(rollouts(PROMPTS[:5])) == 3
    assert len(rollouts(PROMPTS[:5], epochs=2)) == 6
    assert [batch.id for batch in rollouts(PROMPTS[:5])] == [0, 1, 2]
    with pytest.raises(TypeError):
        len(rollouts(Stream(PROMPTS)))
    assert [batch.id for batch in rollouts(Stream(PROMPTS[:5]))] == [0, 1, 2]


@examples(20, 500)
@given(
    job=st.integers(0, 30),
    accumulate=st.integers(1, 5),
    length=st.none() | st.integers(1, 12),
    staleness=st.integers(0, 4),
    epochs=st.none() | st.integers(1, 3),
    steps=st.none() | st.integers(1, 6),
    data=st.data(),
)
def test_the_limit_is_the_end_of_a_window(
    job: int, accumulate: int, length: int | None, staleness: int, epochs: int | None, steps: int | None, data: Any
) -> None:
    """Against a simulation of Lightning's loops, job by job."""
    position = data.draw(st.integers(0, (length or 20) - 1))
    limit = TrainingProgress(job, position, accumulate, length, epochs, steps).limit(staleness)
    number, place, left, windows = job, position, epochs, 0
    allowed = staleness + 1 if steps is None else min(staleness + 1, steps)
    while windows < allowed and left != 0:
        number, place = number + 1, place + 1
        if place % accumulate == 0 or place == length:
            windows += 1
        if place == length:
            place, left = 0, None if left is None else left - 1
    assert limit == number


class Slow(Environment):
    """Takes a given time, without a model; calls a function when it starts."""

    def __init__(self, seconds: float, started: Callable[[], None] = lambda: None) -> None:
        self.seconds = seconds
        self.started = started

    async def rollout(self, policy: Policy) -> Trajectory:
        self.started()
        await asyncio.sleep(self.seconds)
        completion = Completion([5], [-1.0], "stop", "a", policy.version)  # type: ignore[arg-type]
        return Trajectory([Turn([1], completion)], self.seconds)


@examples(10, 1000)
@given(
    durations=st.lists(st.sampled_from([0.0, 0.0, 0.0005, 0.003]), min_size=4, max_size=12),
    staleness=st.integers(0, 3),
    batch_size=st.integers(1, 3),
    steps=st.integers(1, 6),
)
def test_admission_is_bounded_and_nothing_is_lost(
    durations: list[float], staleness: int, batch_size: int, steps: int
) -> None:
    """Accepted and running groups never exceed (k + finished steps + 1) batches, and all are trained in order."""

    class Sampler:
        def __await__(self) -> Any:
            return asyncio.sleep(0, self).__await__()

    starts: list[int] = []  # the finished steps when each group was started
    step = 0
    environments = [Slow(each, lambda: starts.append(step)) for each in durations]
    loader = RolloutLoader(environments, group_size=1, batch_size=batch_size, staleness=staleness, shuffle=False)
    trained, started = [], 0
    for step in range(steps):
        limit = TrainingProgress(step, steps=steps - step).limit(staleness)
        source = PolicySource(step, Sampler(), tokenizer=object())
        loader.follow(step, lambda step=step: step)  # type: ignore[misc]
        loader.admit(limit, lambda source=source: source)  # type: ignore[misc]
        job = loader.job(step)
        for _, group in job.receive(range(job.planned), None):
            done, running = loader.counts
            assert step * batch_size + done + running <= (staleness + step + 1) * batch_size
            assert step - staleness <= group.version <= step
        trained += [task.number for task in job.tasks]
        started = max(started, limit)
    assert trained == list(range(steps * batch_size))
    assert started == steps  # nothing was sampled that is not trained
    assert len(starts) == steps * batch_size
    assert all(count < (staleness + finished + 1) * batch_size for count, finished in enumerate(starts))
    assert loader.counts == (batch_size, 0)


def test_an_environment_that_never_ends(caplog: pytest.LogCaptureFixture) -> None:
    loader = RolloutLoader([Slow(60.0)], group_size=1, batch_size=1, timeout=0.05)
    loader.admit(1, lambda: PolicySource(0, _nothing(), object()))
    with pytest.raises(RolloutFailed, match=r"prompt 0 \(Slow\): did not end within 0.05 s. Pass on_error='skip'"):
        arrived(loader, 0)
    skipping = RolloutLoader([Slow(60.0), Slow(0.0)], group_size=1, batch_size=2, timeout=0.05, on_error="skip")
    skipping.admit(1, lambda: PolicySource(0, _nothing(), object()))
    failed = [group.failed for group in sorted(arrived(skipping, 0), key=lambda group: group.task.index)]
    assert failed == ["did not end within 0.05 s", ""]
    assert skipping.sampling.failures == {"Slow": 1}
    assert "prompt 0 (Slow): did not end within 0.05 s; this prompt and others that fail are left out" in caplog.text


class Blocking(Environment):
    """Keeps the event loop that all rollouts share."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    async def rollout(self, policy: Policy) -> Trajectory:
        del policy
        time.sleep(self.seconds)  # the mistake
        return Trajectory([], 0.0)


def test_an_environment_that_blocks_all_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tinker_lightning.rl.rollout_jobs._BLOCKED_SECONDS", 0.1)
    monkeypatch.setattr("tinker_lightning.rl.rollout_jobs._CALLBACK_SECONDS", 0.05)
    loader = RolloutLoader([Blocking(1.5)], group_size=1, batch_size=1, timeout=0.1)
    loader.admit(1, lambda: PolicySource(0, _nothing(), object()))
    with pytest.raises(RolloutFailed, match="a rollout of Blocking has blocked the event loop"):
        arrived(loader, 0)


class _nothing:  # noqa: N801  # stands for a function
    def __await__(self) -> Any:
        return asyncio.sleep(0).__await__()


class Returning(Environment):
    """Returns what it is given, or what a function of the policies returns."""

    def __init__(self, result: Any) -> None:
        self.result = result

    async def rollout(self, policy: Policy) -> Trajectory:
        raise NotImplementedError

    async def group(self, policies: Sequence[Policy]) -> list[Trajectory]:
        return self.result(policies) if callable(self.result) else self.result  # type: ignore[no-any-return]


class Exiting(Environment):
    """Raises in a task of its own, as a tool that is called might."""

    def __init__(self, error: type[BaseException] | None) -> None:
        self.error = error

    async def rollout(self, policy: Policy) -> Trajectory:
        del policy

        async def tool() -> float:
            if self.error is not None:
                raise self.error("enough")
            return 1.0

        (reward,) = await asyncio.gather(tool())
        return Trajectory([], reward)


@pytest.mark.parametrize("error", [SystemExit, KeyboardInterrupt, GeneratorExit, asyncio.CancelledError])
def test_no_exception_ends_the_loop_of_all_rollouts(
    error: type[BaseException], caplog: pytest.LogCaptureFixture
) -> None:
    environments = [Exiting(error), Exiting(None)]
    options: dict[str, Any] = {"group_size": 2, "batch_size": 2, "shuffle": False}
    loader = RolloutLoader(environments, **options)
    loader.admit(1, lambda: PolicySource(0, _nothing(), object()))
    with pytest.raises(RuntimeError, match=rf"prompt 0.*{error.__name__}"):
        arrived(loader, 0)
    if error is not GeneratorExit:  # which also ends a coroutine that is no longer needed
        skipping = RolloutLoader(environments, on_error="skip", **options)
        skipping.admit(1, lambda: PolicySource(0, _nothing(), object()))
        assert [group.failed for group in arrived(skipping, 0)] == [f"{error.__name__}: enough", ""]
        assert f"prompt 0 (Exiting): {error.__name__}: enough; this prompt" in caplog.text


@pytest.mark.parametrize("blocks_the_loop", [False, True])
def test_a_reward_that_hangs_is_named(
    blocks_the_loop: bool, service: ServiceClient, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for name, seconds in (("rewards._SLOW_SECONDS", 0.3), ("rollout_jobs._CALLBACK_SECONDS", 0.05)):
        monkeypatch.setattr(f"tinker_lightning.rl.{name}", seconds)
    deadline = time.monotonic() + 30

    def judge(prompt: str, completion: str) -> float:
        while len(caplog.records) < 2 and time.monotonic() < deadline:
            time.sleep(0.01)
        return 1.0

    async def blocking(prompt: str, completion: str) -> float:
        return judge(prompt, completion)

    loader = rollouts(rewards={"judge": blocking if blocks_the_loop else judge}, batch_size=1)
    loader.admit(1, lambda: source_of(service))
    arrived(loader, 0)
    first, second = (record.getMessage() for record in caplog.records[:2])
    count = "1" if blocks_the_loop else "[1-4]"  # threads may start late
    assert re.match(rf"reward 'judge' has been running for \d+ s; unfinished calls: {count}\. .*timeout=", first)
    assert "Prompt: 'prompt " in first
    assert second.startswith("reward 'judge' has been running")
    assert caplog.records[1].created - caplog.records[0].created >= 0.3


WORDS: Any = {"turns": "two"}


@pytest.mark.parametrize(
    ("result", "message"),
    [
        ([], "returned 0 trajectories for 2 policies"),
        ([1, 2], "returned int; return a Trajectory for each policy"),
        (None, "returned NoneType; return a Trajectory"),
        ([Trajectory([], 0.0), Trajectory([], float("inf"))], "the reward of an episode is inf"),
        ([Trajectory([], 0.0), Trajectory([], 0.0, metrics=WORDS)], "'turns' of an episode is 'two'"),
        (lambda policies: policies[7], "IndexError"),
    ],
)
def test_what_an_environment_must_return(result: Any, message: str) -> None:
    loader = RolloutLoader([Returning(result)], group_size=2, batch_size=1)
    loader.admit(1, lambda: PolicySource(0, _nothing(), object()))
    for _ in range(2):  # also for a checkpoint that is saved after the failure
        with pytest.raises(RolloutFailed, match=rf"prompt 0 \(Returning\): .*{message}"):
            arrived(loader, 0)


class NotAsync(Environment):
    def rollout(self, policy: Policy) -> Trajectory:  # type: ignore[override]
        return Trajectory([], float(policy.version))


def test_a_rollout_that_is_no_coroutine() -> None:
    loader = RolloutLoader([NotAsync()], group_size=2, batch_size=1)
    loader.admit(1, lambda: PolicySource(0, _nothing(), object()))
    with pytest.raises(RolloutFailed, match=r"write `async def rollout\(self, policy\)` in NotAsync"):
        arrived(loader, 0)


def test_an_episode_that_fails_ends_the_others_of_its_group() -> None:
    ended: list[str] = []

    class OneFails(Environment):
        def __init__(self) -> None:
            self.episodes = 0

        async def rollout(self, policy: Policy) -> Trajectory:
            del policy
            self.episodes += 1
            if self.episodes == 3:
                raise ValueError("no dice")
            try:
                return await asyncio.get_running_loop().create_future()  # type: ignore[no-any-return]
            finally:
                ended.append("ended")

    loader = RolloutLoader([OneFails()], group_size=3, batch_size=1)
    loader.admit(1, lambda: PolicySource(0, _nothing(), object()))
    with pytest.raises(RolloutFailed, match="ValueError: no dice"):
        arrived(loader, 0)
    run_on_loop(asyncio.sleep(0)).result()  # behind the cancellations
    assert ended == ["ended"] * 2


def test_prompts_that_end() -> None:
    """Lightning would start one empty epoch after the other."""
    once = rollouts(iter(PROMPTS[:2]))
    assert [batch.id for batch in once] == [0]
    for ended in (rollouts(Stream([])), rollouts(iter(()))):
        with pytest.raises(InvalidInput, match="there are no more prompts; a generator can be read only once"):
            next(iter(ended))


def test_datasets_that_are_read_by_index() -> None:
    class Indexed(torch.utils.data.Dataset[str]):
        def __len__(self) -> int:
            return 5

        def __getitem__(self, index: int) -> str:
            return PROMPTS[index]

    assert len(rollouts(Indexed())) == 3


def test_a_prompt_that_leaves_no_room(service: ServiceClient) -> None:
    loader = rollouts(["x" * 5000], batch_size=1)
    loader.admit(1, lambda: source_of(service))
    with pytest.raises(RolloutFailed, match=r"prompt 0 .*tokens"):
        arrived(loader, 0)


@pytest.mark.parametrize("stream", first_only([False, True]))
def test_a_state_neither_repeats_nor_skips(stream: bool, service: ServiceClient) -> None:
    source = source_of(service)
    loader = rollouts(Stream(PROMPTS) if stream else PROMPTS, staleness=1)
    loader.admit(2, lambda: source)
    loader.follow(0, lambda: 0)
    assert loader.state_dict()["rollout_id"] == 0
    done = [0]
    loader.follow(0, lambda: done[0])
    done[0] = 1  # the first batch was trained
    state = loader.state_dict()
    resumed = rollouts(Stream(PROMPTS) if stream else PROMPTS, staleness=1)
    resumed.load_state_dict(state)
    assert next(batch.id for batch in resumed) == 1
    resumed.admit(4, lambda: source)
    loader.admit(4, lambda: source)
    for job in (1, 2, 3):
        assert [task.position for task in resumed.job(job).tasks] == [task.position for task in loader.job(job).tasks]
        assert tokens_of(arrived(resumed, job)) == tokens_of(arrived(loader, job))


def test_a_state_of_other_prompts_or_settings_raises() -> None:
    state = rollouts().state_dict()
    with pytest.raises(InvalidInput, match="saved with 8 prompts, but the loader has 5"):
        rollouts(PROMPTS[:5]).load_state_dict(state)
    with pytest.raises(InvalidInput, match="saved with group_size=4, but this RolloutLoader has group_size=2"):
        rollouts(group_size=2).load_state_dict(state)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"group_size": 0}, "group_size must be at least 1"),
        ({"staleness": -1}, "staleness must be at least 0"),
        ({"minibatches": 3}, "cannot be split into 3 equal minibatches"),
        ({"refill": 1, "epochs": 2}, "refill is for batches that are trained once"),
        ({"sampling_params": SamplingParams(seed=1)}, "leave the seed out"),
        ({"timeout": 0}, "timeout must be a positive"),
        ({"on_error": "ignore"}, "on_error must be"),
        ({"rewards": None}, "a prompt needs a reward"),
        ({"prompts": [Slow(0.0)]}, "rewards are for prompts; an environment such as Slow gives"),
        ({"prompts": ["Say no", 5]}, "needs prompts, or instances of subclasses of Environment, got int"),
        ({"prompts": []}, "there are no prompts"),
        ({"prompts": "a prompt"}, "needs a list of prompts"),
        ({"prompts": {"prompt": PROMPTS}}, "needs a list of prompts .*, got dict"),
    ],
)
def test_bad_settings(options: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidInput, match=message):
        rollouts(**options)
    assert lower("", "ab") == 0.5
