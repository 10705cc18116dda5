"""Trajectories, the tokens that a policy sampled, and groups of them; the datums train on exactly these tokens."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray

from tinker_lightning.errors import InvalidDatum
from tinker_lightning.remote.calls import TokenCount
from tinker_lightning.types import Datum, ModelInput
from tinker_lightning.types.model_input import token_array

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from tinker_lightning.rl.tasks import Task


@dataclass(frozen=True, eq=False)
class Completion:
    """An answer of a policy: the sampled tokens, never tokenized again.

    Args:
        tokens: The sampled token ids, including the one that ended the sequence.
        logprobs: The log-probability of each token under the policy that sampled it.
        stop_reason: `stop`, or `length` if the completion was cut.
        text: The tokens as text, without special tokens.
        version: The number of optimizer steps that the weights of the policy had taken.
    """

    tokens: list[int]
    logprobs: NDArray[np.float32]
    stop_reason: str
    text: str
    version: int

    def __post_init__(self) -> None:
        if len(self.tokens) != len(self.logprobs):
            raise InvalidDatum(
                f"the completion has {len(self.tokens)} tokens but {len(self.logprobs)} log-probabilities; pass those "
                "of the sampler, one for each token"
            )


@dataclass(frozen=True, eq=False)
class Turn:
    """A prompt and its completion, which is context for later turns only if it is not trained."""

    prompt_tokens: list[int]
    completion: Completion
    trained: bool = True

    @property
    def tokens(self) -> list[int]:
        """The tokens of the prompt and the completion."""
        return [*self.prompt_tokens, *self.completion.tokens]


@dataclass(frozen=True)
class Receipt:
    """A record of the datums of a trajectory.

    Attributes:
        datums: The number of datums.
        sampled_tokens: The number of sampled tokens.
        splits: The reasons why turns started a datum of their own, or have none; empty if all turns are in one datum.
    """

    datums: int
    sampled_tokens: int
    splits: tuple[str, ...] = ()

    def __str__(self) -> str:
        why = "".join(f"; {split}" for split in self.splits)
        return f"{self.datums} datum{'s' * (self.datums != 1)} of {self.sampled_tokens} sampled tokens{why}"


class Trajectory:
    """The turns of one episode and its reward.

    Args:
        turns: Prompts and completions in order. A prompt that starts with all tokens before it extends the datum of the
            turn before, so that a conversation is usually one datum.
        reward: The reward of the episode. NaN means that a reward failed and was skipped: such a trajectory is not
            trained on, and is left out of its group.
        rewards: The reward of each reward function, by name.
        metrics: Other numbers to log, by name.
        truncated: Whether the episode was cut short; by default, whether its last completion was.
    """

    # Not a dataclass: Lightning would rebuild it when it moves a batch to a device.
    __slots__ = ("metrics", "reward", "rewards", "truncated", "turns")

    def __init__(
        self,
        turns: Sequence[Turn],
        reward: float,
        rewards: Mapping[str, float] | None = None,
        metrics: Mapping[str, float] | None = None,
        truncated: bool | None = None,
    ) -> None:
        self.turns = list(turns)
        self.reward = float(reward)
        self.rewards = dict(rewards or {})
        self.metrics = dict(metrics or {})
        cut = bool(self.turns) and self.turns[-1].completion.stop_reason == "length"
        self.truncated = cut if truncated is None else truncated

    @property
    def is_scored(self) -> bool:
        """Whether the reward is a number."""
        return not math.isnan(self.reward)

    @property
    def text(self) -> str:
        """The text of the last completion."""
        return self.turns[-1].completion.text if self.turns else ""

    @property
    def version(self) -> int:
        """The oldest policy version of its completions."""
        return min((turn.completion.version for turn in self.turns), default=0)

    @property
    def receipt(self) -> Receipt:
        """The number of datums of the trajectory, and the reasons for splits."""
        sequences, splits = self._sequences()
        return Receipt(len(sequences), sum(len(turn.completion.tokens) for turn in self.turns), tuple(splits))

    def datums(self) -> list[Datum]:
        """Returns datums of the sampled tokens.

        The loss inputs are `target_tokens`; `logprobs` of the sampler, 0 on the prompts; `mask`, 1 on sampled tokens;
        and `weights`, equal to the mask. Add advantages with `datum.with_inputs(advantages=...)`.
        """
        return [sequence.datum() for sequence in self._sequences()[0]]

    def _sequences(self) -> tuple[list[_Sequence], list[str]]:
        sequences: list[_Sequence] = []
        splits: list[str] = []
        for i, turn in enumerate(self.turns):
            prompt = token_array(turn.prompt_tokens)
            if not len(prompt):
                raise InvalidDatum(f"turn {i}: the prompt is empty, so nothing predicts the first sampled token")
            if not turn.completion.tokens:
                splits.append(f"turn {i}: the completion is empty, so it trains nothing")
                continue
            if sequences and (why := sequences[-1].departure(prompt)):
                splits.append(f"turn {i}: {why}")
                sequences.append(_Sequence())
            elif not sequences:
                sequences.append(_Sequence())
            sequences[-1].append(prompt, turn.completion, trained=turn.trained)
        return sequences, splits

    def to_state(self) -> dict[str, Any]:
        """Returns the trajectory as tensors and plain data."""
        turns = [
            {
                **vars(turn.completion),
                "tokens": torch.tensor(turn.completion.tokens, dtype=torch.int64),
                "logprobs": torch.tensor(turn.completion.logprobs),
                "prompt": torch.tensor(turn.prompt_tokens, dtype=torch.int64),
                "trained": turn.trained,
            }
            for turn in self.turns
        ]
        return {**{name: getattr(self, name) for name in self.__slots__}, "turns": turns}

    @classmethod
    def from_state(cls, state: dict[str, Any]) -> Trajectory:
        """Returns the trajectory that `to_state` was called on."""
        turns = []
        for turn in state["turns"]:
            tokens, logprobs = turn["tokens"].tolist(), turn["logprobs"].numpy()
            completion = Completion(tokens, logprobs, turn["stop_reason"], turn["text"], turn["version"])
            turns.append(Turn(turn["prompt"].tolist(), completion, turn["trained"]))
        return cls(**{**state, "turns": turns})

    def __repr__(self) -> str:
        return f"Trajectory({len(self.turns)} turns, reward={self.reward:.4g})"


class Group:
    """The episodes of one task, whose rewards are compared with each other.

    Args:
        task: The task.
        trajectories: Its episodes, one per sample.
        version: The number of optimizer steps taken by the weights that sampled it.
        seconds: The time that sampling and scoring took.
        failed: The reason why there are no episodes; empty if there are.
        tokens: The tokens that were sampled, also for episodes that have failed, and their prompts.
    """

    # Not a dataclass: Lightning would rebuild it when it moves a batch to a device.
    __slots__ = ("failed", "old_logprobs", "seconds", "task", "tokens", "trajectories", "version")

    def __init__(
        self,
        task: Task,
        trajectories: Sequence[Trajectory],
        version: int,
        seconds: float = 0.0,
        failed: str = "",
        tokens: TokenCount | None = None,
    ) -> None:
        self.task = task
        self.trajectories = list(trajectories)
        self.version = version
        self.seconds = seconds
        self.failed = failed
        self.tokens = tokens or TokenCount()
        # The log-probabilities of its datums when it was first trained, if the loss needs them later.
        self.old_logprobs: list[torch.Tensor] | None = None

    @property
    def scored(self) -> list[Trajectory]:
        """The episodes that have a reward."""
        return [each for each in self.trajectories if each.is_scored]

    def to_state(self) -> dict[str, Any]:
        """Returns the group as tensors and plain data."""
        return {
            "trajectories": [each.to_state() for each in self.trajectories],
            "version": self.version,
            "failed": self.failed,
            "tokens": asdict(self.tokens),
            "old_logprobs": self.old_logprobs,
        }

    @classmethod
    def from_state(cls, task: Task, state: dict[str, Any]) -> Group:
        """Returns the group that `to_state` was called on."""
        trajectories = [Trajectory.from_state(each) for each in state["trajectories"]]
        tokens = TokenCount(**state["tokens"])
        group = cls(task, trajectories, state["version"], failed=state["failed"], tokens=tokens)
        group.old_logprobs = state["old_logprobs"]
        return group

    def __repr__(self) -> str:
        return f"Group(prompt {self.task.index}, {len(self.trajectories)} trajectories, version {self.version})"


class _Sequence:
    """Tokens that extend each other, some of them sampled."""

    def __init__(self) -> None:
        self._tokens: NDArray[np.int32] = np.empty(0, np.int32)
        self._logprobs: list[NDArray[np.float32]] = []
        self._mask: list[NDArray[np.float32]] = []

    def departure(self, prompt: NDArray[np.int32]) -> str:
        """Returns how a prompt departs from the tokens so far; an empty string if it starts with all of them."""
        so_far, length = self._tokens, min(len(self._tokens), len(prompt))
        different = np.flatnonzero(so_far[:length] != prompt[:length])
        if len(different):
            at = int(different[0])
            return (
                f"its prompt differs from the tokens before it at position {at} of {len(so_far)}, where it has token "
                f"{prompt[at]} instead of {so_far[at]}"
            )
        if length < len(so_far):
            return f"its prompt has {length} tokens, the first of the {len(so_far)} before it"
        return ""

    def append(self, prompt: NDArray[np.int32], completion: Completion, *, trained: bool) -> None:
        added, sampled = len(prompt) - len(self._tokens), len(completion.tokens)
        self._tokens = np.concatenate([prompt, token_array(completion.tokens)])
        self._logprobs += [np.zeros(added, np.float32), np.asarray(completion.logprobs, np.float32)]
        self._mask += [np.zeros(added, np.float32), np.full(sampled, trained, np.float32)]

    def datum(self) -> Datum:
        mask = np.concatenate(self._mask)[1:]
        inputs: dict[str, Any] = {
            "target_tokens": self._tokens[1:],
            "logprobs": np.concatenate(self._logprobs)[1:],
            "mask": mask,
            "weights": mask.copy(),
        }
        return Datum(ModelInput.from_ints(self._tokens[:-1]), inputs)
