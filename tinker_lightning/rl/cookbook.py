"""Environments of `tinker_cookbook`, unchanged, for a `RolloutLoader`."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from typing_extensions import override

from tinker_lightning.errors import InvalidInput
from tinker_lightning.rl.environment import Environment, Policy, gather
from tinker_lightning.rl.trajectory import Completion, Trajectory, Turn
from tinker_lightning.types import ModelInput, SamplingParams


def environments(source: Any, params: SamplingParams | None = None) -> list[CookbookEnvironment]:
    """Returns the environments of an `RLDataset`, or of a list of `EnvGroupBuilder`s.

    Args:
        source: The dataset or the builders.
        params: The sampling parameters. The stop condition is the environment's own.
    """
    from tinker_cookbook.rl.types import EnvGroupBuilder

    if not isinstance(source, Sequence):
        source = [builder for i in range(len(source)) for builder in source.get_batch(i)]
    for each in source:
        if not isinstance(each, EnvGroupBuilder):
            raise InvalidInput(
                f"expected an RLDataset or EnvGroupBuilders, got {type(each).__name__}. An Env plays one episode only; "
                "pass a builder that makes group_size of them, such as ProblemGroupBuilder."
            )
    return [CookbookEnvironment(builder, params) for builder in source]


class CookbookEnvironment(Environment):
    """An `EnvGroupBuilder` of `tinker_cookbook`, whose environments are the episodes of a group.

    The builder makes new environments for each group, runs them with the cookbook's own loop, and may score the group
    as a whole. The number of environments that it makes must be `group_size` of the `RolloutLoader`.

    Args:
        builder: The builder.
        params: The sampling parameters. The stop condition is the environment's own.
    """

    def __init__(self, builder: Any, params: SamplingParams | None = None) -> None:
        self.builder = builder
        self.params = params or SamplingParams()

    @override
    async def rollout(self, policy: Policy) -> Trajectory:
        """Plays one episode, if the builder makes one environment."""
        return (await self.group([policy]))[0]

    @override
    async def group(self, policies: Sequence[Policy]) -> list[Trajectory]:
        """Plays one episode in each environment of the builder."""
        from tinker_cookbook.rl.rollout_runner import run_rollout

        try:
            envs = await self.builder.make_envs()
            if len(envs) != len(policies):
                raise InvalidInput(
                    f"{type(self.builder).__name__} makes {len(envs)} environments, but group_size of the "
                    f"RolloutLoader is {len(policies)}; they must be equal"
                )
            runs = [run_rollout(_Completer(p, self.params), env) for p, env in zip(policies, envs, strict=True)]
            episodes = await gather(runs)
            scores = await self.builder.compute_group_rewards(episodes, envs)
        finally:
            await self.builder.cleanup()
        return [
            _trajectory(episode, policy, float(reward), metrics)
            for episode, policy, (reward, metrics) in zip(episodes, policies, scores, strict=True)
        ]


@dataclass
class _Completer:
    """A `TokenCompleter` of the cookbook that samples from a policy."""

    policy: Policy
    params: SamplingParams

    async def __call__(self, model_input: Any, stop: Any, *, max_tokens: int | None = None) -> Any:
        from tinker_cookbook.completers import TokensWithLogprobs

        limits = [limit for limit in (max_tokens, self.params.max_tokens) if limit is not None]
        params = replace(self.params, stop=stop, max_tokens=min(limits, default=None))
        tokens = ModelInput.from_ints(model_input.to_ints())
        [completion] = await self.policy.sample(tokens, params=params)
        return TokensWithLogprobs(completion.tokens, completion.logprobs.tolist(), completion.stop_reason)


def _trajectory(episode: Any, policy: Policy, group_reward: float, group_metrics: Any) -> Trajectory:
    from tinker_cookbook.rl.types import PARSE_ERROR_MASKED_METRIC_KEY

    turns, metrics = [], defaultdict(list)
    for transition in episode.transitions:
        for name, value in transition.metrics.items():
            metrics[name].append(float(value))
        prompt, action = transition.ob.to_ints(), transition.ac
        if prompt:  # there is none if the first prompt was too long to sample from
            text = policy.tokenizer.decode(action.tokens, skip_special_tokens=True)
            logprobs = np.array(action.logprobs, np.float32)
            completion = Completion(action.tokens, logprobs, action.stop_reason, text, policy.version)
            masked = transition.metrics.get(PARSE_ERROR_MASKED_METRIC_KEY, 0) >= 1
            turns.append(Turn(prompt, completion, trained=not masked))
    means = {name: sum(values) / len(values) for name, values in metrics.items()}
    steps = sum(transition.reward for transition in episode.transitions)
    return Trajectory(
        turns,
        steps + group_reward,
        {"steps": steps, "group": group_reward},
        {**means, **{name: float(value) for name, value in group_metrics.items()}},
    )
