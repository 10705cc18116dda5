"""Each model's operations run in the order of their numbers, each number once, whatever arrives when."""

from __future__ import annotations

import gc
import random
import threading
import time
import weakref
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, nullcontext, suppress
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.helpers.fuzzing import examples
from tinker_lightning.errors import InvalidInput, MemoryLimitExceeded, NotFound, OperationFailed, TrainerClosed
from tinker_lightning.server import EmbeddedTrainer
from tinker_lightning.server.trainer.jobs import JOB_BYTES, Job
from tinker_lightning.server.trainer.memory import MemoryBudget
from tinker_lightning.server.trainer.scheduler import Scheduler

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

SOON = 10.0


@pytest.fixture
def scheduler() -> Iterator[Scheduler]:
    scheduler = Scheduler(gap_timeout=SOON * 10)
    yield scheduler
    scheduler.close()


class Log:
    """Operations that write down when they ran."""

    def __init__(self) -> None:
        self.ran: list[tuple[str, int]] = []

    def operation(self, line: str, number: int, kind: str = "work") -> Job:
        def run() -> tuple[str, int]:
            self.ran.append((line, number))
            return line, number

        return Job(f"{line}:{number}", kind, run, model=line, seq=number)


def submit(scheduler: Scheduler, log: Log, number: int, line: str = "m", kind: str = "work") -> Job:
    return scheduler.submit(log.operation(line, number, kind), line, number)


def block(scheduler: Scheduler) -> Callable[[], None]:
    """Keeps the scheduler busy until the returned function is called."""
    started, go = threading.Event(), threading.Event()

    def run() -> None:
        started.set()
        assert go.wait(SOON)

    scheduler.submit(Job(f"block:{id(go)}", "block", run))
    assert started.wait(SOON)
    return go.set


@examples(50, 1000)
@given(
    st.integers(1, 12).flatmap(
        lambda n: st.tuples(
            st.permutations(range(1, n + 1)),
            st.lists(st.integers(1, n), max_size=n),  # sent again, at the end
            st.sets(st.integers(1, n), max_size=n),  # refused at their first arrival
        )
    )
)
def test_any_arrival_order_with_repeats_and_refusals_runs_each_accepted_number_once_in_order(
    arrivals: tuple[list[int], list[int], set[int]],
) -> None:
    order, repeats, refused = arrivals
    scheduler, log = Scheduler(gap_timeout=SOON * 10), Log()
    try:
        operations: dict[int, Job] = {}
        for number in order:
            if number in refused:
                scheduler.skip("m", number)
            else:
                operations[number] = submit(scheduler, log, number)
        for number in repeats:
            if number not in refused:
                assert submit(scheduler, log, number) is operations[number]
        accepted = sorted(set(order) - refused)
        assert [operations[n].future.result(SOON) for n in accepted] == [("m", n) for n in accepted]
        assert log.ran == [("m", n) for n in accepted]
    finally:
        scheduler.close()


@examples(15, 400)
@given(st.data())
def test_several_models_interleave_without_touching_each_others_order(data: st.DataObject) -> None:
    arrivals = data.draw(st.permutations([(line, n) for line in "abc" for n in range(1, 5)]))
    scheduler, log = Scheduler(gap_timeout=SOON * 10), Log()
    try:
        operations = [submit(scheduler, log, number, line) for line, number in arrivals]
        for operation in operations:
            operation.future.result(SOON)
        for line in "abc":
            assert [n for name, n in log.ran if name == line] == [1, 2, 3, 4]
    finally:
        scheduler.close()


def test_an_early_arrival_waits_for_the_numbers_before_it(scheduler: Scheduler) -> None:
    log = Log()
    third = submit(scheduler, log, 3)
    submit(scheduler, log, 2)
    submit(scheduler, log, 1, line="other").future.result(SOON)
    assert not third.future.done()
    submit(scheduler, log, 1)
    assert third.future.result(SOON) == ("m", 3)


