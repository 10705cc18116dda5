"""Environments, the policies that act in them, and their conversations. A rollout is ordinary async Python.

`Environment` is the class to derive from, `PromptEnvironment` a prompt with rewards. `Policy` is what a rollout samples
from, and `SamplerPolicy` makes a policy of a sampling client. In a `Conversation`, every prompt extends the tokens
that were sampled before.
"""

from __future__ import annotations

import asyncio
import inspect
from abc import ABC, abstractmethod
from collections.abc import Coroutine, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias, TypeVar

import numpy as np
from typing_extensions import override

from tinker_lightning.errors import InvalidInput, RolloutFailed, TooLong, Unsupported
from tinker_lightning.remote.calls import TokenCount
from tinker_lightning.rl.rewards import Rewards
from tinker_lightning.rl.trajectory import Completion, Trajectory, Turn
from tinker_lightning.rows.formats import PromptLike, RowFormat, is_chat
from tinker_lightning.types import ModelInput, SamplingParams
from tinker_lightning.types.chat import Message, check_messages, following_prompt, generation_prompt

if TYPE_CHECKING:
    from tinker_lightning.rl.rewards import RewardFunction

T = TypeVar("T")
Prompt: TypeAlias = ModelInput | Sequence[int] | Sequence[Message] | str


class Policy(Protocol):
    """The model that acts, with its current weights or with the weights of a few steps ago."""

    @property
    def tokenizer(self) -> Any:
        """The tokenizer of the model."""

    @property
    def version(self) -> int:
        """The number of optimizer steps that its weights have taken."""

    async def sample(
        self, prompt: Prompt, *, num_samples: int = 1, params: SamplingParams | None = None
    ) -> list[Completion]:
        """Returns completions of a prompt: tokens, a chat to answer, or a text to continue."""


class Environment(ABC):
    """One task, such as a game or a problem with tools. Its episodes are compared with each other.

    A rollout may run several times at once: keep its state in local variables.
    """

    @abstractmethod
    async def rollout(self, policy: Policy) -> Trajectory:
        """Plays one episode: samples from the policy, as often as needed, and scores the result."""

    async def group(self, policies: Sequence[Policy]) -> list[Trajectory]:
        """Plays one episode with each policy, by default concurrently. Override it to score episodes together.

        The policies have the same weights and different seeds.
        """
        rollouts = [self.rollout(policy) for policy in policies]
        if not all(map(inspect.isawaitable, rollouts)):
            raise RolloutFailed(f"write `async def rollout(self, policy)` in {type(self).__name__}, without yield")
        return await gather(rollouts)

    def most_tokens(self, tokenizer: Any, params: SamplingParams, group_size: int) -> TokenCount | None:
        """Returns the most tokens that a group takes, for estimates of costs; None if that is not known."""
        del tokenizer, params, group_size
        return None


