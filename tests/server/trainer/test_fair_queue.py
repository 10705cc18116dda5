"""Sessions share a trainer's time, and a job that runs for long lets those of other sessions run meanwhile."""

from __future__ import annotations

from typing import Any

import pytest

from tinker_lightning.server.trainer.fair_queue import MIN_SLICE, FairQueue
from tinker_lightning.server.trainer.jobs import Job


class Clock:
    """A time that the test sets."""

    now = 100.0

    def __call__(self) -> float:
        self.now += 1e-9  # as between two calls of a real one
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def queue(clock: Clock) -> FairQueue:
    return FairQueue(clock)


def job(name: str, *, can_pause: bool = False) -> Job:
    """A job of the session that the first letter names."""
    return Job(name, "work", lambda: None, owner=name[0], can_pause=can_pause)


def names(queue: FairQueue, clock: Clock, seconds: float, most: int = 100) -> list[str]:
    """Runs jobs that take this long, and requeue their names in order."""
    ran: list[str] = []
    while len(ran) < most and (started := queue.start()) is not None:
        ran.append(started.request_id)
        clock.now += seconds
        queue.stop("ended")
    return ran


def slices(queue: FairQueue, clock: Clock, endless: Job, seconds: float, total: float) -> dict[str, float]:
    """Runs jobs of this length next to an endless one that pauses; requeue the time that each session got."""
    spent: dict[str, float] = {}
    end = clock.now + total
    while clock.now < end:
        started = queue.start()
        assert started is not None
        before = clock.now
        if started is endless:
            while not queue.should_pause() and clock.now < end:
                clock.now += MIN_SLICE / 4
            queue.stop("paused")
        else:
            clock.now += seconds
            queue.stop("ended")
        owner = str(started.owner)
        spent[owner] = spent.get(owner, 0.0) + clock.now - before
    return spent


def test_the_jobs_of_a_session_run_in_their_order(queue: FairQueue, clock: Clock) -> None:
    queue.add(map(job, ["a1", "a2", "a3"]))
    assert names(queue, clock, 1.0) == ["a1", "a2", "a3"]
    assert queue.start() is None


def test_a_session_with_one_job_does_not_wait_for_all_jobs_of_another(queue: FairQueue, clock: Clock) -> None:
    queue.add(job(f"a{i}") for i in range(50))
    assert names(queue, clock, 1.0, most=10) == [f"a{i}" for i in range(10)]
    queue.add([job("b0")])
    assert "b0" in names(queue, clock, 1.0, most=2)


def test_time_counts_and_not_the_number_of_jobs(queue: FairQueue, clock: Clock) -> None:
    long, short = job("a0"), [job(f"b{i}") for i in range(10)]
    queue.add([long, job("a1"), *short])
    assert queue.start() is long
    clock.now += 5.0
    queue.stop("ended")
    ran = names(queue, clock, 1.0)
    assert ran.index("a1") == 5  # after as many seconds of the other session


@pytest.mark.parametrize("seconds", [MIN_SLICE / 10, MIN_SLICE, 3.0, 20.0])
def test_a_long_job_and_the_short_ones_of_another_session_get_half_of_the_time_each(
    queue: FairQueue, clock: Clock, seconds: float
) -> None:
    endless = job("a")
    queue.add([endless])
    queue.add(job(f"b{i}") for i in range(1000))
    spent = slices(queue, clock, endless, seconds, total=10 + 20 * seconds)
    assert 0.4 < spent["a"] / sum(spent.values()) < 0.6, spent


@pytest.mark.parametrize("alone", [0.0, 1000.0])
def test_a_client_that_sends_one_job_after_the_other_neither_starves_nor_displaces_a_long_one(
    queue: FairQueue, clock: Clock, alone: float
) -> None:
    endless = job("a")
    queue.add([endless])
    assert queue.start() is endless
    clock.now += alone
    assert not queue.should_pause()  # nobody waits
    own = waited = 0.0
    for i in range(40):
        queue.add([job(f"b{i}")])
        before = clock.now
        while not queue.should_pause():
            clock.now += MIN_SLICE / 4
        waited += clock.now - before
        queue.stop("paused")
        started = queue.start()
        assert started is not None
        assert started.owner == "b"
        clock.now += 2.0
        own += 2.0
        queue.stop("ended")
        assert queue.start() is endless
        clock.now += 0.01  # what the client takes to send the next one
    assert 0.4 < waited / (waited + own) < 0.6


