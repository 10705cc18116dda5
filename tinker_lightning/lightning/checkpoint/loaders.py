"""Loaders with look-ahead that resume at the batch where training stopped.

A loader is replayed, not pickled: a checkpoint stores the random number generators at the start of the epoch, and a
resume draws the batches again up to the last one trained. A loader with a `state_dict` uses that instead.

Its generators belong to torch, numpy and Python. Each batch is drawn with its own seed.
"""

from __future__ import annotations

import random
import zlib
from abc import ABC, abstractmethod
from collections import deque
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from typing_extensions import override

from tinker_lightning.errors import InvalidInput

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from tinker_lightning.remote.calls import TokenCount


_END = object()
_SET_BY_LIGHTNING = ("worker_init_fn", "_iterator")


def capture_rng() -> dict[str, Any]:
    """Returns the states of the generators, as plain data that loads with `weights_only=True`."""
    numpy_state: Any = np.random.get_state(legacy=True)
    kind, keys, position, has_gauss, gauss = numpy_state
    version, words, next_gauss = random.getstate()
    return {
        "torch": torch.get_rng_state(),
        "numpy": [str(kind), torch.from_numpy(keys.astype(np.int64)), position, has_gauss, gauss],
        "python": [version, torch.tensor(words, dtype=torch.int64), next_gauss],
    }


def restore_rng(state: dict[str, Any]) -> None:
    """Restores the result of `capture_rng`."""
    kind, keys, position, has_gauss, gauss = state["numpy"]
    version, words, next_gauss = state["python"]
    torch.set_rng_state(state["torch"])
    np.random.set_state((kind, keys.numpy().astype(np.uint32), position, has_gauss, gauss))
    random.setstate((version, tuple(words.tolist()), next_gauss))


@contextmanager
def isolated_rng() -> Iterator[None]:
    """Restores the generators at the end of the `with` block, also after an error, unlike Lightning's `isolate_rng`."""
    torch_state, numpy_state, python_state = torch.get_rng_state(), np.random.get_state(), random.getstate()
    try:
        yield
    finally:
        torch.set_rng_state(torch_state)
        np.random.set_state(numpy_state)
        random.setstate(python_state)


@contextmanager
def seeded_rng(seed: int) -> Iterator[None]:
    """Seeds the generators for the `with` block, and restores them at its end."""
    with isolated_rng():
        torch.default_generator.manual_seed(seed)  # leaves the generators of GPUs alone
        np.random.seed(seed % 2**32)
        random.seed(seed)
        yield


