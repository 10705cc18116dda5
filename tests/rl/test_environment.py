"""Environments on the embedded trainer: one turn from a prompt, or any Python."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

from tinker_lightning import ModelInput, SamplingParams
from tinker_lightning.errors import InvalidInput, RewardFailed, Unsupported
from tinker_lightning.rl import Environment, Policy, PromptEnvironment, SamplerPolicy, Trajectory, Turn

if TYPE_CHECKING:
    from tinker_lightning.client import ServiceClient

SHORT = SamplingParams(max_tokens=6, seed=1)


@pytest.fixture(scope="module")
def policy(service: ServiceClient) -> SamplerPolicy:
    return SamplerPolicy(service.create_sampling_client(base_model="tiny"), version=3, params=SHORT)


def letters(prompt: Any, completion: str) -> float:
    return float(sum(each.isalpha() for each in completion))


def test_a_policy_takes_tokens_chats_and_texts(policy: SamplerPolicy) -> None:
    async def sampled(prompt: Any) -> Any:
        return [(each.tokens, each.version) for each in await policy.sample(prompt, num_samples=2)]

    async def both() -> None:
        text, tokens, prompt = "Hello", list(b"Hello"), ModelInput.from_ints(list(b"Hello"))
        assert await sampled(text) == await sampled(tokens) == await sampled(prompt)
        chat = [{"role": "user", "content": "Hi"}]
        ids = policy.tokenizer.apply_chat_template(chat, add_generation_prompt=True)["input_ids"]
        found = await sampled(chat)
        assert found == await sampled(ids)
        assert len(found) == 2
        assert all(len(tokens) <= 6 and version == 3 for tokens, version in found)

    asyncio.run(both())


def test_a_group_of_answers_to_a_prompt_takes_one_request(policy: SamplerPolicy) -> None:
    requests = []

    class Counting(SamplerPolicy):
        async def sample(self, *args: Any, **options: Any) -> Any:
            requests.append(options["num_samples"])
            return await super().sample(*args, **options)

    counting = Counting(policy.sampler, params=SHORT)
    seen = []

    def recorded(prompt: Any, completion: str, answer: str) -> float:
        seen.append((prompt, answer))
        return letters(prompt, completion)

    environment = PromptEnvironment({"prompt": "2 + 2?", "answer": "4", "id": 1}, recorded)
    group = asyncio.run(environment.group([counting] * 4))
    assert requests == [4]
    assert seen == [("2 + 2?", "4")] * 4
    tokens = policy.tokenizer.apply_chat_template([{"role": "user", "content": "2 + 2?"}], add_generation_prompt=True)
    for trajectory in group:
        [turn] = trajectory.turns
        assert turn.prompt_tokens == tokens["input_ids"]
        assert trajectory.reward == letters("", turn.completion.text)
        assert trajectory.rewards == {"recorded": trajectory.reward}
        assert trajectory.receipt.datums == 1
    alone = asyncio.run(environment.rollout(counting))
    assert alone.turns[0].completion.tokens == group[0].turns[0].completion.tokens


def test_rows_may_be_texts_chats_and_model_inputs(policy: SamplerPolicy) -> None:
    shown = []

    def seen(prompt: Any, completion: str) -> float:
        shown.append(prompt)
        return 0.0

    chat = [{"role": "user", "content": "Hi"}]
    rows = [{"prompt": ModelInput.from_ints(list(b"Hi"))}, {"messages": chat}, "Hi", {"prompt": "Hi"}]
    prompts = []
    for row in rows:
        environment = PromptEnvironment(row, seen, as_text=True)
        prompts.append(asyncio.run(environment.rollout(policy)).turns[0].prompt_tokens)
    assert shown == ["Hi", chat, "Hi", "Hi"]
    assert prompts[0] == prompts[2] == prompts[3] == list(b"Hi")
    assert len(prompts[1]) > 2


class Twice(Environment):
    """Answers, and continues its answer."""

    async def rollout(self, policy: Policy) -> Trajectory:
        turns = []
        prompt = list(b"Say ")
        for observation in (b" and ", b""):
            [completion] = await policy.sample(prompt)
            turns.append(Turn(prompt, completion))
            prompt = [*turns[-1].tokens, *observation]
        return Trajectory(turns, reward=len(turns))


def test_an_environment_is_ordinary_python(policy: SamplerPolicy) -> None:
    group = asyncio.run(Twice().group([policy, policy]))
    assert [trajectory.reward for trajectory in group] == [2, 2]
    assert [str(trajectory.receipt) for trajectory in group] == ["1 datum of 12 sampled tokens"] * 2


def test_a_prompt_that_leaves_no_room_to_answer(policy: SamplerPolicy) -> None:
    with pytest.raises(InvalidInput, match="2048 tokens fill the context and leave no room"):
        asyncio.run(PromptEnvironment({"prompt": "a" * 2048}, letters, as_text=True).rollout(policy))
    with pytest.raises(InvalidInput, match="the prompt is empty"):
        asyncio.run(policy.sample([]))


def test_a_sampler_without_log_probabilities_is_named(policy: SamplerPolicy, monkeypatch: pytest.MonkeyPatch) -> None:
    sample = policy.sampler.sample

    def bare(*args: Any) -> Any:
        return sample(*args).then(lambda found: replace(found, sequences=[replace(found.sequences[0], logprobs=None)]))

    monkeypatch.setattr(policy.sampler, "sample", bare)
    with pytest.raises(Unsupported, match="no log-probabilities with its samples, which reinforcement learning needs"):
        asyncio.run(policy.sample("Hi"))


def test_a_failing_reward_fails_its_group(policy: SamplerPolicy) -> None:
    def judge(prompt: str, completion: str) -> float:
        raise ValueError("no judge")

    with pytest.raises(RewardFailed, match="reward 'judge' raised ValueError: no judge"):
        asyncio.run(PromptEnvironment("Hi", judge).group([policy] * 2))