def test_a_repeat_gets_the_same_operation_before_during_and_after_its_run(scheduler: Scheduler) -> None:
    log = Log()
    go_on = block(scheduler)
    first = submit(scheduler, log, 1)
    assert submit(scheduler, log, 1) is first
    go_on()
    assert first.future.result(SOON) == ("m", 1)
    assert submit(scheduler, log, 1) is first
    assert log.ran == [("m", 1)]


def test_a_failed_operation_is_not_run_again_by_a_repeat_and_the_next_number_runs(scheduler: Scheduler) -> None:
    log, runs = Log(), []

    def fail() -> None:
        runs.append(1)
        raise InvalidInput("no")

    first = scheduler.submit(Job("m:1", "work", fail), "m", 1)
    assert isinstance(first.future.exception(SOON), InvalidInput)
    assert scheduler.submit(Job("m:1", "work", fail), "m", 1) is first
    assert submit(scheduler, log, 2).future.result(SOON) == ("m", 2)
    assert runs == [1]


def test_a_missing_number_holds_up_the_rest_for_the_gap_timeout_only_and_is_rejected_when_late() -> None:
    scheduler, log = Scheduler(gap_timeout=0.05), Log()
    try:
        started = time.monotonic()
        submit(scheduler, log, 1)
        later = [submit(scheduler, log, n) for n in (3, 6)]
        assert later[1].future.result(SOON) == ("m", 6)
        assert time.monotonic() - started >= 0.1  # two gaps, each waited for
        assert log.ran == [("m", 1), ("m", 3), ("m", 6)]
        for number in (2, 4, 5):
            with pytest.raises(InvalidInput, match=rf"number {number} of m arrived too late: 6 has already run"):
                submit(scheduler, log, number)
    finally:
        scheduler.close()


def test_a_missing_number_does_not_wait_for_a_busy_neighbour_to_pause() -> None:
    scheduler, log = Scheduler(gap_timeout=0.05), Log()
    stop = threading.Event()
    count = iter(range(1, 10**9))

    def keep_busy() -> None:
        time.sleep(0.001)
        if not stop.is_set():
            scheduler.submit(Job(f"busy:{next(count)}", "busy", keep_busy))

    try:
        for _ in range(3):
            scheduler.submit(Job(f"busy:{next(count)}", "busy", keep_busy))
        assert submit(scheduler, log, 2).future.result(SOON) == ("m", 2)
    finally:
        stop.set()
        scheduler.close()


@pytest.mark.parametrize("refused", [1, 2])
def test_a_rejected_submission_frees_its_number_at_once(scheduler: Scheduler, refused: int) -> None:
    log = Log()
    for number in range(1, refused):
        submit(scheduler, log, number)
    scheduler.skip("m", refused)
    assert submit(scheduler, log, refused + 1).future.result(SOON) == ("m", refused + 1)


def test_a_freed_number_may_still_be_used_if_nothing_later_ran(scheduler: Scheduler) -> None:
    log = Log()
    scheduler.skip("m", 1)
    assert submit(scheduler, log, 1).future.result(SOON) == ("m", 1)
    scheduler.skip("m", 2)
    submit(scheduler, log, 3).future.result(SOON)
    with pytest.raises(InvalidInput, match="arrived too late"):
        submit(scheduler, log, 2)


def test_freeing_a_number_that_waits_or_ran_changes_nothing(scheduler: Scheduler) -> None:
    log = Log()
    second = submit(scheduler, log, 2)
    scheduler.skip("m", 2)  # a repeat of it was damaged on its way
    submit(scheduler, log, 1)
    assert second.future.result(SOON) == ("m", 2)
    scheduler.skip("m", 1)
    assert submit(scheduler, log, 3).future.result(SOON) == ("m", 3)


def test_results_can_be_found_any_number_of_times(scheduler: Scheduler) -> None:
    operation = submit(scheduler, Log(), 1)
    operation.future.result(SOON)
    for _ in range(3):
        assert scheduler.find("m:1") is operation
        operation.mark_fetched()


