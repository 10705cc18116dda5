"""Conversations with a policy in which every prompt extends the tokens that were sampled before."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from tinker_lightning.errors import InvalidInput, RolloutFailed, TooLong
from tinker_lightning.rl.trajectory import Trajectory, Turn
from tinker_lightning.types.chat import check_messages, following_prompt, generation_prompt

if TYPE_CHECKING:
    from tinker_lightning.rl.environment import Policy
    from tinker_lightning.rl.trajectory import Completion
    from tinker_lightning.types import SamplingParams
    from tinker_lightning.types.chat import Message


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
