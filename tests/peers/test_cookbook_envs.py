"""Environments of `tinker-cookbook`, unchanged, in place of ours. Run it with `tox -e cookbook`."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from tinker_cookbook import renderers
from tinker_cookbook.recipes.math_rl.arithmetic_env import ArithmeticDataset, ArithmeticEnv
from tinker_cookbook.recipes.multiplayer_rl.guess_number.env import GuessNumberDataset, GuessNumberEnvGroupBuilder
from tinker_cookbook.rl.data_processing import assemble_training_data, compute_advantages, trajectory_to_data
from tinker_cookbook.rl.types import TrajectoryGroup
from tinker_cookbook.tokenizer_utils import register_tokenizer, unregister_tokenizer

from tests.helpers.reference import gathered
from tests.helpers.trainers import SMALL, quiet
from tinker_lightning import Datum, SamplingParams
from tinker_lightning.errors import InvalidInput
from tinker_lightning.recipes import GRPO
from tinker_lightning.rl import RolloutLoader, SamplerPolicy
from tinker_lightning.rl.cookbook import CookbookEnvironment, environments
from tinker_lightning.server import EmbeddedTrainer
from tinker_lightning.testing import embedded_service
from tinker_lightning.types.datum import to_datum

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tinker_lightning.client import ServiceClient

pytestmark = SMALL

SHORT = SamplingParams(max_tokens=6)


@pytest.fixture(scope="module")
def policies(service: ServiceClient) -> Iterator[list[SamplerPolicy]]:
    sampler = service.create_sampling_client(base_model="tiny")
    register_tokenizer("tiny", sampler.get_tokenizer)
    yield [SamplerPolicy(sampler, version=5) for _ in range(2)]
    unregister_tokenizer("tiny")


def renderer(policies: list[SamplerPolicy]) -> Any:
    return renderers.get_renderer("role_colon", policies[0].tokenizer)


@dataclass(frozen=True)
class Recorded(GuessNumberEnvGroupBuilder):  # type: ignore[misc]
    """Keeps the trajectories that the cookbook would train on, and rewards the second episode as a group reward."""

    episodes: list[Any] = field(default_factory=list)
    cleaned: list[bool] = field(default_factory=list)

    async def compute_group_rewards(self, trajectory_group: list[Any], env_group: Any) -> list[tuple[float, Any]]:
        self.episodes.extend(trajectory_group)
        return [(float(i), {"place": i}) for i in range(len(env_group))]

    async def cleanup(self) -> None:
        self.cleaned.append(True)


def test_datums_are_those_of_the_cookbook(policies: list[SamplerPolicy]) -> None:
    builder = Recorded(answer=7, renderer=renderer(policies), num_envs=2)
    group = asyncio.run(CookbookEnvironment(builder, SHORT).group(policies))
    assert builder.cleaned == [True]
    assert len(group) == 2
    for i, (ours, theirs) in enumerate(zip(group, builder.episodes, strict=True)):
        assert len(ours.turns) == 10  # the environment's own limit
        steps = sum(each.reward for each in theirs.transitions)
        assert (ours.reward, ours.rewards) == (steps + i, {"steps": steps, "group": i})
        assert ours.metrics["place"] == i
        assert ours.version == 5
        expected = [to_datum(datum) for datum in trajectory_to_data(theirs, 1.0)]
        data = ours.datums()
        assert ours.receipt.datums == len(data) == len(expected)
        for mine, its in zip(data, expected, strict=True):
            assert mine.model_input == its.model_input
            for name in ("target_tokens", "logprobs", "mask"):
                np.testing.assert_array_equal(
                    mine.loss_fn_inputs[name].to_numpy(), its.loss_fn_inputs[name].to_numpy(), name
                )


def test_environments_of_datasets(policies: list[SamplerPolicy]) -> None:
    guess = GuessNumberDataset(answers=[1, 2, 3, 4], renderer=renderer(policies), batch_size=2, group_size=2)
    assert [each.builder.answer for each in environments(guess)] == [1, 2, 3, 4]
    problems = ArithmeticDataset(batch_size=2, renderer=renderer(policies), group_size=2, n_batches=3)
    assert len(environments(problems, SHORT)) == 6
    group = asyncio.run(environments(problems, SHORT)[0].group(policies))
    assert [len(each.turns) for each in group] == [1, 1]
    assert all("correct" in each.metrics for each in group)


def test_an_environment_of_one_episode_is_not_a_builder(policies: list[SamplerPolicy]) -> None:
    env = ArithmeticEnv(1, 2, renderer(policies))
    with pytest.raises(InvalidInput, match="expected an RLDataset or EnvGroupBuilders, got ArithmeticEnv"):
        environments([env])


def test_the_number_of_environments_must_be_the_group_size(policies: list[SamplerPolicy]) -> None:
    builder = Recorded(answer=7, renderer=renderer(policies), num_envs=3)
    with pytest.raises(InvalidInput, match="Recorded makes 3 environments, but group_size of the RolloutLoader is 2"):
        asyncio.run(CookbookEnvironment(builder).group(policies))
    assert builder.cleaned == [True]


def test_the_gradient_of_a_step_is_that_of_the_cookbook(tmp_path: Path) -> None:  # R4.3, R5.9
    trainer = EmbeddedTrainer(["tiny"], data_dir=tmp_path)
    with embedded_service(trainer) as service:
        ours, theirs = (service.create_lora_training_client("tiny", rank=4, seed=1) for _ in range(2))
        module = GRPO(ours, scale_rewards=False, normalize="sum", learning_rate=1e-2)
        builders = [Recorded(answer, renderers.get_renderer("role_colon", module.tokenizer), 3) for answer in (3, 7)]
        differences: list[float] = []
        step = ours.optim_step

        def compared(params: Any = None) -> Any:
            ours.forward([Datum.from_tokens([1, 2])], "cross_entropy").result()  # behind what was sent before
            groups = [TrajectoryGroup(each.episodes, [0.0, 1.0, 2.0], [{}] * 3) for each in builders]
            data, _ = assemble_training_data(groups, compute_advantages(groups))
            names = ("target_tokens", "logprobs", "advantages")
            data = [to_datum(each) for each in data]
            data = [each.with_only_inputs({name: each.loss_fn_inputs[name] for name in names}) for each in data]
            theirs.forward_backward(data, "importance_sampling").result()
            mine, its = (gathered(trainer, client.model_id) for client in (ours, theirs))
            differences.append(((mine - its).norm() / its.norm()).item())
            return step(params)

        ours.optim_step = compared  # type: ignore[method-assign, assignment]
        loader = RolloutLoader(environments(builders, SHORT), group_size=3, batch_size=2, shuffle=False)
        quiet(max_steps=1).fit(module, loader)
    trainer.close()
    assert len(differences) == 1
    assert differences[0] < 1e-5