class PromptEnvironment(Environment):
    """A prompt to answer in one turn. A group of answers takes one request.

    Args:
        row: A text or a chat, or a dict with `prompt` or `messages`, whose other columns are passed to the rewards.
        rewards: A reward, several, or `Rewards`.
        params: Sampling parameters, in place of the policy's own.
        as_text: Whether a string is plain text to continue; by default it is a message of the user.
        system: A system message for chats that have none.
    """

    def __init__(
        self,
        row: Any,
        rewards: Rewards | RewardFunction | Sequence[RewardFunction] | Mapping[str, RewardFunction],
        *,
        params: SamplingParams | None = None,
        as_text: bool = False,
        system: str | None = None,
    ) -> None:
        self.row: dict[str, Any] = dict(row) if isinstance(row, Mapping) else {"prompt": row}
        self.rewards = rewards if isinstance(rewards, Rewards) else Rewards(rewards)
        self.params = params
        self._as_text = as_text
        self._system = system

    def prompt_tokens(self, tokenizer: Any) -> list[int]:
        """Returns the tokens of the prompt."""
        return RowFormat(tokenizer, as_text=self._as_text, system=self._system).prompt(self.row).to_ints()

    @override
    async def rollout(self, policy: Policy) -> Trajectory:
        """Samples and scores one answer."""
        return (await self.group([policy]))[0]

    @override
    async def group(self, policies: Sequence[Policy]) -> list[Trajectory]:
        """Samples an answer for each policy by one request of the first, and scores them concurrently."""
        tokens = self.prompt_tokens(policies[0].tokenizer)
        completions = await policies[0].sample(tokens, num_samples=len(policies), params=self.params)
        prompt = self._reward_prompt(tokens, policies[0].tokenizer)
        return await gather([self._score(tokens, prompt, each) for each in completions])

    @override
    def most_tokens(self, tokenizer: Any, params: SamplingParams, group_size: int) -> TokenCount | None:
        """Returns the tokens of answers that are all as long as `max_tokens` allows; None without that limit."""
        prompt, most = len(self.prompt_tokens(tokenizer)), (self.params or params).max_tokens
        if most is None:
            return None
        # The last token is only a target.
        return TokenCount(group_size * (prompt + most - 1), prompt, group_size * most)

    async def _score(self, tokens: list[int], prompt: Any, completion: Completion) -> Trajectory:
        columns = {name: value for name, value in self.row.items() if name != "prompt"}
        reward, rewards = await self.rewards.score(prompt, completion.text, columns)
        return Trajectory([Turn(tokens, completion)], reward, rewards)

    def _reward_prompt(self, tokens: list[int], tokenizer: Any) -> Any:
        """Returns the prompt that is passed to the rewards: the row's own, or the text of tokens."""
        prompt = self.row.get("prompt", self.row.get("messages"))
        return tokenizer.decode(tokens, skip_special_tokens=True) if isinstance(prompt, PromptLike) else prompt


class SamplerPolicy:
    """A policy with the weights of a sampling client.

    Args:
        sampler: A sampling client.
        tokenizer: The tokenizer of the model; by default the client's.
        version: The number of optimizer steps that its weights have taken.
        params: Default sampling parameters; without them, tokens are drawn from the unmodified distribution.
    """

    def __init__(
        self, sampler: Any, tokenizer: Any = None, *, version: int = 0, params: SamplingParams | None = None
    ) -> None:
        self.sampler = sampler
        self.tokenizer = sampler.get_tokenizer() if tokenizer is None else tokenizer
        self.version = version
        self.params = params or SamplingParams()
        self.tokens = TokenCount()  # of all its requests

    async def sample(
        self, prompt: Prompt, *, num_samples: int = 1, params: SamplingParams | None = None
    ) -> list[Completion]:
        """Returns completions of a prompt: tokens, a chat to answer, or a text to continue."""
        tokens = prompt_tokens(prompt, self.tokenizer)
        if not len(tokens):
            raise InvalidInput("the prompt is empty; it needs at least one token")
        response = await self.sampler.sample(ModelInput.from_ints(tokens), num_samples, params or self.params)
        self.tokens.add_samples(len(tokens), response)
        return [self.completion(sequence) for sequence in response.sequences]

    def completion(self, sequence: Any) -> Completion:
        """Returns a sampled sequence as a completion; raises `Unsupported` if it has no log-probabilities."""
        if sequence.logprobs is None:
            raise Unsupported(
                "the server returned no log-probabilities with its samples, which reinforcement learning needs. Train "
                "on another server; `tinker-lightning doctor` lists what a server offers."
            )
        tokens = list(sequence.tokens)
        text = self.tokenizer.decode(tokens, skip_special_tokens=True)
        return Completion(tokens, np.array(sequence.logprobs, np.float32), sequence.stop_reason, text, self.version)


def prompt_tokens(prompt: Prompt, tokenizer: Any) -> list[int]:
    """Returns the tokens of a prompt; a chat is rendered up to where the assistant answers."""
    if isinstance(prompt, Sequence) and not isinstance(prompt, str) and not is_chat(prompt):
        return ModelInput.from_ints(prompt).to_ints()
    return RowFormat(tokenizer).prompt(prompt).to_ints()


