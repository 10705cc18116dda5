"""Conversations are token-exact: later prompts extend what was sampled, however it would be tokenized again."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.helpers.fuzzing import examples
from tinker_lightning import SamplingParams
from tinker_lightning.errors import InvalidDatum, InvalidInput, RolloutFailed, TooLong
from tinker_lightning.rl import Completion, Conversation, Environment, Policy, SamplerPolicy, Trajectory

if TYPE_CHECKING:
    from tinker_lightning.client import ServiceClient

END = 257  # <|im_end|> of `tiny`


@pytest.fixture(scope="module")
def policy(service: ServiceClient) -> SamplerPolicy:
    params = SamplingParams(max_tokens=5, seed=1)
    return SamplerPolicy(service.create_sampling_client(base_model="tiny"), params=params)


class Scripted:
    """Answers with given tokens, which the sampler would take long to draw."""

    version = 0

    def __init__(self, tokenizer: Any, *answers: list[int]) -> None:
        self.tokenizer = tokenizer
        self._answers = list(answers)
        self.prompts: list[Any] = []

    async def sample(self, prompt: Any, **_: Any) -> list[Completion]:
        self.prompts.append(prompt)
        tokens = self._answers.pop(0)
        text = self.tokenizer.decode(tokens, skip_special_tokens=True)
        reason = "stop" if tokens[-1:] == [END] else "length"
        return [Completion(tokens, np.zeros(len(tokens), np.float32), reason, text, 0)]


def rendered(tokenizer: Any, messages: Any) -> Any:
    return tokenizer.apply_chat_template(messages, add_generation_prompt=True)["input_ids"]


def test_sampled_conversations_are_one_datum(policy: SamplerPolicy) -> None:
    async def talk() -> Conversation:
        chat = Conversation(policy, system="Be brief.")
        for question in ("Who?", "Where?", "When?"):
            await chat.reply(question)
        return chat

    chat = asyncio.run(talk())
    trajectory = chat.trajectory(0.5)
    assert str(trajectory.receipt) == "1 datum of 15 sampled tokens"
    assert trajectory.metrics == {"turns": 3}
    [datum] = trajectory.datums()
    mask = datum.loss_fn_inputs["mask"].to_numpy() != 0
    sampled = [token for turn in chat.turns for token in turn.completion.tokens]
    assert datum.loss_fn_inputs["target_tokens"].to_numpy()[mask].tolist() == sampled
    # What was sampled is random bytes, whose text is not tokenized back to them.
    assert rendered(policy.tokenizer, chat.messages[:-1]) != chat.turns[-1].prompt_tokens


ANSWERS = st.lists(st.integers(0, 255), max_size=6) | st.lists(st.integers(0, 255), max_size=5).map(lambda t: [*t, END])


@examples(few=10, many=1000)
@given(turns=st.lists(st.tuples(st.text(max_size=8), ANSWERS), min_size=1, max_size=6), as_text=st.booleans())
def test_tokens_trained_are_the_tokens_sampled(
    turns: list[tuple[str, list[int]]], as_text: bool, policy: SamplerPolicy
) -> None:
    scripted = Scripted(policy.tokenizer, *(answer for _, answer in turns))

    async def talk() -> Conversation:
        chat = Conversation(scripted, as_text=as_text)
        for i, (question, _) in enumerate(turns):
            await chat.reply(f"{i}{question}")
        return chat

    chat = asyncio.run(talk())
    trajectory = chat.trajectory(1.0)
    sampled = [(turn.prompt_tokens, turn.completion.tokens) for turn in chat.turns]
    assert [tokens for _, tokens in sampled] == [answer for _, answer in turns]
    data = trajectory.datums()
    assert len(data) == any(answer for _, answer in turns)
    for datum in data:
        tokens = [*datum.model_input.to_ints(), int(datum.loss_fn_inputs["target_tokens"].to_numpy()[-1])]
        trained = (np.flatnonzero(datum.loss_fn_inputs["mask"].to_numpy()) + 1).tolist()
        places = [range(len(prompt), len(prompt) + len(answer)) for prompt, answer in sampled]
        assert trained == [place for each in places for place in each]
        for prompt, answer in sampled:
            if answer:
                assert tokens[: len(prompt) + len(answer)] == prompt + answer


def test_prompts_are_those_of_the_template_if_the_answers_are_plain_text(policy: SamplerPolicy) -> None:
    scripted = Scripted(policy.tokenizer, [*b"Ann", END], [*b"cut"], [*b"now", END])

    async def talk() -> Conversation:
        chat = Conversation(scripted, system="Be brief.")
        await chat.reply("Who?")
        await chat.reply({"role": "tool", "content": "no result"}, "Where?")
        await chat.reply("When?")
        return chat

    chat = asyncio.run(talk())
    for i, turn in zip((2, 5, 7), chat.turns, strict=True):
        assert turn.prompt_tokens == rendered(policy.tokenizer, chat.messages[:i])
    assert chat.trajectory(0).receipt.datums == 1


def test_plain_text_is_appended_as_it_is(policy: SamplerPolicy) -> None:
    scripted = Scripted(policy.tokenizer, list(b" 4"), list(b" 6"))

    async def talk() -> None:
        chat = Conversation(scripted, as_text=True)
        await chat.reply("2 + 2 =")
        await chat.reply("\n2 + 4 =")

    asyncio.run(talk())
    assert scripted.prompts == [list(b"2 + 2 ="), list(b"2 + 2 = 4\n2 + 4 =")]


def test_an_empty_answer_is_followed_by_the_next_turn(policy: SamplerPolicy) -> None:
    scripted = Scripted(policy.tokenizer, [], [*b"yes", END])

    async def talk() -> Conversation:
        chat = Conversation(scripted)
        assert (await chat.reply("Well?")).text == ""
        await chat.reply("Well?")
        return chat

    trajectory = asyncio.run(talk()).trajectory(0)
    assert str(trajectory.receipt) == (
        "1 datum of 4 sampled tokens; turn 0: the completion is empty, so it trains nothing"
    )


class Endless(Environment):
    async def rollout(self, policy: Policy) -> Trajectory:
        chat = Conversation(policy, max_turns=3, as_text=True)
        while True:
            await chat.reply("again ")


class Growing(Environment):
    async def rollout(self, policy: Policy) -> Trajectory:
        chat = Conversation(policy, max_prompt_tokens=100, as_text=True)
        while True:
            await chat.reply("a longer and longer prompt ")


@pytest.mark.parametrize(
    ("environment", "error", "message"),
    [
        (Endless(), RolloutFailed, "another answer after max_turns=3"),
        (Growing(), TooLong, r"turn 3: the prompt has \d+ tokens, but max_prompt_tokens of the Conversation is 100"),
    ],
)
def test_environments_that_never_end(
    policy: SamplerPolicy, environment: Environment, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        asyncio.run(environment.group([policy]))


def test_mistakes(policy: SamplerPolicy) -> None:
    with pytest.raises(InvalidInput, match="max_turns must be at least 1"):
        Conversation(policy, max_turns=0)
    with pytest.raises(InvalidInput, match="neither a system message nor tools"):
        Conversation(policy, as_text=True, system="Be brief.")
    with pytest.raises(InvalidDatum, match="message 0 has the unknown role 'usr'; did you mean 'user'"):
        asyncio.run(Conversation(policy).reply({"role": "usr", "content": "Hello"}))
