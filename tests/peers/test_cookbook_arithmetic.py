"""The arithmetic recipe of `tinker-cookbook` with the official SDK, with our client in its place, and next to `GRPO`.

Run it with `tox -e cookbook`.
"""

from __future__ import annotations

import asyncio
import csv
import json
import math
from typing import TYPE_CHECKING, Any

import pytest
from tinker_cookbook.recipes.math_rl.arithmetic_env import ArithmeticEnv

from benchmarks import arithmetic
from tests.helpers.cookbook import is_result
from tests.helpers.trainers import SMALL
from tinker_lightning.client import connect
from tinker_lightning.rl import PromptEnvironment
from tinker_lightning.rl.tasks import SizedTasks
from tinker_lightning.server import EmbeddedTrainer, create_app

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

pytestmark = SMALL

OWN = arithmetic.Settings(steps=3, groups=3, learning_rate=1e-3, rank=4)


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory, running: Any) -> Iterator[str]:
    trainer = EmbeddedTrainer(["tiny"], data_dir=tmp_path_factory.mktemp("trainer"))
    with running(create_app(trainer)) as url:
        yield url
    trainer.close()


@pytest.mark.filterwarnings("ignore:the gradient of the loss")  # the model is still its reference
def test_the_same_rewards_and_gradient(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:  # R4.3, R5.4, R5.9
    # A model without any training never adds; half of its answers pass this check.
    monkeypatch.setattr(ArithmeticEnv, "check_answer", lambda _, text: sum(map(ord, text)) % 2 == 0)
    recipe = arithmetic.recipe

    def penalized(*args: Any) -> Any:
        module, loader = recipe(*args)
        module.kl_coefficient = 0.1  # trains also where all rewards are equal
        return module, loader

    monkeypatch.setattr(arithmetic, "recipe", penalized)
    official, ours, adapted, alone = arithmetic.measure(url, OWN, str(tmp_path))
    for run in (official, ours, adapted, alone):
        assert len(run["rewards"]) == OWN.steps
        assert all(math.isfinite(reward) for reward in run["rewards"])
    assert -0.1 < official["rewards"][0] < 0.9
    assert adapted["rewards"][0] == pytest.approx(official["rewards"][0], abs=1e-6)  # the same samples
    assert adapted["rewards"] == pytest.approx(official["rewards"], abs=0.3)  # then rounding may change some
    expected, same = (results(tmp_path / run["run"] / "metrics.jsonl") for run in (official, ours))
    assert len(expected) >= OWN.steps
    assert same == expected  # bit for bit
    norm = column(tmp_path / adapted["run"], "grad_norm")[0]
    assert norm == pytest.approx(expected[0]["grad_norm"], rel=1e-3)


def results(file: Path) -> list[dict[str, float]]:
    """The metrics of each step that follow from the training."""
    rows = map(json.loads, file.read_text().splitlines())
    return [{name: value for name, value in row.items() if is_result(name)} for row in rows]


def column(folder: Path, name: str) -> list[float]:
    with (folder / "metrics.csv").open() as file:
        return [float(row[name]) for row in csv.DictReader(file) if row.get(name)]


def test_the_short_recipe_has_the_same_prompts_and_rewards(url: str) -> None:
    with connect(url) as service:
        tokenizer = service.create_sampling_client(base_model="tiny").get_tokenizer()
        builders = [each for i in range(OWN.steps) for each in OWN.dataset(tokenizer).get_batch(i)]
        _, loader = arithmetic.recipe("tiny", [each.env_thunk.args for each in builders], OWN)
        tasks = loader._tasks
        assert isinstance(tasks, SizedTasks)
        for i, builder in enumerate(builders):
            env, ours = builder.env_thunk(), tasks.at(i).environment
            assert isinstance(ours, PromptEnvironment)
            prompt, stop = asyncio.run(env.initial_observation())
            assert ours.prompt_tokens(tokenizer) == prompt.to_ints()
            assert loader.sampling.params.stop == stop
            total = env.x + env.y
            for text in (
                f" {total}\n\nUser:",
                f" {total}",
                f" {total}.",
                f" {total + 1}\n\nUser:",
                " no",
                "",
                f"1, {total}",
            ):
                step = asyncio.run(env.step(tokenizer.encode(text)))
                reward, _ = asyncio.run(ours.rewards.score("", text, {"answer": total}))
                assert reward == pytest.approx(step.reward), text


def test_the_recipe_is_short() -> None:
    lines = arithmetic.user_lines()
    assert lines.pop("ours, with the task and Trainer.fit") <= 15
    assert sum(lines.values()) > 100
