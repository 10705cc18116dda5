"""GRPO by hand: a remote model samples, is rewarded and takes a step, in a plain PyTorch loop without a trainer.

Group relative policy optimization (Shao et al. 2024, arXiv:2402.03300) compares the answers to a prompt with each
other: an answer that scores higher than the mean of its group becomes more likely. The reward here is the share of
lower-case letters. Run it with `python examples/grpo_by_hand.py`; `grpo.py` does the same with the recipe, which logs,
validates, saves and resumes.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tinker_lightning import Datum, ModelInput, RemoteAdamW, RemoteLM, SamplingParams, connect

PROMPTS = [f"Say word {i}: " for i in range(4)]
GROUP_SIZE, MAX_TOKENS, CLIP = 8, 6, 0.2


def reward(text: str) -> float:
    """The share of lower-case letters."""
    return sum("a" <= letter <= "z" for letter in text) / MAX_TOKENS


def group_advantages(rewards: Tensor) -> Tensor:
    """Returns by how many standard deviations each reward exceeds the mean of its group."""
    return (rewards - rewards.mean()) / (rewards.std() + 1e-6)


def clipped_loss(logprobs: Tensor, sampler_logprobs: Tensor, advantage: Tensor) -> Tensor:
    """The loss of each token of an answer (PPO): no more is gained once its probability has changed by 20%."""
    ratio = (logprobs - sampler_logprobs).exp()
    return -torch.minimum(ratio * advantage, ratio.clamp(1 - CLIP, 1 + CLIP) * advantage)


def train(client: Any, steps: int = 12) -> list[float]:
    """Returns the mean reward of each step."""
    tokenizer = client.get_tokenizer()
    prompts = [tokenizer.encode(prompt) for prompt in PROMPTS]
    model = RemoteLM(client)
    optimizer = RemoteAdamW(model.parameters(), lr=3e-2)

    means = []
    for step in range(steps):
        # Sample a group of answers to each prompt from the current weights; all requests are in flight at once.
        sampler = client.save_weights_and_get_sampling_client()
        params = SamplingParams(max_tokens=MAX_TOKENS, temperature=1.0, seed=step)
        requests = [sampler.sample(ModelInput.from_ints(prompt), GROUP_SIZE, params) for prompt in prompts]

        # Score them, and compare the answers of a group with each other.
        data, sampled, rewards = [], [], []
        advantages: list[Tensor] = []
        for prompt, request in zip(prompts, requests, strict=True):
            answers = request.result().sequences
            texts = [tokenizer.decode(answer.tokens, skip_special_tokens=True) for answer in answers]
            scores = torch.tensor([reward(text) for text in texts])
            rewards += scores.tolist()
            if scores.max() > scores.min():  # equal rewards teach nothing
                data += [Datum.from_tokens([*prompt, *answer.tokens]) for answer in answers]
                sampled += [torch.tensor(answer.logprobs) for answer in answers]
                advantages += group_advantages(scores)
        means.append(sum(rewards) / len(rewards))
        if not data:
            continue

        # Take a step: the answer's log-probabilities are the last ones of its datum.
        pairs = zip(model(data), sampled, advantages, strict=True)
        losses = [clipped_loss(logprobs[-len(old) :], old, advantage) for logprobs, old, advantage in pairs]
        optimizer.zero_grad()
        torch.cat(losses).mean().backward()
        optimizer.step()
    return means


if __name__ == "__main__":
    with connect("embedded") as service:
        trained = train(service.create_lora_training_client("tiny", rank=8, seed=0))
        print(*(f"step {step}: reward {mean:.3f}" for step, mean in enumerate(trained)), sep="\n")
