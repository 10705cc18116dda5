"""The memory budget of a trainer, charged before work starts, and the memory of this process and machine.

The limit is divided so that no kind of use can starve another one:

    models      base models, and the process itself when it is a server
    weights     adapters and samplers; at most a quarter of the limit
    messages    request bodies, waiting requests, results, metadata, uploaded losses; a quarter of the limit is set
                aside for them, so that a pass neither depends on them nor stops them
    work        passes, sampling and retained forwards; the rest of the limit

Some charges can be evicted. Retained forwards yield to any work, the oldest first. Messages yield to other messages:
first results that were fetched and bodies that arrive slowly, then unread results of the owner that holds most.
Requests are never evicted: a client that sends several at once would lose those that overtake another one. Instead, an
owner, and all sessions of an API key together, get at most half of the memory that others leave, so that a few cannot
take all, and requests that arrive early leave as much as they take for the request that they wait for.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal, Self, TypeAlias

from tinker_lightning.errors import InvalidInput, MemoryLimitExceeded

if TYPE_CHECKING:
    from collections.abc import Iterator

Pool: TypeAlias = Literal["models", "weights", "messages", "work"]

# The share of the machine's memory that a trainer takes by default: the rest is for other programs and for files.
DEFAULT_SHARE = 0.6
# The parts of the limit for weights, and for messages; and of the latter for one owner, and for bodies, whose owner is
# not known before they are parsed.
_WEIGHTS, _MESSAGES, _OWNER, _NO_OWNER = 1 / 4, 1 / 4, 1 / 3, 1 / 2
# Parameters of mallopt(3).
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}


@dataclass(eq=False, slots=True)
class Charge:
    """Memory in use until `release`, which may be called several times. Also a context manager."""

    _budget: MemoryBudget
    purpose: str
    pool: Pool
    owner: str | None
    key: str | None  # the API key of the owner
    evict: Callable[[], object] | None
    expendable: bool  # evicted before others
    size: int = 0

    @property
    def limit(self) -> int:
        """The memory limit of the budget."""
        return self._budget.limit

    def resize(self, size: int, *, spares_bodies: bool = False) -> None:
        """Changes the size; raises `MemoryLimitExceeded` and keeps the old size if the new one does not fit.

        With `spares_bodies`, no request body is evicted for it.
        """
        self._budget.resize(self, size, spares_bodies=spares_bodies)

    def set_evict(self, evict: Callable[[], object] | None, *, expendable: bool = False) -> None:
        """Makes the memory evictable. None protects it again; raises `MemoryLimitExceeded` beyond the fair share."""
        self._budget.set_evict(self, evict, expendable=expendable)

    def release(self) -> None:
        """Returns the memory."""
        self._budget.release(self)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


class MemoryBudget:
    """Counts what a trainer holds, and rejects what does not fit. All methods are thread-safe.

    Args:
        limit: The limit in bytes, or None for a share of the machine's memory.
    """

    def __init__(self, limit: int | None = None) -> None:
        if limit is not None and limit <= 0:
            raise InvalidInput(f"memory_limit must be a positive number of bytes, got {limit}")
        self.limit = int(DEFAULT_SHARE * machine_memory()) if limit is None else limit
        self.covers_process = False  # whether the limit holds for the whole process, as it does for a server
        self.key_of: Callable[[str | None], str | None] = lambda _: None  # the API key that a session belongs to
        self._lock = threading.Lock()
        self._used: Counter[Pool] = Counter()
        self._owners: Counter[str] = Counter()  # messages by owner
        self._protected: Counter[str] = Counter()  # messages by owner that cannot be evicted
        self._keys: Counter[str] = Counter()  # the same by API key
        self._evictable: dict[Charge, None] = {}  # oldest first

    def charge(
        self,
        purpose: str,
        size: int,
        pool: Pool = "work",
        *,
        owner: str | None = None,
        evict: Callable[[], object] | None = None,
        expendable: bool = False,
        spare: int = 0,
        fix: str = "",
    ) -> Charge:
        """Takes memory before it is used; raises `MemoryLimitExceeded` if it does not fit.

        Args:
            purpose: The use of the memory, for error messages.
            size: The number of bytes.
            pool: The kind of use.
            owner: The session whose message it is. A session takes at most a part of the memory for messages.
            evict: Frees the memory when something else needs it. The charge is released before this is called.
            expendable: Whether it is evicted before others.
            spare: The number of bytes that must be left for another charge like this one.
            fix: A sentence about what the caller can do, for error messages.
        """
        charge = Charge(self, purpose, pool, owner, self.key_of(owner), evict, expendable)
        self.resize(charge, size, fix, spare=spare)
        return charge

    def resize(self, charge: Charge, size: int, fix: str = "", *, spare: int = 0, spares_bodies: bool = False) -> None:
        """Changes the size of a charge; evicts others if it grows, unless it would not fit even then."""
        grown = size - charge.size
        evicted = 0
        # The C library keeps freed memory, in pieces that may not fit. It is asked to return them only when the process
        # comes near its limit, because memory that is taken again has to be cleared first.
        if self.covers_process and grown > self.limit >> 7 and resident_memory() + grown > self.limit * 7 // 8:
            trim_heap()
        while True:
            with self._lock:
                if grown <= 0 or grown + spare <= self._available(charge):
                    self._add(charge, grown)
                    break
                may_fit = size + spare <= self._max_size(charge) and grown + spare <= self._fair_growth(charge)
                victim = self._victim(charge, grown + spare, spares_bodies=spares_bodies) if may_fit else None
                if victim is None:
                    raise self._error(charge, grown, fix)
                evicted += victim.size
                evict = victim.evict  # with the lock, because its owner may change it at any time
                self._remove(victim)
            # Without the lock, because the owner of a victim has a lock of its own.
            if evict is not None:
                evict()
        if evicted > self.limit >> 7:
            trim_heap()

    def set_evict(self, charge: Charge, evict: Callable[[], object] | None, *, expendable: bool = False) -> None:
        """Makes a charge evictable. None protects it again; raises if that exceeds the fair share of its owner."""
        with self._lock:
            size = charge.size
            if evict is None and charge.evict is not None and size > self._fair_growth(charge):
                raise self._error(charge, 0, "Try again later.")
            self._remove(charge)
            charge.evict, charge.expendable = evict, expendable
            self._add(charge, size)

    def release(self, charge: Charge) -> None:
        """Returns the memory of a charge."""
        with self._lock:
            self._remove(charge)
            charge.evict = None  # it may refer to what was charged, which would then wait for the garbage collector

    def used(self, pool: Pool) -> int:
        """Returns the bytes in use."""
        with self._lock:
            return self._used[pool]

    @property
    def work_limit(self) -> int:
        """The memory that is always left for work. Depends on the limit and the models, not on the load."""
        with self._lock:
            return max(0, self.limit - self._used["models"] - self._portion(_WEIGHTS) - self._portion(_MESSAGES))

    def _portion(self, share: float) -> int:
        return int(share * self.limit)

    def _available(self, charge: Charge) -> int:
        """Returns how much a charge may grow now."""
        if charge.pool == "messages":
            owned = self._portion(_MESSAGES * _share(charge.owner)) - self._owners[charge.owner or ""]
            return min(owned, self._fair_growth(charge), self._portion(_MESSAGES) - self._used["messages"])
        rest = self.limit - self._portion(_MESSAGES)
        rest -= self._used["models"] + self._used["weights"] + self._used["work"]
        return min(rest, self._portion(_WEIGHTS) - self._used["weights"]) if charge.pool == "weights" else rest

    def _fair_growth(self, charge: Charge) -> int:
        """Returns how much a message may grow at most: its owner may keep half of the memory that others leave.

        So may all owners with the same API key together. Only memory that cannot be evicted counts, and no bodies,
        because the body of the request itself is one of them.
        """
        if charge.owner is None or charge.pool != "messages":
            return self.limit
        total = self._protected.total() - self._protected[""]
        used = [self._protected[charge.owner], *([] if charge.key is None else [self._keys[charge.key]])]
        return min((self._portion(_MESSAGES) - (total - own)) // 2 - own for own in used)

    def _max_size(self, charge: Charge) -> int:
        """Returns the largest size that such a charge could have if nothing else were in use but models."""
        if charge.pool == "messages":
            return self._portion(_MESSAGES * _share(charge.owner))
        rest = self.limit - self._portion(_MESSAGES) - self._used["models"]
        return min(rest, self._portion(_WEIGHTS)) if charge.pool == "weights" else rest

    def _victim(self, charge: Charge, grown: int, *, spares_bodies: bool) -> Charge | None:
        """Returns the charge to evict next, or None if none may be."""
        if charge.pool != "messages":
            return next((each for each in self._evictable if each.pool == "work"), None)
        own = charge.owner or ""
        own_only = self._owners[own] + grown > self._portion(_MESSAGES * _share(charge.owner))

        def messages() -> Iterator[Charge]:
            for each in self._evictable:
                if each.pool != "messages" or each is charge or (own_only and each.owner != charge.owner):
                    continue
                if each.owner is not None or not spares_bodies:
                    yield each

        victim = next((each for each in messages() if each.expendable), None)
        if victim is None:
            others = (each for each in messages() if self._owners[each.owner or ""] > self._owners[own] + grown)
            victim = max(others, key=lambda each: self._owners[each.owner or ""], default=None)
        return victim

    def _add(self, charge: Charge, size: int) -> None:
        charge.size += size
        self._used[charge.pool] += size
        if charge.pool == "messages":
            for count in (self._owners, self._protected) if charge.evict is None else (self._owners,):
                count[charge.owner or ""] += size
                if not count[charge.owner or ""]:
                    del count[charge.owner or ""]
            if charge.key is not None and charge.evict is None:
                self._keys[charge.key] += size
        if charge.evict is not None and charge.size:
            self._evictable.setdefault(charge)
        else:
            self._evictable.pop(charge, None)

    def _remove(self, charge: Charge) -> None:
        self._add(charge, -charge.size)

    def _error(self, charge: Charge, size: int, fix: str) -> MemoryLimitExceeded:
        most = self._max_size(charge)
        total = charge.size + size
        temporary = total <= most
        share = f"{format_size(max(0, self._available(charge)))} of {format_size(most)} are free at the moment"
        if not temporary:
            share = f"at most {format_size(most)} are available"
        fix = fix or ("Try again later." if temporary else "Send less at once.")
        error = MemoryLimitExceeded(
            f"{charge.purpose} would take {format_size(total)} of memory, but {share} for it within the memory limit "
            f"of {format_size(self.limit)}. {fix} The limit is set by serve --memory-limit, or "
            "EmbeddedTrainer(memory_limit=)."
        )
        error.is_temporary = temporary
        if charge.pool != "messages":
            by_others = self._used["models"] + self._used["weights"]
            rest = self.limit - self._portion(_MESSAGES) - by_others
            weights_rest = self._portion(_WEIGHTS) - self._used["weights"]
            error.fits_without_work = total <= rest if charge.pool == "work" else size <= min(rest, weights_rest)
        return error


def _share(owner: str | None) -> float:
    return _NO_OWNER if owner is None else _OWNER


def format_size(size: int) -> str:
    """Returns a number of bytes in a readable unit.

    >>> format_size(3 << 29)
    '1.5 GiB'
    """
    for unit, power in (("GiB", 30), ("MiB", 20), ("KiB", 10)):
        if size >= 1 << power:
            number = size / (1 << power)
            return f"{number:.0f} {unit}" if number >= 100 else f"{number:.3g} {unit}"
    return f"{size} bytes"


def parse_size(text: str) -> int:
    """Returns the bytes that a text such as `6G`, `512MiB` or `1000000` means; raises `InvalidInput` for others."""
    number = text.strip().upper().removesuffix("B").removesuffix("I")
    unit = number[-1:] if number[-1:] in _UNITS else ""
    try:
        size = int(float(number.removesuffix(unit)) * _UNITS[unit])
    except (ValueError, OverflowError):
        size = 0
    if size <= 0:
        raise InvalidInput(f"{text!r} is not a size; write it as 6G, 512M or a number of bytes")
    return size


def machine_memory() -> int:
    """Returns the memory of this machine, or of the container that this process runs in."""
    try:
        total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, OSError, ValueError):  # not a POSIX system
        return 8 << 30
    for file in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        with contextlib.suppress(OSError, ValueError):  # "max" if there is no limit
            total = min(total, int(Path(file).read_text()))
    return total


def resident_memory() -> int:
    """Returns the memory that this process takes, or 0 where that is unknown."""
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, OSError, ValueError, IndexError):
        return 0


def trim_heap() -> None:
    """Returns freed memory to the operating system where the C library would keep it."""
    with contextlib.suppress(AttributeError, OSError):  # not glibc
        ctypes.CDLL(None).malloc_trim(0)


def return_large_blocks() -> None:
    """Makes the C library return blocks of 4 MB and more as soon as they are freed.

    By default it comes to keep blocks of up to 32 MB in its heap, where the layer inputs that a long pass keeps leave
    holes between them which nothing fits into: a pass of smollm2-135m over 4,096 tokens took 2.8 GB instead of 1.5 GB.
    The blocks of passes within a token budget of 512 are smaller.
    """
    with contextlib.suppress(AttributeError, OSError):  # not glibc
        library = ctypes.CDLL(None)
        library.mallopt(_M_MMAP_THRESHOLD, 4 << 20)
        # Setting one threshold fixes the other one too, and its default would resize the heap all the time.
        library.mallopt(_M_TRIM_THRESHOLD, 64 << 20)
