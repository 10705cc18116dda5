"""The memory budget: what it refuses, what it evicts, and that nothing is lost from its count."""  # R5.11

from __future__ import annotations

import contextlib
import threading

import pytest

from tinker_lightning.errors import InvalidInput, MemoryLimitExceeded
from tinker_lightning.server.trainer.memory import Charge, MemoryBudget, format_size, machine_memory, parse_size

MIB = 1 << 20


def test_a_charge_lasts_until_it_is_released() -> None:
    memory = MemoryBudget(100 * MIB)
    with memory.charge("a pass", 70 * MIB) as charge:
        assert memory.used("work") == 70 * MIB
        with pytest.raises(
            MemoryLimitExceeded, match=r"a pass would take 10 MiB .* 5 MiB of 75 MiB are free"
        ) as caught:
            memory.charge("a pass", 10 * MIB)
        assert caught.value.is_temporary
        charge.resize(10 * MIB)
        with pytest.raises(MemoryLimitExceeded):
            charge.resize(76 * MIB)
        assert charge.size == 10 * MIB
    charge.release()
    assert memory.used("work") == 0
    with pytest.raises(MemoryLimitExceeded, match=r"would take 80 MiB .* at most 75 MiB .* limit of 100 MiB") as caught:
        memory.charge("a pass", 80 * MIB)
    assert not caught.value.is_temporary


def test_work_and_messages_do_not_starve_each_other() -> None:
    memory = MemoryBudget(120 * MIB)
    memory.charge("a pass", 90 * MIB)
    memory.charge("a result", 10 * MIB, "messages", owner="a")
    memory.charge("a body", 15 * MIB, "messages")
    with pytest.raises(MemoryLimitExceeded):
        memory.charge("a body", 1, "messages")
    with pytest.raises(MemoryLimitExceeded):
        memory.charge("a pass", 1 * MIB)


def test_one_owner_takes_a_third_of_the_messages() -> None:
    memory = MemoryBudget(120 * MIB)
    memory.charge("a result", 10 * MIB, "messages", owner="a")
    with pytest.raises(MemoryLimitExceeded, match="of 10 MiB are free"):
        memory.charge("a result", 1, "messages", owner="a")
    memory.charge("a result", 10 * MIB, "messages", owner="b")


def test_an_owner_takes_at_most_half_of_what_others_leave() -> None:
    memory = MemoryBudget(120 * MIB)
    for owner, size in (("a", 10), ("b", 10), ("c", 5), ("d", 2.5)):
        memory.charge("a request", int(size * MIB), "messages", owner=owner)
        with pytest.raises(MemoryLimitExceeded) as caught:
            memory.charge("a request", 1024, "messages", owner=owner)
        assert caught.value.is_temporary
    memory.charge("a request", MIB, "messages", owner="late")
    memory.charge("a body", MIB, "messages")


def test_thirty_sessions_of_one_key_leave_memory_for_another() -> None:  # R5.18
    memory = MemoryBudget(120 * MIB)
    memory.key_of = lambda session: (session or "")[:3]
    charges = []
    for i in range(30):
        with contextlib.suppress(MemoryLimitExceeded):
            charges.append(memory.charge("a request", MIB, "messages", owner=f"bob {i}"))
    assert memory.used("messages") == 15 * MIB  # of 30
    ann = memory.charge("a request", 7 * MIB, "messages", owner="ann 0")
    for charge in (ann, *charges):
        charge.release()
    memory.charge("a request", 10 * MIB, "messages", owner="bob 0")


def test_what_is_no_longer_evictable_is_kept() -> None:
    memory = MemoryBudget(100 * MIB)
    evicted: list[int] = []
    charges = [
        memory.charge("a retained forward", 25 * MIB, evict=lambda i=i: evicted.append(i))  # type: ignore[misc]
        for i in range(3)
    ]
    charges[0].set_evict(None)
    memory.charge("a pass", 25 * MIB)
    assert evicted == [1]
    charges[0].set_evict(lambda: evicted.append(0))
    memory.charge("a pass", 50 * MIB)
    assert evicted == [1, 2, 0]


