"""The training loops of `tinker-cookbook` run on our client when it takes the place of `tinker.ServiceClient`.

Each `main` runs as it is installed, once with the official SDK and once with our client, against the same trainer. Run
it with `tox -e cookbook`.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import json
import math
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import chz
import pytest
import tinker
import torch
from safetensors.torch import load_file
from tinker_cookbook import renderers, weights
from tinker_cookbook.distillation import sdft, train_off_policy, train_on_policy
from tinker_cookbook.distillation.datasets import DistillationDatasetConfig, PromptOnlyEnv, TeacherConfig
from tinker_cookbook.preference import train_dpo
from tinker_cookbook.preference.dpo_datasets import DPODatasetBuilderFromComparisons
from tinker_cookbook.preference.preference_datasets import ComparisonBuilderFromJsonl
from tinker_cookbook.recipes.sdft.datasets import SDFTDataset
from tinker_cookbook.rl import train as rl
from tinker_cookbook.rl.problem_env import ProblemEnv, ProblemGroupBuilder
from tinker_cookbook.rl.types import RLDataset, RLDatasetBuilder
from tinker_cookbook.supervised import train as supervised
from tinker_cookbook.supervised.data import FromConversationFileBuilder
from tinker_cookbook.tokenizer_utils import get_tokenizer, register_tokenizer, unregister_tokenizer

from tests.helpers.cookbook import (
    GOOD,
    IS_0_6,
    KEY,
    QUESTIONS,
    common,
    comparisons,
    conversations,
    is_result,
    seeded,
    write_rows,
)
from tinker_lightning import Datum
from tinker_lightning.client import RestClient, ServiceClient, connect
from tinker_lightning.server import EmbeddedTrainer, create_app

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

MODEL: dict[str, Any] = {"model_name": "tiny", "renderer_name": "role_colon", "lora_rank": 8}
KINDS: dict[str, Any] = {
    "official": (tinker.ServiceClient, tinker.RestClient),
    "ours": (ServiceClient, RestClient),
}


class Run(NamedTuple):
    """What a loop leaves behind: the metrics of each step, and the weights and optimizer state at its end."""

    metrics: list[dict[str, float]]
    weights: dict[str, torch.Tensor]


class Loops:
    """Runs loops of the cookbook on one trainer with either client."""

    def __init__(self, url: str, data_dir: Path) -> None:
        self.url = url
        self._data_dir = data_dir

    def run(self, kind: str, log_path: Path, main: Callable[[str], Any]) -> Run:
        """Runs a loop whose `main` is given the folder to log into."""
        with self.client(kind) as client:
            running = main(str(log_path))
            if inspect.isawaitable(running):
                asyncio.run(awaited(running))
        assert client.created == 1  # the loop has used this client
        lines = (log_path / "metrics.jsonl").read_text().splitlines()
        metrics = [{name: value for name, value in json.loads(line).items() if is_result(name)} for line in lines]
        last = json.loads((log_path / "checkpoints.jsonl").read_text().splitlines()[-1])
        return Run(metrics, self._weights(last["state_path"]))

    @contextlib.contextmanager
    def client(self, kind: str) -> Iterator[Any]:
        """Puts a client in the place of the official one; returns its class."""
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("TINKER_API_KEY", KEY)
            service, rest = KINDS[kind]
            client = seeded(service)
            patch.setattr(tinker, "ServiceClient", client)
            patch.setattr(tinker, "RestClient", rest)
            yield client

    def both(self, folder: Path, main: Callable[[str], Any]) -> tuple[Run, Run]:
        """Runs a loop with the official SDK and with our client."""
        return self.run("official", folder / "official", main), self.run("ours", folder / "ours", main)

    def _weights(self, path: str) -> dict[str, torch.Tensor]:
        (summary,) = (
            file for file in self._data_dir.rglob("checkpoint.json") if f'"tinker_path": "{path}"' in file.read_text()
        )
        return {
            f"{file}/{name}": tensor
            for file in ("adapter_model.safetensors", "optimizer.safetensors")
            for name, tensor in load_file(summary.parent / file).items()
        }


async def awaited(running: Any) -> None:
    await running


@pytest.fixture(scope="module")
def loops(tmp_path_factory: pytest.TempPathFactory, running: Any) -> Iterator[Loops]:
    data_dir = tmp_path_factory.mktemp("trainer")
    trainer = EmbeddedTrainer(["tiny"], data_dir=data_dir, sampling_seed=7)
    with running(create_app(trainer)) as url, connect(url) as service:
        tokenizer = service.create_lora_training_client("tiny", rank=1).get_tokenizer()
        register_tokenizer("tiny", lambda: tokenizer)  # any other name is looked for on the hub
        yield Loops(url, data_dir)
        unregister_tokenizer("tiny")
    trainer.close()


def assert_same(official: Run, ours: Run, steps: int) -> None:
    """Bit for bit: the server is deterministic, so any difference is in what the clients sent or made of the answer."""
    assert len(trained_steps(ours)) == steps
    assert ours.metrics == official.metrics
    assert ours.weights.keys() == official.weights.keys()
    assert all(torch.equal(ours.weights[name], tensor) for name, tensor in official.weights.items())


def trained_steps(run: Run) -> list[dict[str, float]]:
    """The metrics of the steps, without what the loops of 0.6 log last: totals of tokens."""
    return [row for row in run.metrics if not all(name == "step" or name.startswith("tokens/") for name in row)]


def assert_trained(run: Run, steps: int) -> None:
    assert len(run.metrics) >= steps
    assert all(math.isfinite(value) for step in run.metrics for value in step.values() if isinstance(value, float))
    assert any(tensor.abs().sum() > 0 for name, tensor in run.weights.items() if "exp_avg" in name)


def chats(folder: Path, copies: int = 1) -> FromConversationFileBuilder:
    file = write_rows(folder / "conversations.jsonl", conversations() * copies)
    return FromConversationFileBuilder(file_path=file, common_config=common(batch_size=2), test_size=0)


def sft(loops: Loops, folder: Path, log_path: str, **settings: Any) -> Any:
    config = supervised.Config(
        log_path=log_path,
        recipe_name="sft",
        dataset_builder=chats(folder, copies=2),
        learning_rate=1e-2,
        lr_schedule="constant",
        base_url=loops.url,
        save_every=2,
        **MODEL,
        **settings,
    )
    return supervised.main(config)


def test_supervised_training(loops: Loops, tmp_path: Path) -> None:  # R5.4
    official, ours = loops.both(tmp_path, partial(sft, loops, tmp_path))
    assert_same(official, ours, 4)
    assert ours.metrics[-1]["train_mean_nll"] < ours.metrics[0]["train_mean_nll"]


def test_supervised_training_resumes(loops: Loops, tmp_path: Path) -> None:  # R5.4
    """A run that stops after two steps and is started again ends where one without a stop does."""
    whole = loops.run("ours", tmp_path / "whole", partial(sft, loops, tmp_path))
    for kind in KINDS:
        loops.run(kind, tmp_path / kind, partial(sft, loops, tmp_path, max_steps=2))
        # The loop records that all its steps are done; the same run with more of them is to go on from the state.
        records = tmp_path / kind / "checkpoints.jsonl"
        lines = [line for line in records.read_text().splitlines() if not json.loads(line).get("final")]
        records.write_text("".join(f"{line}\n" for line in lines if json.loads(line)["batch"] == 2))
        resumed = loops.run(kind, tmp_path / kind, partial(sft, loops, tmp_path))
        assert all(torch.equal(resumed.weights[name], tensor) for name, tensor in whole.weights.items())


def test_dpo(loops: Loops, tmp_path: Path) -> None:  # R5.4
    builder = DPODatasetBuilderFromComparisons(
        comparison_builder=ComparisonBuilderFromJsonl(train_path=write_rows(tmp_path / "pairs.jsonl", comparisons())),
        common_config=common(batch_size=2),
    )

    def main(log_path: str) -> None:
        config = train_dpo.Config(
            log_path=log_path,
            recipe_name="dpo",
            dataset_builder=builder,
            learning_rate=1e-2,
            base_url=loops.url,
            eval_every=0,
            infrequent_eval_every=0,
            num_epochs=2,
            **MODEL,
        )
        train_dpo.main(config)

    official, ours = loops.both(tmp_path, main)
    assert_same(official, ours, 4)
    assert ours.metrics[-1]["dpo_loss"] < ours.metrics[0]["dpo_loss"]


def test_off_policy_distillation(loops: Loops, tmp_path: Path) -> None:  # R5.4
    def main(log_path: str) -> Any:
        config = train_off_policy.Config(
            log_path=log_path,
            recipe_name="off-policy",
            learning_rate=1e-2,
            dataset_configs=[
                train_off_policy.DatasetWithTeacher(
                    dataset_builder=chats(tmp_path), teacher_config=TeacherConfig(base_model="tiny")
                )
            ],
            n_teacher_targets=4,
            batch_size=2,
            base_url=loops.url,
            **MODEL,
        )
        return train_off_policy.main(config)

    assert_same(*loops.both(tmp_path, main), 2)


class CountsLetters(ProblemEnv):  # type: ignore[misc]
    """Rewards answers with an even number of characters, which a model without any training gives half of the time."""

    def get_question(self) -> str:
        return QUESTIONS[0]

    def check_answer(self, sample_str: str) -> bool:
        return len(sample_str) % 2 == 0

    def check_format(self, sample_str: str) -> bool:
        return bool(sample_str)

    def get_reference_answer(self) -> str:
        return ""


class Problems(RLDataset):  # type: ignore[misc]
    """The same problem again and again, in groups of four."""

    def __init__(self, env: Callable[[], Any], batches: int) -> None:
        self._env = env
        self._batches = batches

    def get_batch(self, _: int) -> list[ProblemGroupBuilder]:
        return [ProblemGroupBuilder(env_thunk=self._env, num_envs=4) for _ in range(2)]

    def __len__(self) -> int:
        return self._batches


@chz.chz
class ProblemsBuilder(RLDatasetBuilder):  # type: ignore[misc]
    prompt_only: bool = False

    async def __call__(self) -> tuple[RLDataset, RLDataset | None]:
        renderer = renderers.get_renderer("role_colon", get_tokenizer("tiny"))
        prompt: Any = partial(PromptOnlyEnv, QUESTIONS[0])
        return Problems(partial(prompt if self.prompt_only else CountsLetters, renderer), batches=3), None


def reinforce(loops: Loops, log_path: str, **settings: Any) -> Any:
    config = rl.Config(
        log_path=log_path,
        recipe_name="rl",
        learning_rate=1e-2,
        dataset_builder=ProblemsBuilder(),
        max_tokens=6,
        base_url=loops.url,
        eval_every=0,
        save_every=2,
        **MODEL,
        **settings,
    )
    return rl.main(config)


def test_synchronous_rl(loops: Loops, tmp_path: Path) -> None:  # R5.4
    official, ours = loops.both(tmp_path, partial(reinforce, loops, num_substeps=2))
    assert_same(official, ours, 3)
    assert any(step.get("grad_norm", 0) > 0 for step in ours.metrics)


PPO = {"loss_fn": "ppo"} if IS_0_6 else {}  # the default of 0.6 exists on hosted Tinker only


@pytest.mark.parametrize(
    "mode",
    [
        {"async_config": rl.AsyncConfig(max_steps_off_policy=2, groups_per_batch=2, **PPO)},
        {"stream_minibatch_config": rl.StreamMinibatchConfig(groups_per_batch=2, num_minibatches=2)},
    ],
    ids=["asynchronous", "streaming"],
)
def test_rl_whose_order_is_not_fixed(loops: Loops, tmp_path: Path, mode: dict[str, Any]) -> None:  # R5.4
    official, ours = loops.both(tmp_path, partial(reinforce, loops, **mode))
    assert len(ours.metrics) == len(official.metrics)
    for run in (official, ours):
        assert_trained(run, 3)


@pytest.mark.skipif(not IS_0_6, reason="new in release 0.6")
@pytest.mark.parametrize("kind", KINDS)
def test_a_loss_without_a_published_formula_fails_before_any_step(loops: Loops, tmp_path: Path, kind: str) -> None:
    mode = {"async_config": rl.AsyncConfig(max_steps_off_policy=2, groups_per_batch=2)}
    with pytest.raises(Exception, match=r"stable_reinforce.*AsyncConfig\(loss_fn=\"ppo\"\)"):  # R5.17
        loops.run(kind, tmp_path, partial(reinforce, loops, **mode))
    assert not (tmp_path / "metrics.jsonl").exists() or "loss" not in (tmp_path / "metrics.jsonl").read_text()


@pytest.mark.filterwarnings("ignore:DEPRECATED. ServiceClient.create_rest_client:FutureWarning")  # used by 0.5.8
@pytest.mark.parametrize("kind", KINDS)
def test_downloads_are_the_weights(loops: Loops, tmp_path: Path, kind: str) -> None:  # R5.4
    """A training checkpoint is downloaded as an encrypted export of a model that is made from it."""
    with connect(loops.url, api_key=KEY) as service:
        model, rest = service.create_lora_training_client("tiny", rank=8), service.create_rest_client()
        for _ in range(2):
            model.forward_backward([Datum.from_tokens(list(text.encode())) for text in GOOD], "cross_entropy").result()
            model.optim_step(tinker.AdamParams(learning_rate=1e-2)).result()
        paths = [save("same").result().path for save in (model.save_state, model.save_weights_external)]
        listed = rest.list_user_checkpoints().result()
        files = []
        with loops.client(kind):
            for path in paths:
                folder = tmp_path / path.split("/")[-2]
                weights.download(tinker_path=path, output_dir=str(folder), base_url=loops.url)
                files.append({each.name: each.read_bytes() for each in folder.rglob("*") if each.is_file()})
        assert rest.list_user_checkpoints().result() == listed  # the encrypted export is deleted again
    assert files[0] == files[1]
    assert "adapter_model.safetensors" in files[0]


def test_on_policy_distillation(loops: Loops, tmp_path: Path) -> None:  # R5.4
    def main(log_path: str) -> Any:
        config = train_on_policy.Config(
            log_path=log_path,
            recipe_name="on-policy",
            learning_rate=1e-2,
            dataset_configs=[
                DistillationDatasetConfig(
                    dataset_builder=ProblemsBuilder(prompt_only=True),
                    teacher_config=TeacherConfig(base_model="tiny"),
                    groups_per_batch=2,
                )
            ],
            max_tokens=6,
            base_url=loops.url,
            eval_every=0,
            **MODEL,
        )
        return train_on_policy.main(config)

    assert_same(*loops.both(tmp_path, main), 3)


@pytest.mark.parametrize("reverse", [False, True])
def test_self_distillation(loops: Loops, tmp_path: Path, reverse: bool) -> None:  # R5.4
    def main(log_path: str) -> Any:
        config = sdft.Config(
            log_path=log_path,
            recipe_name="sdft",
            learning_rate=1e-2,
            max_tokens=6,
            topk=4,
            reverse=reverse,
            base_url=loops.url,
            eval_every=0,
            **MODEL,
        )
        renderer = renderers.get_renderer("role_colon", get_tokenizer("tiny"))
        return sdft.main(config, SDFTDataset(list(QUESTIONS), list(GOOD), 2, 1, renderer))

    assert_same(*loops.both(tmp_path, main), 2)
