"""The tasks of a run, numbered in the order in which they are sampled, so that a run can resume at any of them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, Any

import numpy as np

from tinker_lightning.errors import InvalidInput
from tinker_lightning.rl.environment import Environment, PromptEnvironment
from tinker_lightning.rows.formats import PromptLike

if TYPE_CHECKING:
    from collections.abc import Callable


@dataclass(frozen=True, eq=False)
class Task:
    """An environment and its position in the run.

    Args:
        number: Its position in the run, counted over all passes; the seeds of its samples derive from it.
        lap: The number of the pass over the data.
        index: Its position in the data.
        environment: The environment.
    """

    number: int
    lap: int
    index: int
    environment: Environment

    @property
    def position(self) -> list[int]:
        """The numbers that identify the task in a checkpoint."""
        return [self.number, self.lap, self.index]


class SizedTasks:
    """Tasks of data with a length, in a new order for each pass.

    With `whole_passes`, what is taken at once ends with the pass; otherwise it continues with the next one.
    """

    def __init__(
        self, rows: Sequence[Any], wrap: Callable[[Any], Environment], seed: int, *, shuffle: bool, whole_passes: bool
    ) -> None:
        self.rows = rows
        self._wrap = wrap
        self._seed = seed
        self._shuffle = shuffle
        self._whole_passes = whole_passes
        self._next = 0
        self._order: tuple[int, np.ndarray[Any, np.dtype[np.int64]]] | None = None

    def take(self, count: int) -> list[Task]:
        """Returns the next tasks."""
        if self._whole_passes:
            count = min(count, len(self.rows) - self._next % len(self.rows))
        numbers = range(self._next, self._next + count)
        self._next += count
        return [self.at(number) for number in numbers]

    def has_more(self, count: int) -> bool:
        """Returns True, because another pass follows."""
        del count
        return True

    def state(self) -> dict[str, int]:
        """Returns the position."""
        return {"number": self._next, "lap": 0, "index": 0, "rows": len(self.rows)}

    def seek(self, state: dict[str, int], positions: Sequence[Sequence[int]]) -> list[Task]:
        """Moves to a position and returns the tasks at earlier positions."""
        if state["rows"] != len(self.rows):
            raise InvalidInput(
                f"the checkpoint was saved with {state['rows']} prompts, but the loader has {len(self.rows)}. Resume "
                "with the prompts that the run was started with."
            )
        self._next = state["number"]
        return [self.at(number) for number, *_ in positions]

    def at(self, number: int) -> Task:
        """Returns the task with a number."""
        lap, offset = divmod(number, len(self.rows))
        if self._order is None or self._order[0] != lap:
            order = np.arange(len(self.rows))
            if self._shuffle:
                np.random.default_rng([self._seed, lap]).shuffle(order)
            self._order = lap, order
        index = int(self._order[1][offset])
        return Task(number, lap, index, self._wrap(self.rows[index]))


class StreamedTasks:
    """Tasks of an iterable without a length, in its own order; the last batch of a pass may be short."""

    def __init__(self, rows: Iterable[Any], wrap: Callable[[Any], Environment]) -> None:
        self._rows = rows
        self._wrap = wrap
        self._number = 0
        self._lap = 0
        self._index = 0
        self._iterator: Iterator[Any] | None = None
        self._ahead: list[Any] = []

    def take(self, count: int) -> list[Task]:
        """Returns the next tasks of this pass; none once at its end, after which the next pass starts."""
        self.has_more(count)
        rows, self._ahead = self._ahead[:count], self._ahead[count:]
        tasks = [self._task(i, row) for i, row in enumerate(rows)]
        self._number += len(rows)
        self._index += len(rows)
        if not rows:
            self._lap, self._index, self._iterator = self._lap + 1, 0, None
        return tasks

    def has_more(self, count: int) -> bool:
        """Returns whether this pass has at least `count` more tasks."""
        if self._iterator is None:
            self._iterator = iter(self._rows)
        self._ahead += islice(self._iterator, max(0, count - len(self._ahead)))
        return len(self._ahead) >= count

    def state(self) -> dict[str, int]:
        """Returns the position."""
        return {"number": self._number, "lap": self._lap, "index": self._index, "rows": -1}

    def seek(self, state: dict[str, int], positions: Sequence[Sequence[int]]) -> list[Task]:
        """Moves to a position by reading up to it, and returns the tasks at earlier positions of the same pass."""
        self._number, self._lap, self._index = state["number"], state["lap"], state["index"]
        self._iterator, self._ahead = iter(self._rows), []
        wanted = {index: (number, lap) for number, lap, index in positions}
        tasks: dict[int, Task] = {}
        read = 0
        for index, row in enumerate(islice(self._iterator, self._index)):
            read += 1
            if index in wanted:
                number, lap = wanted[index]
                tasks[index] = Task(number, lap, index, self._wrap(row))
        if read < self._index:
            raise InvalidInput(
                f"the checkpoint was saved after {self._index} prompts of a pass, but there are only {read}. Resume "
                "with the prompts that the run was started with."
            )
        return [tasks[index] for _, _, index in positions]

    def _task(self, offset: int, row: Any) -> Task:
        return Task(self._number + offset, self._lap, self._index + offset, self._wrap(row))


def create_tasks(
    items: Iterable[Any], rewards: Any, seed: int, *, shuffle: bool, whole_passes: bool, options: dict[str, Any]
) -> SizedTasks | StreamedTasks:
    """Creates the tasks of environments, or of rows of prompts, which `rewards` score."""

    def wrap(item: Any) -> Environment:
        if isinstance(item, Environment):
            return item
        _check_prompt(item, rewards)
        return PromptEnvironment(item, rewards, **options)

    if not isinstance(items, Sequence) and not _is_map_style(items) and isinstance(items, Iterable):
        return StreamedTasks(items, wrap)
    if isinstance(items, str | Mapping) or not _is_map_style(items):
        raise InvalidInput(f"RolloutLoader needs a list of prompts or environments, got {type(items).__name__}")
    if not len(items):  # type: ignore[arg-type]
        raise InvalidInput("RolloutLoader: there are no prompts")
    _check_all(items if isinstance(items, Sequence) else [items[0]], rewards)  # type: ignore[index]
    return SizedTasks(items, wrap, seed, shuffle=shuffle, whole_passes=whole_passes)  # type: ignore[arg-type]


def _check_all(items: Sequence[Any], rewards: Any) -> None:
    """Checks prompts and environments before a model is used."""
    prompts = [item for item in items if not isinstance(item, Environment)]
    for item in prompts:
        _check_prompt(item, rewards)
    if rewards is not None and not prompts:
        raise InvalidInput(
            f"rewards are for prompts; an environment such as {type(items[0]).__name__} gives rewards to its own "
            "trajectories. Leave rewards out."
        )


def _check_prompt(item: Any, rewards: Any) -> None:
    if not isinstance(item, str | Mapping | Sequence | PromptLike):
        a = f"the class {item.__name__}; pass an instance" if isinstance(item, type) else type(item).__name__
        raise InvalidInput(f"RolloutLoader needs prompts, or instances of subclasses of Environment, got {a}")
    if rewards is None:
        raise InvalidInput(
            f"a prompt needs a reward: pass rewards=... to RolloutLoader, or environments in place of {item!r:.80}"
        )


def _is_map_style(items: Any) -> bool:
    """Returns whether a dataset can be read by index, as datasets of torch and of the package `datasets` can."""
    try:
        len(items)
    except TypeError:
        return False
    return callable(getattr(type(items), "__getitem__", None))