async def gather(coroutines: Sequence[Coroutine[Any, Any, T]]) -> list[T]:
    """Runs coroutines concurrently and returns their results; the first one that raises cancels the others."""
    tasks = [asyncio.ensure_future(each) for each in coroutines]
    try:
        return list(await asyncio.gather(*tasks))
    finally:
        for task in tasks:
            task.cancel()


class Conversation:
    """A conversation of an environment with a policy.

    Sampled answers are never tokenized again; only the messages between two answers are, so a whole conversation trains
    as one datum.

    Args:
        policy: The policy.
        system: A system message.
        params: Sampling parameters, in place of the policy's own.
        max_turns: The maximum number of answers; one more raises `RolloutFailed`, so that no episode is endless.
        max_prompt_tokens: The maximum number of tokens before an answer; more raise `TooLong`.
        tools: Tools to pass to the chat template.
        as_text: Whether messages are plain text that is appended as it is, without a chat template.
    """

    def __init__(
        self,
        policy: Policy,
        *,
        system: str | None = None,
        params: SamplingParams | None = None,
        max_turns: int = 64,
        max_prompt_tokens: int | None = None,
        tools: Sequence[Any] | None = None,
        as_text: bool = False,
    ) -> None:
        if max_turns < 1:
            raise InvalidInput(f"max_turns must be at least 1, got {max_turns}")
        if as_text and (system is not None or tools is not None):
            raise InvalidInput("a conversation of plain text has neither a system message nor tools")
        self.policy = policy
        self.params = params
        self.max_turns = max_turns
        self.max_prompt_tokens = max_prompt_tokens
        self.turns: list[Turn] = []
        self.messages: list[Message] = [] if system is None else [{"role": "system", "content": system}]
        self._tools = tools
        self._as_text = as_text

    async def reply(self, *messages: str | Message, params: SamplingParams | None = None) -> Completion:
        """Adds messages, and returns the policy's answer to them.

        Args:
            *messages: Messages; a string is a message of the user.
            params: The sampling parameters of this answer.
        """
        if len(self.turns) == self.max_turns:
            raise RolloutFailed(
                f"the environment asked for another answer after max_turns={self.max_turns}. End the episode, or raise "
                "max_turns of the Conversation."
            )
        new = [each if isinstance(each, Mapping) else {"role": "user", "content": each} for each in messages]
        check_messages(new)
        prompt = self._prompt(new)
        if self.max_prompt_tokens is not None and len(prompt) > self.max_prompt_tokens:
            raise TooLong(
                f"turn {len(self.turns)}: the prompt has {len(prompt)} tokens, but max_prompt_tokens of the "
                f"Conversation is {self.max_prompt_tokens}. End the episode earlier, or raise it."
            )
        [completion] = await self.policy.sample(prompt, params=params or self.params)
        self.turns.append(Turn(prompt, completion))
        self.messages += [*new, {"role": "assistant", "content": completion.text}]
        return completion

    def trajectory(
        self,
        reward: float,
        rewards: Mapping[str, float] | None = None,
        metrics: Mapping[str, float] | None = None,
        truncated: bool | None = None,
    ) -> Trajectory:
        """Returns the conversation as a trajectory, with `turns` among its metrics."""
        return Trajectory(self.turns, reward, rewards, {"turns": len(self.turns), **(metrics or {})}, truncated)

    def _prompt(self, new: Sequence[Message]) -> list[int]:
        """Returns the tokens so far and the tokens of new messages, up to where the assistant answers."""
        tokenizer = self.policy.tokenizer
        so_far = self.turns[-1].tokens if self.turns else []
        if self._as_text:
            text = "".join(str(message["content"]) for message in new)
            return [*so_far, *tokenizer(text, add_special_tokens=not so_far)["input_ids"]]
        if not so_far:
            return generation_prompt([*self.messages, *new], tokenizer, tools=self._tools)
        after = following_prompt(self.messages, new, tokenizer, tools=self._tools)
        # The end of the turn was sampled, unless the answer was cut.
        return [*so_far, *(after[1:] if after[:1] == so_far[-1:] else after)]
