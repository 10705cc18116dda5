"""The arithmetic recipe of tinker-cookbook next to ours: rewards by step, on one server.

The runs start from the same weights, with the same problems, group sizes and learning rate: the loop of the cookbook
with the official SDK, and with our client in its place; `GRPO` on the cookbook's own environments, where prompts and
seeds of samples are the same, too; and the whole recipe with this library alone. Needs the package tinker-cookbook.
"""

from __future__ import annotations

import argparse
import ast
import asyncio
import csv
import inspect
import json
import logging
import os
import tempfile
import time
import warnings
from collections import defaultdict, deque
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import tinker
from tinker_cookbook import renderers
from tinker_cookbook.recipes.math_rl import arithmetic_env
from tinker_cookbook.recipes.math_rl.arithmetic_env import ArithmeticDataset, ArithmeticDatasetBuilder
from tinker_cookbook.rl import train
from tinker_cookbook.tokenizer_utils import register_tokenizer, unregister_tokenizer

from benchmarks import report
from benchmarks.processes import process, serve_model
from tinker_lightning import client as ours
from tinker_lightning.client import connect
from tinker_lightning.rl.rollout_jobs import derive_seed

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

KEY = "tml-benchmark"
RENDERER = "role_colon"
SEED = 5


@dataclass(frozen=True)
class Settings:
    """What the runs have in common; the defaults of the rates are those of the recipe.

    Args:
        model: The base model.
        steps: The number of optimizer steps.
        groups: The number of problems of a step.
        group_size: The number of answers to a problem.
        learning_rate: The learning rate.
        rank: The rank of the adapter.
        max_tokens: The maximum length of an answer.
    """

    model: str = "tiny"
    steps: int = 20
    groups: int = 16
    group_size: int = 4
    learning_rate: float = 1e-4
    rank: int = 32
    max_tokens: int = 5

    def dataset(self, tokenizer: Any) -> ArithmeticDataset:
        """Returns the problems as the cookbook has them."""
        renderer = renderers.get_renderer(RENDERER, tokenizer)
        return ArithmeticDataset(self.groups, renderer, self.group_size, n_batches=self.steps)


def cookbook(url: str, own: Settings, folder: str) -> list[float]:
    """Runs the loop of the cookbook with the client in place; returns the mean reward of each step."""
    config = train.Config(
        model_name=own.model,
        renderer_name=RENDERER,
        recipe_name="arithmetic",
        dataset_builder=ArithmeticDatasetBuilder(
            batch_size=own.groups,
            group_size=own.group_size,
            n_batches=own.steps,
            model_name_for_tokenizer=own.model,
            renderer_name=RENDERER,
        ),
        learning_rate=own.learning_rate,
        lora_rank=own.rank,
        max_tokens=own.max_tokens,
        log_path=folder,
        base_url=url,
        eval_every=0,
        save_every=0,
    )
    asyncio.run(train.main(config))
    with open(f"{folder}/metrics.jsonl") as file:
        rows = [json.loads(line) for line in file]
    name = "env/all/reward/total"
    return [row[name] for row in rows if name in row]  # the loop of release 0.6 logs totals of tokens last


def adapted(url: str, own: Settings, folder: str) -> list[float]:
    """Fits `GRPO` on the environments of the cookbook; returns the mean reward of each step."""
    from tinker_lightning import SamplingParams
    from tinker_lightning.recipes import GRPO
    from tinker_lightning.rl import RolloutLoader
    from tinker_lightning.rl.cookbook import environments

    with connect(url, api_key=KEY) as service:
        client = service.create_lora_training_client(own.model, rank=own.rank, seed=SEED)
        tasks = environments(own.dataset(client.get_tokenizer()), SamplingParams(max_tokens=own.max_tokens))
        loader = RolloutLoader(tasks, group_size=own.group_size, batch_size=own.groups, shuffle=False)
        eps = 1e-8  # the cookbook's
        plain: dict[str, Any] = {"scale_rewards": False, "normalize": "sum", "reference": None}
        module = GRPO(client, learning_rate=own.learning_rate, eps=eps, **plain)
        return fitted(module, loader, own.steps, folder)