def test_an_unknown_result_is_not_found(scheduler: Scheduler) -> None:
    with pytest.raises(NotFound, match="'m:7' is unknown, or its result has expired"):
        scheduler.find("m:7")


@pytest.mark.parametrize("fetched", [True, False])
def test_old_results_are_dropped_and_the_errors_say_so(fetched: bool) -> None:
    scheduler = Scheduler(retention=SOON, fetched_retention=0.0) if fetched else Scheduler(retention=0.0)
    log = Log()
    try:
        old = submit(scheduler, log, 1)
        old.future.result(SOON)
        if fetched:
            submit(scheduler, log, 2).future.result(SOON)
            assert scheduler.find("m:1") is old  # nobody has fetched it yet
            old.mark_fetched()
        while time.monotonic() == old.kept_since:
            pass
        submit(scheduler, log, 3)
        with pytest.raises(NotFound, match="its result has expired"):
            scheduler.find("m:1")
        with pytest.raises(InvalidInput, match="Either its result has expired"):
            submit(scheduler, log, 1)
        assert log.ran.count(("m", 1)) == 1
    finally:
        scheduler.close()


def test_an_operation_that_ran_is_not_run_again_though_its_result_was_dropped() -> None:
    scheduler, log = Scheduler(retention=0.0), Log()
    try:
        creation = scheduler.submit(log.operation("m", 0))
        creation.future.result(SOON)
        while time.monotonic() == creation.kept_since:
            pass
        submit(scheduler, log, 1).future.result(SOON)
        with pytest.raises(NotFound):
            scheduler.find(creation.request_id)
        assert scheduler.submit(creation) is creation
        assert scheduler.find(creation.request_id) is creation
        assert submit(scheduler, log, 2).future.result(SOON) == ("m", 2)  # the thread lives
        assert log.ran == [("m", 0), ("m", 1), ("m", 2)]
    finally:
        scheduler.close()


def test_closing_finishes_what_runs_fails_what_waits_and_refuses_what_comes() -> None:
    scheduler, log = Scheduler(gap_timeout=SOON * 10), Log()
    running, go = threading.Event(), threading.Event()

    def run() -> str:
        running.set()
        assert go.wait(SOON)
        return "done"

    current = scheduler.submit(Job("m:1", "work", run), "m", 1)
    assert running.wait(SOON)
    queued, early = submit(scheduler, log, 2), submit(scheduler, log, 4)
    closer = threading.Thread(target=scheduler.close)
    closer.start()
    for operation in (queued, early):
        error = operation.future.exception(SOON)
        assert isinstance(error, TrainerClosed)
        assert "closed before this job could finish" in str(error)
    assert not current.future.done()
    go.set()
    closer.join(SOON)
    assert not closer.is_alive()
    assert current.future.result(0) == "done"
    with pytest.raises(TrainerClosed, match="has been closed"):
        submit(scheduler, log, 5)
    scheduler.skip("m", 5)
    scheduler.close()
    assert log.ran == []


def test_closing_breaks_off_what_runs_too_long() -> None:
    scheduler = Scheduler()
    running = threading.Event()

    def run() -> None:
        running.set()
        while True:
            time.sleep(0.001)

    operation = scheduler.submit(Job("m:1", "work", run), "m", 1)
    assert running.wait(SOON)
    scheduler.close(timeout=0.1)
    error = operation.future.exception(SOON)
    assert isinstance(error, TrainerClosed)
    assert str(error) == "the trainer was closed while this operation ran"
    assert scheduler._thread is not None
    assert not scheduler._thread.is_alive()