class _Wrapper:
    """Wraps a loader and forwards its attributes (`dataset`, `sampler`, ...)."""

    def __init__(self, loader: Iterable[Any]) -> None:
        self.loader = loader

    def __len__(self) -> int:
        return len(self.loader)  # type: ignore[arg-type]  # raises TypeError if the loader has no length

    def __getattr__(self, name: str) -> Any:
        if name == "loader":  # not set yet, while unpickling
            raise AttributeError(name)
        return getattr(self.loader, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "_iterator":  # which Lightning sets to None at the end of a fit, to stop the workers
            self._end()
        super().__setattr__(name, value) if name not in _SET_BY_LIGHTNING else setattr(self.loader, name, value)

    def _end(self) -> None:
        """Ends the last pass."""


class ResumableLoader(_Wrapper):
    """Loads training batches. Its state is the position after the last batch trained, not after the last one drawn.

    `trained` returns the number of batches of this epoch trained so far, `is_over` whether that includes the last one.
    """

    def __init__(self, loader: Iterable[Any], trained: Callable[[], int], is_over: Callable[[], bool]) -> None:
        super().__init__(loader)
        self._trained = trained
        self._is_over = is_over
        self._resume: dict[str, Any] | None = None
        self._run = Run(loader, None)
        self._drawn = 0
        # The positions after the last batches drawn. Lightning draws one batch ahead if the loader has no length.
        self._marks: deque[_Mark] = deque(maxlen=4)

    def __iter__(self) -> Iterator[Any]:
        resume, self._resume = self._resume, None
        if resume is not None:
            self._drawn = resume["drawn"]
        elif self._trained() == 0 or self._is_over():
            self._drawn = 0  # a new epoch, and not a short loader that starts again next to a longer one
        self._run.close()
        run = self._run = Run(self.loader, resume)
        self._marks.append(_Mark(self._drawn, run, run.count, run.inner))
        for batch in run:
            self._drawn += 1
            self._marks.append(_Mark(self._drawn, run, run.count, run.inner))
            yield batch

    @property
    def seed(self) -> int:
        """The seed of this pass over the loader; the same after a resume."""
        return self._run.seed

    def peek(self, after: int, count: int) -> list[Any]:
        """Returns up to `count` batches after number `after` of this epoch; fewer if the loader ends or fails."""
        return self._run.peek(after, count)

    def state_dict(self) -> dict[str, Any]:
        """Returns the position after the last batch trained."""
        if self._resume is not None:  # nothing has been drawn since
            return self._resume
        trained = self._trained()
        marks = [mark for mark in self._marks if mark.drawn <= trained]
        if self._is_over() or not marks:
            return _resting_state(self.loader, has_begun=bool(self._marks))
        mark = marks[-1]
        return {"drawn": mark.drawn, "count": mark.count, "start": mark.run.start, "inner": mark.inner}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Sets the position at which the next `iter` starts."""
        self._resume = state

    @override
    def _end(self) -> None:
        if self._marks:
            self._resume = self.state_dict()  # a loader with a `state_dict` is about to lose its state
        self._run.close()


class TrainedPosition(ABC):
    """A loader whose state is the position after the last batch trained, however many were drawn."""

    @abstractmethod
    def __iter__(self) -> Iterator[Any]:
        """Starts at the first batch that has not been trained."""

    @abstractmethod
    def state_dict(self) -> dict[str, Any]:
        """Returns the position after the last batch trained."""

    @abstractmethod
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Sets the position at which the next `iter` starts."""

    def most_tokens(self, tokenizer: Any) -> TokenCount | None:
        """Returns the most tokens that an average batch takes, without forward passes; None if that is not known."""
        del tokenizer
        return None

    def describe(self) -> str:
        """Returns what the loader has to train on, for the report at the start of a fit."""
        return type(self).__name__


class PositionedLoader(_Wrapper):
    """Wraps a `TrainedPosition`, and stores its state in the format of checkpoint files."""

    loader: Any

    def __iter__(self) -> Iterator[Any]:
        return iter(self.loader)

    def state_dict(self) -> dict[str, Any]:
        """Returns the position after the last batch trained."""
        return {"drawn": 0, "count": 0, "start": None, "inner": self.loader.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Sets the position at which the next `iter` starts."""
        inner = state.get("inner", state)  # the loader's own, if it was saved without the strategy
        if inner is not None:
            self.loader.load_state_dict(inner)


class IsolatedRngLoader(_Wrapper):
    """Loads batches without changing the random number generators of training."""

    def __iter__(self) -> Iterator[Any]:
        with isolated_rng():
            seed, iterator = pass_seed(_start_state(self.loader)), iter(self.loader)
        return _seeded(iterator, seed)


class Run:
    """One pass over a loader, from its start or from a position in the middle."""

    def __init__(self, loader: Iterable[Any], resume: dict[str, Any] | None) -> None:
        self.start: dict[str, Any] | None = resume["start"] if resume else None
        self.seed = 0 if self.start is None else pass_seed(self.start)
        self.count: int = resume["count"] if resume else 0
        self.inner: Any = resume and resume["inner"]
        self._before = resume and resume.get("before")
        self._loader = loader
        self._source: Iterator[Any] | None = None
        self._recent: deque[tuple[int, Any]] = deque(maxlen=4)  # batches that were returned, with their numbers
        self._ahead: deque[tuple[Any, Any]] = deque()
        self._failure: Exception | None = None

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        if not self._ahead:
            if self._failure is not None:
                raise self._failure
            self._pull()
        batch, self.inner = self._ahead.popleft()
        self._recent.append((self.count, batch))
        self.count += 1
        return batch

    def peek(self, after: int, count: int) -> list[Any]:
        """Returns up to `count` batches after number `after`, drawing them if needed; iteration still returns them."""
        batches = [batch for number, batch in self._recent if number > after]
        while len(batches) + len(self._ahead) < count and self._failure is None:
            try:
                self._pull()
            except Exception as failure:  # raised after the batches before it have been trained
                self._failure = failure
        return [*batches, *(batch for batch, _ in islice(self._ahead, max(0, count - len(batches))))][:count]

    def close(self) -> None:
        """Drops the iterator of the loader, which stops its workers."""
        self._source = None
        self._recent.clear()
        self._ahead.clear()

    def _pull(self) -> None:
        if self._source is None:
            self._source = self._begin()
            if self._ahead:
                return
        self._keep(next(self._source))

    def _begin(self) -> Iterator[Any]:
        """Draws the first batch, or, after a resume, all that were trained before."""
        if self.start is None:
            if self._before is not None:
                _restore_end(self._loader, self._before, self.inner)
            self.start = _start_state(self._loader)
            self.seed = pass_seed(self.start)
            source = _pass(self._loader, self.seed)
            self._keep(next(source))
            return source
        with isolated_rng():
            if self.inner is not None:
                self._loader.load_state_dict(self.inner)  # type: ignore[attr-defined]
                return _seeded(iter(self._loader), self.seed, self.count)
            _start_workers(self._loader, self.start)
            restore_rng(self.start["rng"])
            _set_generators(self._loader, self.start)
            source = _pass(self._loader, self.seed)
            if self.count == 0:
                self._keep(next(source))
            if (drawn := sum(1 for _ in islice(source, self.count))) < self.count:
                raise InvalidInput(
                    f"the checkpoint was saved after {self.count} batches of an epoch, but the training loader has "
                    f"only {drawn}. Resume with the data that it was trained on."
                )
            return source

    def _keep(self, batch: Any) -> None:
        self._ahead.append((batch, self._loader.state_dict() if _is_stateful(self._loader) else None))  # type: ignore[attr-defined]


@dataclass(frozen=True, slots=True)
class _Mark:
    """The position after a batch: how many were drawn in this epoch, and where the pass over the loader was."""

    drawn: int
    run: Run
    count: int
    inner: Any


def _pass(loader: Iterable[Any], seed: int) -> Iterator[Any]:
    """Yields the batches of a pass, the first with the current generators, from which a loader draws its order."""
    iterator = iter(loader)
    first = next(iterator, _END)
    if first is not _END:
        yield first
        yield from _seeded(iterator, seed, 1)


def _seeded(iterator: Iterator[Any], seed: int, count: int = 0) -> Iterator[Any]:
    """Yields batches after the first `count`, each drawn with its own seed, so that look-ahead changes no numbers."""
    while True:
        count += 1
        with seeded_rng(seed + count):
            batch = next(iterator, _END)
        if batch is _END:
            return
        yield batch


def _is_stateful(loader: Any) -> bool:
    return hasattr(loader, "state_dict") and hasattr(loader, "load_state_dict")


def _resting_state(loader: Any, *, has_begun: bool) -> dict[str, Any]:
    """Returns the state of a loader whose next pass has not started."""
    inner = loader.state_dict() if has_begun and _is_stateful(loader) else None
    return {"drawn": 0, "count": 0, "start": None, "inner": inner, "before": _settings(loader)}


def _start_state(loader: Any) -> dict[str, Any]:
    return {"rng": capture_rng(), **_settings(loader)}


def _settings(loader: Any) -> dict[str, Any]:
    """Returns the state that the next pass of a loader depends on, apart from the global generators."""
    return {
        "generators": [generator.get_state() for generator in _generators(loader)],
        "is_warm": _is_warm(loader),
    }


def _restore_end(loader: Any, settings: dict[str, Any], inner: Any) -> None:
    """Restores the state of a loader at the end of its last pass."""
    with isolated_rng():
        if inner is not None:
            loader.load_state_dict(inner)
            iter(loader)
        _start_workers(loader, settings)
    _set_generators(loader, settings)


def _is_warm(loader: Any) -> bool:
    """Returns whether a `DataLoader` keeps an iterator, as it does with persistent workers."""
    return getattr(loader, "_iterator", None) is not None


def _start_workers(loader: Any, settings: dict[str, Any]) -> None:
    """Starts persistent workers if they were running, because a pass draws fewer random numbers with them."""
    if settings["is_warm"] and getattr(loader, "persistent_workers", False) and not _is_warm(loader):
        iter(loader)


def _set_generators(loader: Any, settings: dict[str, Any]) -> None:
    generators, states = _generators(loader), settings["generators"]
    if len(generators) != len(states):
        raise InvalidInput(
            f"the checkpoint was saved with {len(states)} random number generators in the training loader, but this "
            f"one has {len(generators)}. Resume with a loader of the same configuration."
        )
    for generator, state in zip(generators, states, strict=True):
        generator.set_state(state)


def pass_seed(start: dict[str, Any]) -> int:
    """Returns the seed of a pass: a hash of all generators at its start."""
    _, keys, position, *_ = start["rng"]["numpy"]
    seed = zlib.crc32(str(position).encode())
    for part in (start["rng"]["torch"], keys, start["rng"]["python"][1], *start["generators"]):
        seed = zlib.crc32(part.numpy().tobytes(), seed)
    return seed


def _generators(loader: Any) -> list[torch.Generator]:
    """Returns the generators of a loader and its samplers, each once."""
    batch_sampler = getattr(loader, "batch_sampler", None)
    owners = (loader, getattr(loader, "sampler", None), batch_sampler, getattr(batch_sampler, "sampler", None))
    generators = [getattr(owner, "generator", None) for owner in owners]
    return list({id(one): one for one in generators if isinstance(one, torch.Generator)}.values())