def alone(url: str, own: Settings, folder: str) -> list[float]:
    """Runs the recipe as a user of this library would write it; returns the mean reward of each step."""
    with connect(url, api_key=KEY) as service:
        client = service.create_lora_training_client(own.model, rank=own.rank, seed=SEED)
        dataset = own.dataset(client.get_tokenizer())
        pairs = [builder.env_thunk.args for i in range(own.steps) for builder in dataset.get_batch(i)]
        module, loader = recipe(client, pairs, own, client.get_tokenizer().bos_token or "")
        return fitted(module, loader, own.steps, folder)


def recipe(model: Any, pairs: list[tuple[int, int]], own: Settings, start: str = "") -> Any:
    """What a user writes for this task, before `Trainer.fit(module, loader)`. `docs/rl.md` has the whole script."""
    import re

    from tinker_lightning import SamplingParams
    from tinker_lightning.recipes import GRPO
    from tinker_lightning.rl import RolloutLoader

    def reward(_: str, completion: str, answer: int) -> float:
        found = re.findall(r"-?\d+", completion.replace(",", ""))
        return float(found[-1:] == [str(answer)]) - 0.1 * (not completion.endswith("\n\nUser:"))

    shot = f"{start}User: What is 4 + 5?\n\nAssistant: 9\n\nUser: What is "
    rows = [{"prompt": f"{shot}{x} + {y}?\n\nAssistant:", "answer": x + y} for x, y in pairs]
    params = SamplingParams(max_tokens=own.max_tokens, stop=["\n\nUser:"])
    sizes: dict[str, Any] = {"group_size": own.group_size, "batch_size": own.groups}
    loader = RolloutLoader(rows, reward, **sizes, sampling_params=params, shuffle=False, as_text=True)
    return GRPO(model, scale_rewards=False, normalize="sum", learning_rate=own.learning_rate), loader


def fitted(module: Any, loader: Any, steps: int, folder: str) -> list[float]:
    """Fits a module; returns the mean reward of each step."""
    import lightning.pytorch as pl
    from lightning.pytorch.loggers import CSVLogger

    quiet: dict[str, Any] = {"enable_progress_bar": False, "enable_model_summary": False}
    logger = CSVLogger(folder, name="", version="")
    trainer = pl.Trainer(
        strategy="tinker", max_steps=steps, logger=logger, log_every_n_steps=1, enable_checkpointing=False, **quiet
    )
    trainer.fit(module, loader)
    with open(f"{folder}/metrics.csv") as file:
        return [float(row["reward"]) for row in csv.DictReader(file) if row.get("reward")]


def seeded(kind: Any) -> Any:
    """Returns a class of clients whose new models start from the same weights: the loops set no seed."""

    class Seeded(kind):  # type: ignore[misc]
        def create_lora_training_client(self, *args: Any, **settings: Any) -> Any:
            return super().create_lora_training_client(*args, **{"seed": SEED, **settings})

        async def create_lora_training_client_async(self, *args: Any, **settings: Any) -> Any:
            return await super().create_lora_training_client_async(*args, **{"seed": SEED, **settings})

    return Seeded


