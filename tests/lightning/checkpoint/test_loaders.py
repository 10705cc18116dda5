"""Loaders that look ahead and go on: any prefix and a resume are the whole; nothing is lost, doubled or disturbed."""

from __future__ import annotations

import io
import multiprocessing
import pickle
import random
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import BatchSampler, DataLoader, Dataset, IterableDataset, RandomSampler
from torchdata.stateful_dataloader import StatefulDataLoader

from tests.helpers.fuzzing import examples
from tests.helpers.soaking import first_only
from tinker_lightning.errors import InvalidInput
from tinker_lightning.lightning.checkpoint.loaders import (
    IsolatedRngLoader,
    ResumableLoader,
    capture_rng,
    pass_seed,
    restore_rng,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator


few = examples(8, 200)
pytestmark = pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")  # torchdata calls it


class Noisy(Dataset[str]):
    """Its items are random by all three kinds of numbers."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, i: int) -> str:
        return f"{i}: {torch.rand(()).item()} {np.random.rand()} {random.random()}"  # noqa: S311


class Stream(IterableDataset[str]):
    """The same without a length."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __iter__(self) -> Iterator[str]:
        return (Noisy(self.count)[i] for i in range(self.count))


class Counter(IterableDataset[int]):
    """Counts on from pass to pass, and knows where it is."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.next = 0

    def __iter__(self) -> Iterator[int]:
        for _ in range(self.count - self.next % self.count):
            self.next += 1
            yield self.next

    def state_dict(self) -> dict[str, int]:
        return {"next": self.next}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.next = state["next"]


class Epochs:
    """Trains on a loader as Lightning does, epoch by epoch, and saves after a number of batches."""

    def __init__(self, make: Callable[[], Iterable[Any]], seed: int, ahead: int, limit: int | None = None) -> None:
        torch.manual_seed(seed)  # before the loader is made: some draw a seed then
        np.random.seed(seed)
        random.seed(seed)
        self.trained = 0
        self.is_over = False
        self.loader = ResumableLoader(make(), lambda: self.trained, lambda: self.is_over)
        self.ahead = ahead
        self.limit = limit
        self.seen: list[tuple[Any, float]] = []

    def run(self, epochs: int, save_after: int | None = None, state: dict[str, Any] | None = None) -> dict[str, Any]:
        """Trains; each batch draws a number of its own. What it saves goes through a file."""
        saved: dict[str, Any] = {}
        if state is not None:
            self.loader.load_state_dict(state["loader"])
            restore_rng(state["rng"])
            self.trained, self.is_over = state["trained"], state["is_over"]
            epochs -= state["epochs"]
        for epoch in range(epochs):
            if self.is_over:
                self.trained, self.is_over = 0, False
            for batch in self._batches():
                self.loader.peek(self.trained, min(self.ahead, self.length() - self.trained - 1))
                self.seen.append((batch, torch.rand(()).item()))
                self.trained += 1
                self.is_over = self.trained == self.length()
                if len(self.seen) == save_after:
                    saved = self._save(epoch + self.is_over)
        if isinstance(self.loader.loader, DataLoader):
            self.loader._iterator = None  # as Lightning does at the end of a fit; workers end with it
        return saved

    def _batches(self) -> Iterator[Any]:
        """Lightning does not ask a loader of known length for a batch behind the last."""
        iterator = iter(self.loader)
        for _ in range(self.trained, self.length()):
            yield next(iterator)

    def length(self) -> int:
        """Of an epoch."""
        return min(len(self.loader), self.limit or len(self.loader))

    def _save(self, epochs: int) -> dict[str, Any]:
        counters = {"trained": self.trained, "is_over": self.is_over, "epochs": epochs}
        file = io.BytesIO()
        torch.save({"loader": self.loader.state_dict(), "rng": capture_rng(), **counters}, file)
        content: dict[str, Any] = torch.load(io.BytesIO(file.getvalue()), weights_only=True)
        return content


def shuffled(**options: Any) -> DataLoader[str]:
    return DataLoader(Noisy(9), batch_size=2, shuffle=True, **options)


def with_generator() -> DataLoader[str]:
    return shuffled(generator=torch.Generator().manual_seed(3))


def with_generator_of_sampler() -> DataLoader[str]:
    sampler: Any = RandomSampler(Noisy(9), replacement=True, generator=torch.Generator().manual_seed(3))
    return DataLoader(Noisy(9), batch_sampler=BatchSampler(sampler, 2, drop_last=True))


def stateful(**options: Any) -> StatefulDataLoader[str]:
    return StatefulDataLoader(Noisy(9), batch_size=2, shuffle=True, **options)


def without_torch() -> list[str]:
    return [str(i) for i in range(5)]


KINDS = [shuffled, with_generator, with_generator_of_sampler, stateful, without_torch]


@pytest.mark.parametrize("make", KINDS, ids=lambda make: make.__name__)
@given(st.integers(1, 15), st.integers(0, 3), st.integers(0, 3), st.sampled_from([None, 3]))
@few
def test_a_prefix_and_a_resume_are_the_whole(
    make: Callable[[], Iterable[Any]], batches: int, ahead: int, ahead_after: int, limit: int | None
) -> None:
    whole = Epochs(make, seed=1, ahead=ahead, limit=limit)
    batches = min(batches, 3 * whole.length())
    saved = whole.run(3, save_after=batches)
    resumed = Epochs(make, seed=2, ahead=ahead_after, limit=limit)
    resumed.run(3, state=saved)
    assert resumed.seen == whole.seen[batches:]


@pytest.mark.parametrize("batches", first_only([5, 7]))
@pytest.mark.parametrize(
    "make",
    [
        lambda: shuffled(num_workers=2),
        lambda: DataLoader(range(9), batch_size=2, shuffle=True, num_workers=1, persistent_workers=True),  # type: ignore[arg-type]
        lambda: StatefulDataLoader(range(9), batch_size=2, shuffle=True, num_workers=2),
    ],
    ids=["workers", "persistent workers", "workers of a stateful loader"],
)
def test_workers_resume_in_the_middle_of_an_epoch_and_at_its_end(
    make: Callable[[], Iterable[Any]], batches: int
) -> None:
    whole = Epochs(make, seed=1, ahead=1)
    saved = whole.run(3, save_after=batches)
    resumed = Epochs(make, seed=2, ahead=1)
    resumed.run(3, state=saved)
    assert str(resumed.seen) == str(whole.seen[batches:])


def test_the_workers_of_a_pass_end_with_it() -> None:
    assert multiprocessing.active_children() == []
    for persistent in (False, True):
        loader = plain(shuffled(num_workers=2, persistent_workers=persistent))
        for _ in range(2):
            iterator = iter(loader)
            next(iterator)
            assert len(multiprocessing.active_children()) == 2
        if persistent:
            loader._iterator._shutdown_workers()  # as Lightning does at the end of a fit
        loader._iterator = None
        del iterator
        assert multiprocessing.active_children() == []
        assert len(list(loader.loader)) == 5


def test_a_state_outlives_the_end_of_a_fit() -> None:
    """Lightning drops a stateful loader's iterator then, and its state with it."""
    loader = ResumableLoader(stateful(), lambda: 5, lambda: True)
    assert len(list(loader)) == 5
    before = loader.state_dict()
    loader._iterator = None
    assert str(loader.state_dict()) == str(before)


def plain(loader: Iterable[Any], trained: int = 0) -> ResumableLoader:
    return ResumableLoader(loader, lambda: trained, lambda: False)


@given(st.lists(st.integers(), max_size=8), st.data())
@few
def test_peeking_loses_and_doubles_nothing(items: list[int], data: st.DataObject) -> None:
    loader = plain(items)
    seen = []
    for number, item in enumerate(loader):
        seen.append(item)
        count = data.draw(st.integers(0, 4))
        assert loader.peek(number, count) == items[number + 1 : number + 1 + count]
    assert seen == items


def test_peeking_sees_what_lightning_has_drawn_ahead_but_not_trained() -> None:
    loader = plain([0, 1, 2, 3])
    iterator = iter(loader)
    assert [next(iterator), next(iterator)] == [0, 1]
    assert loader.peek(0, 2) == [1, 2]
    assert list(iterator) == [2, 3]


def test_how_far_is_looked_ahead_changes_no_random_numbers() -> None:
    seen = []
    for ahead in (0, 1, 3):
        epochs = Epochs(shuffled, seed=1, ahead=ahead)
        epochs.run(2)
        seen.append(epochs.seen)
    assert seen[0] == seen[1] == seen[2]


def test_the_order_is_that_of_the_loader_itself() -> None:
    torch.manual_seed(5)
    expected = [int(text.split(":")[0]) for batch in shuffled() for text in batch]
    torch.manual_seed(5)
    assert [int(text.split(":")[0]) for batch in plain(shuffled()) for text in batch] == expected


def test_passes_differ_though_training_draws_nothing() -> None:
    """A pass has random numbers of its own, and the next one others."""
    loader = plain(DataLoader(Noisy(4)))
    first, second = list(loader), list(loader)
    assert len({text for batch in (*first, *second) for text in batch}) == 8


class Broken:
    """Fails after some batches."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __iter__(self) -> Iterator[int]:
        yield from range(self.count)
        raise OSError("the disk is gone")


@pytest.mark.parametrize("ahead", [0, 1, 5])
def test_an_error_arrives_in_its_turn(ahead: int) -> None:
    loader = plain(Broken(3))
    iterator = iter(loader)
    for number in range(3):
        assert next(iterator) == number
        assert loader.peek(number, ahead) == list(range(number + 1, min(3, number + 1 + ahead)))
    with pytest.raises(OSError, match="the disk is gone"):
        next(iterator)


def resumed_after(count: int) -> dict[str, Any]:
    """The state after a number of batches."""
    trained = 0
    loader = ResumableLoader(shuffled(), lambda: trained, lambda: False)
    for _ in loader:
        trained += 1
        if trained == count:
            return loader.state_dict()
    raise AssertionError


@pytest.mark.parametrize("left", [0, 2])
def test_a_loader_that_shrank_raises(left: int) -> None:
    loader = plain(DataLoader(Noisy(2 * left), batch_size=2))
    loader.load_state_dict(resumed_after(3))
    with pytest.raises(InvalidInput, match=rf"saved after 3 batches .* has only {left}\. Resume with the data"):
        next(iter(loader))


def test_a_loader_with_other_generators_raises() -> None:
    loader = plain(with_generator())
    loader.load_state_dict(resumed_after(3))
    with pytest.raises(InvalidInput, match=r"saved with 0 random number generators .* this one has 1"):
        next(iter(loader))


def test_a_state_is_that_of_the_last_batch_trained_and_not_of_the_last_one_drawn() -> None:
    trained = 0
    loader = ResumableLoader(shuffled(), lambda: trained, lambda: False)
    iterator = iter(loader)
    batches = [next(iterator)]
    for trained in range(1, 4):  # as Lightning does where there is no length: one batch is drawn ahead
        batches.append(next(iterator))
        assert loader.state_dict()["count"] == trained
    again = plain(shuffled(), trained)
    again.load_state_dict(loader.state_dict())
    assert next(iter(again)) == batches[3]


def test_a_state_that_was_loaded_is_given_on_while_nothing_is_drawn() -> None:
    state = resumed_after(3)
    loader = plain(shuffled(), 3)
    loader.load_state_dict(state)
    assert loader.state_dict() is state


@pytest.mark.parametrize("batches", [0, 1, 2, 3, 4, 5])
def test_a_dataset_with_a_state_counts_on_from_pass_to_pass(batches: int) -> None:
    """Without a length, Lightning draws one batch ahead, and sees the end of a pass."""

    def start() -> tuple[ResumableLoader, dict[str, Any]]:
        at: dict[str, Any] = {"trained": 0, "is_over": False}
        loader = StatefulDataLoader(Counter(6), batch_size=2)
        return ResumableLoader(loader, lambda: at["trained"], lambda: at["is_over"]), at

    def train(loader: ResumableLoader, at: dict[str, Any], stop: int | None) -> list[Any]:
        seen: list[Any] = []
        while len(seen) < 9:
            iterator = iter(loader)
            following = next(iterator)
            while not at["is_over"]:
                if len(seen) == stop:
                    return seen
                batch, following = following, next(iterator, None)
                seen.append(batch.tolist())
                at["trained"] += 1
                at["is_over"] = following is None
            if len(seen) == stop:
                return seen
            at.update(trained=0, is_over=False)
        return seen

    whole = train(*start(), None)
    loader, at = start()
    first = train(loader, at, batches)
    state = loader.state_dict()
    resumed, again = start()
    resumed.load_state_dict(state)
    again.update(at)
    if again["is_over"]:
        again.update(trained=0, is_over=False)
    assert first + train(resumed, again, None)[: len(whole) - batches] == whole
    assert whole[:4] == [[1, 2], [3, 4], [5, 6], [7, 8]]


def test_a_short_loader_that_starts_over_next_to_a_longer_one_resumes_in_its_own_pass() -> None:
    trained = 0
    loader = ResumableLoader(shuffled(), lambda: trained, lambda: False)
    seen = []
    for _ in range(2):  # two passes in one epoch
        for batch in loader:
            trained += 1
            seen.append(batch)
            if trained == 7:
                state = loader.state_dict()
    assert state["drawn"] == 7
    assert state["count"] == 2
    again = plain(shuffled(), 7)
    again.load_state_dict(state)
    assert list(again) == seen[7:]


@pytest.mark.parametrize("wrapper", [plain, IsolatedRngLoader])
def test_what_a_loader_has_is_reached_through_it(wrapper: Callable[[Any], Any]) -> None:
    inner = shuffled()
    loader = wrapper(inner)
    assert len(loader) == 5
    assert loader.dataset is inner.dataset
    assert loader.sampler is inner.sampler
    loader.worker_init_fn = print
    assert inner.worker_init_fn is print
    with pytest.raises(AttributeError, match="no attribute 'colour'"):
        _ = loader.colour
    with pytest.raises(TypeError, match="has no len"):
        len(wrapper(iter(())))


def test_an_isolated_loader_survives_pickling() -> None:
    assert list(pickle.loads(pickle.dumps(IsolatedRngLoader([1, 2])))) == [1, 2]  # noqa: S301


def test_an_isolated_loader_gives_all_and_disturbs_nothing() -> None:
    rng_before = pass_seed({"rng": capture_rng(), "generators": []})
    for inner in (shuffled(), DataLoader(Stream(9), batch_size=2)):
        texts = [text for batch in IsolatedRngLoader(inner) for text in batch]
        assert sorted(int(text.split(":")[0]) for text in texts) == list(range(9))
    assert pass_seed({"rng": capture_rng(), "generators": []}) == rng_before


def test_an_isolated_loader_gives_the_same_where_the_random_numbers_are_the_same() -> None:
    torch.manual_seed(1)
    first = list(IsolatedRngLoader(shuffled()))
    assert list(IsolatedRngLoader(shuffled())) == first
    torch.rand(())
    assert list(IsolatedRngLoader(shuffled())) != first