def test_what_an_operation_was_asked_with_is_not_kept(scheduler: Scheduler) -> None:
    import gc
    import weakref

    class Payload: ...

    payload = Payload()
    ghost = weakref.ref(payload)

    def run(payload: Payload = payload) -> None: ...

    operation = scheduler.submit(Job("m:1", "work", run), "m", 1)
    del payload, run
    operation.future.result(SOON)
    submit(scheduler, Log(), 2).future.result(SOON)
    gc.collect()
    assert ghost() is None


def test_a_defect_is_logged_with_its_traceback_and_does_not_stop_the_thread(
    scheduler: Scheduler, caplog: pytest.LogCaptureFixture
) -> None:
    def crash() -> None:
        raise KeyError("lost")

    with caplog.at_level("INFO", "tinker_lightning.server"):
        failed = scheduler.submit(Job("m:1", "work", crash, model="m", seq=1), "m", 1)
        assert isinstance(failed.future.exception(SOON), KeyError)
        assert submit(scheduler, Log(), 2).future.result(SOON) == ("m", 2)
        submit(scheduler, Log(), 3).future.result(SOON)
    first, second, *_ = caplog.records
    assert first.levelname == "ERROR"
    assert first.exc_info
    assert "op=work model=m seq=1 ms=" in first.getMessage()
    assert second.levelname == "INFO"
    assert second.getMessage().endswith("ok")


def test_threads_that_submit_repeat_free_and_find_at_once_lose_nothing() -> None:
    lines, numbers = ["a", "b", "c"], 60
    scheduler, log = Scheduler(gap_timeout=SOON * 10), Log()
    refused = {(line, n) for line in lines for n in range(1, numbers + 1) if n % 7 == 0}

    def client(seed: int) -> list[Any]:
        # Every client sends everything in an order of its own, so that each number comes four times.
        work = [(line, n) for line in lines for n in range(1, numbers + 1)]
        random.Random(seed).shuffle(work)  # noqa: S311
        found = []
        for line, number in work:
            if (line, number) in refused:
                scheduler.skip(line, number)
            else:
                operation = submit(scheduler, log, number, line)
                assert scheduler.find(operation.request_id) is operation
                found.append(operation)
        return found

    try:
        with ThreadPoolExecutor(4) as pool:
            found = [operation for part in pool.map(client, range(4)) for operation in part]
        for operation in found:
            operation.future.result(SOON)
        assert len({id(operation) for operation in found}) == len(lines) * numbers - len(refused)
        for line in lines:
            assert [n for name, n in log.ran if name == line] == [n for n in range(1, numbers + 1) if n % 7]
    finally:
        scheduler.close()


def test_the_thread_of_a_trainer_that_nobody_closes_ends_with_it(tmp_path: Path) -> None:
    trainer = EmbeddedTrainer(["tiny"], data_dir=tmp_path)
    trainer.open_session()
    done = trainer.scheduler.submit(Job("a", "test", lambda: 1))
    assert done.future.result(SOON * 10) == 1
    thread = trainer.scheduler._thread
    assert thread is not None
    del trainer
    gc.collect()
    assert not thread.is_alive()


def test_a_number_that_a_client_polls_past_is_skipped() -> None:
    scheduler, log = Scheduler(gap_timeout=SOON * 10, polled_gap_timeout=0.05), Log()
    try:
        third = submit(scheduler, log, 3)
        scheduler.skip("m", 1)
        assert scheduler.missing_before(third, submits_in_turn=True) == 2
        assert not third.future.done()
        time.sleep(0.06)
        assert scheduler.missing_before(third, submits_in_turn=True) is None
        assert third.future.result(SOON) == ("m", 3)
        with pytest.raises(InvalidInput, match="number 2 of m arrived too late"):
            submit(scheduler, log, 2)
    finally:
        scheduler.close()