@contextmanager
def client_in_place(kind: Any, own: Settings, tokenizer: Any) -> Iterator[None]:
    """Lets the cookbook run here, with the clients of a package as the SDK's.

    It gets a tokenizer, an API key, and the seeds of weights and samples that our runs have.
    """
    seeds: dict[tuple[int, ...], deque[int]] = defaultdict(deque)
    dataset = own.dataset(tokenizer)
    for step in range(own.steps):
        for i, builder in enumerate(dataset.get_batch(step)):
            prompt, _ = asyncio.run(builder.env_thunk().initial_observation())
            number = step * own.groups + i
            seeds[tuple(prompt.to_ints())] += [derive_seed(0, number, sample, 0) for sample in range(own.group_size)]
    sample = kind.SamplingClient.sample

    def with_seed(self: Any, prompt: Any, num_samples: int, sampling_params: Any, *options: Any, **named: Any) -> Any:
        params = sampling_params.model_copy(update={"seed": seeds[tuple(prompt.to_ints())].popleft()})
        return sample(self, prompt, num_samples, params, *options, **named)

    register_tokenizer(own.model, lambda: tokenizer)  # any other name is looked for on the hub
    try:
        with (
            patch.dict(os.environ, TINKER_API_KEY=KEY),
            patch.object(tinker, "ServiceClient", seeded(kind.ServiceClient)),
            patch.object(tinker, "RestClient", kind.RestClient),
            patch.object(kind.SamplingClient, "sample", with_seed),
        ):
            yield
    finally:
        unregister_tokenizer(own.model)


RUNS: dict[str, Callable[[str, Settings, str], list[float]]] = {
    "tinker-cookbook": cookbook,
    "tinker-cookbook, our client": cookbook,
    "GRPO, its environments": adapted,
    "GRPO alone": alone,
}


def measure(url: str, own: Settings, folder: str) -> list[dict[str, Any]]:
    """Returns the rewards and seconds of each run."""
    with connect(url, api_key=KEY) as service:
        tokenizer = service.create_sampling_client(base_model=own.model).get_tokenizer()
    rows = []
    for name, run in RUNS.items():
        kind = tinker if name == "tinker-cookbook" else ours
        with client_in_place(kind, own, tokenizer) if run is cookbook else nullcontext():
            began = time.perf_counter()
            rewards = run(url, own, f"{folder}/{name}")
        rows.append({"run": name, "seconds": time.perf_counter() - began, "rewards": rewards})
    return rows


def lines_of_code(source: str) -> int:
    """Counts the lines that have code, without docstrings."""
    lines: set[int] = set()
    for node in ast.walk(ast.parse(source)):
        is_text = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        if isinstance(node, ast.stmt) and not is_text:
            body = getattr(node, "body", None)
            lines |= set(range(node.lineno, body[0].lineno if body else (node.end_lineno or 0) + 1))
    texts = source.splitlines()
    return sum(bool(texts[number - 1].strip()) for number in lines)


def user_lines() -> dict[str, int]:
    """How many lines of code a user writes, in the scripts of `docs/rl.md`, and for the task in the cookbook."""
    section = (Path(__file__).parents[1] / "docs" / "rl.md").read_text().partition("## Next to tinker-cookbook")[2]
    ours, theirs = (section.partition(f"```{kind}\n")[2].partition("```")[0] for kind in ("python", "text"))
    return {
        "the environment of the cookbook": lines_of_code(inspect.getsource(arithmetic_env)),
        "its configuration": lines_of_code(theirs),
        "ours, with the task and Trainer.fit": lines_of_code(ours),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", nargs="?", default="tiny", help="the base model, for example smollm2-135m")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the figures to a file")
    for name, default in asdict(Settings()).items():
        if name != "model":
            parser.add_argument(f"--{name.replace('_', '-')}", type=type(default), default=default)
    options = vars(parser.parse_args())
    json_file = options.pop("json")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore")
    own = Settings(**options)
    with tempfile.TemporaryDirectory() as folder, process(serve_model, f"{folder}/server", own.model) as url:
        rows = measure(url, own, folder)
    print(f"\nMean reward of each step, {own}:\n")
    report.show(
        [{"step": i, **{row["run"]: f"{row['rewards'][i]:.3f}" for row in rows}} for i in range(own.steps)]
        + [{"step": "seconds", **{row["run"]: f"{row['seconds']:.0f}" for row in rows}}]
    )
    print("Lines of user code:\n")
    report.show([{"part": name, "lines": count} for name, count in user_lines().items()])
    report.write(json_file, {"arithmetic": {"settings": asdict(own), "runs": rows, "lines": user_lines()}})


if __name__ == "__main__":
    main()
