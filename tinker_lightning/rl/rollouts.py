"""The loader of rollouts for `Trainer.fit`.

A `RolloutBatch` that the loader yields is a plan: the recipe lets the loader start the rollout jobs that are due, and
trains the groups of its batch as they arrive. The state of the loader is the position of the run, with the groups of a
batch that is trained in part.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, TypeAlias, get_args

from typing_extensions import override

from tinker_lightning.errors import InvalidInput, check_choice
from tinker_lightning.lightning.checkpoint.loaders import TrainedPosition
from tinker_lightning.remote.calls import TokenCount
from tinker_lightning.remote.saved_state import check_keys
from tinker_lightning.rl.rewards import Rewards
from tinker_lightning.rl.rollout_jobs import OnError, PolicySource, RolloutJob, Sampling
from tinker_lightning.rl.tasks import SizedTasks, Task, create_tasks
from tinker_lightning.rl.trajectory import Group
from tinker_lightning.types import SamplingParams

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    import lightning.pytorch as pl

RolloutId: TypeAlias = int
"""The number of a batch in the run, counted over all epochs and minibatches."""

# The number of prompts that an estimate of tokens looks at.
_LOOKED_AT = 32

_SAVED = ("group_size", "batch_size", "epochs", "minibatches")
_KEYS = ("rollout_id", "tasks", "pending", "next_job", "skipped_steps", "settings")


class RolloutLoader(TrainedPosition):
    """Batches of prompts or environments, sampled from the model that is trained.

    Lightning may draw a batch before it is trained: a batch is a plan, and nothing is sampled before it is due. With
    `staleness=0` that is when the optimizer step of the previous batch was sent, so every sample is from exactly the
    weights that it trains. With `staleness=k`, sampling runs up to k optimizer steps ahead.

    All samples have seeds that derive from `seed`, the position of the prompt in the run and the number of the sample.

    Args:
        prompts: Prompts or environments. A prompt is a text, a chat, or a dict with `prompt` or `messages`, whose other
            columns go to the rewards. With a length, prompts are shuffled again for each pass, and every batch is
            full unless `num_epochs` is set; without, they are taken in their order.
        rewards: A reward, several, or `Rewards`, for prompts. Environments have their own.
        group_size: The number of episodes of each prompt.
        batch_size: The number of prompts of a batch.
        staleness: The maximum age, in optimizer steps, of the weights that sample a batch.
        sampling_params: The sampling parameters; without a seed.
        num_epochs: The number of times that each prompt is visited, after which the fit ends. An epoch of the trainer
            is then one pass over the prompts, whose last batch may be short. None leaves the end to the trainer.
        epochs: The number of passes over a batch.
        minibatches: The number of optimizer steps into which each pass over a batch is split.
        refill: The number of times at most that groups dropped by a recipe are replaced by further prompts.
        shuffle: Whether to shuffle the prompts.
        seed: The seed of the order and of the samples.
        timeout: The time in seconds that the episodes of a prompt may take together; None for any.
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
        num_epochs: int | None = None,
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
        if rewards is not None and not isinstance(rewards, Rewards):
            rewards = Rewards(rewards)
        self.group_size = group_size
        self.batch_size = batch_size
        self.staleness = staleness
        self.num_epochs = num_epochs
        self.epochs = epochs
        self.minibatches = minibatches
        self.refill = refill
        self.sampling = Sampling(group_size, sampling_params or SamplingParams(), seed, timeout, on_error)
        self._check_settings()
        self._tasks = create_tasks(
            prompts,
            rewards,
            seed,
            shuffle=shuffle,
            whole_passes=num_epochs is not None,
            options={"as_text": as_text, "system": system},
        )
        self._jobs: dict[int, RolloutJob] = {}
        self._next_job = 0
        self._first_id = 0
        self._followed: tuple[int, int, Callable[[], int]] | None = None
        self.skipped_steps = 0
        """The number of optimizer steps of the run that were not taken, because all their groups were dropped."""

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
        """The number of optimizer steps that train a batch."""
        return self.epochs * self.minibatches

    def __len__(self) -> int:
        """The number of batches that Lightning counts as an epoch.

        With `num_epochs`, it visits each prompt once; otherwise it starts the next pass, too, to fill the last batch.
        """
        if not isinstance(self._tasks, SizedTasks):
            raise TypeError("the prompts of this RolloutLoader have no length")
        return math.ceil(len(self._tasks.rows) / self.batch_size) * self.steps_per_batch

    def __iter__(self) -> Iterator[RolloutBatch]:
        # A generator, so that the position is read with the first batch.
        rollout_id = self.position()
        if self.is_sized:
            yield from (RolloutBatch(self, rollout_id + i) for i in range(len(self)))
            return
        if not self._has(rollout_id):
            self._tasks.take(1)  # ends the last pass
            if not self._has(rollout_id):  # Lightning would start one empty epoch after the other
                raise InvalidInput(
                    "RolloutLoader: there are no more prompts; a generator can be read only once. Pass a list or an "
                    "object whose __iter__ starts again, or end training with max_epochs=1."
                )
        while self._has(rollout_id):
            yield RolloutBatch(self, rollout_id)
            rollout_id += 1

    def limit_epochs(self, trainer: pl.Trainer) -> None:
        """Makes a trainer end after `num_epochs`, unless it ends before."""
        most = trainer.max_epochs
        if self.num_epochs is not None and (most is None or most == -1 or most > self.num_epochs):
            trainer.fit_loop.max_epochs = self.num_epochs

    @override
    def describe(self) -> str:
        """Returns the number of prompts, and how they are sampled."""
        prompts = f"{len(self._tasks.rows):,} prompts" if isinstance(self._tasks, SizedTasks) else "a stream of prompts"
        return f"{prompts}, {self.batch_size} in a batch with {self.group_size} answers each"

    @override
    def most_tokens(self, tokenizer: Any) -> TokenCount | None:
        """Returns the tokens of a full batch of average prompts with the longest answers; None if not known."""
        if not isinstance(self._tasks, SizedTasks):
            return None
        rows, total = len(self._tasks.rows), TokenCount()
        numbers = range(0, rows, math.ceil(rows / _LOOKED_AT))
        for number in numbers:
            environment = self._tasks.at(number).environment
            group = environment.most_tokens(tokenizer, self.sampling.params, self.group_size)
            if group is None:
                return None
            total += group
        share = self.batch_size / len(numbers) / self.steps_per_batch
        return TokenCount(
            trained=round(share * self.epochs * total.trained),
            prefilled=round(share * (1 + self.refill) * total.prefilled),
            sampled=round(share * (1 + self.refill) * total.sampled),
        )

    # The methods that a recipe calls.

    def follow(self, rollout_id: RolloutId, processed: Callable[[], int]) -> None:
        """Notes that a batch is being trained; it is done when the count of processed batches changes."""
        self._first_id = rollout_id
        self._followed = rollout_id, processed(), processed
        for number in [number for number in self._jobs if number < rollout_id // self.steps_per_batch]:
            del self._jobs[number]

    def position(self) -> RolloutId:
        """Returns the first batch that has not been trained."""
        if self._followed is None:
            return self._first_id
        rollout_id, before, processed = self._followed
        return rollout_id + int(processed() != before)

    def admit(self, limit: int, source: Callable[[], PolicySource]) -> None:
        """Starts the rollouts of all jobs below a limit; `source` is called if there are any to start."""
        waiting = [job for number, job in sorted(self._jobs.items()) if number < limit and not job.is_started]
        # A stream ends its pass with a short batch; the next pass waits for the next epoch.
        while self._next_job < limit and (self.is_sized or self._tasks.has_more(1)):
            waiting.append(self._add_job(self._tasks.take(self.batch_size)))
        if waiting:
            policy = source()
            for job in waiting:
                job.start(range(job.planned), self.sampling, policy)

    def replace_dropped(self, job: RolloutJob, count: int, source: Callable[[], PolicySource]) -> list[int]:
        """Starts rollouts of further prompts in place of dropped groups; returns their slots in the job."""
        first = max(job.groups, default=-1) + 1
        # Not at the end of a stream, where `take` starts the next pass.
        if (missing := first + count - len(job.tasks)) > 0 and self._tasks.has_more(1):
            job.tasks += self._tasks.take(missing)
        slots = list(range(first, min(first + count, len(job.tasks))))
        if slots:
            job.start(slots, self.sampling, source())
        return slots

    def job(self, number: int) -> RolloutJob:
        """Returns a job that was admitted; an empty one if refilling others has used up the prompts of a stream."""
        while self._next_job <= number:
            self._add_job([])
        return self._jobs[number]

    def stop(self) -> TokenCount:
        """Cancels all rollouts; rollouts of batches that have not been trained start again when they are due.

        Returns the tokens of groups that had arrived, and that nobody has received.
        """
        unused = TokenCount()
        trained = self.position()
        self._first_id, self._followed = trained, None
        for number, job in list(self._jobs.items()):
            if number < trained // self.steps_per_batch:
                del self._jobs[number]
            elif number > trained // self.steps_per_batch or trained % self.steps_per_batch == 0:
                unused += job.stop()
        return unused

    @property
    def counts(self) -> tuple[int, int]:
        """The number of groups that have arrived and are not trained yet, and the number that are being sampled."""
        counts = [job.counts for job in self._jobs.values()]
        return sum(done for done, _ in counts), sum(running for _, running in counts)

    def evaluate(self, batch: int, source: PolicySource) -> RolloutJob:
        """Starts the rollouts of a batch of validation prompts: the same prompts and seeds each time.

        Args:
            batch: Its number in this pass. With several epochs or minibatches, the last batches have no prompts.
            source: The weights to sample from.
        """
        if not isinstance(self._tasks, SizedTasks):
            raise InvalidInput("validation needs prompts with a length: pass a list to RolloutLoader")
        numbers = range(batch * self.batch_size, min((batch + 1) * self.batch_size, len(self._tasks.rows)))
        job = RolloutJob([self._tasks.at(number) for number in numbers], len(numbers))
        job.start(range(job.planned), self.sampling, source)
        return job

    # Checkpoints.

    @override
    def state_dict(self) -> dict[str, Any]:
        """Returns the position after the last trained batch, with the groups of a batch that is trained in part.

        Waits for these groups, because the weights that they are sampled from have changed.
        """
        rollout_id = self.position()
        first, trained = divmod(rollout_id, self.steps_per_batch)
        pending = []
        for number, job in sorted(self._jobs.items()):
            if number >= first:
                kept = dict(job.receive(range(job.planned), None)) if number == first and trained else {}
                groups = {slot: group.to_state() for slot, group in kept.items()}
                positions = [task.position for task in job.tasks]
                pending.append({"job": number, "positions": positions, "planned": job.planned, "groups": groups})
        return {
            "rollout_id": rollout_id,
            "tasks": self._tasks.state(),
            "pending": pending,
            "next_job": self._next_job,
            "skipped_steps": self.skipped_steps,
            "settings": self._settings(),
        }

    @override
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Sets the position at which the next `iter` starts."""
        state = state.get("inner", state)  # as the strategy saves it
        check_keys(state, "the state of the RolloutLoader", _KEYS)
        for name, value in self._settings().items():
            saved = state["settings"].get(name)
            is_another_limit = name == "num_epochs" and None not in (saved, value)
            if saved != value and not is_another_limit:
                raise InvalidInput(
                    f"the checkpoint was saved with {name}={saved}, but this RolloutLoader has {name}={value}. Resume "
                    "with the settings that the run was started with."
                )
        self.stop()
        positions = [position for pending in state["pending"] for position in pending["positions"]]
        tasks = iter(self._tasks.seek(state["tasks"], positions))
        self._jobs, self._next_job, self.skipped_steps = {}, state["next_job"], state["skipped_steps"]
        self._first_id, self._followed = state["rollout_id"], None
        for pending in state["pending"]:
            own = [next(tasks) for _ in pending["positions"]]
            job = self._jobs[pending["job"]] = RolloutJob(own, pending["planned"])
            job.groups = {slot: Group.from_state(own[slot], one) for slot, one in pending["groups"].items()}

    def _check_settings(self) -> None:
        """Raises `InvalidInput` for a setting that is out of range, or conflicts with another."""
        for name, least in {**dict.fromkeys(_SAVED, 1), "staleness": 0, "refill": 0}.items():
            if (value := getattr(self, name)) < least:
                raise InvalidInput(f"RolloutLoader: {name} must be at least {least}, got {value}")
        timeout = self.sampling.timeout
        if timeout is not None and not timeout > 0:
            raise InvalidInput(f"RolloutLoader: timeout must be a positive number of seconds, or None, got {timeout}")
        check_choice("RolloutLoader: on_error", self.sampling.on_error, get_args(OnError))
        if self.batch_size % self.minibatches:
            raise InvalidInput(
                f"RolloutLoader: a batch of {self.batch_size} prompts cannot be split into {self.minibatches} equal "
                "minibatches"
            )
        if self.num_epochs is not None and not (isinstance(self.num_epochs, int) and self.num_epochs >= 1):
            raise InvalidInput(f"RolloutLoader: num_epochs must be at least 1, or None, got {self.num_epochs!r}")
        if self.refill and self.steps_per_batch > 1:
            raise InvalidInput("RolloutLoader: refill is for batches that are trained once, in one step")
        if self.refill and self.num_epochs is not None:
            raise InvalidInput(
                "RolloutLoader: refill takes further prompts for dropped groups, so num_epochs cannot count how often "
                "each is visited. Leave one of them out, and end training with max_steps."
            )
        if self.sampling.params.seed is not None:
            raise InvalidInput("RolloutLoader: leave the seed out of sampling_params and pass seed=... to the loader")

    def _settings(self) -> dict[str, int | None]:
        own = {name: getattr(self, name) for name in (*_SAVED, "num_epochs")}
        return {**own, "seed": self.sampling.seed}

    def _add_job(self, tasks: list[Task]) -> RolloutJob:
        job = self._jobs[self._next_job] = RolloutJob(tasks, len(tasks))
        self._next_job += 1
        return job

    def _has(self, rollout_id: RolloutId) -> bool:
        """Returns whether a stream has prompts for a batch, apart from the prompts of the batches before it."""
        job = rollout_id // self.steps_per_batch
        return job < self._next_job or self._tasks.has_more((job - self._next_job) * self.batch_size + 1)


class RolloutBatch:
    """A batch of a `RolloutLoader`: a plan of the prompts to train on, not yet sampled.

    Args:
        loader: The loader.
        rollout_id: Its number in the run.
    """

    # Not a dataclass: Lightning would rebuild it when it moves a batch to a device.
    __slots__ = ("id", "loader")

    def __init__(self, loader: RolloutLoader, rollout_id: RolloutId) -> None:
        self.loader = loader
        self.id = rollout_id

    @property
    def job(self) -> int:
        """The number of its rollout job, which the batches of all epochs and minibatches share."""
        return self.id // self.loader.steps_per_batch

    @property
    def part(self) -> int:
        """Its number among the optimizer steps of the job."""
        return self.id % self.loader.steps_per_batch

    def slots(self, job: RolloutJob) -> range:
        """Returns the slots of its groups in the job."""
        size = math.ceil(job.planned / self.loader.minibatches)
        first = self.part % self.loader.minibatches * size
        return range(first, min(first + size, job.planned))

    def __repr__(self) -> str:
        return f"RolloutBatch({self.id})"