def test_a_number_may_still_arrive_from_a_client_that_submits_side_by_side_or_does_not_poll() -> None:
    scheduler, log = Scheduler(gap_timeout=SOON * 10, polled_gap_timeout=0.01), Log()
    try:
        second = submit(scheduler, log, 2)
        for _ in range(3):
            time.sleep(0.02)
            assert scheduler.missing_before(second, submits_in_turn=False) == 1
        assert scheduler.missing_before(second, submits_in_turn=True) == 1  # the first poll of such a client
        assert submit(scheduler, log, 1).future.result(SOON) == ("m", 1)
        assert second.future.result(SOON) == ("m", 2)
        # What was polled before does not count for a new gap.
        fourth = submit(scheduler, log, 4)
        time.sleep(0.02)
        assert scheduler.missing_before(fourth, submits_in_turn=True) == 3
    finally:
        scheduler.close()


def test_a_failed_job_does_not_keep_the_memory_of_its_calls() -> None:  # R5.11
    class Tensor:
        pass

    kept: list[weakref.ref[Tensor]] = []

    def run() -> None:
        tensor = Tensor()
        kept.append(weakref.ref(tensor))
        try:
            raise KeyError("inner")
        except KeyError as error:
            raise InvalidInput("outer") from error

    job = Job("m:1", "forward", run)
    job.execute()
    assert str(job.future.exception()) == "outer"
    assert kept[0]() is None


def test_a_job_that_arrives_after_its_session_was_finished_does_not_wait_for_those_before() -> None:
    ended: set[str | None] = set()
    scheduler = Scheduler(has_ended=ended.__contains__)
    scheduler.submit(Job("s:m:1", "forward", lambda: 1, owner="s"), "s:m", 1).future.result(30)
    ended.add("s")
    scheduler.finish("s")
    with pytest.raises(NotFound, match="forward arrived after its session was finished"):
        scheduler.submit(Job("s:m:2", "forward", lambda: 2, owner="s"), "s:m", 2)
    scheduler.close()


def test_finishing_a_session_fails_what_waits_and_drops_results_soon() -> None:  # R5.11
    memory = MemoryBudget(1 << 30)
    scheduler = Scheduler(memory=memory, finished_retention=0.0, fetched_retention=0.5)
    try:
        done = scheduler.submit(Job("s:m:1", "forward", lambda: 1, owner="s", result_bytes=1000), "s:m", 1)
        other = scheduler.submit(Job("t:m:1", "forward", lambda: 2, owner="t", result_bytes=1000), "t:m", 1)
        blocked = scheduler.submit(Job("s:m:3", "forward", lambda: 3, owner="s", request_bytes=1 << 20), "s:m", 3)
        assert done.future.result(SOON) == 1
        assert memory.used("messages") > 1 << 20
        scheduler.finish("s")
        with pytest.raises(OperationFailed, match="its session was finished"):
            blocked.future.result(SOON)
        assert memory.used("messages") < 1 << 20
        deadline = time.monotonic() + 60
        while scheduler.get("s:m:1") is not None and time.monotonic() < deadline:
            time.sleep(0.01)
        with pytest.raises(NotFound):
            scheduler.find("s:m:1")
        assert scheduler.find("t:m:1") is other
    finally:
        scheduler.close()


@pytest.fixture
def limited() -> Iterator[Scheduler]:
    """A scheduler with 30 MiB for messages, a third of it for one owner."""
    scheduler = Scheduler(gap_timeout=SOON * 10, memory=MemoryBudget(120 << 20))
    yield scheduler
    scheduler.close()


def submit_sized(scheduler: Scheduler, owner: str, number: int, request: int = 0, result: int = 0) -> Job:
    job = Job(f"{owner}:{number}", "work", lambda: None, owner=owner, request_bytes=request, result_bytes=result)
    return scheduler.submit(job, owner, number)


def test_requests_that_overtook_another_one_are_never_evicted(limited: Scheduler) -> None:  # R5.11
    """A client that sends several requests at once would lose its run where others get HTTP 429 and try again."""
    assert limited.memory is not None
    early = {owner: submit_sized(limited, owner, 2, 4 << 20) for owner in "abcd"}
    bodies = limited.memory.charge("bodies", 27 << 19, "messages")
    with bodies, pytest.raises(MemoryLimitExceeded) as caught:
        submit_sized(limited, "e", 1, 1 << 20)
    assert caught.value.is_temporary
    for owner, job in early.items():
        assert submit_sized(limited, owner, 1, 4 << 20).future.result(SOON) is None
        assert job.future.result(SOON) is None
    assert submit_sized(limited, "e", 1, 1 << 20).future.result(SOON) is None


