"""The loader of rollouts: `Trainer.fit` draws batches of prompts from it, which are sampled when they may be."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from tinker_lightning.errors import InvalidInput
from tinker_lightning.lightning.checkpoint.loaders import TrainedPosition
from tinker_lightning.remote.saved_state import check_keys
from tinker_lightning.rl.groups import Group
from tinker_lightning.rl.rewards import Rewards
from tinker_lightning.rl.tasks import SizedTasks, tasks_of
from tinker_lightning.rl.units import OnError, PolicySource, Sampling, Unit
from tinker_lightning.types import SamplingParams

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

_SAVED = ("group_size", "batch_size", "epochs", "minibatches")
_KEYS = ("tickets", "tasks", "pending", "next_unit", "skipped_steps", "settings")


class RolloutLoader(TrainedPosition):
    """Batches of prompts or environments, sampled from the model that is trained.

    Lightning may draw a batch before it is trained: a batch is a plan, and nothing is sampled before it is due. With
    `staleness=0` that is when the optimizer step of the batch before was sent, so every sample is from exactly the
    weights that it trains. With `staleness=k`, sampling runs up to k optimizer steps ahead.

    All samples have seeds that derive from `seed`, the place of the prompt in the run and the number of the sample.

    Args:
        prompts: Prompts or environments. A prompt is a text, a chat, or a dict with `prompt` or `messages`, whose other
            columns go to the rewards. With a length, prompts are shuffled again for each pass, and every batch is
            full; without, they are taken in their order.
        rewards: A reward, several, or `Rewards`, for prompts. Environments have their own.
        group_size: The number of episodes of each prompt.
        batch_size: The number of prompts of a batch.
        staleness: The maximum age, in optimizer steps, of the weights that sample a batch.
        sampling_params: How tokens are chosen; without a seed.
        epochs: How often a batch is trained.
        minibatches: Into how many optimizer steps each pass over a batch is split.
        refill: How many times at most the groups that a recipe dropped are replaced by further prompts.
        shuffle: Whether to shuffle the prompts.
        seed: The seed of the order and of the samples.
        timeout: How many seconds the episodes of a prompt may take together; None for any number.
        on_error: What to do if an environment raises or takes too long: `raise`, or `skip` its prompt and count it.
        as_text: Whether strings are plain text to continue; by default they are messages of the user.
        system: A system message for chats that have none.
    """

    def __init__(
        self,
        prompts: Iterable[Any],
        rewards: Any = None,
        *,
        group_size: int = 8,
        batch_size: int = 8,
        staleness: int = 0,
        sampling_params: SamplingParams | None = None,
        epochs: int = 1,
        minibatches: int = 1,
        refill: int = 0,
        shuffle: bool = True,
        seed: int = 0,
        timeout: float | None = None,
        on_error: OnError = "raise",
        as_text: bool = False,
        system: str | None = None,
    ) -> None:
        params = sampling_params or SamplingParams()
        counts = {"group_size": group_size, "batch_size": batch_size, "epochs": epochs, "minibatches": minibatches}
        check_settings(counts, {"staleness": staleness, "refill": refill}, params, timeout, on_error)
        if rewards is not None and not isinstance(rewards, Rewards):
            rewards = Rewards(rewards)
        self.group_size = group_size
        self.batch_size = batch_size
        self.staleness = staleness
        self.epochs = epochs
        self.minibatches = minibatches
        self.refill = refill
        self.sampling = Sampling(group_size, params, seed, timeout, on_error)
        self._tasks = tasks_of(prompts, rewards, seed, shuffle=shuffle, options={"as_text": as_text, "system": system})
        self._units: dict[int, Unit] = {}
        self._next_unit = 0
        self._first_ticket = 0
        self._followed: tuple[int, int, Callable[[], int]] | None = None
        self.skipped_steps = 0
        """How many optimizer steps of the run were not taken, because all their groups were dropped."""

    @property
    def _iterator(self) -> None:
        """Nothing; Lightning sets it to None at the end of a fit, to stop the workers of a loader."""

    @_iterator.setter
    def _iterator(self, _: None) -> None:
        self.stop()

    @property
    def is_sized(self) -> bool:
        """Whether the prompts have a length."""
        return isinstance(self._tasks, SizedTasks)

    @property
    def steps_per_batch(self) -> int:
        """How many optimizer steps train a batch."""
        return self.epochs * self.minibatches

    def __len__(self) -> int:
        """The number of batches that Lightning counts as an epoch; each prompt is visited once in about that many."""
        if not isinstance(self._tasks, SizedTasks):
            raise TypeError("the prompts of this RolloutLoader have no length")
        return math.ceil(len(self._tasks.rows) / self.batch_size) * self.steps_per_batch

    def __iter__(self) -> Iterator[RolloutBatch]:
        # A generator, so that the position is read with the first batch.
        ticket = self.position()
        if self.is_sized:
            yield from (RolloutBatch(self, ticket + i) for i in range(len(self)))
            return
        if not self._has(ticket):
            self._tasks.take(1)  # ends the last pass
            if not self._has(ticket):  # Lightning would start one empty epoch after the other
                raise InvalidInput(
                    "RolloutLoader: there are no more prompts; a generator can be read only once. Pass a list or an "
                    "object whose __iter__ starts again, or end training with max_epochs=1."
                )
        while self._has(ticket):
            yield RolloutBatch(self, ticket)
            ticket += 1

    # What a recipe does with it.

    def follow(self, ticket: int, processed: Callable[[], int]) -> None:
        """Notes that a batch is trained now; it has been when the count of processed batches changes."""
        self._first_ticket = ticket
        self._followed = ticket, processed(), processed
        for number in [number for number in self._units if number < ticket // self.steps_per_batch]:
            del self._units[number]

    def position(self) -> int:
        """Returns the number of the first batch that has not been trained."""
        if self._followed is None:
            return self._first_ticket
        ticket, before, processed = self._followed
        return ticket + int(processed() != before)

    def admit(self, limit: int, source: Callable[[], PolicySource]) -> None:
        """Starts the rollouts of all units below a limit; `source` is called if there are any to start."""
        waiting = [unit for number, unit in sorted(self._units.items()) if number < limit and not unit.is_started]
        # A stream ends its pass with a short batch; the next pass waits for the next epoch.
        while self._next_unit < limit and (self.is_sized or self._tasks.left(1)):
            waiting.append(self._assign())
        if waiting:
            policy = source()
            for unit in waiting:
                unit.start(range(unit.planned), self.sampling, policy)

    def more(self, unit: Unit, count: int, source: Callable[[], PolicySource]) -> list[int]:
        """Starts rollouts of further prompts in place of dropped groups; returns their places in the unit."""
        first = max(unit.groups, default=-1) + 1
        # Not at the end of a stream, where `take` starts the next pass.
        if (missing := first + count - len(unit.tasks)) > 0 and self._tasks.left(1):
            unit.tasks += self._tasks.take(missing)
        orders = list(range(first, min(first + count, len(unit.tasks))))
        if orders:
            unit.start(orders, self.sampling, source())
        return orders

    def unit(self, number: int) -> Unit:
        """Returns a unit that was admitted; an empty one if refilling others has used up the prompts of a stream."""
        while self._next_unit <= number:
            self._units[self._next_unit] = Unit(self._next_unit, [], 0)
            self._next_unit += 1
        return self._units[number]

    def stop(self) -> None:
        """Cancels all rollouts; those of batches that have not been trained start again when they are due."""
        trained = self.position()
        self._first_ticket, self._followed = trained, None
        for number, unit in list(self._units.items()):
            if number < trained // self.steps_per_batch:
                del self._units[number]
            elif number > trained // self.steps_per_batch or trained % self.steps_per_batch == 0:
                unit.stop()

    @property
    def counts(self) -> tuple[int, int]:
        """How many groups have arrived and are not trained yet, and how many are being sampled."""
        counts = [unit.counts for unit in self._units.values()]
        return sum(done for done, _ in counts), sum(running for _, running in counts)

    def evaluation(self, batch: int, source: PolicySource) -> Unit:
        """Starts the rollouts of a batch of validation prompts: the same prompts and seeds each time.

        Args:
            batch: Its number in this pass. With several epochs or minibatches, the last batches have no prompts.
            source: The weights to sample from.
        """
        if not isinstance(self._tasks, SizedTasks):
            raise InvalidInput("validation needs prompts with a length: pass a list to RolloutLoader")
        numbers = range(batch * self.batch_size, min((batch + 1) * self.batch_size, len(self._tasks.rows)))
        unit = Unit(batch, [self._tasks.at(number) for number in numbers], len(numbers))
        unit.start(range(unit.planned), self.sampling, source)
        return unit

    # Checkpoints.

    def state_dict(self) -> dict[str, Any]:
        """Returns the position after the last batch trained, with the rollouts of one that is trained in part.

        Waits for the latter, because the weights that they are sampled from have changed.
        """
        tickets = self.position()
        first, trained = divmod(tickets, self.steps_per_batch)
        pending = []
        for number, unit in sorted(self._units.items()):
            if number >= first:
                kept = dict(unit.arriving(range(unit.planned), None)) if number == first and trained else {}
                groups = {order: group.to_state() for order, group in kept.items()}
                places = [task.place for task in unit.tasks]
                pending.append({"unit": number, "places": places, "planned": unit.planned, "groups": groups})
        return {
            "tickets": tickets,
            "tasks": self._tasks.state(),
            "pending": pending,
            "next_unit": self._next_unit,
            "skipped_steps": self.skipped_steps,
            "settings": self._settings(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Sets the position at which the next `iter` starts."""
        state = state.get("inner", state)  # as the strategy saves it
        check_keys(state, "the state of the RolloutLoader", _KEYS)
        for name, value in self._settings().items():
            if (saved := state["settings"].get(name)) != value:
                raise InvalidInput(
                    f"the checkpoint was saved with {name}={saved}, but this RolloutLoader has {name}={value}. Resume "
                    "with the settings that the run was started with."
                )
        self.stop()
        places = [place for pending in state["pending"] for place in pending["places"]]
        tasks = iter(self._tasks.seek(state["tasks"], places))
        self._units, self._next_unit, self.skipped_steps = {}, state["next_unit"], state["skipped_steps"]
        self._first_ticket, self._followed = state["tickets"], None
        for pending in state["pending"]:
            own = [next(tasks) for _ in pending["places"]]
            unit = self._units[pending["unit"]] = Unit(pending["unit"], own, pending["planned"])
            unit.groups = {order: Group.from_state(own[order], one) for order, one in pending["groups"].items()}

    def _settings(self) -> dict[str, int]:
        return {**{name: getattr(self, name) for name in _SAVED}, "seed": self.sampling.seed}

    def _assign(self) -> Unit:
        tasks = self._tasks.take(self.batch_size)
        unit = self._units[self._next_unit] = Unit(self._next_unit, tasks, len(tasks))
        self._next_unit += 1
        return unit

    def _has(self, ticket: int) -> bool:
        """Returns whether a stream has prompts for a batch, apart from those of the batches before it."""
        unit = ticket // self.steps_per_batch
        return unit < self._next_unit or self._tasks.left((unit - self._next_unit) * self.batch_size + 1)