def test_a_blocked_job_starts_again_when_a_paused_one_has_ended(queue: FairQueue, clock: Clock) -> None:
    paused, large, small = job("a0", can_pause=True), job("b0"), job("c0")
    queue.add([paused])
    assert queue.start() is paused
    clock.now += 1.0
    queue.add([large, small, job("b1")])
    clock.now += MIN_SLICE
    assert queue.should_pause()
    queue.stop("paused")
    assert queue.start() is large
    assert queue.has_paused_jobs()
    queue.stop("blocked")
    assert queue.start() is small
    queue.stop("ended")
    assert queue.start() is paused  # the large one is still blocked, as no memory was freed
    assert not queue.has_paused_jobs()
    clock.now += 10.0
    assert not queue.should_pause()  # for a job that cannot start anyway
    queue.stop("ended")
    assert names(queue, clock, 1.0) == ["b0", "b1"]


@pytest.mark.parametrize(("first", "second"), [(10.0, 17.0), (20.0, 33.0), (5.0, 11.3)])
def test_sessions_that_sample_all_the_time_cannot_keep_another_one_blocked(
    queue: FairQueue, clock: Clock, first: float, second: float
) -> None:
    """R5.11."""
    left: dict[Job, float] = {}

    def sampling(owner: str, seconds: float) -> Job:
        started = job(f"{owner}{len(left)}", can_pause=True)
        left[started] = seconds
        return started

    lengths = {"a": first, "c": second}
    queue.add([sampling(owner, seconds) for owner, seconds in lengths.items() for _ in range(2)])
    large = job("b0")
    held: set[Job] = set()
    begun = clock.now
    added = False
    while clock.now < begun + 500.0:
        started = queue.start()
        assert started is not None
        if started is large:
            if not held:
                return
            queue.stop("blocked")
            continue
        held.add(started)
        while not queue.should_pause() and left[started] > 0:
            clock.now += MIN_SLICE / 4
            left[started] -= MIN_SLICE / 4
            if not added and clock.now > begun + 3.0:
                added = True
                queue.add([large])
        if left[started] > 0:
            queue.stop("paused")
        else:
            held.remove(started)
            queue.stop("ended")
            queue.add([sampling(str(started.owner), lengths[str(started.owner)])])
    pytest.fail("the large job never ran")


def test_sessions_of_one_job_each_do_not_displace_one_that_has_run(queue: FairQueue, clock: Clock) -> None:
    queue.add([job("a0"), job("a1"), Job("n0", "work", lambda: None, owner="new 0")])
    assert names(queue, clock, 5.0, most=1) == ["a0"]
    for i in range(1, 100):
        queue.add([Job(f"n{i}", "work", lambda: None, owner=f"new {i}")])
        if "a1" in names(queue, clock, 1.0, most=1):
            return
    pytest.fail("the second job of the first session never ran")


def test_idle_sessions_are_forgotten(queue: FairQueue, clock: Clock) -> None:
    for i in range(5000):
        queue.add([Job(f"{i}", "work", lambda: None, owner=f"session {i}")])
        names(queue, clock, 0.01)
    assert len(vars(queue)["_spent"]) < 1100


def test_clearing_requeue_all_that_wait(queue: FairQueue, clock: Clock) -> None:
    jobs: list[Any] = [job("a0"), job("a1"), job("b0")]
    queue.add(jobs)
    started = queue.start()
    queue.stop("paused")
    assert started in jobs
    assert set(queue.clear()) == set(jobs)
    assert queue.start() is None
    assert not queue.has_paused_jobs()


def test_thirty_sessions_of_one_key_take_no_more_than_the_one_of_another(clock: Clock) -> None:  # R5.18
    queue = FairQueue(clock, key_of=lambda session: "alice" if session == "a" else "bob")
    queue.add(job(f"a{i}") for i in range(100))
    queue.add(Job(f"b{i}", "work", lambda: None, owner=f"b{i % 30}") for i in range(600))
    ran = names(queue, clock, 1.0, most=120)
    assert sum(name.startswith("a") for name in ran) == 60
    sessions = [int(name[1:]) % 30 for name in ran if name.startswith("b")]
    assert {sessions.count(i) for i in range(30)} == {2}  # and they share the time of their key


def test_a_long_job_pauses_for_another_key_and_the_sessions_of_its_own_share_the_rest(clock: Clock) -> None:
    queue = FairQueue(clock, key_of=lambda session: {"a": "alice"}.get(str(session), "bob"))
    endless = job("b")
    queue.add([endless, *(job(f"c{i}") for i in range(1000)), *(job(f"a{i}") for i in range(1000))])
    spent = slices(queue, clock, endless, 1.0, total=400.0)
    assert spent == {"a": pytest.approx(200, abs=8), "b": pytest.approx(100, abs=8), "c": pytest.approx(100, abs=8)}


def test_a_key_that_was_idle_has_not_saved_up_time(clock: Clock) -> None:
    queue = FairQueue(clock, key_of=lambda session: session)
    queue.add(job(f"a{i}") for i in range(200))
    names(queue, clock, 1.0, most=100)
    queue.add(job(f"b{i}") for i in range(100))
    ran = names(queue, clock, 1.0, most=40)
    assert 18 <= sum(name.startswith("b") for name in ran) <= 22
