"""Sessions share a trainer's time, and a job that runs for long lets those of other sessions run meanwhile."""

from __future__ import annotations

from typing import Any

import pytest

from tinker_lightning.server.core.jobs import Job
from tinker_lightning.server.core.turns import MIN_SLICE, Turns


class Clock:
    """A time that passes only when told."""

    now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def turns(clock: Clock) -> Turns:
    return Turns(clock)


def job(name: str) -> Job:
    """A job of the session that the first letter names."""
    return Job(name, "work", lambda: None, owner=name[0])


def names(turns: Turns, clock: Clock, seconds: float, most: int = 100) -> list[str]:
    """Runs jobs that take this long, and returns their names in order."""
    ran: list[str] = []
    while len(ran) < most and (started := turns.start()) is not None:
        ran.append(started.request_id)
        clock.now += seconds
        turns.stop("ended")
    return ran


def slices(turns: Turns, clock: Clock, endless: Job, seconds: float, total: float) -> dict[str, float]:
    """Runs jobs of this length next to an endless one that pauses; returns the time that each session got."""
    spent: dict[str, float] = {}
    end = clock.now + total
    while clock.now < end:
        started = turns.start()
        assert started is not None
        before = clock.now
        if started is endless:
            while not turns.should_pause() and clock.now < end:
                clock.now += MIN_SLICE / 4
            turns.stop("paused")
        else:
            clock.now += seconds
            turns.stop("ended")
        owner = str(started.owner)
        spent[owner] = spent.get(owner, 0.0) + clock.now - before
    return spent


def test_the_jobs_of_a_session_run_in_their_order(turns: Turns, clock: Clock) -> None:
    turns.add(map(job, ["a1", "a2", "a3"]))
    assert names(turns, clock, 1.0) == ["a1", "a2", "a3"]
    assert turns.start() is None


def test_a_session_with_one_job_does_not_wait_for_all_jobs_of_another(turns: Turns, clock: Clock) -> None:
    turns.add(job(f"a{i}") for i in range(50))
    assert names(turns, clock, 1.0, most=10) == [f"a{i}" for i in range(10)]
    turns.add([job("b0")])
    assert "b0" in names(turns, clock, 1.0, most=2)


def test_time_counts_and_not_the_number_of_jobs(turns: Turns, clock: Clock) -> None:
    long, short = job("a0"), [job(f"b{i}") for i in range(10)]
    turns.add([long, job("a1"), *short])
    assert turns.start() is long
    clock.now += 5.0
    turns.stop("ended")
    ran = names(turns, clock, 1.0)
    assert ran.index("a1") == 5  # after as many seconds of the other session


@pytest.mark.parametrize("seconds", [MIN_SLICE / 10, MIN_SLICE, 3.0, 20.0])
def test_a_long_job_and_the_short_ones_of_another_session_get_half_of_the_time_each(
    turns: Turns, clock: Clock, seconds: float
) -> None:
    endless = job("a")
    turns.add([endless])
    turns.add(job(f"b{i}") for i in range(1000))
    spent = slices(turns, clock, endless, seconds, total=10 + 20 * seconds)
    assert 0.4 < spent["a"] / sum(spent.values()) < 0.6, spent


@pytest.mark.parametrize("alone", [0.0, 1000.0])
def test_a_client_that_sends_one_job_after_the_other_neither_starves_nor_displaces_a_long_one(
    turns: Turns, clock: Clock, alone: float
) -> None:
    endless = job("a")
    turns.add([endless])
    assert turns.start() is endless
    clock.now += alone
    assert not turns.should_pause()  # nobody waits
    own = waited = 0.0
    for i in range(40):
        turns.add([job(f"b{i}")])
        before = clock.now
        while not turns.should_pause():
            clock.now += MIN_SLICE / 4
        waited += clock.now - before
        turns.stop("paused")
        started = turns.start()
        assert started is not None
        assert started.owner == "b"
        clock.now += 2.0
        own += 2.0
        turns.stop("ended")
        assert turns.start() is endless
        clock.now += 0.01  # what the client takes to send the next one
    assert 0.4 < waited / (waited + own) < 0.6


def test_a_job_waits_for_memory_until_another_one_has_ended(turns: Turns, clock: Clock) -> None:
    paused, large, small = job("a0"), job("b0"), job("c0")
    turns.add([paused])
    assert turns.start() is paused
    clock.now += 1.0
    turns.add([large, small, job("b1")])
    assert not turns.should_pause()
    clock.now += MIN_SLICE / 2
    assert turns.should_pause()
    turns.stop("paused")
    assert turns.start() is large
    assert turns.others_hold_memory()
    turns.stop("waits for memory")
    assert turns.start() is small
    turns.stop("paused")
    assert turns.start() is small  # the large one still waits, as nothing has ended
    turns.stop("ended")
    assert turns.start() is large  # before the other one of its session
    turns.stop("waits for memory")
    assert turns.start() is paused
    assert not turns.others_hold_memory()
    clock.now += MIN_SLICE * 2
    assert not turns.should_pause()  # for a job that cannot start anyway
    turns.stop("ended")
    assert names(turns, clock, 1.0) == ["b0", "b1"]


def test_idle_sessions_are_forgotten(turns: Turns, clock: Clock) -> None:
    for i in range(5000):
        turns.add([Job(f"{i}", "work", lambda: None, owner=f"session {i}")])
        names(turns, clock, 0.01)
    assert len(vars(turns)["_spent"]) < 1100


def test_clearing_returns_all_that_wait(turns: Turns, clock: Clock) -> None:
    jobs: list[Any] = [job("a0"), job("a1"), job("b0")]
    turns.add(jobs)
    started = turns.start()
    turns.stop("paused")
    assert started in jobs
    assert set(turns.clear()) == set(jobs)
    assert turns.start() is None
    assert not turns.others_hold_memory()