class RolloutBatch:
    """A batch of a `RolloutLoader`: which prompts to train on, not yet sampled.

    Args:
        loader: The loader.
        ticket: Its number in the run.
    """

    # Not a dataclass: Lightning would rebuild it when it moves a batch to a device.
    __slots__ = ("loader", "ticket")

    def __init__(self, loader: RolloutLoader, ticket: int) -> None:
        self.loader = loader
        self.ticket = ticket

    @property
    def unit(self) -> int:
        """The number of its rollouts in the run; with several epochs or minibatches, several batches have the same."""
        return self.ticket // self.loader.steps_per_batch

    @property
    def part(self) -> int:
        """Which of the optimizer steps of these rollouts it is."""
        return self.ticket % self.loader.steps_per_batch

    def places(self, unit: Unit) -> range:
        """Returns the places of its groups in the unit."""
        size = math.ceil(unit.planned / self.loader.minibatches)
        first = self.part % self.loader.minibatches * size
        return range(first, min(first + size, unit.planned))

    def __repr__(self) -> str:
        return f"RolloutBatch({self.ticket})"


def check_settings(
    counts: Mapping[str, int],
    limits: Mapping[str, int],
    params: SamplingParams,
    timeout: float | None,
    on_error: str,
) -> None:
    """Raises `InvalidInput` for a setting that is out of range, or conflicts with another.

    Args:
        counts: Settings of at least 1, by name: `group_size`, `batch_size`, `epochs` and `minibatches`.
        limits: Settings of at least 0, by name: `staleness` and `refill`.
        params: How tokens are chosen.
        timeout: How many seconds the episodes of a prompt may take.
        on_error: What to do if an environment fails.
    """
    for least, settings in ((1, counts), (0, limits)):
        for name, value in settings.items():
            if value < least:
                raise InvalidInput(f"RolloutLoader: {name} must be at least {least}, got {value}")
    if timeout is not None and not timeout > 0:
        raise InvalidInput(f"RolloutLoader: timeout must be a positive number of seconds, or None, got {timeout}")
    if on_error not in ("raise", "skip"):
        raise InvalidInput(f"RolloutLoader: on_error must be 'raise' or 'skip', got {on_error!r}")
    batch_size, minibatches = counts["batch_size"], counts["minibatches"]
    if batch_size % minibatches:
        raise InvalidInput(
            f"RolloutLoader: a batch of {batch_size} prompts cannot be split into {minibatches} equal minibatches"
        )
    if limits["refill"] and (counts["epochs"] > 1 or minibatches > 1):
        raise InvalidInput("RolloutLoader: refill is for batches that are trained once, in one step")
    if params.seed is not None:
        raise InvalidInput("RolloutLoader: leave the seed out of sampling_params and pass seed=... to the loader")