def test_a_victim_is_evicted_though_its_owner_keeps_it_at_that_moment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its memory is taken already; the owner finds that out when it charges it again."""
    memory = MemoryBudget(100 * MIB)
    evicted: list[str] = []
    victim = memory.charge("a retained forward", 50 * MIB, evict=lambda: evicted.append("victim"))
    remove = memory._remove

    def removed(charge: Charge) -> None:
        remove(charge)
        charge.evict = None  # what its owner does as soon as it gets the lock

    monkeypatch.setattr(memory, "_remove", removed)
    memory.charge("a pass", 50 * MIB)
    assert evicted == ["victim"]
    assert victim.size == 0


def test_what_takes_no_memory_is_not_evicted() -> None:
    memory = MemoryBudget(100 * MIB)
    evicted: list[str] = []
    empty = memory.charge("a retained forward", 50 * MIB, evict=lambda: evicted.append("a"))
    work = memory.charge("a pass", 75 * MIB)
    empty.set_evict(lambda: evicted.append("empty"))
    work.resize(0)
    memory.charge("a retained forward", 50 * MIB, evict=lambda: evicted.append("b"))
    memory.charge("a pass", 50 * MIB)
    assert evicted == ["a", "b"]


def test_weights_take_a_quarter() -> None:
    memory = MemoryBudget(100 * MIB)
    memory.charge("an adapter", 25 * MIB, "weights")
    with pytest.raises(MemoryLimitExceeded):
        memory.charge("an adapter", 1, "weights")
    memory.charge("a pass", 50 * MIB)


def test_retained_forwards_yield_to_work_the_oldest_first() -> None:
    memory = MemoryBudget(100 * MIB)
    evicted: list[int] = []
    for i in range(3):
        memory.charge("a retained forward", 20 * MIB, evict=lambda i=i: evicted.append(i))  # type: ignore[misc]
    memory.charge("a pass", 30 * MIB)
    assert evicted == [0]
    memory.charge("an adapter", 20 * MIB, "weights")
    assert evicted == [0, 1]


def test_what_can_never_fit_evicts_nothing() -> None:
    memory = MemoryBudget(120 * MIB)
    evicted: list[str] = []
    memory.charge("a retained forward", 20 * MIB, evict=lambda: evicted.append("forward"))
    memory.charge("a result", 5 * MIB, "messages", owner="a", evict=lambda: evicted.append("result"), expendable=True)
    for size, pool in ((91 * MIB, "work"), (31 * MIB, "weights"), (11 * MIB, "messages")):
        with pytest.raises(MemoryLimitExceeded, match="at most"):
            memory.charge("too much", size, pool, owner="a")  # type: ignore[arg-type]
    assert evicted == []
    memory.charge("a result", 10 * MIB, "messages", owner="a")
    assert evicted == ["result"]


def test_fetched_results_are_evicted_first_and_then_those_of_whoever_holds_most() -> None:
    memory = MemoryBudget(120 * MIB)
    evicted: list[str] = []

    def result(owner: str, size: int, *, fetched: bool = False) -> None:
        name = f"{owner}{'-fetched' if fetched else ''}"
        memory.charge(
            "a result", size * MIB, "messages", owner=owner, evict=lambda: evicted.append(name), expendable=fetched
        )

    result("large", 9)
    result("other", 8)
    result("third", 5)
    result("fourth", 4, fetched=True)
    result("new", 5)
    assert evicted == ["fourth-fetched"]
    result("newer", 5)
    assert evicted == ["fourth-fetched", "large"]
    with pytest.raises(MemoryLimitExceeded):  # it would hold more than all others
        result("greedy", 9)
    assert evicted == ["fourth-fetched", "large"]


def test_charges_of_many_threads_add_up() -> None:
    memory = MemoryBudget(100 * MIB)

    def work() -> None:
        for _ in range(300):
            try:
                with memory.charge("a pass", 20 * MIB) as charge:
                    assert memory.used("work") <= 75 * MIB
                    charge.resize(5 * MIB)
            except MemoryLimitExceeded:
                continue

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert memory.used("work") == 0


@pytest.mark.parametrize(
    ("text", "size"), [("6G", 6 << 30), ("512MiB", 512 * MIB), ("1.5gb", 3 << 29), (" 1000 ", 1000), ("2k", 2048)]
)
def test_sizes_are_read(text: str, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "six", "-1G", "0", "1X", "inf", "nan", "GiB"])
def test_other_sizes_raise(text: str) -> None:
    with pytest.raises(InvalidInput, match="is not a size; write it as 6G"):
        parse_size(text)


def test_the_default_is_a_share_of_the_machine() -> None:
    assert 0.5 * machine_memory() < MemoryBudget().limit < 0.7 * machine_memory()
    with pytest.raises(InvalidInput, match="memory_limit must be a positive number of bytes, got 0"):
        MemoryBudget(0)


def test_sizes_are_written_for_people() -> None:
    assert [format_size(size) for size in (5, 1500, 1020 << 10, 3 << 29)] == [
        "5 bytes",
        "1.46 KiB",
        "1020 KiB",
        "1.5 GiB",
    ]