def test_requests_that_arrive_early_leave_memory_for_the_one_they_wait_for(limited: Scheduler) -> None:  # R5.11
    """Otherwise it is rejected until later numbers run without it."""
    submit_sized(limited, "a", 3, 2 << 20)
    with pytest.raises(MemoryLimitExceeded, match="Number 1 of a has to arrive first, and memory is left") as caught:
        submit_sized(limited, "a", 2, 6 << 20)
    assert caught.value.is_temporary
    assert submit_sized(limited, "a", 1, 6 << 20).future.result(SOON) is None
    assert submit_sized(limited, "a", 2, 6 << 20).future.result(SOON) is None
    assert limited.find("a:3").future.result(SOON) is None


def test_no_memory_is_left_for_a_number_that_never_arrives() -> None:
    scheduler = Scheduler(gap_timeout=0.1, memory=MemoryBudget(120 << 20))
    try:
        with pytest.raises(MemoryLimitExceeded):
            submit_sized(scheduler, "a", 2, 6 << 20)
        time.sleep(0.15)
        assert submit_sized(scheduler, "a", 2, 6 << 20).future.result(SOON) is None
    finally:
        scheduler.close()


@pytest.mark.parametrize(("early", "first"), [((10 << 20) - 4 * JOB_BYTES, 0), ((5 << 20) - 2 * JOB_BYTES,) * 2])
def test_three_sessions_cannot_take_all_memory_with_requests_that_arrive_early(
    limited: Scheduler, early: int, first: int
) -> None:  # R5.11
    release = block(limited)
    try:
        for number, size in ((2, early), (1, first)):
            for owner in "abc":
                with suppress(MemoryLimitExceeded):
                    submit_sized(limited, owner, number, size)
        submit_sized(limited, "d", 1, 100 << 10)
    finally:
        release()


def test_three_sessions_cannot_take_all_memory_with_results_that_are_being_sent(limited: Scheduler) -> None:  # R5.11
    jobs = []
    for owner in "abc":
        for number in range(1, 11):
            jobs.append(submit_sized(limited, owner, number, 0, (1 << 20) - JOB_BYTES))
            jobs[-1].future.result(SOON)
    with ExitStack() as sent:
        rejected = []
        for job in jobs:
            try:
                sent.enter_context(job.sending())
            except MemoryLimitExceeded as error:
                rejected.append(error)
        assert 0 < len(rejected) < 10
        assert all(error.is_temporary for error in rejected)
        submit_sized(limited, "d", 1, 100 << 10)
    with jobs[-1].sending():
        pass  # those that were rejected are kept, and can be sent later


@pytest.mark.parametrize("is_sent", [False, True])
def test_a_job_that_is_submitted_again_is_charged_for_its_result_only(limited: Scheduler, is_sent: bool) -> None:
    """The creation of a model is, after its result was dropped, because the model still has it."""
    memory = limited.memory
    assert memory is not None
    job = limited.submit(Job("a:1", "work", lambda: None, owner="a", request_bytes=1 << 20, result_bytes=1000))
    job.future.result(SOON)
    with job.sending() if is_sent else nullcontext():
        limited._forget(job)
        assert limited.submit(job) is job
        assert memory.used("messages") == JOB_BYTES + 1000
    assert memory.used("messages") == JOB_BYTES + 1000
    for owner in "bcd":
        memory.charge("a result", 5 << 20, "messages", owner=owner)
    memory.charge("a body", 15 << 20, "messages")
    assert limited.get("a:1") is None  # it was evicted
