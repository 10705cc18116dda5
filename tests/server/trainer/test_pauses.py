"""A job that takes long lets the jobs of other sessions run meanwhile, and nobody's results depend on it."""

from __future__ import annotations

import threading
import time
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import pytest

from tinker_lightning.errors import MemoryLimitExceeded, OperationFailed, TrainerClosed
from tinker_lightning.server.engine.causal_lm import CausalLM
from tinker_lightning.server.trainer import fair_queue
from tinker_lightning.server.trainer.jobs import Job
from tinker_lightning.server.trainer.memory import MemoryBudget
from tinker_lightning.server.trainer.scheduler import Scheduler
from tinker_lightning.types import Datum, ModelInput
from tinker_lightning.types.requests import ForwardBackwardRequest

if TYPE_CHECKING:
    from collections.abc import Generator, Iterator

    from torch import Tensor

    from tests.helpers.api import Api
    from tinker_lightning.server.trainer.memory import Pool

SOON = 30.0
MEGABYTE = 1 << 20


class Long(Job):
    """A job that pauses whenever it should, until `may_end` is set. It holds memory meanwhile."""

    def __init__(self, scheduler: Scheduler, owner: str = "long", memory: MemoryBudget | None = None) -> None:
        self.may_end = threading.Event()
        self.was_closed = False

        def run() -> Generator[None, None, str]:
            charge = None if memory is None else memory.charge("a long job", memory.work_limit * 3 // 4)
            try:
                while not self.may_end.wait(0.001):
                    self.raise_if_cancelled()
                    if scheduler.should_pause():
                        yield
                return "done"
            except GeneratorExit:
                self.was_closed = True
                raise
            finally:
                if charge is not None:
                    charge.release()

        super().__init__(f"{owner}:1", "sample", run, owner=owner, can_pause=True)


@pytest.fixture
def scheduler() -> Iterator[Scheduler]:
    scheduler = Scheduler()
    yield scheduler
    scheduler.close()


def short(name: str) -> Job:
    return Job(name, "work", lambda: name, owner=name.partition(":")[0])


def test_another_session_need_not_wait_for_the_end(scheduler: Scheduler) -> None:
    """R5.11."""
    long = Long(scheduler)
    scheduler.submit(long)
    for i in range(3):
        assert scheduler.submit(short(f"other:{i}")).future.result(SOON) == f"other:{i}"
    own = scheduler.submit(short("long:2"))  # behind it, as it was sent
    assert scheduler.submit(short("other:3")).future.result(SOON) == "other:3"
    assert not own.future.done()
    assert not long.future.done()
    long.may_end.set()
    assert [long.future.result(SOON), own.future.result(SOON)] == ["done", "long:2"]
    assert long.run_seconds > 0
    assert long.queue_seconds >= 0


def test_what_does_not_fit_next_to_a_paused_job_waits_for_it(caplog: pytest.LogCaptureFixture) -> None:
    """R5.11: it would have run if nothing were paused, so it must not fail."""
    memory = MemoryBudget(400 * MEGABYTE)
    scheduler = Scheduler(memory=memory)
    long = Long(scheduler, memory=memory)
    attempts: list[str] = []
    caplog.set_level("INFO", "tinker_lightning.server")

    def take(name: str, size: int) -> str:
        attempts.append(name)
        with memory.charge(name, size):
            return name

    try:
        scheduler.submit(long)
        large = scheduler.submit(
            Job("other:1", "work", lambda: take("large", memory.work_limit), owner="other"), "other:m", 1
        )
        after = scheduler.submit(Job("other:2", "work", lambda: take("after", 1), owner="other"), "other:m", 2)
        small = scheduler.submit(Job("third:1", "work", lambda: take("small", MEGABYTE), owner="third"))
        assert small.future.result(SOON) == "small"
        impossible = scheduler.submit(Job("third:2", "work", lambda: take("impossible", 500 * MEGABYTE), owner="third"))
        with pytest.raises(MemoryLimitExceeded, match="impossible would take"):
            impossible.future.result(SOON)  # at once, because waiting would not help
        assert not large.future.done()
        assert not after.future.done()  # not out of its turn
        assert "op=work waits until other work ends: large would take" in caplog.text
        long.may_end.set()
        assert [large.future.result(SOON), after.future.result(SOON)] == ["large", "after"]
        assert attempts.count("large") == 2
        assert attempts.count("after") == attempts.count("small") == 1
        assert memory.used("work") == 0
    finally:
        long.may_end.set()
        scheduler.close()


def test_a_request_that_the_end_of_paused_jobs_would_not_help_fails_at_once() -> None:
    """R5.11: adapters take the memory that it needs, not sampling."""
    memory = MemoryBudget(400 * MEGABYTE)
    scheduler = Scheduler(memory=memory)
    long = Long(scheduler, memory=memory)
    try:
        with memory.charge("adapters", 99 * MEGABYTE, "weights"):
            scheduler.submit(long)
            asked: list[tuple[str, int, Pool]] = [("another", 2, "weights"), ("a pass", 202, "work")]
            for name, size, pool in asked:
                run = partial(memory.charge, name, size * MEGABYTE, pool)
                job = scheduler.submit(Job(f"{name}:1", "work", run, owner=name))
                with pytest.raises(MemoryLimitExceeded, match=f"{name} would take") as caught:
                    job.future.result(SOON)
                assert caught.value.is_temporary
                assert not long.future.done()
    finally:
        long.may_end.set()
        scheduler.close()


def test_a_paused_job_can_be_cancelled(scheduler: Scheduler) -> None:
    long = Long(scheduler)
    scheduler.submit(long)
    scheduler.submit(short("other:1")).future.result(SOON)
    long.cancelled = True
    with pytest.raises(OperationFailed, match="cancelled"):
        long.future.result(SOON)


def test_closing_ends_a_paused_job_and_frees_its_memory() -> None:
    memory = MemoryBudget(400 * MEGABYTE)
    scheduler = Scheduler(memory=memory)
    long, go = Long(scheduler, memory=memory), threading.Event()
    scheduler.submit(long)
    running = threading.Event()

    def block() -> bool:
        running.set()
        return go.wait(SOON)

    blocking = scheduler.submit(Job("other:1", "work", block, owner="other"))
    assert running.wait(SOON)
    closing = threading.Thread(target=scheduler.close)
    closing.start()
    with pytest.raises(TrainerClosed, match="could finish"):
        long.future.result(SOON)
    go.set()
    closing.join(SOON)
    assert blocking.future.result(SOON) is True
    assert long.was_closed
    assert memory.used("work") == 0


def test_closing_ends_a_job_that_pauses_just_then() -> None:
    scheduler = Scheduler()
    pausing, go = threading.Event(), threading.Event()

    def run() -> Generator[None, None, None]:
        pausing.set()
        go.wait(SOON)
        yield

    job = scheduler.submit(Job("a:1", "sample", run, owner="a", can_pause=True))
    assert pausing.wait(SOON)
    closing = threading.Thread(target=scheduler.close)
    closing.start()
    while not vars(scheduler)["_closed"]:
        time.sleep(0.001)
    go.set()
    with pytest.raises(TrainerClosed):
        job.future.result(SOON)
    closing.join(SOON)
    scheduler.close()  # finds nothing left


def test_a_client_trains_while_another_one_samples(api: Api) -> None:
    """R5.10: the weights and the samples are the same as one after the other."""

    def train(model: str, while_running: str | None = None) -> dict[str, bytes]:
        for seq in (1, 3, 5):
            api.run("forward_backward", api.train(model, seq))
            if seq == 1 and while_running is not None:
                assert not api.trainer.scheduler.find(while_running).future.done()
            api.run("optim_step", api.step(model, seq + 1))
        return api.state(model)

    expected = train(api.model(seed=1))
    model, sampler = api.model(seed=1), api.sampler()
    body = {**api.sample(sampler, 0, max_tokens=400, seed=3), "num_samples": 32}
    sampling = api.submit("asample", body)
    assert train(model, sampling) == expected
    sampled = api.result(sampling)["sequences"]
    assert sampled == api.run("asample", {**body, "seq_id": 1})["sequences"]


@pytest.mark.parametrize("kind", ["forward_backward", "retained_backward"])
def test_a_client_takes_a_step_in_the_middle_of_a_long_pass_and_no_bit_changes(
    api: Api, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:  # R5.11
    monkeypatch.setattr(fair_queue, "MIN_SLICE", 0.0)
    api.trainer.retained.limit = 0  # so that the forward runs again, in calls
    lengths = range(20, 32)
    data = [Datum.from_tokens([i + 5] * length) for i, length in enumerate(lengths)]
    gradient = [Datum(ModelInput([]), {"gradient": [-1.0] * (length - 1)}) for length in lengths]
    called, go_on = threading.Event(), threading.Event()
    hidden_states = CausalLM.hidden_states

    def held(base: CausalLM, tokens_BT: Tensor) -> Tensor:
        called.set()
        assert go_on.wait(SOON)
        return hidden_states(base, tokens_BT)

    monkeypatch.setattr(CausalLM, "hidden_states", held)

    def long(model: str) -> Job:
        request = ForwardBackwardRequest(model, 1, data, "cross_entropy")
        if kind == "forward_backward":
            return api.trainer.passes.forward_backward(request)
        return api.trainer.passes.retained_backward(
            replace(request, seq_id=2, data=gradient, loss_fn_config={"forward": 1.0})
        )

    def prepared(model: str) -> str:
        api.trainer.registry.model(model).ready()[1].token_budget = 40  # so that there are many calls
        if kind == "retained_backward":
            forward = ForwardBackwardRequest(model, 1, data, "cross_entropy")
            api.trainer.passes.retained_forward(forward).future.result(SOON)
        return model

    go_on.set()
    alone, interrupted = prepared(api.model(seed=1)), prepared(api.model(seed=1))
    long(alone).future.result(SOON)
    other, undisturbed = api.model(seed=2), api.model(seed=2)
    for model in (other, undisturbed):
        api.run("forward_backward", api.train(model, 1))
    api.run("optim_step", api.step(undisturbed, 2))

    called.clear()
    go_on.clear()
    job = long(interrupted)
    assert called.wait(SOON)
    step = api.trainer.scheduler.find(api.submit("optim_step", api.step(other, 2)))
    ended: list[Job] = []
    for each in (job, step):
        each.future.add_done_callback(partial(lambda job, _: ended.append(job), each))
    time.sleep(0.05)  # the time of the long pass, which is more than that of the other session then
    go_on.set()
    job.future.result(SOON)
    assert ended == [step, job]
    assert api.state(other) == api.state(undisturbed)
    assert api.state(interrupted) == api.state(alone)
